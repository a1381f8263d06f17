"""What a source attention looks like, as data: one row per source family, one record per attention module."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """One row of the table of source families.

    `model_type` is transformers' name. `qk_norm`: a norm on q and k before the rotary embedding: "none", "head" (over
    each head's own channels) or "all" (over all heads' channels at once). `fused`: the name of a projection that holds
    q, k and v one after the other, or "".
    """

    model_type: str
    title: str
    qk_norm: str = "none"
    fused: str = ""


FAMILIES: dict[str, Family] = {
    row.model_type: row
    for row in (
        Family("llama", "Llama 2/3, SmolLM2 and everything with their layout"),
        Family("mistral", "Mistral"),
        Family("qwen2", "Qwen 2 and 2.5 (biases on q, k, v)"),
        Family("qwen3", "Qwen 3 (norm per head on q and k)", qk_norm="head"),
        Family("gemma3_text", "Gemma 3, text (norm per head, sliding layers, two rotary bases)", qk_norm="head"),
        Family("gemma2", "Gemma 2 (softcapped logits, every other layer slides)"),
        Family("granite", "Granite 3 (its own attention and residual multipliers)"),
        Family("smollm3", "SmolLM3 (layers without rotary embedding)"),
        Family("olmo2", "OLMo 2 (norm over all heads of q and k, norms after the blocks)", qk_norm="all"),
        Family("phi3", "Phi-3 and 4 (q, k and v in one projection)", fused="qkv_proj"),
        Family("mixtral", "Mixtral (mixture-of-experts trunk)"),
        Family("qwen3_moe", "Qwen 3 MoE (mixture-of-experts trunk, norm per head)", qk_norm="head"),
    )
}


@dataclass(frozen=True)
class AttentionSpec:
    """Shapes and settings of one source attention.

    `num_heads` query heads share `num_kv_heads` key/value heads in groups of `num_heads // num_kv_heads`; query head h
    uses key/value head h // group. `scaling` multiplies q.k; `softcap` (or None) bounds the scaled logits by
    softcap * tanh(logits / softcap); `sliding_window` (or None) is the source layer's own window. `rope` is the
    family's own rotary function, called as rope(q, k, cos, sin, unsqueeze_dim=2) on [B, T, heads, D], or None for a
    layer without one. `qk_norm` and `fused` are the family's.
    """

    layer_idx: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    softcap: float | None = None
    sliding_window: int | None = None
    qk_norm: str = "none"
    fused: str = ""
    rope: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads


def attention_spec(attn: Any, config: Any) -> AttentionSpec:
    """Read the spec off a source attention module `attn` built from `config`.

    Raises ValueError for a family that is not in FAMILIES or a module without the projections it should have.
    """
    model_type = config.model_type.removeprefix("regraft_")
    family = FAMILIES.get(model_type)
    if family is None:
        raise ValueError(f"no source family '{model_type}'; known: {', '.join(sorted(FAMILIES))}")
    projections = (family.fused, "o_proj") if family.fused else ("q_proj", "k_proj", "v_proj", "o_proj")
    missing = [name for name in projections if not hasattr(attn, name)]
    if missing:
        raise ValueError(f"layer {attn.layer_idx}: {type(attn).__name__} has no {', '.join(missing)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return AttentionSpec(
        layer_idx=attn.layer_idx,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=attn.head_dim if family.fused else attn.q_proj.out_features // heads,
        value_dim=attn.head_dim if family.fused else attn.v_proj.out_features // kv_heads,
        scaling=float(attn.scaling),
        softcap=getattr(attn, "attn_logit_softcapping", None),
        sliding_window=_own_window(attn, config),
        qk_norm=family.qk_norm,
        fused=family.fused,
        rope=sys.modules[type(attn).__module__].apply_rotary_pos_emb if getattr(attn, "use_rope", True) else None,
    )


def _own_window(attn: Any, config: Any) -> int | None:
    """The window of this layer in the source: families with layer types keep it on the module, others in the config."""
    if hasattr(attn, "sliding_window"):
        return attn.sliding_window
    return getattr(config, "sliding_window", None) if getattr(config, "layer_types", None) is None else None
