"""Is this converted checkpoint right: every mode of use agrees, nothing leaks, the exact limit is exact, it reloads.

Runs on any converted model, on a CPU, on inputs that the model itself produces. A check that fails names its layer.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import StaticCache

from regraft.convert.graft import attention_slots, converted_layers
from regraft.convert.mixers.base import Mixer
from regraft.convert.mixers.registry import get_mixer
from regraft.convert.model.context import Context
from regraft.convert.spec import attention_spec
from regraft.errors import UserError

LIMIT = 2e-4  # largest difference, relative to the largest value compared; fp32 reaches 1e-5
_EXACT_LENGTH = 48
_LARGEST_WINDOW = 128  # a wider window is checked on a copy of the layer with this one: the oracle is quadratic


@dataclass(frozen=True)
class Check:
    """One check of one layer (None: of the whole model). Passed when `value` <= `limit`; `note` says what failed."""

    name: str
    layer: int | None
    passed: bool
    value: float
    limit: float
    note: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """All checks that ran."""

    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def summary(self) -> str:
        """One line."""
        failed = [c for c in self.checks if not c.passed]
        if not failed:
            return f"verified: {len(self.checks)} checks passed"
        first = failed[0]
        at = "" if first.layer is None else f" in layer {first.layer}"
        return f"NOT verified: {len(failed)} of {len(self.checks)} checks failed, the first: {first.name}{at}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values (a difference that is not a number is told as the text "nan")."""
        checks = [asdict(c) for c in self.checks]
        for check in checks:
            if not math.isfinite(check["value"]):
                check["value"] = str(check["value"])
        return {"passed": self.passed, "checks": checks}

    def render(self) -> str:
        """A table: one line a kind of check, failures one line each."""
        lines = []
        for name in dict.fromkeys(c.name for c in self.checks):
            group = [c for c in self.checks if c.name == name]
            worst = max(group, key=lambda c: _rank(c.value))
            of = f"{len(group)} layers" if group[0].layer is not None else "model"
            state = "ok  " if all(c.passed for c in group) else "FAIL"
            lines.append(f"{state}  {name:42} {of:10} worst {worst.value:.1e}  limit {worst.limit:.0e}")
            lines += [
                f"      {'model' if c.layer is None else f'layer {c.layer}'}: {c.value:.1e} {c.note}"
                for c in group
                if not c.passed
            ]
        return "\n".join([*lines, self.summary()])


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference relative to the largest value wanted; NaN if anything is not a number."""
    found, wanted = found.double(), wanted.double()
    if not bool(torch.isfinite(found).all()):
        return math.nan
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))


@torch.no_grad()
def verify(model: Any, *, teacher: Any = None, seed: int = 0, reload: bool = True) -> VerifyReport:
    """Check a grafted causal LM, or a checkpoint of one: a folder, or anything that load_source takes.

    `teacher` (optional, in memory): nothing may be shared with it. `reload`: also load the folder (or, for a model in
    memory, a copy saved for the purpose) in a fresh process in which regraft cannot be imported. Computes in fp32 on
    the CPU (another model is checked as such a copy). UserError for a model without converted layers.
    """
    folder = None
    if isinstance(model, str | Path):
        from regraft.convert.sources import load_source

        folder = Path(model) if Path(model).is_dir() else None
        model = load_source(str(model), dtype="float32").model
    if not converted_layers(model):
        raise UserError("no layer of this model is converted", fix="verify checks what `regraft convert` writes")
    checks = [*_parameters(model), *_shared(model, teacher)]
    if any(not c.passed for c in checks):
        return VerifyReport(checks)
    if model.device.type != "cpu" or any(p.dtype != torch.float32 for p in model.parameters()):
        model = copy.deepcopy(model).to("cpu").float()
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    try:
        longest = max(_length(mixer) for mixer in converted_layers(model).values())
        inputs = _inputs(model, _ids(model, 1, longest, generator))
    except Exception as error:
        return VerifyReport([*checks, _check("runs without an error", None, math.nan, _told(error))])
    for index, mixer in converted_layers(model).items():
        _collect(checks, _layer(model, index, mixer, *inputs[index]), index)
    _collect(checks, _model(model, generator), None)
    if reload:
        checks.append(_reload(model, folder, generator))
    model.train(was_training)
    return VerifyReport(checks)


def _collect(checks: list[Check], found: Iterator[Check], layer: int | None) -> None:
    """Add what `found` yields; a model that raises on the way has failed, with the message as the note."""
    try:
        for check in found:
            checks.append(check)
    except Exception as error:
        checks.append(_check("runs without an error", layer, math.nan, f"after '{checks[-1].name}': {_told(error)}"))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _check(name: str, layer: int | None, value: float, note: str = "", limit: float = LIMIT) -> Check:
    return Check(name, layer, value <= limit, value, limit, note)


def _parameters(model: Any) -> Iterator[Check]:
    """Finite and real tensors, buffers as a freshly built model has them, ties as configured."""
    bad = [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.is_meta or not bool(torch.isfinite(tensor).all())
    ]
    yield _check("parameters finite and loaded", None, float(len(bad)), ", ".join(bad[:3]), 0)
    if bad:
        return
    fresh = dict(_source_base(model).named_buffers())
    stale = [
        name
        for name, buffer in model.get_decoder().named_buffers()
        if name in fresh and not torch.allclose(buffer.float().cpu(), fresh[name].float().cpu(), rtol=1e-3, atol=1e-7)
    ]
    yield _check("buffers as freshly computed", None, float(len(stale)), ", ".join(stale[:3]), 0)
    unsaved = [
        f"layer {i}: {name}"
        for i, mixer in converted_layers(model).items()
        for module in mixer.modules()
        for name in module._non_persistent_buffers_set
    ]
    note = f"{', '.join(unsaved[:3])}: uninitialised memory after a reload"
    yield _check("mixers have no unsaved buffers", None, float(len(unsaved)), note, 0)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    told = bool(model.config.tie_word_embeddings)
    note = f"config says {told}, the model is {'tied' if tied else 'untied'}"
    yield _check("embeddings tied as configured", None, float(tied != told), note, 0)
    honest = all(
        model.config.layer_types[i] == mixer.layer_type and model.config.regraft["mixers"][str(i)]["name"] == mixer.name
        for i, mixer in converted_layers(model).items()
    )
    yield _check("config names what the layers are", None, float(not honest), "layer_types or mixers differ", 0)


def _source_base(model: Any) -> Any:
    """The source family's base model with one layer and random weights: its buffers and its attention class."""
    view = copy.deepcopy(model.get_decoder().config)
    view.__dict__["num_hidden_layers"] = 1
    view.__dict__["vocab_size"] = 8
    view.__dict__["pad_token_id"] = None
    return type(model.get_decoder()).__mro__[2](view)


def _shared(model: Any, teacher: Any) -> Iterator[Check]:
    """Every parameter has memory of its own: training one must change no other, and not the teacher."""
    own = [(*_span(p), name) for name, p in model.named_parameters() if p.numel()]
    pairs = _overlaps(own)
    note = ", ".join(f"{a} and {b}" for a, b in pairs[:3])
    yield _check("parameters share no memory", None, float(len(pairs)), note, 0)
    if teacher is not None:
        theirs = [(*_span(p), "") for p in teacher.parameters() if p.numel()]
        shared = sorted({a or b for a, b in _overlaps([*own, *theirs]) if bool(a) != bool(b)})
        yield _check("nothing shared with the teacher", None, float(len(shared)), ", ".join(shared[:3]), 0)


def _span(x: torch.Tensor) -> tuple[str, int, int]:
    """Device and addresses of the first byte of `x` and of the one after its last."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return str(x.device), x.data_ptr(), x.data_ptr() + reach * x.element_size()


def _overlaps(spans: list[tuple[str, int, int, str]]) -> list[tuple[str, str]]:
    """Names of each span that begins before an earlier one has ended, with that one's."""
    found = []
    device, end, holder = "", 0, ""
    for where, start, stop, name in sorted(spans):
        if where == device and start < end:
            found.append((holder, name))
        if where != device or stop > end:
            device, end, holder = where, stop, name
    return found


class _OneLayerCache:
    """Just enough of a cache for one mixer; static with a `size`."""

    def __init__(self, mixer: Mixer, size: int | None = None):
        self.layers = {mixer.layer_idx: mixer.cache_layer(size)}


def _length(mixer: Mixer) -> int:
    """How long a text the checks of one layer use: past the window, and past a block of the kernels."""
    return 2 * min(getattr(mixer.options, "window", 16), _LARGEST_WINDOW) + 23


def _layer(model: Any, index: int, mixer: Mixer, hidden: torch.Tensor, position: Any) -> Iterator[Check]:
    """One mixer by itself, on the hidden states that the model brings to it."""
    length = _length(mixer)
    hidden, position = hidden[:, :length], tuple(p[:, :length] for p in position)
    plain = Context.plain()
    yield from _cache_size(index, mixer, hidden, position)
    if getattr(mixer.options, "window", 0) > _LARGEST_WINDOW:
        yield _own_window(index, mixer, hidden, position)
        mixer = copy.deepcopy(mixer)
        mixer.options = dataclasses.replace(mixer.options, window=_LARGEST_WINDOW)
    window = getattr(mixer.options, "window", 16)
    whole = mixer.heads(hidden, position, plain)
    inputs = [x.double() for x in mixer.inputs(hidden, position)]
    yield _check("equals its float64 oracle", index, difference(whole, mixer.reference(*inputs)))
    yield from _exact_limit(model, index, mixer, hidden, position)

    third = length // 3
    pieces = [third, 1, window, length - third - 1 - window] if length > third + 1 + window else [third, length - third]
    yield _check("prefill in pieces = whole", index, difference(_cached(mixer, hidden, position, pieces), whole))
    # steps across the edge of the window, then the rest at once on the state that they leave; and steps at the end
    early = max(window - 6, 1)
    ways = ([early, *[1] * 12, length - early - 12], [length - 18, *[1] * 18])
    worst = max((difference(_cached(mixer, hidden, position, way), whole) for way in ways), key=_rank)
    yield _check("prefill, then steps = whole", index, worst)
    few = [length - 4, 1, 1, 1, 1]
    yield _check("static cache = whole", index, difference(_cached(mixer, hidden, position, few, length), whole))

    hole = min(window, 9)
    for side, real in _paddings(length, hole):
        for fill in (1.0, -2.0):
            padded, turned = _spread(hidden, position, real, fill)
            out = mixer.heads(padded, turned, Context.of(real[None], None))
            value = difference(out[:, real], whole) if bool(torch.isfinite(out).all()) else math.nan
            if not value <= LIMIT:
                break
        yield _check(f"{side} padding changes nothing", index, value)
    yield _check("padded pieces = whole", index, difference(_padded_pieces(mixer, hidden, position, hole), whole))

    cut = length // 2
    document = (torch.arange(length) >= cut).long()[None]
    restarted = tuple(torch.cat([p[:, :cut], p[:, : length - cut]], 1) for p in position)
    packed = mixer.heads(hidden, restarted, Context.of(None, document))[:, cut:]
    alone = mixer.heads(hidden[:, cut:], tuple(p[:, : length - cut] for p in position), plain)
    yield _check("a packed document = alone", index, difference(packed, alone))
    other = torch.cat([hidden[:, :cut].flip(1) * 3, hidden[:, cut:]], 1)
    again = mixer.heads(other, restarted, Context.of(None, document))[:, cut:]
    yield _check("documents do not leak", index, difference(again, packed), limit=1e-6)

    rows = torch.cat([hidden, hidden.flip(1)])
    both = mixer.heads(rows, position, plain)
    yield _check("the batch does not matter", index, difference(both[:1], whole))
    worst = max((_rows_moved(mixer, rows, position, both, move) for move in _MOVES), key=_rank)
    yield _check("cache rows reordered, repeated, selected", index, worst)
    yield _check("a padded step changes nothing", index, _padded_step(mixer, rows, position, both))
    cache = _OneLayerCache(mixer)
    mixer.heads(hidden, position, plain, cache)
    cache.layers[index].reset()
    after = mixer.heads(hidden, position, plain, cache)
    yield _check("a reset cache is a fresh one", index, difference(after, whole))


def _rank(value: float) -> float:
    """For finding the worst difference: one that is not a number is worse than any."""
    return math.inf if math.isnan(value) else value


def _cached(mixer: Mixer, hidden: torch.Tensor, position: Any, pieces: list[int], static: int | None = None) -> Any:
    """The outputs when the text comes in pieces, through one cache (a static one with a size)."""
    cache, at, parts = _OneLayerCache(mixer, static), 0, []
    for size in pieces:
        part = slice(at, at + size)
        parts.append(mixer.heads(hidden[:, part], tuple(p[:, part] for p in position), Context.plain(), cache))
        at += size
    return torch.cat(parts, 1)


def _cache_size(index: int, mixer: Mixer, hidden: torch.Tensor, position: Any) -> Iterator[Check]:
    cache = _OneLayerCache(mixer)
    mixer.heads(hidden, position, Context.plain(), cache)
    live = sum(t.untyped_storage().nbytes() for t in cache.layers[index].state)
    told = get_mixer(mixer.name).cache_bytes(mixer.spec, mixer.options, hidden.shape[1], 1, hidden.dtype)
    yield _check("cache bytes as promised", index, float(abs(live - told)), f"{live} live, {told} promised", 0)


def _own_window(index: int, mixer: Mixer, hidden: torch.Tensor, position: Any) -> Check:
    """Across the edge of a window too wide for the oracle: text repeated beyond it, in pieces and as a whole."""
    size = mixer.options.window + 24
    repeat = -(-size // hidden.shape[1])
    hidden = hidden.repeat(1, repeat, 1)[:, :size]
    position = tuple(p.repeat(1, repeat, 1)[:, :size] for p in position)
    whole = mixer.heads(hidden, position, Context.plain())
    pieces = [mixer.options.window - 3, 12, *[1] * 15]
    return _check(
        "its own window, in pieces = whole", index, difference(_cached(mixer, hidden, position, pieces), whole)
    )


def _padded_pieces(mixer: Mixer, hidden: torch.Tensor, position: Any, hole: int) -> torch.Tensor:
    """The outputs at the real places of a cached prefill in two padded pieces, then steps."""
    length = hidden.shape[1]
    cuts = [0, length // 3, length - 4]
    cache, parts = _OneLayerCache(mixer), []
    for start, stop in pairwise(cuts):
        part = slice(start, stop)
        for side, real in _paddings(stop - start, hole):
            if side == ("left" if start == 0 else "interior"):
                padded, turned = _spread(hidden[:, part], tuple(p[:, part] for p in position), real, 1.0)
                parts.append(mixer.heads(padded, turned, Context.of(real[None], None), cache)[:, real])
    for t in range(length - 4, length):
        at = slice(t, t + 1)
        parts.append(mixer.heads(hidden[:, at], tuple(p[:, at] for p in position), Context.plain(), cache))
    return torch.cat(parts, 1)


# how a cache's rows are moved, and the same on a batch-first tensor of two rows
_MOVES: tuple[tuple[str, Any, Any], ...] = (
    ("reorder_cache", torch.tensor([1, 0]), lambda x: x.flip(0)),
    ("batch_repeat_interleave", 2, lambda x: x.repeat_interleave(2, 0)),
    ("batch_select_indices", torch.tensor([1]), lambda x: x[1:]),
)


def _rows_moved(mixer: Mixer, rows: torch.Tensor, position: Any, whole: torch.Tensor, move: Any) -> float:
    """The difference when rows of the cache are moved in the middle of the text, and the rest of the text likewise."""
    name, argument, same = move
    cut = 2 * rows.shape[1] // 3
    cache = _OneLayerCache(mixer)
    mixer.heads(rows[:, :cut], tuple(p[:, :cut] for p in position), Context.plain(), cache)
    getattr(cache.layers[mixer.layer_idx], name)(argument)
    late = tuple(p[:, cut:] for p in position)
    return difference(mixer.heads(same(rows)[:, cut:], late, Context.plain(), cache), same(whole)[:, cut:])


def _padded_step(mixer: Mixer, rows: torch.Tensor, position: Any, whole: torch.Tensor) -> float:
    """Two rows decoded together, of which the second pauses on a padding token before its last token."""
    cut = rows.shape[1] - 2
    cache = _OneLayerCache(mixer)
    mixer.heads(rows[:, :cut], tuple(p[:, :cut] for p in position), Context.plain(), cache)

    def one(first: int, second: int, write: list[int]) -> torch.Tensor:
        hidden = torch.stack([rows[0, first], rows[1, second]])[:, None]
        turned = tuple(torch.stack([p[0, first], p[0, second]])[:, None] for p in position)
        return mixer.heads(hidden, turned, Context(write=torch.tensor(write)), cache)[:, 0]

    one(cut, 0, [1, 0])
    last = one(cut + 1, cut, [1, 1])
    return difference(last, torch.stack([whole[0, cut + 1], whole[1, cut]]))


def _exact_limit(model: Any, index: int, mixer: Mixer, hidden: torch.Tensor, position: Any) -> Iterator[Check]:
    """At its exact setting, the mixer against the source's own attention class with the mixer's weights."""
    options = mixer.exact_options(_EXACT_LENGTH)
    if options is None:
        return
    name = "exact limit = source attention"
    view = model.get_decoder().config
    attn_class = type(_source_base(model).layers[0].self_attn)
    source = attn_class(view, index).to(hidden)
    weights = {k: v for k, v in mixer.source_weights().items() if k in source.state_dict()}
    lacking = sorted(source.state_dict().keys() - weights.keys())
    if lacking:
        yield _check(name, index, math.nan, f"the source has {', '.join(lacking)}, the layer does not")
        return
    source.load_state_dict(weights)
    source.eval()
    own = attention_spec(source, view).sliding_window
    x, rotary = hidden[:, :_EXACT_LENGTH], tuple(p[:, :_EXACT_LENGTH] for p in position)
    size = x.shape[1]
    t = torch.arange(size)
    seen = t[None] <= t[:, None]
    if own is not None:
        seen &= t[:, None] - t[None] < own
    mask = torch.zeros(size, size).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    with _eager(view):
        wanted = source(hidden_states=x, position_embeddings=rotary, attention_mask=mask)[0]
    wide = copy.deepcopy(mixer)
    wide.options = options
    found = wide(hidden_states=x, position_embeddings=rotary, regraft=Context.plain())[0]
    yield _check(name, index, difference(found, wanted))


@contextmanager
def _eager(config: Any) -> Iterator[None]:
    kept = config._attn_implementation
    config.__dict__["_attn_implementation_internal"] = "eager"
    try:
        yield
    finally:
        config.__dict__["_attn_implementation_internal"] = kept


def _ids(model: Any, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random ordinary ids."""
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)


def _inputs(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, Any]]:
    """Hidden states and rotary tables that reach the attention of every layer."""
    taken: list[tuple[torch.Tensor, Any]] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        taken.append((kwargs["hidden_states"], kwargs["position_embeddings"]))

    handles = [slot.register_forward_pre_hook(hook, with_kwargs=True) for slot in attention_slots(model)]
    try:
        model.get_decoder()(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return taken


def _paddings(length: int, hole: int) -> list[tuple[str, torch.Tensor]]:
    keep, off = torch.ones(length, dtype=torch.bool), torch.zeros(hole, dtype=torch.bool)
    half = length // 2
    return [
        ("left", torch.cat([off, keep])),
        ("right", torch.cat([keep, off])),
        ("interior", torch.cat([keep[:half], off, keep[half:]])),
    ]


def _spread(hidden: torch.Tensor, position: Any, real: torch.Tensor, fill: float) -> tuple[torch.Tensor, Any]:
    """`hidden` and the rotary tables at the real places of a padded row, `fill` elsewhere."""

    def place(x: torch.Tensor, blank: float) -> torch.Tensor:
        out = torch.full((x.shape[0], real.numel(), *x.shape[2:]), blank, dtype=x.dtype, device=x.device)
        out[:, real] = x
        return out

    return place(hidden, fill), tuple(place(p, 0.5) for p in position)


def _model(model: Any, generator: torch.Generator) -> Iterator[Check]:
    """The whole model through its public face."""
    window = max(getattr(m.options, "window", 16) for m in converted_layers(model).values())
    length = min(window + 40, 300)
    ids = _ids(model, 1, length, generator)
    whole = model(input_ids=ids, use_cache=False).logits
    pieces = ids.split([length - 12, 5, *[1] * 7], dim=1)
    for name, cache in (("cached", None), ("static cache", StaticCache(model.config, max_cache_len=length))):
        parts = []
        for piece in pieces:
            out = model(input_ids=piece, cache=cache, use_cache=True)
            cache = out.cache
            parts.append(out.logits)
        yield _check(f"model: {name} = whole", None, difference(torch.cat(parts, 1), whole))
    for side, real in _paddings(length, 7):
        if side == "interior" and _kept_layers_slide(model):
            continue  # transformers counts a sliding window in places, padding included
        for seed in (0, 1):
            blank = _ids(model, 1, real.numel(), torch.Generator().manual_seed(seed))
            blank[:, real] = ids
            mask = real.long()[None]
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            out = model(input_ids=blank, attention_mask=mask, position_ids=positions, use_cache=False)
            value = difference(out.logits[:, real], whole)
            if not value <= LIMIT:
                break
        yield _check(f"model: {side} padding changes nothing", None, value)
    yield _check("model: padded batch, cached = alone", None, _padded_batch(model, ids, whole, generator))
    cut = length // 2
    alone = model(input_ids=ids[:, cut:], use_cache=False).logits
    positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])[None]
    edges = torch.tensor([0, cut, length])
    for name, told in (("", {"position_ids": positions}), (" (cu_seqlens)", {"cu_seqlens": edges})):
        packed = model(input_ids=ids, use_cache=False, **told).logits[:, cut:]
        yield _check(f"model: packed documents = alone{name}", None, difference(packed, alone))
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = ids[:, : length - 12]
    for name, extra in (("greedy", {}), ("beam", {"num_beams": 3})):
        told = {"attention_mask": torch.ones_like(prompt), **settings, **extra}
        same = torch.equal(model.generate(prompt, **told), model.generate(prompt, use_cache=False, **told))
        yield _check(f"model: {name} with cache = without", None, float(not same), limit=0)


def _kept_layers_slide(model: Any) -> bool:
    """Whether a layer that is not converted has a sliding window in the source."""
    view, converted = model.get_decoder().config, converted_layers(model)
    kept = [slot for i, slot in enumerate(attention_slots(model)) if i not in converted]
    return any(attention_spec(slot, view).sliding_window is not None for slot in kept)


def _padded_batch(model: Any, ids: torch.Tensor, whole: torch.Tensor, generator: torch.Generator) -> float:
    """A text beside a longer one, left-padded, prefilled and decoded through one cache, against the text alone."""
    pad, length = 9, ids.shape[1]
    longer = _ids(model, 1, length + pad, generator)
    rows = torch.cat([longer, torch.cat([_ids(model, 1, pad, generator), ids], 1)])
    mask = torch.ones_like(rows)
    mask[1, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, parts, at = None, [], 0
    for size in (length + pad - 5, 1, 1, 3):
        end = at + size
        told = {"attention_mask": mask[:, :end], "position_ids": positions[:, at:end], "cache": cache}
        out = model(input_ids=rows[:, at:end], use_cache=True, **told)
        cache, at = out.cache, end
        parts.append(out.logits)
    return difference(torch.cat(parts, 1)[1:, pad:], whole)


_FRESH = """
import sys, torch
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "regraft" or name.startswith("regraft."):
            raise ImportError("regraft is hidden")
sys.meta_path.insert(0, Hidden())
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32).eval()
ids = load_file(sys.argv[2])["ids"]
with torch.no_grad():
    logits = model(input_ids=ids, use_cache=False).logits
save_file({"logits": logits.contiguous()}, sys.argv[3])
"""


def _reload(model: Any, folder: Path | None, generator: torch.Generator) -> Check:
    """Load the folder (or a fresh save of the model) in a fresh process without regraft, compare logits."""
    from safetensors.torch import load_file, save_file

    name = "model: reloads without regraft"
    ids = _ids(model, 1, 90, generator)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        if folder is None:
            folder = root / "model"
            model.save_pretrained(folder)
        save_file({"ids": ids}, root / "ids.safetensors")
        environment = {**os.environ, "HF_MODULES_CACHE": str(root / "modules"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", _FRESH, str(folder.resolve()), str(root / "ids.safetensors"), str(root / "out")],
            cwd=root,
            env=environment,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            return _check(name, None, math.nan, last[0][:200])
        found = load_file(root / "out")["logits"]
    return _check(name, None, difference(found, model(input_ids=ids, use_cache=False).logits))
