"""Checkpoints load without regraft: alone, beside each other, sharded, tied or not, again after a second save."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from regraft.convert.sources import load_source
from regraft.errors import UserError

LOAD_ALL = """
import json, sys, torch
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "regraft":
            raise ImportError("hidden")
sys.meta_path.insert(0, Hidden())
import socket
def refuse(*a, **k):
    raise OSError("the network is blocked")
socket.socket.connect = refuse
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM
root, names = sys.argv[1], sys.argv[2].split(",")
told = {}
for name in names:
    wanted = load_file(f"{root}/{name}.out")
    try:
        AutoModelForCausalLM.from_pretrained(f"{root}/{name}", trust_remote_code=False)
        told[name] = "loaded without trust"
        continue
    except ValueError:
        pass
    model = AutoModelForCausalLM.from_pretrained(f"{root}/{name}", trust_remote_code=True).eval()
    with torch.no_grad():
        gap = (model(wanted["ids"]).logits - wanted["logits"]).abs().max().item()
    mixers = sorted({type(l.self_attn).__name__ for l in model.get_decoder().layers})
    model.generate(wanted["ids"][:1], max_new_tokens=3, do_sample=False, eos_token_id=None)
    model.save_pretrained(f"{root}/{name}-again")
    again = AutoModelForCausalLM.from_pretrained(f"{root}/{name}-again", trust_remote_code=True).eval()
    with torch.no_grad():
        gap2 = (again(wanted["ids"]).logits - wanted["logits"]).abs().max().item()
    base = AutoModel.from_pretrained(f"{root}/{name}", trust_remote_code=True)
    fp32 = sorted({n.rsplit(".", 1)[1] for n, p in model.named_parameters() if p.dtype == torch.float32})
    told[name] = [gap, gap2, str(model.dtype), mixers, model.lm_head.weight is model.get_input_embeddings().weight,
                  type(base).__name__, fp32]
print("TOLD" + json.dumps(told))
"""


def test_exports_load_in_a_fresh_process_without_regraft(tiny_model, tiny_llama, grafted, tmp_path):
    from regraft.convert.graft import cast_parameters

    options = {"window": 6, "sinks": 2}
    models = {
        "linear": grafted(
            tiny_llama(tie_word_embeddings=True), "window_linear", layers=[0, 3], feature_dim=8, **options
        ),
        "window": grafted(tiny_llama(), "sliding_window", layers=[1], **options),
        "qwen": grafted(tiny_model("qwen3"), "window_linear", feature_dim=8, **options),
        "gemma": grafted(tiny_model("gemma3_text"), "sliding_window", layers=[0, 2], **options),
        "half": cast_parameters(grafted(tiny_model("qwen2"), "window_linear", layers=[1], **options), torch.bfloat16),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name, max_shard_size="100KB" if name == "window" else "5GB")
        ids = torch.randint(3, 128, (2, 25))
        with torch.no_grad():
            save_file({"ids": ids, "logits": model(ids).logits.contiguous()}, tmp_path / f"{name}.out")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, str(tmp_path), ",".join(models)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.split("TOLD")[1])
    for name, (gap, again, dtype, mixers, tied, base, fp32) in told.items():
        assert gap == 0 and again == 0, (name, gap, again)
        assert dtype == ("torch.bfloat16" if name == "half" else "torch.float32")
        assert ("WindowLinear" in mixers) == (name not in ("window", "gemma"))
        assert tied == bool(models[name].config.tie_word_embeddings)
        assert base.startswith("Regraft") and base.endswith("Model")
        if name == "half":
            assert fp32 == ["far_logit", "feature_k", "feature_q"]
    assert len(list((tmp_path / "window").glob("*.safetensors"))) > 1
    assert not (tmp_path / "window" / "regraft_convert_mixers_window_linear.py").exists()


def test_a_saved_model_loads_here_with_local_code_and_no_trust(tiny_llama, grafted, tmp_path):
    model = grafted(tiny_llama(), "window_linear", layers=[1], window=5)
    model.save_pretrained(tmp_path / "m")
    loaded = load_source(str(tmp_path / "m")).model
    ids = torch.randint(3, 128, (1, 30))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert type(loaded).__module__.startswith("regraft.")
    more = grafted(loaded, "sliding_window", layers=[2], window=4)
    assert more.config.layer_types == ["full_attention", "hybrid_sliding", "sliding_attention", "full_attention"]


def test_a_newer_format_is_refused(tiny_llama, grafted, tmp_path):
    grafted(tiny_llama(), "sliding_window", layers=[1]).save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    config["regraft"]["format"] = 99
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="format 99"):
        load_source(str(tmp_path / "m"))
