"""The training loop: what trains, what stays, resume, refusals, and that it learns."""

import itertools
import json
import shutil

import pytest
import torch

from regraft.convert.graft import attention_slots, converted_layers
from regraft.data.packing import Batch, PackedText
from regraft.data.text import documents
from regraft.distill.loop import learning_rate, run_stage, steps_of, teacher_taps
from regraft.distill.stages import make_trainable, trainable_summary
from regraft.errors import UserError
from regraft.eval.divergence import compare
from regraft.recipes.schema import AlignStage, DataConfig, FinetuneStage, LogitsStage, LoraConfig

ALIGN = {"stage": "align", "tokens": 1200, "seq_len": 48, "lr": 3e-2, "warmup": 2, "checkpoint_every": 10}
LOGITS = {**ALIGN, "stage": "logits", "lr": 1e-3}
SMALL = {"window": 5, "sinks": 2, "feature_dim": 8}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    words = ["alpha", "beta", "gamma", "delta", "omega"]
    rows = [{"text": " ".join(words[(i * j + j) % 5] for j in range(i % 17 + 30))} for i in range(150)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return DataConfig(source=str(path), split="all")


@pytest.fixture
def pair(tiny_llama, grafted):
    def make(layers=(1, 3), name="window_linear", **options):
        teacher = tiny_llama(vocab=260)
        return teacher, grafted(
            teacher, name, layers=list(layers), **({**SMALL, **options} if name == "window_linear" else options)
        )

    return make


def train(stage, student, teacher, tokenizer, data, out, **more):
    return run_stage(
        stage, student=student, teacher=teacher, tokenizer=tokenizer, data=data, out_dir=out, log=lambda m: None, **more
    )


def test_alignment_lowers_the_error_of_every_layer_and_touches_nothing_else(pair, tiny_tokenizer, text, tmp_path):
    teacher, student = pair()
    before = {k: v.clone() for k, v in student.state_dict().items()}
    kept = {k: v.clone() for k, v in teacher.state_dict().items()}
    result = train(AlignStage(**ALIGN), student, teacher, tiny_tokenizer, text, tmp_path / "a")
    assert result.steps == 25 and result.tokens == 1200
    for layer, error in result.layer_error.items():
        assert 0 < error < result.start_error[layer]
    changed = {k for k, v in student.state_dict().items() if not torch.equal(v, before[k])}
    names = ("feature_q", "feature_k", "far_logit")
    assert changed == {f"model.layers.{i}.self_attn.{n}" for i in (1, 3) for n in names}
    assert all(torch.equal(v, kept[k]) for k, v in teacher.state_dict().items())
    rows = [json.loads(line) for line in result.metrics_path.read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(1, 26))
    assert set(rows[0]["layers"]) == {"1", "3"}


def test_the_alignment_target_is_the_teachers_own_attention(pair, tiny_tokenizer):
    """The tapped heads, sent through o_proj, are what the teacher's attention puts out."""
    teacher, student = pair()
    ids = torch.randint(3, 260, (2, 30))
    batch = Batch(ids, torch.arange(30).expand(2, -1), ids)
    taken = {}
    slot = attention_slots(teacher)[1]
    handle = slot.register_forward_hook(lambda m, a, out: taken.update(out=out[0]))
    taps = teacher_taps(teacher, batch, [1, 3])
    handle.remove()
    torch.testing.assert_close(slot.o_proj(taps[1][2].flatten(2)), taken["out"])
    wide = converted_layers(student)[1]
    wide.options = wide.exact_options(64)
    from regraft.convert.model.context import Context

    torch.testing.assert_close(wide.heads(*taps[1][:2], Context.plain()), taps[1][2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", ["new", "mixers", "all"])
def test_distillation_learns_and_trains_only_what_it_says(pair, tiny_tokenizer, text, tmp_path, mode):
    teacher, student = pair()
    before = {k: v.clone() for k, v in student.state_dict().items()}
    stage = LogitsStage(**{**LOGITS, "tokens": 2400}, train=mode, new_lr=1e-2)
    ids = PackedText(documents(text), tiny_tokenizer, 48, seed=5).batch(0, 16).input_ids
    untrained = compare(teacher, {"student": student}, ids, "core")[1].kl
    result = train(stage, student, teacher, tiny_tokenizer, text, tmp_path / "l")
    assert compare(teacher, {"student": result.student}, ids, "core")[1].kl < 0.95 * untrained
    changed = {k for k, v in student.state_dict().items() if not torch.equal(v, before[k])}
    inside = {k for k in before if ".1.self_attn." in k or ".3.self_attn." in k}
    new = {k for k in inside if k.rsplit(".", 1)[1] in ("feature_q", "feature_k", "far_logit")}
    assert changed == {"new": new, "mixers": inside, "all": set(before)}[mode]
    summary = trainable_summary(student, stage)
    trained = summary["new"]["parameters"] + summary["rest"]["parameters"]
    assert trained == sum(p.numel() for n, p in student.named_parameters() if n in changed)
    assert summary["frozen"] == sum(p.numel() for p in student.parameters()) - trained


def test_a_packed_students_gradient_does_not_cross_documents(pair):
    """Student-forced loss on the second document alone equals the loss on it behind another one."""
    teacher, student = pair(layers=(0, 1, 2, 3))
    a, b = torch.randint(3, 260, (1, 13)), torch.randint(3, 260, (1, 20))
    positions = torch.cat([torch.arange(13), torch.arange(20)])[None]
    for model in (teacher, student):
        packed = model.get_decoder()(input_ids=torch.cat([a, b], 1), position_ids=positions, use_cache=False)
        alone = model.get_decoder()(input_ids=b, use_cache=False)
        torch.testing.assert_close(packed.last_hidden_state[:, 13:], alone.last_hidden_state, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["align", "logits"])
def test_accumulation_equals_a_larger_batch(pair, tiny_tokenizer, text, tmp_path, kind):
    finals = []
    for number, shape in enumerate(({"batch_size": 4}, {"batch_size": 1, "accumulate": 4})):
        teacher, student = pair()
        made = {"align": AlignStage, "logits": LogitsStage}[kind]
        stage = made(**{**{"align": ALIGN, "logits": LOGITS}[kind], **shape}, train="mixers")
        finals.append(train(stage, student, teacher, tiny_tokenizer, text, tmp_path / str(number)).student.state_dict())
    for name in finals[0]:
        torch.testing.assert_close(finals[0][name], finals[1][name], atol=2e-5, rtol=1e-4)


def test_gradient_checkpointing_changes_nothing(pair, tiny_tokenizer, text, tmp_path):
    finals = []
    for on in (False, True):
        teacher, student = pair()
        stage = LogitsStage(**{**LOGITS, "tokens": 300}, train="mixers", gradient_checkpointing=on)
        finals.append(train(stage, student, teacher, tiny_tokenizer, text, tmp_path / str(on)).student.state_dict())
    for name in finals[0]:
        torch.testing.assert_close(finals[0][name], finals[1][name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["align", "logits", "lora"])
def test_an_interrupted_stage_ends_with_the_same_bits(pair, tiny_tokenizer, text, tmp_path, kind, monkeypatch):
    torch.set_num_threads(1)
    lora = LoraConfig(r=2, dropout=0.1)
    stage = {
        "align": AlignStage(**ALIGN),
        "logits": LogitsStage(**LOGITS, train="mixers", positions=9),
        "lora": LogitsStage(**LOGITS, train="lora", lora=lora),
    }[kind]
    teacher, student = pair()
    whole = train(stage, student, teacher, tiny_tokenizer, text, tmp_path / "whole").student.state_dict()

    import regraft.distill.loop as loop

    original = loop._Run._step

    def dies(self, step):
        if step == 17:
            raise KeyboardInterrupt
        return original(self, step)

    monkeypatch.setattr(loop._Run, "_step", dies)
    teacher, student = pair()
    with pytest.raises(KeyboardInterrupt):
        train(stage, student, teacher, tiny_tokenizer, text, tmp_path / "cut")
    monkeypatch.setattr(loop._Run, "_step", original)
    teacher, student = pair()
    result = train(stage, student, teacher, tiny_tokenizer, text, tmp_path / "cut")
    for name, tensor in result.student.state_dict().items():
        assert torch.equal(tensor, whole[name]), name
    steps = [json.loads(line)["step"] for line in result.metrics_path.read_text().splitlines()]
    assert steps == list(range(1, 26))


def test_a_checkpoint_is_a_model_that_loads_and_holds_no_teacher(pair, tiny_tokenizer, text, tmp_path):
    from regraft.convert.sources import load_source

    for number, stage in enumerate(
        (
            LogitsStage(**LOGITS, train="lora", lora=LoraConfig(r=2)),
            LogitsStage(**LOGITS, train="mixers", dtype="bfloat16"),
        )
    ):
        teacher, student = pair()
        out = tmp_path / f"c{number}"
        result = train(stage, student, teacher, tiny_tokenizer, text, out)
        checkpoints = sorted(p.name for p in out.glob("checkpoint-*"))
        assert checkpoints == ["checkpoint-000010", "checkpoint-000020"]
        loaded = load_source(str(out / "checkpoint-000020")).model
        assert loaded.dtype == torch.float32
        names = set(loaded.state_dict())
        assert names == set(result.student.state_dict())
        assert not any("lora" in name for name in names)
        # close to the end of training, and not the start
        ids = torch.randint(3, 260, (1, 40))
        assert (loaded(ids).logits - result.student(ids).logits).abs().max() < 1.0


def test_frozen_weights_survive_half_precision_exactly(pair, tiny_tokenizer, text, tmp_path):
    teacher, student = pair()
    before = {k: v.clone() for k, v in student.state_dict().items()}
    original = {k: v.clone() for k, v in teacher.state_dict().items()}
    stage = AlignStage(**{**ALIGN, "tokens": 300}, dtype="bfloat16")
    result = train(stage, student, teacher, tiny_tokenizer, text, tmp_path / "h")
    for name, tensor in result.student.state_dict().items():
        assert tensor.dtype == torch.float32
        if not any(n in name for n in ("feature_", "far_logit")):
            assert torch.equal(tensor, before[name])
    assert all(torch.equal(v, original[k]) for k, v in teacher.state_dict().items())
    with pytest.raises(UserError, match="leaves none"):
        train(
            LogitsStage(**LOGITS, train="all", dtype="bfloat16"), student, teacher, tiny_tokenizer, text, tmp_path / "i"
        )


def test_a_checkpoint_of_another_configuration_is_refused_with_the_difference(pair, tiny_tokenizer, text, tmp_path):
    teacher, student = pair()
    train(AlignStage(**ALIGN), student, teacher, tiny_tokenizer, text, tmp_path / "x")
    teacher, student = pair()
    with pytest.raises(UserError, match=r"stage.lr: 0.03 -> 0.02"):
        train(AlignStage(**{**ALIGN, "lr": 2e-2}), student, teacher, tiny_tokenizer, text, tmp_path / "x")
    with pytest.raises(UserError, match="seed: 0 -> 1"):
        train(AlignStage(**ALIGN), student, teacher, tiny_tokenizer, text, tmp_path / "x", seed=1)


def test_a_checkpoint_that_was_not_finished_is_not_read(pair, tiny_tokenizer, text, tmp_path):
    teacher, student = pair()
    train(AlignStage(**ALIGN), student, teacher, tiny_tokenizer, text, tmp_path / "x")
    for name in ("checkpoint-000010", "checkpoint-000020"):
        shutil.move(tmp_path / "x" / name, tmp_path / "x" / f".writing-{name[-2:]}")
    teacher, student = pair()
    result = train(AlignStage(**ALIGN), student, teacher, tiny_tokenizer, text, tmp_path / "x")
    assert result.steps == 25


def test_a_loss_that_is_not_a_number_stops_the_run(pair, tiny_tokenizer, text, tmp_path):
    teacher, student = pair()
    with torch.no_grad():
        converted_layers(student)[3].feature_q.fill_(float("nan"))
    with pytest.raises(UserError, match="the loss is nan") as caught:
        train(AlignStage(**ALIGN), student, teacher, tiny_tokenizer, text, tmp_path / "n")
    assert "layer 3" in caught.value.where


def test_lora_goes_on_the_converted_layers_only_and_merges_exactly(pair, tiny_tokenizer, text, tmp_path):
    import peft

    teacher, student = pair()
    stage = LogitsStage(**LOGITS, train="lora", lora=LoraConfig(r=2))
    trainable = make_trainable(student, stage)
    with_lora = {n.split(".lora_")[0] for n in trainable.rest}
    assert with_lora == {f"model.layers.{i}.self_attn.{n}_proj" for i in (1, 3) for n in "qkvo"}
    assert len(trainable.new) == 6
    teacher, student = pair()
    result = train(stage, student, teacher, tiny_tokenizer, text, tmp_path / "m")
    assert type(result.student) is type(student)
    # the saved adapter, on a freshly converted base with the trained new parameters, gives the same logits
    teacher, base = pair()
    state = {k: v for k, v in result.student.state_dict().items() if "feature_" in k or "far_logit" in k}
    base.load_state_dict(state, strict=False)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "m" / "adapter")
    ids = torch.randint(3, 260, (2, 40))
    torch.testing.assert_close(adapted(ids).logits, result.student(ids).logits, atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match="match nothing: nothing_proj"):
        make_trainable(pair()[1], LogitsStage(**LOGITS, train="lora", lora=LoraConfig(targets=["nothing_proj"])))


def test_what_cannot_train_is_refused(pair, tiny_llama, tiny_tokenizer, text, tmp_path):
    teacher, student = pair(name="sliding_window", window=5)
    with pytest.raises(UserError, match="trains nothing"):
        train(AlignStage(**ALIGN), student, teacher, tiny_tokenizer, text, tmp_path / "a")
    with pytest.raises(UserError, match="no layer is converted"):
        make_trainable(tiny_llama(vocab=260), LogitsStage(**LOGITS))
    with pytest.raises(UserError, match="needs a teacher"):
        train(LogitsStage(**LOGITS), student, None, tiny_tokenizer, text, tmp_path / "b")


def test_finetuning_needs_no_teacher(pair, tiny_tokenizer, text, tmp_path):
    _, student = pair()
    stage = FinetuneStage(**{**LOGITS, "stage": "finetune", "tokens": 2400, "lr": 3e-3}, train="all")
    ids = PackedText(documents(text), tiny_tokenizer, 48, seed=5).batch(0, 16).input_ids
    before = student(ids, labels=ids).loss.item()
    result = train(stage, student, None, tiny_tokenizer, text, tmp_path / "f")
    assert result.student(ids, labels=ids).loss.item() < 0.9 * before


def test_another_tokenizer_is_refused(pair, tiny_tokenizer, text, tmp_path):
    import copy

    other = copy.deepcopy(tiny_tokenizer)
    other.add_tokens(["<extra>"])
    teacher, student = pair()
    with pytest.raises(UserError, match="wrong tokenizer"):
        train(AlignStage(**ALIGN), student, teacher, tiny_tokenizer, text, tmp_path / "t", teacher_tokenizer=other)


def test_schedules():
    stage = AlignStage(**{**ALIGN, "warmup": 4, "min_lr": 1e-3, "lr": 1e-1})
    rates = [learning_rate(stage, stage.lr, step, 50) for step in range(50)]
    assert rates[0] < rates[3] < rates[4] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:])) and rates[-1] >= 1e-3
    assert rates[-1] < 2e-3
    constant = stage.model_copy(update={"schedule": "constant"})
    assert learning_rate(constant, 0.1, 49, 50) == 0.1
    assert steps_of(stage) == 25 and steps_of(stage, 2) == 13


def test_a_second_alignment_goes_on_from_the_first(pair, tiny_tokenizer, text, tmp_path):
    """Starts are chosen for a far branch that was never trained; a trained one is not thrown away."""
    teacher, student = pair()
    first = train(AlignStage(**ALIGN), student, teacher, tiny_tokenizer, text, tmp_path / "1")
    learnt = converted_layers(first.student)[1].far_logit.clone()
    still = AlignStage(**{**ALIGN, "tokens": 48, "lr": 1e-9, "warmup": 0})
    second = train(still, first.student, teacher, tiny_tokenizer, text, tmp_path / "2")
    torch.testing.assert_close(converted_layers(second.student)[1].far_logit, learnt, atol=1e-6, rtol=0)


def test_the_error_that_chooses_layers_is_relative_whatever_the_loss(pair, tiny_tokenizer, text, tmp_path):
    """The same untrained student gives the same errors, so layers of different size compare."""
    errors = []
    for loss in ("mse_over_variance", "mse", "l2norm"):
        teacher, student = pair()
        stage = AlignStage(**{**ALIGN, "tokens": 48, "lr": 1e-9, "warmup": 0}, loss=loss)
        errors.append(train(stage, student, teacher, tiny_tokenizer, text, tmp_path / loss).layer_error)
    for other in errors[1:]:
        assert other == pytest.approx(errors[0], rel=1e-4)
