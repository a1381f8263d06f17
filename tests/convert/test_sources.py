"""Where models come from, and everything that can be wrong with the files."""

import json
import struct

import pytest
import torch

from regraft.convert.sources import check_same_tokenizer, load_config, load_source, pick_device, resolve
from regraft.errors import UserError


@pytest.fixture
def folder(tiny_llama, tiny_tokenizer, tmp_path):
    model = tiny_llama(vocab=260)
    model.save_pretrained(tmp_path / "m")
    tiny_tokenizer.save_pretrained(tmp_path / "m")
    return tmp_path / "m", model


def test_a_folder_loads_as_it_was(folder):
    path, model = folder
    loaded = load_source(str(path))
    ids = torch.randint(3, 260, (1, 20))
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)
    assert loaded.info.kind == "folder" and len(loaded.info.fingerprint) == 16
    assert load_source(str(path)).info.fingerprint == loaded.info.fingerprint
    assert load_source(str(path), dtype="bfloat16").model.dtype == torch.bfloat16


def test_shards_load_and_a_missing_one_is_named(folder, tmp_path):
    _, model = folder
    model.save_pretrained(tmp_path / "s", max_shard_size="50KB")
    shards = sorted((tmp_path / "s").glob("*.safetensors"))
    assert len(shards) > 2
    loaded = load_source(str(tmp_path / "s"))
    ids = torch.randint(3, 260, (1, 20))
    assert torch.equal(loaded.model(ids).logits, model(ids).logits) and loaded.tokenizer is None
    shards[1].unlink()
    with pytest.raises(UserError, match=f"a shard is missing: {shards[1].name}"):
        load_source(str(tmp_path / "s"))


def test_a_changed_weight_changes_the_fingerprint(folder, tmp_path):
    path, model = folder
    first = load_source(str(path)).info.fingerprint
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 3] += 1e-3
    model.save_pretrained(tmp_path / "n")
    assert load_source(str(tmp_path / "n")).info.fingerprint != first


def test_truncated_weights(folder):
    path, _ = folder
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"truncated or corrupt"):
        load_source(str(path))


def test_a_missing_tensor_is_named(folder):
    from safetensors.torch import load_file, save_file

    path, _ = folder
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.k_proj\.weight"):
        load_source(str(path))


@pytest.mark.parametrize("name", ["window_linear", "sliding_window"])
def test_a_missing_tensor_of_a_converted_model_is_named(tiny_llama, grafted, tmp_path, name):
    from safetensors.torch import load_file, save_file

    grafted(tiny_llama(), name, layers=[1], window=5).save_pretrained(tmp_path / "g")
    file = tmp_path / "g" / "model.safetensors"
    tensors = load_file(file)
    lost = "model.layers.1.self_attn." + ("feature_k" if name == "window_linear" else "k_proj.weight")
    save_file({k: v for k, v in tensors.items() if k != lost}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=lost.replace(".", r"\.")):
        load_source(str(tmp_path / "g"))
    save_file({**tensors, "model.layers.9.extra": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.9\.extra"):
        load_source(str(tmp_path / "g"))


def test_a_pickle_is_not_opened_unasked(folder):
    path, model = folder
    (path / "model.safetensors").unlink()
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickle"):
        load_source(str(path))
    ids = torch.randint(3, 260, (1, 9))
    assert torch.equal(load_source(str(path), allow_pickle=True).model(ids).logits, model(ids).logits)


def test_remote_code_is_not_run_unasked(folder):
    path, _ = folder
    config = json.loads((path / "config.json").read_text())
    config.update(model_type="mystery", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    (path / "config.json").write_text(json.dumps(config))
    (path / "evil.py").write_text("raise SystemExit('code was run')")
    with pytest.raises(UserError, match="code of its own"):
        load_source(str(path))


def test_the_wrong_tokenizer(folder, tiny_tokenizer):
    import copy

    path, _ = folder
    bigger = copy.deepcopy(tiny_tokenizer)
    bigger.add_tokens([f"<extra{i}>" for i in range(20)])
    bigger.save_pretrained(path)
    with pytest.raises(UserError, match="wrong tokenizer: its ids go up to 279"):
        load_source(str(path))
    with pytest.raises(UserError, match="different vocabularies"):
        check_same_tokenizer(tiny_tokenizer, bigger, "x")


def test_gguf_that_is_broken_or_unknown(tmp_path):
    import gguf

    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + struct.pack("<I", 3) + b"\x00" * 7)
    with pytest.raises(UserError, match="GGUF"):
        load_source(str(bad))
    writer = gguf.GGUFWriter(str(tmp_path / "odd.gguf"), "no_such_arch")
    writer.add_uint32("no_such_arch.block_count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="no_such_arch"):
        load_config(str(tmp_path / "odd.gguf"))


def test_what_is_no_model(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve(str(tmp_path / "empty"))
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(UserError, match="not a model"):
        resolve(str(tmp_path / "x.txt"))
    with pytest.raises(UserError, match="no model 'nothing here'"):
        resolve("nothing here")
    with pytest.raises(UserError, match="no demo model"):
        resolve("demo:other")
    assert resolve("owner/name").kind == "hub"
    with pytest.raises(UserError) as caught:
        load_source("owner/name-that-is-not-cached")
    assert caught.value.fix


def test_a_config_that_is_not_json(folder):
    path, _ = folder
    (path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load_config(str(path))


def test_devices():
    assert pick_device("cpu") == "cpu"
    assert pick_device("auto") in ("cpu", "cuda", "mps")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no device 'cuda:1'"):
            pick_device("cuda:1")


@pytest.mark.slow
def test_the_demo_model_is_the_gguf_it_comes_from():
    from transformers import AutoModelForCausalLM, GgufConfig

    place = resolve("demo:smollm2")
    loaded = load_source("demo:smollm2")
    assert loaded.info.quantized_from == "Q4_1" and loaded.info.license == "apache-2.0"
    first, keywords = place.load_arguments()
    direct = AutoModelForCausalLM.from_pretrained(
        first, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **keywords
    )
    ids = torch.randint(3, 40000, (1, 30))
    torch.testing.assert_close(loaded.model(ids).logits, direct.eval()(ids).logits, atol=2e-4, rtol=1e-4)
