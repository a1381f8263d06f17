"""verify passes what is right, and names the check and the layer for each way of being wrong."""

import pytest
import torch

from regraft.convert.graft import converted_layers
from regraft.convert.mixers import sliding_window as sw_mixer
from regraft.convert.mixers import window_linear as wl_mixer
from regraft.convert.model.context import Context
from regraft.errors import UserError
from regraft.eval.verify import verify
from regraft.kernels import ragged
from regraft.kernels.window_linear import WindowLinearState


@pytest.fixture
def model(tiny_llama, grafted):
    teacher = tiny_llama(attention_bias=True)
    student = grafted(teacher, "window_linear", layers=[1, 2], window=8, sinks=2, feature_dim=8)
    with torch.no_grad():
        for mixer in converted_layers(student).values():
            mixer.far_logit.fill_(1.0)
    return student


def failures(model, **options):
    report = verify(model, reload=False, **options)
    return {(c.name, c.layer) for c in report.checks if not c.passed}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
def test_a_right_model_passes(tiny_model, grafted, family):
    config = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]} if family == "gemma3_text" else {}
    teacher = tiny_model(family, **config)
    mixed = grafted(grafted(teacher, "sliding_window", layers=[0], window=6), "window_linear", layers=[3], window=7)
    report = verify(mixed, teacher=teacher, reload=False)
    assert report.passed, report.render()
    assert "checks passed" in report.summary()


def test_it_reloads_in_a_fresh_process(model):
    report = verify(model)
    assert report.passed and any(c.name == "model: reloads without regraft" for c in report.checks)


def break_chunk(monkeypatch, change, module=wl_mixer, name="chunk"):
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: original(*a, **change(k)))


def test_a_window_off_by_one(model, monkeypatch):
    break_chunk(monkeypatch, lambda k: {**k, "window": k["window"] + 1})
    broken = failures(model)
    assert ("equals its float64 oracle", 1) in broken and ("equals its float64 oracle", 2) in broken


def test_an_unscaled_softmax(model, monkeypatch):
    break_chunk(monkeypatch, lambda k: {**k, "scale": 1.0})
    break_chunk(monkeypatch, lambda k: {**k, "scale": 1.0}, name="naive")
    break_chunk(monkeypatch, lambda k: {**k, "scale": 1.0}, name="one_step")
    assert ("exact limit = source attention", 1) in failures(model)


def test_a_dropped_bias(model):
    converted_layers(model)[2].k_proj.bias = None
    assert ("exact limit = source attention", 2) in failures(model)
    assert not any(layer == 1 for _, layer in failures(model))


def test_kv_heads_expanded_row_by_row(model, monkeypatch):
    """Keys and values that go to the wrong query heads: h % groups instead of h // group."""

    def shuffled(q, *rest, **k):
        heads = torch.arange(q.shape[2]).view(2, -1).T.reshape(-1)
        out, state = original(q[:, :, heads], *rest, **k)
        return out[:, :, heads.argsort()], state

    original = wl_mixer.chunk
    monkeypatch.setattr(wl_mixer, "chunk", shuffled)
    assert ("exact limit = source attention", 1) in failures(model)


def test_writes_under_the_padding(model, monkeypatch):
    """Padding that is not taken out."""
    monkeypatch.setattr("regraft.convert.model.context.build", lambda real, document: ragged.build(None, document))
    names = {name for name, _ in failures(model)}
    assert "left padding changes nothing" in names and "model: left padding changes nothing" in names


def test_state_that_leaks_across_documents(model, monkeypatch):
    monkeypatch.setattr("regraft.convert.model.context.build", lambda real, document: ragged.build(real, None))
    names = {name for name, _ in failures(model)}
    assert {"a packed document = alone", "documents do not leak", "model: packed documents = alone"} <= names


def test_a_lost_state_between_calls(model, monkeypatch):
    """The far sums are not carried over from prefill to the next call."""
    original = wl_mixer.chunk

    def forgets(*a, **k):
        out, state = original(*a, **k)
        return out, WindowLinearState(*state[:5], torch.zeros_like(state.kv), torch.zeros_like(state.norm))

    monkeypatch.setattr(wl_mixer, "chunk", forgets)
    names = {name for name, _ in failures(model)}
    assert "prefill, then steps = whole" in names and "model: cached = whole" in names


def test_a_step_that_differs_from_the_chunk(model, monkeypatch):
    break_chunk(monkeypatch, lambda k: {**k, "scale": 2 * k["scale"]}, name="one_step")
    names = {name for name, _ in failures(model)}
    assert "prefill, then steps = whole" in names and "equals its float64 oracle" not in names


def test_the_wrong_rotary_layout(model, monkeypatch):
    """Even and odd channels paired, where the family pairs halves."""

    def interleaved(q, k, cos, sin, unsqueeze_dim=1):
        def turn(x):
            half = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
            return x * cos.unsqueeze(unsqueeze_dim) + half * sin.unsqueeze(unsqueeze_dim)

        return turn(q), turn(k)

    mixer = converted_layers(model)[1]
    object.__setattr__(mixer.spec, "rope", interleaved)
    broken = failures(model)
    assert ("exact limit = source attention", 1) in broken
    assert ("exact limit = source attention", 2) not in broken


def test_a_stale_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(1.01)
    assert ("buffers as freshly computed", None) in failures(model)


def test_tensors_shared_with_the_teacher(model, tiny_llama):
    teacher = tiny_llama(attention_bias=True)
    model.model.layers[0].mlp.up_proj.weight = teacher.model.layers[0].mlp.up_proj.weight
    report = verify(model, teacher=teacher, reload=False)
    failed = [c for c in report.checks if not c.passed]
    assert [c.name for c in failed] == ["nothing shared with the teacher"]
    assert "up_proj" in failed[0].note


def test_a_parameter_that_is_not_a_number(model):
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[0, 0] = float("nan")
    report = verify(model, reload=False)
    assert not report.passed and "layers.3.mlp.up_proj" in report.render()
    assert report.to_dict()["passed"] is False


def test_a_config_that_does_not_say_what_the_layers_are(model):
    model.config.layer_types[1] = "full_attention"
    assert ("config names what the layers are", None) in failures(model)


def test_cache_bytes_that_are_not_as_promised(model, monkeypatch):
    monkeypatch.setattr(sw_mixer, "window_bytes", lambda *a: 1)
    monkeypatch.setattr(wl_mixer, "window_bytes", lambda *a: 1)
    assert ("cache bytes as promised", 1) in failures(model)


def test_a_source_model_has_nothing_to_verify(tiny_llama):
    with pytest.raises(UserError, match="no layer of this model is converted"):
        verify(tiny_llama())
    assert Context.plain().layout is None
