"""What the judges say, recomputed by hand."""

import json
import math

import pytest
import torch

from regraft.convert.layers import evenly
from regraft.data.packing import token_stream
from regraft.data.synthetic import RecallItem
from regraft.errors import UserError
from regraft.eval.baselines import sliding_window_baseline
from regraft.eval.bench import bench, cache_bytes
from regraft.eval.divergence import compare, windows
from regraft.eval.evaluate import evaluate
from regraft.eval.recall import recall, score
from regraft.eval.results import Results, mean_and_stderr
from regraft.recipes.schema import DataConfig, EvalConfig


def test_divergence_by_hand(tiny_llama):
    teacher, student = tiny_llama(seed=0), tiny_llama(seed=1)
    ids = torch.randint(3, 128, (3, 40))
    base, found = compare(teacher, {"student": student}, ids, "core")
    with torch.no_grad():
        p, q = (m(ids).logits[:, :-1].double().log_softmax(-1) for m in (teacher, student))
    kl = (p.exp() * (p - q)).sum(-1)
    labels = ids[:, 1:, None]
    assert found.kl == pytest.approx(kl.mean().item(), rel=1e-5)
    assert found.kl_stderr == pytest.approx(kl.mean(1).std().item() / math.sqrt(3), rel=1e-4)
    assert found.ppl == pytest.approx(math.exp(-q.gather(-1, labels).mean()), rel=1e-5)
    assert base.ppl == pytest.approx(math.exp(-p.gather(-1, labels).mean()), rel=1e-5)
    assert found.ppl_ratio == pytest.approx(found.ppl / base.ppl)
    assert found.top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert found.tokens == 3 * 39


def test_a_model_against_itself_is_exactly_zero(tiny_llama):
    model = tiny_llama()
    _, same = compare(model, {"student": model}, torch.randint(3, 128, (2, 30)), "core")
    assert same.kl == 0 and same.ppl_ratio == 1 and same.top1 == 1


def test_windows_are_the_protocols_and_come_from_the_whole_text(tiny_tokenizer):
    stream = torch.arange(100 * 512 + 17)
    ids = windows("core", stream)
    assert ids.shape == (40, 512)
    assert ids[0, 0] == 0 and ids[-1, -1] == 100 * 512 - 1
    assert len(set(ids[:, 0].tolist())) == 40
    assert windows("long", stream, 3).shape == (3, 2048)
    with pytest.raises(UserError, match="needs 40 windows of 512 tokens, the text gives 3"):
        windows("core", torch.arange(2000))
    joined = token_stream(tiny_tokenizer, ["ab", "cd"])
    assert tiny_tokenizer.decode(joined.tolist()) == "ab\n\ncd"
    assert tiny_tokenizer.bos_token_id not in joined.tolist()


class Oracle(torch.nn.Module):
    """A model that predicts the next token of the items right, except where told otherwise."""

    device = torch.device("cpu")

    def __init__(self, wrong=()):
        super().__init__()
        self.wrong = set(wrong)

    def forward(self, input_ids, use_cache, logits_to_keep):
        logits = torch.zeros(len(input_ids), len(logits_to_keep), 200)
        for row, ids in enumerate(input_ids):
            for i, p in enumerate(logits_to_keep.tolist()):
                right = int(ids[p + 1])
                logits[row, i, right + 1 if (row, p + 1) in self.wrong else right] = 1.0
        return type("Out", (), {"logits": logits})


def test_recall_counts_an_answer_only_if_all_its_tokens_are_right():
    items = [
        RecallItem(torch.arange(50), [[10, 11], [20], [30, 31, 32]]),
        RecallItem(torch.arange(50) + 3, [[12, 13], [40]]),
    ]
    assert score(Oracle(), items) == [[True, True, True], [True, True]]
    assert score(Oracle({(0, 11), (1, 10)}), items) == [[False, True, True], [True, True]]
    assert score(Oracle({(0, 30), (0, 20), (1, 40)}), items) == [[True, False, False], [True, False]]


def test_recall_asks_more_of_tasks_with_one_answer(tiny_llama, tiny_tokenizer):
    model, text = tiny_llama(vocab=260, max_position_embeddings=2048), list(range(4, 104)) * 30
    rows = recall({"m": model}, tiny_tokenizer, text, [300, 600], 16)
    answers = {(r.task, r.length): r.n for r in rows}
    assert answers["passkey", 300] == 16 and answers["passkey", 600] == 8
    assert answers["associative", 300] == 8 * 4 and answers["associative", 600] == 4 * 4
    assert answers["copy", 300] == 4 * 119 and answers["copy", 600] == 2 * 239


def test_recall_runs_all_models_on_the_same_items(tiny_llama, tiny_tokenizer):
    teacher = tiny_llama(vocab=260)
    haystack = tiny_tokenizer(" ".join(map(str, range(300))))["input_ids"]
    rows = recall({"teacher": teacher, "same": teacher}, tiny_tokenizer, haystack, [256], 2)
    by = {(r.name, r.task): r for r in rows}
    for task in ("copy", "passkey", "associative"):
        assert by["teacher", task].accuracy == by["same", task].accuracy
        assert by["teacher", task].n > 0


def test_baselines(tiny_llama):
    assert evenly(30, 15) == list(range(1, 30, 2))
    assert evenly(4, 1) == [2] and evenly(5, 5) == [0, 1, 2, 3, 4]
    teacher = tiny_llama()
    model = sliding_window_baseline(teacher, [1, 2], 7)
    assert model.config.regraft["mixers"]["1"] == {"name": "sliding_window", "options": {"window": 7, "sinks": 4}}
    _, found = compare(teacher, {"b": model}, torch.randint(3, 128, (2, 40)), "core")
    assert found.kl > 0


def test_cache_bytes_are_what_the_tensors_hold(tiny_llama, grafted):
    teacher = tiny_llama()
    ids = torch.randint(3, 128, (1, 50))
    cache = teacher(ids, use_cache=True).cache
    assert cache_bytes(cache) == 4 * 2 * 50 * 2 * 16 * 4
    model = grafted(teacher, "window_linear", layers=[0, 2], window=8, sinks=2, feature_dim=8)
    rows = bench({"teacher": teacher, "student": model}, [32, 64], repeats=2, new_tokens=3)
    assert [(r.name, r.context) for r in rows] == [(n, c) for c in (32, 64) for n in ("teacher", "student")]
    by = {(r.name, r.context): r for r in rows}
    per_token = 4 * 2 * 2 * 16 * 4
    assert [by["teacher", c].cache_bytes for c in (32, 64)] == [(c + 3) * per_token for c in (32, 64)]
    grown = by["student", 64].cache_bytes - by["student", 32].cache_bytes
    assert grown == (by["teacher", 64].cache_bytes - by["teacher", 32].cache_bytes) // 2
    assert all(r.prefill_tok_s > 0 and r.decode_tok_s > 0 and r.repeats == 2 for r in rows)


def test_standard_errors():
    assert mean_and_stderr([2.0]) == (2.0, 0.0)
    mean, stderr = mean_and_stderr([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5 and stderr == pytest.approx(math.sqrt(5 / 3 / 4))


@pytest.fixture
def small(tiny_llama, grafted, tmp_path):
    teacher = tiny_llama(vocab=260, max_position_embeddings=4096)
    student = grafted(teacher, "window_linear", layers=[1, 2], window=8, sinks=2, feature_dim=8)
    rows = [{"text": " ".join(str(i * j) for j in range(300))} for i in range(12)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return teacher, student, DataConfig(source=str(path), split="all")


def test_an_evaluation_is_complete_repeatable_and_survives_its_file(small, tiny_tokenizer, tmp_path):
    teacher, student, data = small
    config = EvalConfig(protocols=["core"], windows=3, recall=[300], recall_samples=2, bench=[64])
    runs = [evaluate(student, teacher, tiny_tokenizer, config, data, log=lambda m: None) for _ in range(2)]
    names = [q.name for q in runs[0].quality]
    assert names == ["teacher", "student", "sliding_window baseline", "interleave baseline"]
    assert len(runs[0].recall) == 3 * 3 and len(runs[0].speed) == 2 and len(runs[0].samples) == 3
    assert runs[0].quality == runs[1].quality and runs[0].recall == runs[1].recall
    assert runs[0].samples == runs[1].samples and runs[0].protocol == runs[1].protocol
    assert runs[0].env["versions"]["torch"] == torch.__version__.split("+")[0] or runs[0].env["versions"]["torch"]
    path = tmp_path / "results.json"
    runs[0].save(path)
    assert Results.load(path) == runs[0]
    runs[0].quality[0] = runs[0].quality[0].__class__(**{**runs[0].quality[0].__dict__, "kl": math.nan})
    with pytest.raises(ValueError, match="JSON"):
        runs[0].save(path)


@pytest.mark.slow
def test_lm_eval_gives_the_same_digits_on_the_object_and_on_the_folder(small, tiny_tokenizer, tmp_path):
    import os
    import subprocess
    import sys

    from regraft.eval.harness import lm_eval_tasks

    _, student, _ = small
    student.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"q": f"{i} plus {i}", "choices": [str(2 * i), str(i), "none"], "gold": 0} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{q}} is"\ndoc_to_choice: choices\ndoc_to_target: gold\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    ours = lm_eval_tasks(student, tiny_tokenizer, ["sums"], include_path=str(tmp_path / "tasks"))
    assert ours["protocol"]["samples"] == {"sums": 20}
    code = (
        "import sys\n"
        "class H:\n"
        "    def find_spec(self, n, p=None, t=None):\n"
        "        if n.split('.')[0] == 'regraft': raise ImportError('hidden')\n"
        "sys.meta_path.insert(0, H())\n"
        "from lm_eval.__main__ import cli_evaluate\ncli_evaluate()\n"
    )
    arguments = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={tmp_path / 'model'},trust_remote_code=True,dtype=float32",
    ]
    arguments += ["--tasks", "sums", "--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out")]
    arguments += ["--batch_size", "8", "--device", "cpu"]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "mod"), "HF_DATASETS_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=tmp_path, env=environment)
    found = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())["results"]["sums"]
    for metric in ("acc,none", "acc_norm,none"):
        assert ours["results"]["sums"][metric] == found[metric]
    with pytest.raises(UserError, match="no task nothing_like_it"):
        lm_eval_tasks(student, tiny_tokenizer, ["nothing_like_it"])


def test_the_report_shows_what_is_there_and_names_what_is_not(tmp_path):
    from regraft.eval.report import report, verdict
    from regraft.eval.results import Quality, Recall, Sample, Speed

    def quality(name, kl, ratio):
        return Quality(name, "core", kl, 0.001, 0.9, 20.0 * ratio, ratio, 40, 512, 20440)

    results = Results(model="run <b>x</b>", teacher="t")
    results.quality = [
        quality("teacher", 0, 1),
        quality("student", 0.02, 1.02),
        quality("sliding_window baseline", 0.01, 1.01),
    ]
    results.recall = [Recall(n, "copy", 512, a, 0.01, 100) for n, a in (("teacher", 0.98), ("student", 0.9))]
    results.speed = [
        Speed(n, c, 500.0, r, 0.1, 0.1, b * c, "float32", 3, 1)
        for c in (1024, 8192)
        for n, r, b in (("teacher", 5.0, 100), ("student", 9.0, 52))
    ]
    results.samples = [Sample("p", "<|im_start|> a", "b")]
    results.layers = {"num_layers": 4, "converted": [1, 2], "mixers": {}}
    (tmp_path / "run").mkdir()
    results.save(tmp_path / "run" / "results.json")
    page = report([tmp_path / "run"]).read_text()
    assert "NOT lower than" in verdict(results), "a baseline that is better must be said to be"
    assert "52.0% of the teacher" in verdict(results) and "1.80 x" in verdict(results)
    assert "&lt;|im_start|&gt;" in page and "<b>x</b>" not in page
    assert "layers.json is not there" in page and "<script" not in page
    twin = (tmp_path / "run" / "report.md").read_text()
    assert "| student | core | 0.0200" in twin
    for name in ("recall", "speed", "frontier"):
        assert (tmp_path / "run" / "figures" / f"{name}.svg").read_text().startswith("<?xml")
    both = report([tmp_path / "run", tmp_path / "run"], tmp_path / "both")
    assert both.read_text().count('verdict">') == 2
    with pytest.raises(UserError, match="several runs"):
        report([tmp_path / "run", tmp_path / "run"])
