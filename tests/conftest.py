"""Shared fixtures: tiny random models of every family, a tiny tokenizer, and grafting in one line."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)


TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
PER_FAMILY = {
    "mistral": {"sliding_window": None},
    "gemma3_text": {"sliding_window": 9, "query_pre_attn_scalar": 16},
    # caps and multipliers that bite: with the usual ones a dropped cap or factor would stay within the tolerances
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0},
    "granite": {"attention_multiplier": 0.4, "residual_multiplier": 0.7, "embedding_multiplier": 1.5},
    # smaller weights: with the usual ones its logits reach 18, and fp32 alone moves the teacher's own by 4e-5
    "smollm3": {"no_rope_layers": [1, 0, 1, 0], "initializer_range": 0.12},
    "phi3": {"original_max_position_embeddings": 512},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}


def _randomise(model, seed):
    """Norm gains and biases at random: defaults of one and zero would hide a dropped one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif "embed_tokens" in name:  # the pad row starts at zero, which makes padding tests blind
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)


@pytest.fixture
def tiny_model():
    """tiny_model("qwen3", seed=0, **config) -> a random causal LM of that family, eval, fp32."""

    def make(family="llama", seed=0, **config):
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

        config_class = CONFIG_MAPPING[family]
        settings = {**TINY, **PER_FAMILY.get(family, {}), **config}
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[config_class](config_class(**settings)).eval()
        _randomise(model, seed)
        return model

    return make


@pytest.fixture
def tiny_llama(tiny_model):
    """tiny_llama(layers=4, hidden=64, heads=4, kv_heads=2, vocab=128, seed=0, **config) -> LlamaForCausalLM."""

    def make(layers=4, hidden=64, heads=4, kv_heads=2, vocab=128, seed=0, **config):
        settings = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "head_dim": hidden // heads,
            **config,
        }
        return tiny_model("llama", seed=seed, **settings)

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A byte-level tokenizer with 260 ids: pad 0, bos 1, eos 2, unk 3, then the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture
def grafted():
    """grafted(model, "window_linear", layers=[0, 2], **options) -> a grafted copy of `model`."""

    def make(model, name, layers=None, **options):
        from regraft.convert.graft import decoder_layers, graft
        from regraft.convert.mixers.registry import parse_options

        layers = range(len(decoder_layers(model))) if layers is None else layers
        chosen = parse_options(name, options)
        return graft(model, {i: (name, chosen) for i in layers}).model

    return make
