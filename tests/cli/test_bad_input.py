"""Bad input: three lines, exit code 2, nothing left behind, and nothing spent before it is refused."""

import errno
import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from regraft.cli.main import app
from regraft.errors import UserError


@pytest.fixture
def folder(tiny_llama, tiny_tokenizer, tmp_path):
    tiny_llama(vocab=260).save_pretrained(tmp_path / "src")
    tiny_tokenizer.save_pretrained(tmp_path / "src")
    return tmp_path / "src"


@pytest.fixture
def call(monkeypatch, capfd):
    """call(*arguments) -> (exit code, lines on stderr), through the entry point, in this process."""
    from regraft.cli.main import main

    def make(*arguments):
        monkeypatch.setattr(sys, "argv", ["regraft", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code, capfd.readouterr().err.strip().splitlines()

    return make


def invoke(*arguments):
    """Run the command in this process; a UserError comes back as it is."""
    return CliRunner().invoke(app, list(map(str, arguments)))


RECIPE = """\
version: 1
name: tiny
base: {base}
convert: {{mixer: window_linear, options: {{window: 8, feature_dim: 8}}}}
layers: {{by: align, keep: 2}}
distill: [{{stage: align, tokens: 600, seq_len: 64}}]
"""


def bad_inputs(folder, tmp_path):
    """(name, arguments, words of the message); every case of the list in the issue that a file can show."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.format(base=folder))
    bad_recipe = tmp_path / "bad.yaml"
    bad_recipe.write_text(RECIPE.format(base=folder).replace("keep", "kep"))
    out = tmp_path / "out"
    layers = tmp_path / "layers.json"
    layers.write_text(json.dumps({"num_layers": 30, "converted": [1]}))
    existing = tmp_path / "existing"
    existing.mkdir()
    to = ["--to", "sliding_window", "-o", out]
    return {
        "unknown mixer": (["convert", folder, "--to", "slidingwindow", "-o", out], "did you mean 'sliding_window'"),
        "layer out of range": (["convert", folder, *to, "--layers", "4"], "layer 4 is out of range"),
        "wrong depth": (["convert", folder, *to, "--layers", layers], "wrong depth"),
        "unknown recipe key": (["run", bad_recipe, "-o", out], "did you mean 'keep'"),
        "unknown recipe": (["run", "quikstart", "-o", out], "did you mean 'quickstart'"),
        "output exists": (["convert", folder, "--to", "sliding_window", "-o", existing], "exists already"),
        "run folder exists": (["run", recipe, "-o", existing], "holds something else"),
        "bad option": (["convert", folder, *to, "--option", "window=0"], "at least 1"),
        "option without value": (["convert", folder, *to, "--option", "window"], "not name=value"),
        "no such model": (["convert", "no such model", *to], "no model"),
        "no such kind": (["ls", "mixer"], "did you mean 'mixers'"),
        "not converted": (["verify", folder], "no layer of this model is converted"),
        "not a checkpoint": (["export", folder, "--push", "a/b", "-n"], "not a converted checkpoint"),
        "no results": (["report", existing], "no results.json"),
        "bad context": (["bench", folder, "--contexts", "big"], "not a context length"),
        "unknown protocol": (["eval", folder, "--protocol", "cor"], "did you mean 'core'"),
        "bad override": (["plan", recipe, "--set", "layers.keep=x"], "valid integer"),
        "no stage": (["distill", recipe, "--student", folder, "--stage", "3", "-o", out], "no stage 3"),
        "unknown selector": (
            ["select", folder, "--to", "sliding_window", "--keep", "1", "--by", "klx", "-o", tmp_path / "o.json"], "unknown selector"
        ),
    }  # fmt: skip


def test_bad_input_is_three_lines_and_leaves_nothing(folder, tmp_path):
    for name, (arguments, words) in bad_inputs(folder, tmp_path).items():
        before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
        result = invoke(*arguments)
        assert isinstance(result.exception, UserError), (name, result.output, result.exception)
        lines = str(result.exception).splitlines()
        assert words in str(result.exception), (name, lines)
        assert len(lines) == 3 and [line.split(":")[0] for line in lines] == ["error", "where", "do"], (name, lines)
        after = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
        assert after == before, (name, after.keys() ^ before.keys())


@pytest.mark.parametrize("case", ["truncated", "missing tensor", "pickle", "remote code", "wrong tokenizer", "gguf"])
def test_bad_files_are_three_lines_and_exit_code_2(folder, tmp_path, tiny_tokenizer, call, case):
    import copy

    from safetensors.torch import load_file, save_file

    weights, model = folder / "model.safetensors", folder
    if case == "truncated":
        weights.write_bytes(weights.read_bytes()[:-64])
    elif case == "missing tensor":
        tensors = load_file(weights)
        del tensors["model.layers.0.mlp.up_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif case == "pickle":
        torch.save(load_file(weights), folder / "pytorch_model.bin")
        weights.unlink()
    elif case == "remote code":
        config = json.loads((folder / "config.json").read_text())
        config.update(model_type="odd", auto_map={"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"})
        (folder / "config.json").write_text(json.dumps(config))
    elif case == "wrong tokenizer":
        other = copy.deepcopy(tiny_tokenizer)
        other.add_tokens([f"<more{i}>" for i in range(9)])
        other.save_pretrained(folder)
    else:
        model = tmp_path / "x.gguf"
        model.write_bytes(b"GGUF\x03\x00\x00\x00broken")
    out = tmp_path / "out"
    code, lines = call("-q", "convert", model, "--to", "sliding_window", "-o", out)
    assert code == 2 and len(lines) == 3, lines
    assert [line.split(":")[0] for line in lines] == ["error", "where", "do"], lines
    assert not out.exists() and not [p for p in tmp_path.iterdir() if p.name.startswith(".out")]


def test_no_disk_space(folder, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    for arguments in (
        ["convert", folder, "--to", "sliding_window", "-o", tmp_path / "out"],
        ["run", tmp_path / "r.yaml", "-o", tmp_path / "out"],
    ):
        (tmp_path / "r.yaml").write_text(RECIPE.format(base=folder))
        result = invoke(*arguments)
        assert isinstance(result.exception, UserError) and "disk space" in str(result.exception)
        assert len(str(result.exception).splitlines()) == 3
        assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(folder, tmp_path, monkeypatch):

    from transformers import PreTrainedModel

    def full(self, directory, **kwargs):
        Path(directory, "half-written").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    result = invoke("convert", folder, "--to", "sliding_window", "-o", tmp_path / "out")
    assert isinstance(result.exception, UserError) and "disk is full" in str(result.exception)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]
