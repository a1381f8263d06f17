"""The table of target mechanisms: one line each. Behaviour tests, docs, `regraft ls`, plan and benchmarks read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from regraft.errors import UserError, suggest

if TYPE_CHECKING:
    from regraft.convert.mixers.base import Mixer, Options


@dataclass(frozen=True)
class MixerEntry:
    """One mechanism. `target` is "module:Class", imported on first use.

    `state_growth`: "constant" or "linear" in the context length. `training`: "none", "optional" or "needed" before
    the converted model is useful. `exact_at`: the setting at which it equals the teacher ("" if there is none).
    """

    name: str
    target: str
    title: str
    state_growth: str
    training: str
    exact_at: str
    paper: str
    layer_type: str


MIXERS: dict[str, MixerEntry] = {
    entry.name: entry
    for entry in (
        MixerEntry(
            "sliding_window",
            "regraft.convert.mixers.sliding_window:SlidingWindow",
            "softmax over the last keys and the first ones (sinks)",
            "constant",
            "optional",
            "window >= length",
            "Xiao et al. 2023, arXiv 2309.17453",
            "sliding_attention",
        ),
        MixerEntry(
            "window_linear",
            "regraft.convert.mixers.window_linear:WindowLinear",
            "softmax over window and sinks, learned linear attention over all older keys, one normaliser",
            "constant",
            "needed",
            "window >= length",
            "Zhang et al. 2024, arXiv 2410.10254 (LoLCATs) and arXiv 2402.04347 (Hedgehog)",
            "hybrid_sliding",
        ),
    )
}


def _entry(name: str) -> MixerEntry:
    if name in MIXERS:
        return MIXERS[name]
    for point in entry_points(group="regraft.mixers"):
        if point.name == name:
            return point.load()
    raise UserError(f"unknown mixer '{name}'", where="the mixer (--to, convert.mixer)", fix=suggest(name, MIXERS))


def get_mixer(name: str) -> type[Mixer]:
    """The class of mechanism `name`; UserError with a suggestion if there is none."""
    module, _, attribute = _entry(name).target.partition(":")
    return getattr(import_module(module), attribute)


def parse_options(name: str, raw: Mapping[str, Any]) -> Options:
    """Validated options of mechanism `name` from plain values; UserError names an unknown or invalid option."""
    options_class = get_mixer(name).Options
    known = [f.name for f in dataclasses.fields(options_class)]
    for key in raw:
        if key not in known:
            raise UserError(f"mixer {name} has no option '{key}'", where="the mixer's options", fix=suggest(key, known))
    try:
        return options_class(**raw)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"mixer {name}: {error}", where="mixer options", fix="give a value in the stated range"
        ) from None


class LazyMixers(Mapping[str, "type[Mixer]"]):
    """All mechanisms by name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> type[Mixer]:
        """The class; KeyError if unknown."""
        try:
            return get_mixer(name)
        except UserError as error:
            raise KeyError(str(error)) from None

    def __iter__(self) -> Iterator[str]:
        """Names."""
        return iter(MIXERS)

    def __len__(self) -> int:
        """Number of mechanisms in the table."""
        return len(MIXERS)
