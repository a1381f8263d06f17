"""Is this converted checkpoint right: every mode of use agrees, nothing leaks, the exact limit is exact, it reloads.

Runs on any converted model, on a CPU, on inputs that the model itself produces. A check that fails names its layer.
"""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from regraft.convert.graft import attention_slots, converted_layers
from regraft.convert.mixers.base import Mixer
from regraft.convert.mixers.registry import get_mixer
from regraft.convert.model.context import Context
from regraft.convert.spec import attention_spec
from regraft.errors import UserError

LIMIT = 2e-4  # largest difference, relative to the largest value compared; fp32 reaches 1e-5
_EXACT_LENGTH = 48


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
            worst = max(group, key=lambda c: math.inf if math.isnan(c.value) else c.value)
            of = f"{len(group)} layers" if group[0].layer is not None else "model"
            state = "ok  " if all(c.passed for c in group) else "FAIL"
            lines.append(f"{state}  {name:34} {of:10} worst {worst.value:.1e}  limit {worst.limit:.0e}")
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
    """Check a grafted causal LM. `teacher` (optional, in memory): nothing may be shared with it.

    `reload`: also save it and load it in a fresh process in which regraft cannot be imported. Computes in fp32 (a
    bf16 model is checked as an fp32 copy). UserError for a model without converted layers.
    """
    if not converted_layers(model):
        raise UserError("no layer of this model is converted", fix="verify checks what `regraft convert` writes")
    checks = [*_parameters(model), *_shared(model, teacher)]
    if any(not c.passed for c in checks):
        return VerifyReport(checks)
    was_training = model.training
    if model.dtype != torch.float32:
        model = copy.deepcopy(model).float()
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    for index, mixer in converted_layers(model).items():
        _collect(checks, _layer(model, index, mixer, generator), index)
    _collect(checks, _model(model, generator), None)
    if reload:
        checks.append(_reload(model, generator))
    model.train(was_training)
    return VerifyReport(checks)


def _collect(checks: list[Check], found: Iterator[Check], layer: int | None) -> None:
    """Add what `found` yields; a model that raises on the way has failed, with the message as the note."""
    try:
        for check in found:
            checks.append(check)
    except Exception as error:
        told = f"after '{checks[-1].name}': {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        checks.append(_check("runs without an error", layer, math.nan, told))


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
    if teacher is None:
        return
    places = {p.data_ptr() for p in teacher.parameters()}
    shared = [name for name, p in model.named_parameters() if p.data_ptr() in places]
    yield _check("nothing shared with the teacher", None, float(len(shared)), ", ".join(shared[:3]), 0)


class _OneLayerCache:
    """Just enough of a cache for one mixer."""

    def __init__(self, mixer: Mixer):
        self.layers = {mixer.layer_idx: mixer.cache_layer()}


def _layer(model: Any, index: int, mixer: Mixer, generator: torch.Generator) -> Iterator[Check]:
    """One mixer by itself, on the hidden states that the model brings to it."""
    window = getattr(mixer.options, "window", 16)
    length = min(2 * window + 23, 400)
    hidden, position = _inputs(model, index, _ids(model, 1, length, generator))
    plain = Context.plain()
    whole = mixer.heads(hidden, position, plain)
    inputs = [x.double() for x in mixer.inputs(hidden, position)]
    yield _check("equals its float64 oracle", index, difference(whole, mixer.reference(*inputs)))
    yield from _exact_limit(model, index, mixer, hidden, position)

    def cached(pieces: list[int]) -> torch.Tensor:
        cache, at, parts = _OneLayerCache(mixer), 0, []
        for size in pieces:
            part = slice(at, at + size)
            parts.append(mixer.heads(hidden[:, part], tuple(p[:, part] for p in position), plain, cache))
            at += size
        return torch.cat(parts, 1)

    third = length // 3
    pieces = [third, 1, window, length - third - 1 - window] if length > third + 1 + window else [third, length - third]
    yield _check("prefill in pieces = whole", index, difference(cached(pieces), whole))
    yield _check("prefill, then steps = whole", index, difference(cached([third] + [1] * (length - third)), whole))

    hole = min(window, 9)
    for side, real in _paddings(length, hole):
        for fill in (1.0, -2.0):
            padded, turned = _spread(hidden, position, real, fill)
            out = mixer.heads(padded, turned, Context.of(real[None], None))[:, real]
            value = difference(out, whole)
            if not value <= LIMIT:
                break
        yield _check(f"{side} padding changes nothing", index, value)

    cut = length // 2
    document = (torch.arange(length) >= cut).long()[None]
    restarted = tuple(torch.cat([p[:, :cut], p[:, : length - cut]], 1) for p in position)
    packed = mixer.heads(hidden, restarted, Context.of(None, document))[:, cut:]
    alone = mixer.heads(hidden[:, cut:], tuple(p[:, : length - cut] for p in position), plain)
    yield _check("a packed document = alone", index, difference(packed, alone))
    other = torch.cat([hidden[:, :cut].flip(1) * 3, hidden[:, cut:]], 1)
    again = mixer.heads(other, restarted, Context.of(None, document))[:, cut:]
    yield _check("documents do not leak", index, difference(again, packed), limit=1e-6)

    two = mixer.heads(torch.cat([hidden, hidden.flip(1)]), position, plain)[:1]
    yield _check("the batch does not matter", index, difference(two, whole))
    cache = _OneLayerCache(mixer)
    mixer.heads(hidden, position, plain, cache)
    live = sum(t.numel() * t.element_size() for t in cache.layers[index].state)
    told = get_mixer(mixer.name).cache_bytes(mixer.spec, mixer.options, length, 1, hidden.dtype)
    yield _check("cache bytes as promised", index, float(abs(live - told)), f"{live} live, {told} promised", 0)
    cache.layers[index].reset()
    after = mixer.heads(hidden, position, plain, cache)
    yield _check("a reset cache is a fresh one", index, difference(after, whole))


def _exact_limit(model: Any, index: int, mixer: Mixer, hidden: torch.Tensor, position: Any) -> Iterator[Check]:
    """At its exact setting, the mixer against the source's own attention class with the mixer's weights."""
    options = mixer.exact_options(_EXACT_LENGTH)
    if options is None:
        return
    name = "exact limit = source attention"
    view = model.get_decoder().config
    attn_class = type(_source_base(model).layers[0].self_attn)
    source = attn_class(view, index).to(hidden)
    weights = {k: v for k, v in mixer.state_dict().items() if k in source.state_dict()}
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
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def _inputs(model: Any, index: int, ids: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states and rotary tables that reach the attention of a layer."""
    taken: dict[str, Any] = {}

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        taken.update(kwargs)

    handle = attention_slots(model)[index].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        model.get_decoder()(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    return taken["hidden_states"], taken["position_embeddings"]


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
    cache, parts = None, []
    for piece in ids.split([length - 12, 5, *[1] * 7], dim=1):
        out = model(input_ids=piece, cache=cache, use_cache=True)
        cache = out.cache
        parts.append(out.logits)
    yield _check("model: cached = whole", None, difference(torch.cat(parts, 1), whole))
    pad = 7
    mask = torch.cat([torch.zeros(1, pad), torch.ones(1, length)], 1).long().to(ids.device)
    for seed in (0, 1):
        blank = _ids(model, 1, pad, torch.Generator().manual_seed(seed))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = model(input_ids=torch.cat([blank, ids], 1), attention_mask=mask, position_ids=positions, use_cache=False)
        value = difference(out.logits[:, pad:], whole)
        if not value <= LIMIT:
            break
    yield _check("model: left padding changes nothing", None, value)
    cut = length // 2
    positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])[None].to(ids.device)
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, cut:]
    alone = model(input_ids=ids[:, cut:], use_cache=False).logits
    yield _check("model: packed documents = alone", None, difference(packed, alone))
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = ids[:, :20]
    for name, extra in (("greedy", {}), ("beam", {"num_beams": 2})):
        told = {"attention_mask": torch.ones_like(prompt), **settings, **extra}
        same = torch.equal(model.generate(prompt, **told), model.generate(prompt, use_cache=False, **told))
        yield _check(f"model: {name} with cache = without", None, float(not same), limit=0)


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


def _reload(model: Any, generator: torch.Generator) -> Check:
    """Save, load in a fresh process without regraft, compare logits."""
    from safetensors.torch import load_file, save_file

    name = "model: reloads without regraft"
    ids = _ids(model, 1, 90, generator)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model.save_pretrained(root / "model")
        save_file({"ids": ids.cpu()}, root / "ids.safetensors")
        environment = {**os.environ, "HF_MODULES_CACHE": str(root / "modules"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", _FRESH, str(root / "model"), str(root / "ids.safetensors"), str(root / "out")],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            return _check(name, None, math.nan, last[0][:200])
        found = load_file(root / "out")["logits"]
    return _check(name, None, difference(found, model(input_ids=ids, use_cache=False).logits.cpu()))
