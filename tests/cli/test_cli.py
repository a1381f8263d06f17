"""The command line: quick, helpful, and for bad input three lines, exit code 2 and nothing left behind."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from regraft.cli.main import COMMANDS, app


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


def test_a_fault_of_ours_says_so(monkeypatch, capsys):
    from regraft.cli import main as entry

    monkeypatch.setattr(entry, "app", lambda **k: 1 / 0)
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert caught.value.code == 1
    told = capsys.readouterr().err
    assert "ZeroDivisionError" in told and "regraft env" in told
