"""verify passes what is right, and names the check and the layer for each way of being wrong."""

import pytest
import torch

from regraft.convert.graft import cast_parameters, converted_layers
from regraft.convert.mixers import sliding_window as sw_mixer
from regraft.convert.mixers import window_linear as wl_mixer
from regraft.convert.model import factory
from regraft.convert.model.cache import MixerCacheLayer
from regraft.convert.model.context import Context
from regraft.convert.spec import FAMILIES
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


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_right_model_passes(tiny_model, grafted, family):
    config = (
        {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]} if family in ("gemma2", "gemma3_text") else {}
    )
    teacher = tiny_model(family, **config)
    mixed = grafted(grafted(teacher, "sliding_window", layers=[0], window=6), "window_linear", layers=[3], window=7)
    report = verify(mixed, teacher=teacher, reload=False)
    assert report.passed, report.render()
    assert "checks passed" in report.summary()


def test_a_folder_reloads_in_a_fresh_process(model, tmp_path):
    """The folder itself is loaded there: a mistake in its code, which regraft's own does not have, is found."""
    model.save_pretrained(tmp_path / "m")
    report = verify(tmp_path / "m")
    assert report.passed and report.checks[-1].name == "model: reloads without regraft"
    code = tmp_path / "m" / "regraft_convert_mixers_sliding_window.py"
    code.write_text(code.read_text().replace('"scale": spec.scaling', '"scale": 2 * spec.scaling'))
    failed = [c for c in verify(str(tmp_path / "m")).checks if not c.passed]
    assert [c.name for c in failed] == ["model: reloads without regraft"]


def test_a_bf16_model_is_checked_as_it_is_and_left_as_it_was(model):
    cast_parameters(model, torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = verify(model.train(), reload=False)
    assert report.passed and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.dtype == torch.bfloat16


def test_a_wide_window_is_checked_across_its_own_edge(tiny_llama, grafted, monkeypatch):
    model = grafted(tiny_llama(), "sliding_window", layers=[2], window=150)
    assert not failures(model)
    wide_only = lambda k: {**k, "scale": k["scale"] * (1.2 if k["window"] > 128 and k["state"] else 1)}  # noqa: E731
    break_chunk(monkeypatch, wide_only, module=sw_mixer)
    broken = failures(model)
    assert {name for name, layer in broken if layer is not None} == {"its own window, in pieces = whole"}
    assert ("model: cached = whole", None) in broken


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


@pytest.mark.parametrize("method", ["reorder_cache", "batch_repeat_interleave", "batch_select_indices"])
def test_a_cache_that_does_not_follow_its_rows(model, monkeypatch, method):
    """The rows are moved, their window is not."""
    original = getattr(MixerCacheLayer, method)

    def partly(self, argument):
        before = self.state.keys
        original(self, argument)
        rows = self.state.keys.shape[0]
        self.state = self.state._replace(keys=before.repeat(2, 1, 1, 1)[:rows])

    monkeypatch.setattr(MixerCacheLayer, method, partly)
    broken = failures(model)
    assert {("cache rows reordered, repeated, selected", 1), ("cache rows reordered, repeated, selected", 2)} <= broken
    assert {name for name, layer in broken if layer is not None} == {"cache rows reordered, repeated, selected"}


def test_a_reset_that_leaves_the_state(model, monkeypatch):
    monkeypatch.setattr(MixerCacheLayer, "reset", lambda self: None)
    assert {name for name, _ in failures(model)} == {"a reset cache is a fresh one"}


def test_a_padded_step_that_writes(model, monkeypatch):
    break_chunk(monkeypatch, lambda k: {**k, "lengths": None}, name="one_step")
    names = {name for name, _ in failures(model)}
    assert names == {"a padded step changes nothing"}


def test_a_static_cache_as_long_as_the_window(tiny_llama, grafted, monkeypatch):
    """A layer that answers mask questions with its own window, not with the length of the whole cache."""
    model = grafted(tiny_llama(), "sliding_window", layers=[0], window=8)
    original = MixerCacheLayer.get_mask_sizes
    monkeypatch.setattr(
        MixerCacheLayer, "get_mask_sizes", lambda self, n: (8, 0) if self.max_cache_len else original(self, n)
    )
    report = verify(model, reload=False)
    failed = [c for c in report.checks if not c.passed]
    assert len(failed) == 1 and "after 'model: cached = whole'" in failed[0].note


def test_a_static_state_that_is_written_short(model, monkeypatch):
    original = MixerCacheLayer.update_state

    def lazy(self, state, tokens):
        if self.max_cache_len is not None and self.state is not None:
            state = state._replace(kv=self.state.kv.clone())
        original(self, state, tokens)

    monkeypatch.setattr(MixerCacheLayer, "update_state", lazy)
    assert {name for name, _ in failures(model)} == {"static cache = whole", "model: static cache = whole"}


def test_positions_that_a_cache_counts_wrongly(tiny_llama, grafted, monkeypatch):
    """All layers converted: the position of the next token comes from our own counter."""
    model = grafted(tiny_llama(), "window_linear", window=8)
    monkeypatch.setattr(MixerCacheLayer, "get_seq_length", lambda self: max(self.cumulative_length - 1, 0))
    names = failures(model)
    assert ("model: cached = whole", None) in names and not any(layer is not None for _, layer in names)


def test_sinks_that_count_from_the_padding(model, monkeypatch):
    """Padding squeezed out only behind the text: the first tokens of a left-padded row are not its sinks."""
    original = ragged.build

    def trailing_only(real, document):
        left = real is not None and not bool(real[:, 0].all())
        return original(None if left else real, document)

    monkeypatch.setattr("regraft.convert.model.context.build", trailing_only)
    names = {name for name, _ in failures(model)}
    assert {"left padding changes nothing", "padded pieces = whole", "model: padded batch, cached = alone"} <= names
    assert not {"right padding changes nothing", "interior padding changes nothing"} & names


def test_explicit_boundaries_that_are_ignored(model, monkeypatch):
    monkeypatch.setattr(
        factory, "documents_from_boundaries", lambda edges, b, t: (torch.zeros(b, t).long(), torch.arange(t)[None])
    )
    assert {name for name, _ in failures(model)} == {"model: packed documents = alone (cu_seqlens)"}


def test_a_mask_that_is_dropped_for_kept_layers(model, monkeypatch):
    original = factory._read_mask
    monkeypatch.setattr(factory, "_read_mask", lambda *a: (*original(*a)[:2], None))
    broken = failures(model)
    assert ("model: left padding changes nothing", None) in broken and not any(layer is not None for _, layer in broken)


def test_an_unsaved_buffer(model):
    converted_layers(model)[2].register_buffer("slopes", torch.ones(4), persistent=False)
    report = verify(model, reload=False)
    assert [c.name for c in report.checks if not c.passed] == ["mixers have no unsaved buffers"]
    assert "layer 2: slopes" in report.render()


def test_two_parameters_in_one_memory(model):
    fused = torch.randn(2, 64, 64)
    model.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(fused[0])
    model.model.layers[3].self_attn.q_proj.weight = torch.nn.Parameter(fused[1])
    assert not failures(model)  # neighbours do not overlap
    model.model.layers[3].self_attn.q_proj.weight = torch.nn.Parameter(
        fused.view(-1)[64:].as_strided((64, 64), (64, 1))
    )
    assert failures(model) == {("parameters share no memory", None)}


def test_tied_where_the_config_says_untied(model):
    model.lm_head.weight = model.model.embed_tokens.weight
    assert failures(model) == {("embeddings tied as configured", None)}


def test_a_model_that_raises_has_failed(model, monkeypatch):
    def stop(*a, **k):
        raise RuntimeError("out of tricks")

    monkeypatch.setattr(wl_mixer, "one_step", stop)
    report = verify(model, reload=False)
    failed = [c for c in report.checks if not c.passed]
    assert {c.layer for c in failed} == {1, 2, None} and all("out of tricks" in c.note for c in failed)
    assert "after 'exact limit = source attention'" in failed[0].note
    monkeypatch.setattr(wl_mixer, "chunk", stop)
    report = verify(model, reload=False)
    assert not report.passed and "out of tricks" in report.render()


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
