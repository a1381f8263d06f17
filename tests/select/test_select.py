"""Selectors: what they score, what they cost, that the swap leaves the teacher alone."""

import json
from dataclasses import replace

import pytest
import torch

from regraft.convert.graft import converted_layers
from regraft.data.synthetic import associative_task
from regraft.errors import UserError
from regraft.select.compare import rank_agreement, render, student_of
from regraft.select.registry import SELECTORS, Calibration, Selection, select_layers


@pytest.fixture
def calibration(tiny_llama, grafted, tiny_tokenizer):
    teacher = tiny_llama(vocab=260)
    student = grafted(teacher, "sliding_window", window=3, sinks=1)
    rows = torch.randint(4, 260, (3, 240))
    return Calibration(teacher, student, tiny_tokenizer, rows)


def attributes(calibration):
    return calibration.teacher, calibration.student, calibration.tokenizer, calibration.rows


def pick(calibration, by, keep=2):
    return select_layers(by, keep, 4, "sliding_window", {"window": 3, "sinks": 1}, calibration)


def test_kl_is_the_kl_of_the_teacher_with_that_one_layer_converted(calibration, grafted):
    before = {k: v.clone() for k, v in calibration.teacher.state_dict().items()}
    slots = [type(layer.self_attn) for layer in calibration.teacher.model.layers]
    chosen = pick(calibration, "kl")
    for layer in range(4):
        alone = grafted(calibration.teacher, "sliding_window", layers=[layer], window=3, sinks=1)
        target, found = (m(calibration.rows).logits.log_softmax(-1) for m in (calibration.teacher, alone))
        kl = (target.exp() * (target - found)).sum(-1)
        wanted = kl[:, torch.arange(3, calibration.rows.shape[1] - 1, 4)].mean().item()
        assert chosen.scores[layer] == pytest.approx(wanted, rel=1e-4, abs=1e-7)
    assert all(torch.equal(v, before[k]) for k, v in calibration.teacher.state_dict().items())
    assert [type(layer.self_attn) for layer in calibration.teacher.model.layers] == slots
    assert len(converted_layers(calibration.student)) == 4
    assert chosen.tokens == calibration.rows.numel() and chosen.passes == pytest.approx(3.5)


def test_recall_adds_the_kl_at_the_answers_of_recall_items(calibration, grafted):
    chosen = pick(calibration, "recall")
    haystack = calibration.rows.flatten().tolist()
    item = associative_task(calibration.tokenizer, haystack, 240, "select 0")
    answers = [p - 1 for answer in item.answers for p in answer]
    assert answers and item.ids.shape == (240,)
    for layer in range(4):
        alone = grafted(calibration.teacher, "sliding_window", layers=[layer], window=3, sinks=1)
        kls = []
        for ids in (calibration.rows[:2], item.ids[None]):
            target, found = (m(ids).logits.log_softmax(-1) for m in (calibration.teacher, alone))
            kls.append((target.exp() * (target - found)).sum(-1))
        wanted = kls[0][:, torch.arange(3, 239, 4)].mean() + kls[1][0, answers].mean()
        assert chosen.scores[layer] == pytest.approx(wanted.item(), rel=1e-4, abs=1e-7)
    assert chosen.passes == pytest.approx(3.5) and chosen.tokens == calibration.rows.numel()


@pytest.mark.parametrize("by", sorted(SELECTORS))
def test_a_choice_converts_the_lowest_scores(calibration, by):
    chosen = pick(calibration, by)
    assert len(chosen.converted) == 2 and sorted(chosen.converted + chosen.kept) == [0, 1, 2, 3]
    assert max(chosen.scores[i] for i in chosen.converted) <= min(chosen.scores[i] for i in chosen.kept)
    again = pick(calibration, by)
    assert again.scores == chosen.scores and again.converted == chosen.converted


def test_align_takes_what_stage_1_left_and_else_measures_it(calibration):
    given = Calibration(*attributes(calibration), {0: 3.0, 1: 1.0, 2: 2.0, 3: 9.0})
    assert pick(given, "align").converted == [1, 2]
    calibration = replace(calibration, rows=calibration.rows[:, :40])
    measured = pick(calibration, "align").scores
    assert all(0 < value < 2 for value in measured.values())


def test_uniform_spreads(calibration):
    chosen = select_layers("uniform", 3, 12, "sliding_window")
    assert chosen.kept == [2, 6, 10]
    assert select_layers("uniform", 0, 4, "sliding_window").converted == [0, 1, 2, 3]


def test_a_selection_survives_its_file(calibration, tmp_path):
    chosen = pick(calibration, "align")
    path = tmp_path / "layers.json"
    chosen.save(path)
    assert Selection.load(path) == chosen
    assert [p.name for p in tmp_path.iterdir()] == ["layers.json"]
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "format": 99}))
    with pytest.raises(UserError, match="newer"):
        Selection.load(path)
    path.write_text("{}")
    with pytest.raises(UserError, match=r"not a layers\.json"):
        Selection.load(path)


def test_comparing_selections(calibration):
    a, b = pick(calibration, "kl"), pick(calibration, "uniform")
    assert rank_agreement(a, a) == pytest.approx(1.0)
    flipped = Selection(**{**a.__dict__, "scores": {k: -v for k, v in a.scores.items()}})
    assert rank_agreement(a, flipped) == pytest.approx(-1.0)
    text = render([a, b], {"kl": {"KL": 0.5}})
    assert "kl ~ uniform" in text and "KL 0.5000" in text
    student = student_of(a, calibration.student, calibration.teacher)
    assert sorted(converted_layers(student)) == a.converted
    assert len(converted_layers(calibration.student)) == 4


def test_mistakes(calibration):
    with pytest.raises(UserError, match="did you mean 'align'"):
        pick(calibration, "algn")
    with pytest.raises(UserError, match="leaves nothing to convert"):
        pick(calibration, "align", keep=4)
    with pytest.raises(UserError, match="needs a converted student"):
        select_layers("kl", 2, 4, "sliding_window")
    few = Calibration(*attributes(calibration), {0: 1.0})
    with pytest.raises(UserError, match="1 layers can be converted"):
        pick(few, "align")
