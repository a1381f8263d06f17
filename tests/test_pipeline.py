"""`regraft run` on a tiny model: everything in its folder, nothing done twice, the same end after a kill."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

from regraft.errors import UserError
from regraft.pipeline import run
from regraft.recipes.load import parse_recipe

RECIPE = """\
version: 1
name: tiny
base: {base}
convert: {{mixer: window_linear, options: {{window: 8, sinks: 2, feature_dim: 8}}}}
layers: {{by: align, keep: 2}}
distill:
  - {{stage: align, tokens: 2000, seq_len: 64, lr: 2e-2, checkpoint_every: 4}}
  - {{stage: logits, tokens: {tokens}, seq_len: 64, lr: 1e-3, checkpoint_every: 5, positions: 20}}
data:
  train: {{source: {text}, split: train}}
  eval: {{source: {text}, split: all}}
eval: {{windows: 2, recall: [300], recall_samples: 1, bench: [48], baselines: true}}
"""


@pytest.fixture
def recipe_text(tiny_llama, tiny_tokenizer, tmp_path):
    tiny_llama(vocab=260, max_position_embeddings=2048).save_pretrained(tmp_path / "src")
    tiny_tokenizer.save_pretrained(tmp_path / "src")
    rows = [{"text": " ".join(str(i * j % 97) for j in range(120))} for i in range(60)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def make(tokens=2000):
        return RECIPE.format(base=tmp_path / "src", text=tmp_path / "t.jsonl", tokens=tokens)

    return make


def go(text, out, said=None):
    said = [] if said is None else said
    return run(parse_recipe(text, "r"), recipe_text=text, out=out, device="cpu", log=said.append)


def test_a_run_leaves_all_it_promises_and_does_nothing_twice(recipe_text, tmp_path):
    out = tmp_path / "runs" / "a"
    said = []
    result = go(recipe_text(), out, said)
    files = {p.name for p in out.iterdir()}
    assert {
        "recipe.yaml", "resolved.yaml", "layers.json", "results.json", "env.json", "verify.json", "report.html",
        "report.md", "figures", "final", "metrics-0-align.jsonl", "metrics-1-logits.jsonl",
    } <= files  # fmt: skip
    assert result.verified.passed and len(result.selection.converted) == 2
    final = {p.name for p in (out / "final").iterdir()}
    assert {"config.json", "model.safetensors", "modeling_regraft.py", "tokenizer.json", "README.md"} <= final
    page = (out / "report.html").read_text()
    assert "<script" not in page and page.count("<svg") >= 3 and "NaN" not in page and "verify" in page
    assert (out / "report.md").read_text().startswith("# tiny")
    assert not list(out.parent.glob(".store/*.partial"))
    first = load_file(out / "final" / "model.safetensors")

    said.clear()
    go(recipe_text(), out, said)
    assert sum("reused" in line for line in said) == 2
    again = load_file(out / "final" / "model.safetensors")
    assert all((first[k] == again[k]).all() for k in first)

    # another second stage: the first is reused
    said.clear()
    go(recipe_text(1000), tmp_path / "runs" / "b", said)
    assert sum("reused" in line for line in said) == 1
    with pytest.raises(UserError, match="holds something else"):
        go(recipe_text(1000), out)


def test_killed_in_the_middle_and_run_again_ends_with_the_same_weights(recipe_text, tmp_path):
    text = recipe_text(6000)
    (tmp_path / "r.yaml").write_text(text)
    command = [
        sys.executable,
        "-m",
        "regraft",
        "--threads",
        "1",
        "run",
        str(tmp_path / "r.yaml"),
        "--device",
        "cpu",
        "-o",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, str(tmp_path / "one" / "x")], check=True, env=environment, capture_output=True)
    for stage in ("0-align", "1-logits"):
        process = subprocess.Popen(
            [*command, str(tmp_path / "two" / "x")],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.time() + 120
        while time.time() < deadline and process.poll() is None:
            if list((tmp_path / "two").glob(f".store/{stage}-*.partial/train/checkpoint-*")):
                break
            time.sleep(0.01)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "two" / "x" / "final").exists()
    subprocess.run([*command, str(tmp_path / "two" / "x")], check=True, env=environment, capture_output=True)
    one, two = (load_file(tmp_path / run / "x" / "final" / "model.safetensors") for run in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        assert (one[name] == two[name]).all(), name
