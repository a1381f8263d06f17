"""The two baselines that every converted model is shown beside: neither costs any training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regraft.convert.graft import decoder_layers, graft
from regraft.convert.layers import evenly
from regraft.convert.mixers.registry import parse_options

SINKS = 4


def sliding_window_baseline(teacher: Any, layers: Sequence[int], window: int, sinks: int = SINKS) -> Any:
    """The teacher with an untrained sliding window and exact sinks on `layers`."""
    options = parse_options("sliding_window", {"window": window, "sinks": sinks})
    return graft(teacher, {i: ("sliding_window", options) for i in layers}).model


def interleave_baseline(teacher: Any, count: int, window: int, sinks: int = SINKS) -> Any:
    """As `sliding_window_baseline`, on `count` evenly spaced layers instead of chosen ones."""
    return sliding_window_baseline(teacher, evenly(len(decoder_layers(teacher)), count), window, sinks)
