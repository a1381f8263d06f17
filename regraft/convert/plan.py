"""What a conversion will do and cost, from the configuration alone: no weights are read, nothing is written."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from regraft.convert.layers import evenly, layer_strip, parse_layers, ruler
from regraft.errors import UserError
from regraft.recipes.schema import AlignStage, Recipe

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
# tokens a second per 10^9 parameters of forward work, by kind of device: coarse, measured on two CPU cores with
# SmolLM2 (512 tokens a second forward); --measure replaces it by a timed step
_FORWARD_RATE = {"cpu": 70.0, "mps": 2_000.0, "cuda": 20_000.0}


@dataclass(frozen=True)
class StagePlan:
    """One training stage: tokens, steps, parameters trained and frozen, FLOPs, and a time estimate in seconds."""

    stage: str
    train: str
    tokens: int
    steps: int
    trained: int
    frozen: int
    flops: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What `regraft plan` shows. Bytes and parameters are exact; memory, disk, FLOPs and time are estimates."""

    name: str
    base: str
    mixer: str
    options: dict[str, Any]
    num_layers: int
    converted: list[int] | None  # None: chosen by data during the run
    converted_count: int
    parameters: dict[str, int]
    cache: dict[int, tuple[int, int]]  # context -> (teacher, student) bytes
    stages: list[StagePlan]
    memory_bytes: int
    disk_bytes: int
    seconds: float
    rate: str
    by: str = ""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "cache": {str(k): list(v) for k, v in self.cache.items()}}

    def render(self) -> str:
        """The plan as text."""
        count, depth = self.converted_count, self.num_layers
        if self.converted is not None:
            strip = f"layers  {ruler(depth)}\n        {layer_strip(self.converted, depth)}   "
        else:
            strip = f"layers  {count} of {depth}, chosen by {self.by} during the run   "
        lines = [
            f"{self.name}: {self.base}",
            f"{strip}S softmax {depth - count} · L {self.mixer} {count}",
            f"params  {_count(self.parameters['kept'])} kept · {_count(self.parameters['fresh'])} fresh"
            f" · {_count(self.parameters['total'])} in the converted model",
        ]
        shown = [c for c in (1024, 8192, 32768) if c in self.cache]
        lines.append(
            "cache   "
            + " · ".join(
                f"at {_k(c)} {_size(self.cache[c][1])} ({self.cache[c][1] / self.cache[c][0]:.0%})" for c in shown
            )
        )
        for s in self.stages:
            lines.append(
                f"stage   {s.stage}: {_k(s.tokens)} tokens, {s.steps} steps, train {s.train}: "
                f"{_count(s.trained)} trained, "
                f"{_count(s.frozen)} frozen, {s.flops:.1e} FLOPs, about {_time(s.seconds)}"
            )
        lines.append(f"memory  about {_size(self.memory_bytes)}  ·  disk about {_size(self.disk_bytes)}")
        lines.append(f"time    about {_time(self.seconds)} of training ({self.rate})")
        lines += [f"note    {note}" for note in self.notes]
        lines.append("nothing has been started")
        return "\n".join(lines)


def _count(n: int) -> str:
    return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.1f}M" if n >= 1e6 else f"{n / 1e3:.1f}k"


def _k(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n // 1000}k" if n >= 1000 else str(n)


def _size(n: float) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 5400
        else f"{seconds / 60:.0f} min"
        if seconds >= 90
        else f"{seconds:.0f} s"
    )


def meta_model(config: Any) -> Any:
    """A source model without memory behind its parameters, for counting."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def softmax_cache_bytes(config: Any, specs: Sequence[Any], layers: Sequence[int], length: int, size: int) -> int:
    """Bytes that the softmax layers among `layers` hold after `length` tokens (a sliding layer holds its window)."""
    total = 0
    for index in layers:
        spec = specs[index]
        held = length if spec.sliding_window is None else min(length, spec.sliding_window - 1)
        total += held * spec.num_kv_heads * (spec.head_dim + spec.value_dim) * size
    return total


def plan(recipe: Recipe, *, measure: bool = False, device: str | None = None) -> Plan:
    """Resolve `recipe` against the source's configuration. `measure` loads the model and times one training step."""
    import torch

    from regraft.convert.graft import attention_slots, fitting_layers
    from regraft.convert.mixers.registry import get_mixer, parse_options
    from regraft.convert.sources import load_config, pick_device
    from regraft.convert.spec import attention_spec

    config = load_config(recipe.base, revision=recipe.revision)
    model = meta_model(config)
    mixer, options = get_mixer(recipe.convert.mixer), parse_options(recipe.convert.mixer, recipe.convert.options)
    specs = [attention_spec(attn, config) for attn in attention_slots(model)]
    depth = len(specs)
    fit = fitting_layers(model, recipe.convert.mixer, options)
    notes = []
    if len(fit) < depth:
        notes.append(
            f"{depth - len(fit)} layers do not fit {recipe.convert.mixer}: {sorted(set(range(depth)) - set(fit))}"
        )
    converted: list[int] | None = None
    if recipe.layers.by == "list":
        converted = parse_layers(str(recipe.layers.layers), depth)
    elif recipe.layers.keep is not None:
        if recipe.layers.keep >= depth:
            raise UserError(
                f"keep {recipe.layers.keep} of {depth} layers leaves nothing to convert", where="layers.keep"
            )
        if recipe.layers.by == "uniform":
            kept = evenly(depth, recipe.layers.keep)
            converted = [i for i in range(depth) if i not in kept]
    count = len(converted) if converted is not None else depth - int(recipe.layers.keep or 0)
    chosen = converted if converted is not None else fit[:count]
    dtype = getattr(torch, recipe.dtype)
    total = sum(p.numel() for p in model.parameters())
    fresh = sum(mixer.new_parameters(specs[i], options) for i in chosen)
    inside = sum(sum(p.numel() for p in attention_slots(model)[i].parameters()) for i in chosen)
    cache = {}
    for context in CONTEXTS:
        rest = [i for i in range(depth) if i not in chosen]
        teacher = softmax_cache_bytes(config, specs, range(depth), context, dtype.itemsize)
        student = softmax_cache_bytes(config, specs, rest, context, dtype.itemsize)
        student += sum(mixer.cache_bytes(specs[i], options, context, 1, dtype) for i in chosen)
        cache[context] = (teacher, student)
    where = pick_device(device).split(":")[0]
    rate, told = _FORWARD_RATE[where] * 1e9 / total, "from a stated default rate; --measure times a step"
    if measure:
        rate, told = _measured_rate(recipe, device), "from a measured forward pass"
    stages = [
        _stage_plan(stage, number == 0, recipe, count, fit, specs, mixer, options, total, fresh, inside, rate)
        for number, stage in enumerate(recipe.distill)
    ]
    trained = max((s.trained for s in stages), default=0)
    rows = max((s.seq_len * s.batch_size for s in recipe.distill), default=512)
    vocab = config.vocab_size
    memory = int(
        2 * total * dtype.itemsize  # teacher and student
        + 3 * trained * 4  # gradients and AdamW's two moments
        + rows * config.hidden_size * depth * 4 * 12  # activations
        + 128 * vocab * 4 * 4  # logits of one chunk, both models
    )
    # the stages' models and, at the last one's end, three checkpoints of it with AdamW's moments, or the final model
    disk = int((2 + len(stages)) * total * dtype.itemsize + 3 * trained * 4 * 3)
    if recipe.convert.mixer == "window_linear" and not recipe.distill:
        notes.append("window_linear needs training: without a stage its far branch stays almost off")
    return Plan(
        name=recipe.name,
        base=recipe.base,
        mixer=recipe.convert.mixer,
        options=options.to_dict(),
        num_layers=depth,
        converted=converted,
        converted_count=count,
        parameters={"kept": total, "derived": 0, "fresh": fresh, "total": total + fresh},
        cache=cache,
        stages=stages,
        memory_bytes=memory,
        disk_bytes=disk,
        seconds=sum(s.seconds for s in stages),
        rate=told,
        by=recipe.layers.by,
        notes=notes,
    )


def _stage_plan(stage, first, recipe, count, fit, specs, mixer, options, total, fresh, inside, rate) -> StagePlan:
    """Tokens, parameters and cost of one stage.

    FLOPs a token: 2 per parameter forward, 4 more backward for what is trained through; attention is left out.
    """
    tokens = stage.tokens
    steps = max(1, math.ceil(tokens / (stage.seq_len * stage.batch_size * stage.accumulate)))
    everything = first and isinstance(stage, AlignStage) and recipe.layers.by not in ("list", "uniform")
    if everything:  # all candidates are aligned before the choice
        fresh = sum(mixer.new_parameters(specs[i], options) for i in fit)
    lora = 0
    if stage.train == "lora":
        spec = specs[0]
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        shapes = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": q}
        targets = stage.lora.targets or mixer.lora_targets
        lora = count * sum(stage.lora.r * (spec.hidden_size + shapes.get(t, spec.hidden_size)) for t in targets)
    trained = {"new": fresh, "mixers": inside + fresh, "all": total + fresh, "lora": lora + fresh}[stage.train]
    frozen = total + fresh + lora - trained
    # align: the teacher forward, and the mixers forward and backward; others: both models forward, the student backward
    factor = 1.0 + 3.0 * min(1.0, 3 * fresh / total + 0.15) if isinstance(stage, AlignStage) else 1.0 + 3.0
    if stage.stage == "finetune":
        factor = 3.0
    return StagePlan(
        stage.stage, stage.train, tokens, steps, trained, frozen, 2.0 * total * factor * tokens, tokens * factor / rate
    )


def _measured_rate(recipe: Recipe, device: str | None) -> float:
    """Forward tokens a second of the source, timed on rows of 512 tokens."""
    import time

    import torch

    from regraft.convert.sources import load_source

    model = load_source(recipe.base, revision=recipe.revision, dtype=recipe.dtype, device=device).model
    ids = torch.randint(3, model.config.vocab_size, (1, 512)).to(model.device)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
        began = time.perf_counter()
        for _ in range(3):
            model(input_ids=ids, use_cache=False)
    return 3 * 512 / (time.perf_counter() - began)


def inspect_source(ref: str, *, revision: str | None = None, trust_remote_code: bool = False) -> dict[str, Any]:
    """What a model is, its cache, and which mixers fit which layers (or what is converted already)."""
    import torch

    from regraft.convert.graft import attention_slots, converted_layers
    from regraft.convert.mixers.registry import MIXERS, get_mixer
    from regraft.convert.sources import load_config
    from regraft.convert.spec import FAMILIES, attention_spec

    config = load_config(ref, revision=revision, trust_remote_code=trust_remote_code)
    told: dict[str, Any] = {"model": ref, "model_type": config.model_type}
    family = config.model_type.removeprefix("regraft_")
    if family not in FAMILIES:
        return {
            **told,
            "supported": False,
            "why": f"no source family '{family}'; known: {', '.join(sorted(FAMILIES))}",
        }
    model = meta_model(config)
    slots = attention_slots(model)
    converted = converted_layers(model)
    view = model.get_decoder().config
    specs = [slot.spec if i in converted else attention_spec(slot, view) for i, slot in enumerate(slots)]
    size = 2  # bf16, the dtype that caches are usually compared in
    kept = [i for i in range(len(slots)) if i not in converted]

    def cache(length: int) -> int:
        own = sum(type(m).cache_bytes(m.spec, m.options, length, 1, torch.bfloat16) for m in converted.values())
        return softmax_cache_bytes(config, specs, kept, length, size) + own

    told.update(
        supported=True,
        num_layers=len(slots),
        hidden_size=config.hidden_size,
        num_heads=specs[0].num_heads,
        num_kv_heads=specs[0].num_kv_heads,
        head_dim=specs[0].head_dim,
        vocab_size=config.vocab_size,
        tied_embeddings=bool(config.tie_word_embeddings),
        max_positions=config.max_position_embeddings,
        parameters=sum(p.numel() for p in model.parameters()),
        cache_bytes_per_token_bf16=(cache(8192) - cache(4096)) // 4096,
        cache_bytes_16k_bf16=cache(16384),
        strip=layer_strip(converted, len(slots)),
    )
    if converted:
        told["converted"] = {
            str(i): {"name": config.regraft["mixers"][str(i)]["name"], "options": m.options.to_dict()}
            for i, m in converted.items()
        }
        told["source"] = config.regraft["source"].get("ref")
    else:
        fits = {}
        for name in MIXERS:
            reasons: dict[str, list[int]] = {}
            for i, spec in enumerate(specs):
                try:
                    get_mixer(name).check_fit(spec, get_mixer(name).Options())
                except ValueError as error:
                    text = re.sub(r"^layer \d+ ", "", str(error))
                    reasons.setdefault(text, []).append(i)
            misfits = sorted(i for layers in reasons.values() for i in layers)
            fits[name] = {"layers": [i for i in range(len(specs)) if i not in misfits], "why_not": reasons}
        told["mixers"] = fits
    return told


def render_inspection(told: dict[str, Any]) -> str:
    """`inspect_source` as text."""
    if not told["supported"]:
        return f"{told['model']}\n {told['model_type']}: not supported, {told['why']}"
    lines = [
        told["model"],
        f" {told['model_type']} · {told['num_layers']} layers · hidden {told['hidden_size']} · "
        f"{told['num_heads']} q heads, {told['num_kv_heads']} kv heads, head {told['head_dim']} · "
        f"vocabulary {told['vocab_size']} · {'tied' if told['tied_embeddings'] else 'untied'} embeddings · "
        f"{_count(told['parameters'])} parameters",
        f" cache {told['cache_bytes_per_token_bf16'] / 1024:.1f} KiB a token, "
        f"{_size(told['cache_bytes_16k_bf16'])} at 16k (bf16)",
    ]
    if "converted" in told:
        lines += [f" {ruler(told['num_layers'])}", f" {told['strip']}   S softmax, L converted, from {told['source']}"]
        kinds: dict[str, list[str]] = {}
        for index, entry in told["converted"].items():
            kinds.setdefault(f"{entry['name']} {entry['options']}", []).append(index)
        lines += [f" {name}: layers {', '.join(where)}" for name, where in kinds.items()]
    else:
        for name, fit in told["mixers"].items():
            where = "all layers" if len(fit["layers"]) == told["num_layers"] else f"{len(fit['layers'])} layers"
            lines.append(f" fits  {name}: {where}")
            lines += [f"       not {', '.join(map(str, at))}: {why}" for why, at in fit["why_not"].items()]
    return "\n".join(lines)
