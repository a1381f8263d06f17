"""Checkpoints load without regraft: alone, beside each other, sharded, tied or not, again after a second save."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from regraft.convert.export import bundle
from regraft.convert.sources import load_source
from regraft.distill.loop import run_stage
from regraft.errors import UserError
from regraft.recipes.schema import AlignStage, DataConfig

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


def checkpoint_of_a_training(teacher, student, tokenizer, folder):
    """The newest checkpoint of a short alignment, as it lies on the disk while training goes on."""
    text = folder / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"line {i} of a short text " * 4}) for i in range(40)))
    stage = AlignStage(stage="align", tokens=192, seq_len=48, lr=1e-2, warmup=1, checkpoint_every=2)
    settings = {
        "data": DataConfig(source=str(text), split="all"),
        "out_dir": folder / "stage",
        "log": lambda line: None,
    }
    run_stage(stage, student=student, teacher=teacher, tokenizer=tokenizer, **settings)
    return max((folder / "stage").glob("checkpoint-*"))


def test_exports_load_in_a_fresh_process_without_regraft(tiny_model, tiny_llama, tiny_tokenizer, grafted, tmp_path):
    from regraft.convert.graft import cast_parameters

    options = {"window": 6, "sinks": 2}
    models = {
        "linear": grafted(
            tiny_llama(tie_word_embeddings=True), "window_linear", layers=[0, 3], feature_dim=8, **options
        ),
        "window": grafted(tiny_llama(), "sliding_window", layers=[1], **options),
        "qwen": grafted(tiny_model("qwen3"), "window_linear", feature_dim=8, **options),
        "gemma": grafted(tiny_model("gemma3_text"), "sliding_window", layers=[0, 2], **options),
        "fused": grafted(tiny_model("phi3"), "window_linear", layers=[0, 2], feature_dim=8, **options),
        "experts": grafted(tiny_model("mixtral"), "window_linear", layers=[1], feature_dim=8, **options),
        "half": cast_parameters(grafted(tiny_model("qwen2"), "window_linear", layers=[1], **options), torch.bfloat16),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name, max_shard_size="100KB" if name == "window" else "5GB")
        ids = torch.randint(3, 128, (2, 25))
        with torch.no_grad():
            save_file({"ids": ids, "logits": model(ids).logits.contiguous()}, tmp_path / f"{name}.out")
    teacher = tiny_llama(vocab=260)
    trained = grafted(teacher, "window_linear", layers=[1], feature_dim=8, **options)
    checkpoint_of_a_training(teacher, trained, tiny_tokenizer, tmp_path).rename(tmp_path / "training")
    models["training"] = load_source(str(tmp_path / "training")).model
    with torch.no_grad():
        save_file({"ids": ids, "logits": models["training"](ids).logits.contiguous()}, tmp_path / "training.out")
    assert not torch.equal(
        models["training"].model.layers[1].self_attn.feature_q, trained.model.layers[1].self_attn.feature_q
    )
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


ORDERS = """
import sys, torch
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "regraft":
            raise ImportError("hidden")
sys.meta_path.insert(0, Hidden())
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
wanted = load_file(sys.argv[1])
models = {}
for place in sys.argv[2:]:
    models[place] = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True).eval()
for place, model in models.items():
    with torch.no_grad():
        gap = (model(wanted["ids"]).logits - wanted[place.split("/")[-2]]).abs().max().item()
    print(place.split("/")[-2], gap, sorted({type(l.self_attn).__name__ for l in model.model.layers}), sep="|")
"""


def test_folders_of_one_name_with_different_models_in_one_process(tiny_llama, grafted, tmp_path):
    """`a/final` and `b/final`: same folder name, other mechanisms, loaded together in both orders."""
    models = {
        "a": grafted(tiny_llama(), "window_linear", layers=[1], window=6),
        "b": grafted(tiny_llama(), "sliding_window", layers=[1, 2], window=6),
    }
    ids = torch.randint(3, 128, (2, 25))
    wanted = {"ids": ids}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name / "final")
        with torch.no_grad():
            wanted[name] = model(ids).logits.contiguous()
    save_file(wanted, tmp_path / "wanted")
    for order in (["a", "b"], ["b", "a"]):
        environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / f"modules-{order[0]}"), "HF_HUB_OFFLINE": "1"}
        places = [f"{tmp_path}/{name}/final" for name in order]
        done = subprocess.run(
            [sys.executable, "-c", ORDERS, str(tmp_path / "wanted"), *places],
            cwd=tmp_path, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        told = {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines()}
        assert told["a"] == ["0.0", "['LlamaAttention', 'WindowLinear']"]
        assert told["b"] == ["0.0", "['LlamaAttention', 'SlidingWindow']"]


def test_what_is_written_obeys_the_loader(tiny_model, grafted, tmp_path):
    """Flat relative imports only, nothing but torch, transformers and the standard library, no tell-tale names."""
    model = grafted(grafted(tiny_model("qwen3"), "window_linear", layers=[3]), "sliding_window", layers=[0])
    model.save_pretrained(tmp_path / "m")
    files = {p.name: p.read_text() for p in (tmp_path / "m").glob("*.py")}
    assert sorted(files) == bundle.code_files(tmp_path / "m")
    for name, text in files.items():
        assert text.startswith("# ") and "Apache-2.0" in text and "regraft 0." in text.splitlines()[0], name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and f"{node.module}.py" in files, (name, node.module)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                for module in modules:
                    assert module.split(".")[0] in {"torch", "transformers", *sys.stdlib_module_names}, (name, module)
        # transformers reads the source text: a module named so is taken for one that cannot switch implementations
        assert not re.search(r"class \w*Attention\w*\(nn\.Module\)", text)
    names = type(model)._family_names.values()
    assert not any(word in n.lower() for n in names for word in ("rwkv", "minimax", "xlstm", "xlnet", "reformer"))


def test_same_model_same_bytes_and_no_leftovers(tiny_llama, grafted, tmp_path):
    both = grafted(grafted(tiny_llama(), "window_linear", layers=[1]), "sliding_window", layers=[0])
    both.save_pretrained(tmp_path / "a")
    both.save_pretrained(tmp_path / "b")
    first = {p.name: p.read_bytes() for p in (tmp_path / "a").glob("*.py")}
    assert first == {p.name: p.read_bytes() for p in (tmp_path / "b").glob("*.py")}
    (tmp_path / "a" / "notes.py").write_text("mine = 1\n")
    grafted(tiny_llama(), "sliding_window", layers=[0]).save_pretrained(tmp_path / "a")
    left = {p.name for p in (tmp_path / "a").glob("*.py")}
    assert "regraft_convert_mixers_window_linear.py" not in left and "notes.py" in left
    assert left - {"notes.py"} == set(bundle.code_files(tmp_path / "a"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "def f():\n    from regraft.kernels.linear import chunk\n",
            "line 2: 'from regraft.kernels.linear import chunk'",
        ),
        ("import regraft.kernels.linear\n", "line 1"),
        ("from regraft.kernels import linear\n", "line 1"),
        ("from regraft import errors\n", "line 1"),
        ("from .linear import chunk\n", "line 1"),
        ("import own_mixers.kernels\n", "line 1"),
    ],
)
def test_an_import_that_cannot_travel_is_refused(tmp_path, monkeypatch, text, told):
    (tmp_path / "own_mixers").mkdir()
    (tmp_path / "own_mixers" / "__init__.py").write_text("")
    (tmp_path / "own_mixers" / "fancy.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_mixers", raising=False)
    with pytest.raises(ValueError, match=r"fancy\.py, " + re.escape(told)):
        bundle.used_modules(["regraft.convert.spec", "own_mixers.fancy"])


def test_a_mixer_of_another_package_takes_its_own_modules_along(tmp_path, monkeypatch):
    (tmp_path / "own_mixers").mkdir()
    (tmp_path / "own_mixers" / "__init__.py").write_text("")
    (tmp_path / "own_mixers" / "maths.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "own_mixers" / "fancy.py").write_text(
        "from own_mixers.maths import f\nfrom regraft.kernels.ragged import (\n    run,\n)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_mixers", raising=False)
    assert bundle.used_modules(["own_mixers.fancy", "regraft.convert.spec"]) == [
        "own_mixers.fancy", "own_mixers.maths", "regraft.convert.spec", "regraft.kernels.ragged",
    ]  # fmt: skip
    text = bundle.flatten("own_mixers.fancy", "1", ["regraft", "own_mixers"])
    assert "from .own_mixers_maths import f\nfrom .regraft_kernels_ragged import (\n" in text


def test_a_base_model_and_a_subclass_save_code_too(tiny_llama, grafted, tmp_path):
    """The base model by itself, and a class made on top (as FSDP does), name the same family."""
    model = grafted(tiny_llama(), "sliding_window", layers=[1])
    model.model.save_pretrained(tmp_path / "base")
    text = (tmp_path / "base" / "modeling_regraft.py").read_text()
    assert "make_classes(LlamaForCausalLM, MIXERS, __name__)" in text
    sharded = type("FSDP" + type(model).__name__, (type("Wrap", (), {}), type(model)), {})
    model.__class__ = sharded
    assert bundle.modeling_source(model, "1").splitlines()[2:] == text.splitlines()[2:]


def test_old_transformers_are_told_so(tiny_llama, grafted, tmp_path, monkeypatch):
    grafted(tiny_llama(), "sliding_window", layers=[1]).save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.__version__", "5.3.1")
    code = compile((tmp_path / "modeling_regraft.py").read_text(), "modeling_regraft.py", "exec")
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.24, found 5\.3\.1"):
        exec(code, {"__name__": "modeling_regraft"})
