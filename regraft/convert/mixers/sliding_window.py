"""Sliding window with exact sinks: softmax over the last keys and the first ones, nothing else."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from regraft.convert.mixers.base import Mixer, Options
from regraft.convert.spec import AttentionSpec
from regraft.kernels.sliding_window import chunk, naive
from regraft.kernels.sliding_window import step as one_step


@dataclass(frozen=True)
class SlidingWindowOptions(Options):
    """`window`: number of latest keys seen, the query's own included. `sinks`: number of first keys always seen."""

    window: int = 64
    sinks: int = 4

    def __post_init__(self) -> None:
        """Refuse an empty window and negative sinks."""
        self.require(isinstance(self.window, int) and self.window >= 1, "window", "must be a whole number, at least 1")
        self.require(isinstance(self.sinks, int) and self.sinks >= 0, "sinks", "must be a whole number, at least 0")


class SlidingWindow(Mixer):
    """Attention over {last `window` keys} and {first `sinks` keys}; equals the teacher when window >= length."""

    Options = SlidingWindowOptions
    layer_type = "sliding_attention"

    def mix(
        self, *inputs: torch.Tensor, state: Any, lengths: torch.Tensor | None, step: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Softmax over window and sinks; see Mixer.mix."""
        q, k, v = inputs
        fn = one_step if step else chunk
        out, _, state = fn(q, k, v, state=state, lengths=lengths, **near_settings(self.spec, self.options))
        return out, state

    def reference(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Masked softmax over all keys, in float64."""
        q, k, v = (x.double() for x in inputs)
        return naive(q, k, v, **near_settings(self.spec, self.options))[0]

    def exact_options(self, length: int) -> SlidingWindowOptions:
        """A window that covers the text."""
        return replace(self.options, window=max(length, self.options.window))

    @classmethod
    def cache_bytes(
        cls, spec: AttentionSpec, options: Options, length: int, batch: int = 1, dtype: torch.dtype = torch.float32
    ) -> int:
        """Constant in `length`: window and sinks in the model's dtype, and a counter."""
        return window_bytes(spec, options, batch, dtype)


def near_settings(spec: AttentionSpec, options: Any) -> dict[str, Any]:
    """Keyword arguments of the window kernels. A source layer that slides itself never saw beyond its own window."""
    own = spec.sliding_window
    return {
        "window": options.window if own is None else min(options.window, own),
        "sinks": options.sinks,
        "scale": spec.scaling,
        "softcap": spec.softcap,
        "reach": own,
    }


def window_bytes(spec: AttentionSpec, options: Any, batch: int, dtype: torch.dtype) -> int:
    """Bytes of the stored window, sinks and token counter of one layer."""
    near = near_settings(spec, options)
    entries = near["window"] + near["sinks"]
    return batch * (entries * spec.num_kv_heads * (spec.head_dim + spec.value_dim) * dtype.itemsize + 8)
