"""`regraft run` on a tiny model: everything in its folder, nothing done twice, the same end after a kill."""

import copy
import json
import os
import shlex
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


def go(text, out, said=None, overrides=(), **options):
    said = [] if said is None else said
    return run(parse_recipe(text, "r", overrides), out, recipe_text=text, device="cpu", log=said.append, **options)


def stored(root, step="1-logits"):
    """The weights that a step left in the store."""
    (path,) = root.glob(f".store/{step}-*/model/model.safetensors")
    return load_file(path)


def same(one, two):
    return one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)


def counted(monkeypatch):
    """The stages that are really trained from here on."""
    from regraft.distill import loop

    trained, real = [], loop.run_stage

    def spy(stage, **rest):
        trained.append(stage.stage)
        return real(stage, **rest)

    monkeypatch.setattr(loop, "run_stage", spy)
    return trained


def test_a_run_leaves_all_it_promises_and_does_nothing_twice(recipe_text, tmp_path):
    out = tmp_path / "runs" / "a"
    said = []
    result = go(recipe_text(), out, said)
    files = {p.name for p in out.iterdir()}
    assert {
        "recipe.yaml", "resolved.yaml", "layers.json", "results.json", "env.json", "verify.json", "report.html",
        "report.md", "figures", "final", "metrics-0-align.jsonl", "metrics-1-logits.jsonl", "metrics.jsonl", "plan.json",
    } <= files  # fmt: skip
    assert result.verified.passed and len(result.selection.converted) == 2
    final = {p.name for p in (out / "final").iterdir()}
    assert {"config.json", "model.safetensors", "modeling_regraft.py", "tokenizer.json", "README.md"} <= final
    page = (out / "report.html").read_text()
    assert "<script" not in page and page.count("<svg") >= 3 and "NaN" not in page and "verify" in page
    assert (out / "report.md").read_text().startswith("# tiny")
    assert not list(out.parent.glob(".store/*.partial"))
    assert not list(out.parent.glob(".store/*/train")), "checkpoints of finished stages are removed"
    first = load_file(out / "final" / "model.safetensors")
    assert same(first, stored(out.parent))

    said.clear()
    go(recipe_text(), out, said)
    assert sum("reused" in line for line in said) == 5  # two stages, select, eval, verify
    assert same(first, load_file(out / "final" / "model.safetensors"))

    # another second stage: the first is reused
    said.clear()
    go(recipe_text(1000), tmp_path / "runs" / "b", said, upto="distill")
    assert sum("reused" in line for line in said) == 2  # align, select
    with pytest.raises(UserError, match="holds something else"):
        go(recipe_text(1000), out)


def test_killed_in_the_middle_and_run_again_ends_with_the_same_weights(recipe_text, tmp_path):
    (tmp_path / "r.yaml").write_text(recipe_text(6000))
    command = [
        *(sys.executable, "-m", "regraft", "--threads", "1", "run", str(tmp_path / "r.yaml")),
        *("--device", "cpu", "--upto", "distill", "-o"),
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
        assert not list((tmp_path / "two").glob(f".store/{stage}-*[!l]/done.json"))
    subprocess.run([*command, str(tmp_path / "two" / "x")], check=True, env=environment, capture_output=True)
    for stage in ("0-align", "1-logits"):
        assert same(stored(tmp_path / "one", stage), stored(tmp_path / "two", stage)), stage
    rows = [(tmp_path / run / "x" / "metrics.jsonl").read_text().splitlines() for run in ("one", "two")]
    losses = [[json.loads(row)["loss"] for row in lines] for lines in rows]
    assert losses[0] == losses[1] and len(losses[0]) == 32 + 94


def test_a_knob_redoes_what_depends_on_it_and_nothing_else(recipe_text, tmp_path, monkeypatch):
    trained = counted(monkeypatch)
    text = recipe_text(600)
    go(text, tmp_path / "a", upto="eval", overrides=["eval.recall=[]", "eval.bench=[]"])
    assert trained == ["align", "logits"]
    trained.clear()
    # names, how often is saved, and what is measured decide nothing that is trained
    free = ["name=other", "distill.1.checkpoint_every=7", "eval.windows=3", "eval.recall=[]", "eval.bench=[]"]
    result = go(text, tmp_path / "b", upto="eval", overrides=free)
    assert trained == [] and result.results.model == "other" and result.results.quality[0].windows == 3
    assert json.loads((tmp_path / "b" / "results.json").read_text())["model"] == "other"
    only_named = ["name=third", "eval.recall=[]", "eval.bench=[]"]
    assert go(text, tmp_path / "c", upto="eval", overrides=only_named).results.model == "third"
    assert len(list((tmp_path / ".store").glob("eval-*"))) == 2
    for overrides, redone in (
        (["layers.keep=1"], ["logits"]),
        (["distill.0.lr=1e-2"], ["align", "logits"]),
        (["convert.options.sinks=1"], ["align", "logits"]),
    ):
        trained.clear()
        go(text, tmp_path / "-".join(overrides), upto="distill", overrides=overrides)
        assert trained == redone, overrides
    # the text itself is an input: a changed file is another one
    trained.clear()
    with (tmp_path / "t.jsonl").open("a") as out:
        out.write("\n" + json.dumps({"text": "more text"}))
    go(text, tmp_path / "more", upto="align")
    assert trained == ["align"]


def test_upto_stops_there_and_the_next_call_goes_on(recipe_text, tmp_path, monkeypatch):
    trained = counted(monkeypatch)
    out, text = tmp_path / "deep" / "x", recipe_text(600)
    result = go(text, out, upto="align", store=tmp_path / "kept")
    assert trained == ["align"] and result.selection is None and result.final is None
    assert not (tmp_path / "deep" / ".store").exists() and list((tmp_path / "kept").glob("0-align-*/done.json"))
    result = go(text, out, upto="select", store=tmp_path / "kept")
    assert trained == ["align"] and len(result.selection.converted) == 2 and (out / "layers.json").is_file()
    go(text, out, upto="distill", store=tmp_path / "kept")
    assert trained == ["align", "logits"] and not (out / "final").exists()
    with pytest.raises(UserError, match="did you mean 'select'"):
        go(text, tmp_path / "y", upto="selct")


@pytest.mark.parametrize(
    "overrides",
    [
        ["distill.1.train=lora", "distill.1.lora={r: 2}"],
        ["dtype=bfloat16"],
        ["distill.1.dtype=bfloat16", "distill.1.gradient_checkpointing=true"],
        ["layers.by=kl", "layers.tokens=512", "distill.0.checkpoint_every=1000"],
    ],
    ids=["lora", "bf16", "bf16 stage", "kl"],
)
def test_a_run_in_two_parts_is_the_run_in_one(recipe_text, tmp_path, overrides):
    import torch

    text = recipe_text(600)
    go(text, tmp_path / "one" / "x", upto="distill", overrides=overrides)
    go(text, tmp_path / "two" / "x", upto="align", overrides=overrides)
    torch.manual_seed(12345)  # another state of the global generator, as in another process
    torch.rand(7)
    go(text, tmp_path / "two" / "x", upto="distill", overrides=overrides)
    assert same(stored(tmp_path / "one"), stored(tmp_path / "two"))
    if "lora" in overrides[0]:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            assert (tmp_path / "one" / "x" / "adapter" / name).is_file()


def test_a_teacher_of_its_own(recipe_text, tmp_path, tiny_llama, tiny_tokenizer, monkeypatch):
    tiny_llama(vocab=260, layers=2, seed=5, max_position_embeddings=2048).save_pretrained(tmp_path / "big")
    tiny_tokenizer.save_pretrained(tmp_path / "big")
    trained, text = counted(monkeypatch), recipe_text(400)
    # of another depth: layers are aligned to the source, and only the logits are this teacher's
    teacher = [f"teacher={tmp_path / 'big'}", "eval.recall=[]", "eval.bench=[]"]
    result = go(text, tmp_path / "a", upto="eval", overrides=teacher)
    assert result.results.teacher == str(tmp_path / "big") and trained == ["align", "logits"]
    trained.clear()
    go(text, tmp_path / "b", upto="distill")
    assert trained == ["logits"]
    files = {path.name for path in tmp_path.iterdir()}
    other = copy.deepcopy(tiny_tokenizer)
    other.add_tokens(["<more>"])
    other.save_pretrained(tmp_path / "big")
    tiny_llama(vocab=261, layers=2).save_pretrained(tmp_path / "big")
    with pytest.raises(UserError, match="wrong tokenizer"):
        go(text, tmp_path / "c", overrides=teacher)
    assert {path.name for path in tmp_path.iterdir()} == files


def test_two_processes_are_not_at_one_step(recipe_text, tmp_path):
    import fcntl

    text = recipe_text(600)
    go(text, tmp_path / "a", upto="align")
    (done,) = tmp_path.glob(".store/0-align-*")
    busy = done.with_name(done.name + ".partial")
    done.rename(busy)
    handle = os.open(busy, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(UserError, match="another process"):
            go(text, tmp_path / "a", upto="align")
    finally:
        os.close(handle)
    go(text, tmp_path / "a", upto="align")
    assert done.is_dir() and not busy.exists()


def test_ctrl_c_says_how_to_go_on(recipe_text, tmp_path):
    (tmp_path / "r.yaml").write_text(recipe_text(60_000))
    out = tmp_path / "a b"
    command = [sys.executable, "-m", "regraft", "--threads", "1", "run", str(tmp_path / "r.yaml"), "-o", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        if list(tmp_path.glob(".store/*.partial/train/checkpoint-*")):
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=180)
    assert process.returncode == 130 and "Traceback" not in told, told
    last = told.strip().splitlines()[-1]
    assert last.startswith("stopped; finished steps and checkpoints are kept. Continue: ")
    typed = shlex.split(last.partition("Continue: ")[2])
    assert typed[:3] == ["python", "-m", "regraft"] and typed[3:] == command[3:]
    assert list(tmp_path.glob(".store/0-align-*.partial/train/checkpoint-*"))


def test_quality_is_measured_while_training_and_changes_nothing(recipe_text, tmp_path, monkeypatch):
    """`eval_every`: the rows stand in the metrics and the report, in an adapter's stage too, and the weights are those
    of a run without.
    """
    lora = ["distill.1.train=lora", "distill.1.lora={r: 2}"]
    measured = [*lora, "distill.0.eval_every=640", "distill.1.eval_every=1280"]
    done = go(recipe_text(), tmp_path / "a" / "run", overrides=measured, upto="eval")
    rows = [json.loads(line) for line in (done.folder / "metrics-1-logits.jsonl").read_text().splitlines()]
    found = {row["step"]: row["heldout"] for row in rows if "heldout" in row}
    assert sorted(found) == [20, 32], "every 1280 tokens of 64 a step, and at the end"
    first = [json.loads(line) for line in (done.folder / "metrics-0-align.jsonl").read_text().splitlines()]
    assert sorted(row["step"] for row in first if "heldout" in row) == [10, 20, 30, 32]
    assert set(rows[0]["before"]) == {"kl", "top1", "ppl_ratio", "copy", "passkey", "associative"}
    student = next(q for q in done.results.quality if q.name == "student")
    assert found[32]["kl"] == pytest.approx(student.kl, rel=1e-4), "the last one is the model that is written"
    plain = go(recipe_text(), tmp_path / "b" / "run", overrides=lora, upto="distill")
    assert same(stored(tmp_path / "a"), stored(tmp_path / "b")) and plain.results is None

    from regraft.eval.report import report

    page = report([done.folder]).with_suffix(".md").read_text()
    assert "Quality against tokens" in page and f"| {found[32]['kl']:.4f} |" in page
