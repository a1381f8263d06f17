"""Replace the attention of chosen layers, and put it back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from regraft.convert.mixers.base import Mixer, Options, TransferReport
from regraft.convert.mixers.registry import get_mixer
from regraft.convert.model.factory import FORMAT, source_view
from regraft.convert.model.families import CLASSES
from regraft.convert.spec import FAMILIES, attention_spec
from regraft.errors import UserError

if TYPE_CHECKING:
    from regraft.convert.sources import SourceInfo


@dataclass(frozen=True)
class GraftResult:
    """The grafted model (a copy: the source is untouched), and where each layer's parameters came from."""

    model: Any
    reports: dict[int, TransferReport]


def is_grafted(model: Any) -> bool:
    """Whether `model` is a grafted causal LM."""
    return getattr(model.config, "regraft", None) is not None


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a causal LM."""
    return model.get_decoder().layers


def attention_slots(model: Any) -> list[nn.Module]:
    """The attention module (the source's, or a mixer) of every layer."""
    return [layer.self_attn for layer in decoder_layers(model)]


def converted_layers(model: Any) -> dict[int, Mixer]:
    """The mixers by 0-based layer index (none for a source model)."""
    return {i: slot for i, slot in enumerate(attention_slots(model)) if isinstance(slot, Mixer)}


def fitting_layers(model: Any, name: str, options: Options) -> list[int]:
    """The layers of a source model that mixer `name` can replace."""
    found = []
    for index, attn in enumerate(attention_slots(model)):
        try:
            get_mixer(name).check_fit(attention_spec(attn, model.config), options)
        except ValueError:
            continue
        found.append(index)
    return found


def graft(model: Any, mixers: Mapping[int, tuple[str, Options]], *, info: SourceInfo | None = None) -> GraftResult:
    """Copy `model` and replace the attention of the layers in `mixers` ({index: (mixer name, options)}).

    `model` is a source causal LM or an already grafted one; `info` is recorded as the lineage. Raises UserError for a
    family that is not in the table, an index out of range, a layer converted already, or a mixer that does not fit.
    """
    depth = len(decoder_layers(model))
    for index in mixers:
        if not 0 <= index < depth:
            raise UserError(f"layer {index} is out of range", fix=f"the model has layers 0 to {depth - 1}")
        if index in converted_layers(model):
            raise UserError(f"layer {index} is converted already", fix="leave it out, or ungraft it first")
    student = copy.deepcopy(model)
    if not is_grafted(student):
        _become_grafted(student, info)
    reports = {}
    for index in sorted(mixers):
        name, options = mixers[index]
        layer = decoder_layers(student)[index]
        try:
            spec = attention_spec(layer.self_attn, student.get_decoder().config)
            layer.self_attn, reports[index] = get_mixer(name).from_attention(layer.self_attn, spec, options)
        except ValueError as error:
            raise UserError(f"{name} does not fit: {error}", fix="see: regraft inspect MODEL") from None
        layer.self_attn.name = name
        layer.self_attn.train(student.training)
    _write_config(student)
    return GraftResult(student, reports)


def ungraft(model: Any, layers: Iterable[int], teacher: Any) -> Any:
    """Give `layers` of a grafted model the teacher's attention back, in place; returns the model.

    Raises UserError for a layer that is not converted.
    """
    slots = converted_layers(model)
    for index in layers:
        if index not in slots:
            raise UserError(f"layer {index} is not converted", fix=f"converted: {sorted(slots)}")
        old = next(slots[index].parameters())
        attn = copy.deepcopy(attention_slots(teacher)[index]).to(device=old.device)
        for module in attn.modules():
            if hasattr(module, "config"):
                module.config = model.get_decoder().config
        attn.requires_grad_(False) if not old.requires_grad else attn.requires_grad_(True)
        decoder_layers(model)[index].self_attn = attn.train(model.training)
    _write_config(model)
    return model


def _become_grafted(model: Any, info: SourceInfo | None) -> None:
    """Turn a (copied) source model into the grafted class of its family, with nothing converted yet."""
    config = model.config
    model_type = config.model_type
    if model_type not in CLASSES:
        raise UserError(
            f"no source family '{model_type}'", where=type(model).__name__, fix=f"known: {', '.join(sorted(FAMILIES))}"
        )
    config_class, base_class, causal_class = CLASSES[model_type]
    if type(model) is not causal_class.__mro__[2]:
        raise UserError(
            f"{type(model).__name__} is not a causal language model of family {model_type}",
            fix=f"load it as {causal_class.__mro__[2].__name__}",
        )
    source = {
        **(dataclasses.asdict(info) if info is not None else {}),
        "model_type": model_type,
        "layer_types": getattr(config, "layer_types", None),
        "sliding_window": getattr(config, "sliding_window", None),
    }
    config.__class__ = config_class
    config.__dict__["regraft"] = {"format": FORMAT, "source": source, "mixers": {}}
    view = source_view(config)
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = view
    base = model.get_decoder()
    base.__class__ = base_class
    base.__dict__["_grafted_config"] = config
    model.__class__ = causal_class
    model.config = config


def _write_config(model: Any) -> None:
    """Make the saved config say what the layers are now."""
    config = model.config
    source = config.regraft["source"]
    slots = converted_layers(model)
    config.regraft["mixers"] = {
        str(i): {"name": mixer.name, "options": mixer.options.to_dict()} for i, mixer in sorted(slots.items())
    }
    own = source["layer_types"] or [
        "full_attention" if source["sliding_window"] is None else "sliding_attention"
    ] * len(decoder_layers(model))
    config.layer_types = [slots[i].layer_type if i in slots else kind for i, kind in enumerate(own)]
    windows = [mixer.options.window for mixer in slots.values() if hasattr(mixer.options, "window")]
    # transformers sizes the cache of sliding layers by this field, and needs one as soon as any layer slides
    config.sliding_window = source["sliding_window"] or (max(windows) if windows else None)
    config.regraft["cache_window"] = config.sliding_window
    model._is_stateful = bool(slots)


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """Cast the parameters in place, except those a mixer keeps in fp32; buffers (rotary tables) stay as they are."""
    kept = {id(p) for mixer in converted_layers(model).values() for n in mixer.full_train for p in _named(mixer, n)}
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def _named(mixer: Mixer, name: str) -> list[nn.Parameter]:
    return [p for n, p in mixer.named_parameters() if n == name or n.startswith(name + ".")]
