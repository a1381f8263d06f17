"""The command line: quick, helpful, and for bad input three lines, exit code 2 and nothing left behind."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from regraft.cli.main import COMMANDS, app
from regraft.errors import UserError


@pytest.fixture
def folder(tiny_llama, tiny_tokenizer, tmp_path):
    tiny_llama(vocab=260).save_pretrained(tmp_path / "src")
    tiny_tokenizer.save_pretrained(tmp_path / "src")
    return tmp_path / "src"


def call(*arguments, cwd=None):
    """Run the command as a user does, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "regraft", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        env={**__import__("os").environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"},
    )


def invoke(*arguments):
    """Run the command in this process; a UserError comes back as it is."""
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_help_comes_without_torch():
    code = (
        "import sys, time\nfrom regraft.cli.main import app\n"
        "from typer.testing import CliRunner\nout = CliRunner().invoke(app, ['--help'])\n"
        "assert out.exit_code == 0, out.output\n"
        "heavy = {'torch', 'transformers', 'datasets', 'peft', 'lm_eval', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    subprocess.run([sys.executable, "-c", "import regraft, sys; assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_with_an_example(name):
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert f"regraft {name}" in result.output


def test_looking(folder, tmp_path):
    assert "4 layers" in invoke("inspect", folder).output
    told = json.loads(invoke("inspect", folder, "--json").output)
    assert told["num_layers"] == 4 and told["mixers"]["window_linear"]["layers"] == [0, 1, 2, 3]
    for kind in ("mixers", "recipes", "selectors", "families", "tasks"):
        assert invoke("ls", kind).exit_code == 0
    assert {row["name"] for row in json.loads(invoke("ls", "mixers", "--json").output)} >= {"window_linear"}
    assert "window_linear" in invoke("cat", "quickstart").output
    target = tmp_path / "mine.yaml"
    assert invoke("cp", "quickstart", target).exit_code == 0 and "# The main job" in target.read_text()
    assert "torch" in invoke("env").output
    assert re.match(r"regraft \d", invoke("--version").output)


def test_converting_verifying_evaluating_exporting(folder, tmp_path):
    out = tmp_path / "half"
    result = invoke(
        "convert",
        folder,
        "--to",
        "window_linear",
        "--layers",
        "SL",
        "-o",
        out,
        "--option",
        "window=8",
        "--option",
        "feature_dim=8",
    )
    assert result.exit_code == 0 and "SLSL" in result.output and "fresh: feature_q" in result.output
    assert (out / "README.md").is_file() and (out / "modeling_regraft.py").is_file()
    assert "SLSL" in invoke("inspect", out).output
    result = invoke("verify", out, "--no-reload")
    assert result.exit_code == 0, result.output
    (tmp_path / "t.jsonl").write_text(
        "\n".join(json.dumps({"text": " ".join(map(str, range(i, i + 400)))}) for i in range(60))
    )
    result = invoke(
        "eval", out, "--data", tmp_path / "t.jsonl", "--windows", "2", "--recall", "none", "-o", tmp_path / "ev"
    )
    assert result.exit_code == 0, result.output
    assert "KL" in result.output and (tmp_path / "ev" / "report.html").is_file()
    result = invoke("bench", out, "--contexts", "32,64", "--repeats", "1", "--new-tokens", "2")
    assert "of the teacher's" in result.output
    assert "teacher:" in invoke("chat", out, "--prompt", "12", "--new-tokens", "3").output
    result = invoke("export", out, "--push", "me/half", "--dry-run")
    assert "model.safetensors" in result.output and "would go to me/half" in result.output
    result = invoke("export", out, "-o", tmp_path / "public")
    assert result.exit_code == 0
    assert str(tmp_path) not in (tmp_path / "public" / "config.json").read_text()
    assert invoke("convert", folder, "--to", "sliding_window", "--layers", "0", "-n").output.startswith("LSSS")


def test_selecting(folder, tmp_path):
    (tmp_path / "t.jsonl").write_text(
        "\n".join(json.dumps({"text": " ".join(map(str, range(i, i + 400)))}) for i in range(60))
    )
    out = tmp_path / "layers.json"
    result = invoke(
        "select", folder, "--to", "sliding_window", "--keep", "2", "--compare", "uniform,align,kl", "--tokens", "1024",
        "--data", tmp_path / "t.jsonl", "--option", "window=8", "-o", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert (
        "rank agreement" in result.output and out.is_file() and out.with_suffix(".svg").read_text().startswith("<?xml")
    )
    result = invoke("convert", folder, "--to", "sliding_window", "--layers", out, "-o", tmp_path / "m")
    assert result.exit_code == 0


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
            ["select", folder, "--to", "sliding_window", "--keep", "1", "--by", "klx", "-o", out], "unknown selector"
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
def test_bad_files_are_three_lines_and_exit_code_2(folder, tmp_path, tiny_tokenizer, case):
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
    done = call("convert", model, "--to", "sliding_window", "-o", out)
    lines = done.stderr.strip().splitlines()
    lines = [line for line in lines if not line.startswith("converting ")]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 3 and lines[0].startswith("error: ") and lines[2].startswith("do:"), done.stderr
    assert "Traceback" not in done.stderr and not out.exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".out")]


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
    import errno

    from transformers import PreTrainedModel

    def full(self, directory, **kwargs):
        Path(directory, "half-written").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    result = invoke("convert", folder, "--to", "sliding_window", "-o", tmp_path / "out")
    assert isinstance(result.exception, UserError) and "disk is full" in str(result.exception)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_a_fault_of_ours_says_so(monkeypatch, capsys):
    from regraft.cli import main as entry

    monkeypatch.setattr(entry, "app", lambda **k: 1 / 0)
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert caught.value.code == 1
    told = capsys.readouterr().err
    assert "ZeroDivisionError" in told and "regraft env" in told


def test_an_interruption_says_how_to_go_on(monkeypatch, capsys):
    from regraft.cli import main as entry

    def stop(**k):
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "app", stop)
    monkeypatch.setattr(sys, "argv", ["regraft", "run", "quickstart"])
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert caught.value.code == 130 and "regraft run quickstart" in capsys.readouterr().err
