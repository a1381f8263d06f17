"""Two gloo processes of `regraft distill` do what one does with the double batch."""

import json
import os
import socket
import subprocess
import sys

import pytest
from safetensors.torch import load_file

import regraft

RECIPE = """\
name: two
base: {base}
convert: {{mixer: window_linear, options: {{window: 8, sinks: 2, feature_dim: 8}}}}
layers: {{by: list, layers: "1,3"}}
distill:
  - {{stage: align, tokens: 1536, seq_len: 64, lr: 2e-2, batch_size: {batch}, checkpoint_every: 5}}
  - {{stage: logits, tokens: 1536, seq_len: 64, lr: 1e-3, batch_size: {batch}, checkpoint_every: 5, ce: 0.5}}
data:
  train: {{source: {text}, split: train}}
  eval: {{source: {text}, split: heldout}}
"""


def launch(processes, *arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    many = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(port)]
    call = [sys.executable, *(many if processes > 1 else []), "-m", "regraft", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(call, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("stage", [0, 1])
def test_two_processes_are_one_with_the_double_batch(stage, tiny_llama, tiny_tokenizer, tmp_path):
    tiny_llama(vocab=260, max_position_embeddings=2048).save_pretrained(tmp_path / "src")
    tiny_tokenizer.save_pretrained(tmp_path / "src")
    rows = [{"text": " ".join(str(i * j % 97) for j in range(30 + i % 90))} for i in range(80)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for processes, batch in ((1, 2), (2, 1)):
        recipe = RECIPE.format(base=tmp_path / "src", text=tmp_path / "t.jsonl", batch=batch)
        (tmp_path / f"{processes}.yaml").write_text(recipe)
    half = tmp_path / "half"
    options = {"window": 8, "sinks": 2, "feature_dim": 8}
    regraft.convert(str(tmp_path / "src"), half, to="window_linear", layers="1,3", options=options)
    for processes in (1, 2):
        recipe, out = tmp_path / f"{processes}.yaml", tmp_path / f"out{processes}"
        told = launch(processes, "distill", recipe, "--student", half, "--stage", stage, "-o", out, "--device", "cpu")
        assert told.count("12 steps, 1536 tokens") == 1, "one process speaks"
    one, two = (
        [json.loads(line) for line in (tmp_path / f"out{p}" / "metrics.jsonl").read_text().splitlines()] for p in (1, 2)
    )
    assert len(one) == len(two) == 12
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4) and b["tokens"] == a["tokens"]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    first, second = (load_file(tmp_path / f"out{p}" / "model" / "model.safetensors") for p in (1, 2))
    start = load_file(half / "model.safetensors")
    moved = [name for name in start if (first[name] - start[name]).abs().max() > 1e-4]
    assert moved and first.keys() == second.keys()
    for name in first:
        assert (first[name] - second[name]).abs().max() < 1e-3, name
