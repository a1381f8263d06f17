"""A text as blocks of queries, each with the span of keys it may see: cutting, masking, and adding gradients back.

The chunked kernels go through a text in passes of a few blocks, so that what a pass computes stays in the processor's
cache and memory grows with the text only by what is kept. A pass is a pair (first block, block after the last).
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch.nn import functional as F

LOG2E = math.log2(math.e)

# Weights of one pass: on a processor a few such matrices fit its second-level cache; an accelerator wants them large.
_CPU_WEIGHTS = 160_000
_ACCELERATOR_WEIGHTS = 32_000_000


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype of computation: fp32, or float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def exactly(device: torch.device) -> contextlib.AbstractContextManager:
    """A context without autocast: sums over a text are never taken in half precision."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def real_tokens(lengths: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors [B, T, ...] with zeros, whatever was there, behind the first lengths[b] tokens of each row."""
    if lengths is None:
        return tensors
    real = torch.arange(tensors[0].shape[1], device=lengths.device) < lengths[:, None]
    return tuple(torch.where(real.view(*real.shape, *[1] * (x.dim() - 2)), x, 0.0) for x in tensors)


class Blocks:
    """The blocks of a batch of texts.

    The span of a block holds the `window` keys before it, its own keys, then the `sinks`. The heads of a group share
    their keys, so a block's matrix of queries has `rep * size` rows, one head after the other.
    """

    def __init__(self, batch: int, length: int, heads: int, groups: int, device: torch.device, size: int = 64):
        self.batch, self.length, self.heads, self.groups, self.device = batch, length, heads, groups, device
        self.rep = heads // groups
        self.size = min(size, length)
        self.number = -(-length // self.size)
        # without `see` a block sees its own keys only
        self.window = self.sinks = 0
        self.count: torch.Tensor | None = None
        self.reach: int | None = None

    def see(self, window: int, sinks: int, count: torch.Tensor | None, reach: int | None) -> "Blocks":
        """Set what a query sees. `count` [B]: tokens before this text; None: there are none in any row."""
        self.window, self.sinks, self.count, self.reach = window, sinks, count, reach
        return self

    @property
    def span(self) -> int:
        """Keys of a span without the sinks."""
        return self.window + self.size

    def passes(self) -> Iterator[tuple[int, int]]:
        """The passes, first to last."""
        weights = self.batch * self.heads * self.size * (self.span + self.sinks)
        step = max(1, (_CPU_WEIGHTS if self.device.type == "cpu" else _ACCELERATOR_WEIGHTS) // weights)
        for first in range(0, self.number, step):
            yield first, min(first + step, self.number)

    def _cut(self, x: torch.Tensor, first: int, last: int, more: int = 0) -> torch.Tensor:
        """Tokens of a pass, and `more` after them, of `x` [B, n, ...]; zeros where `x` ends."""
        length = (last - first) * self.size + more
        x = x[:, first * self.size : first * self.size + length]
        short = length - x.shape[1]
        return wide(F.pad(x, (0, 0) * (x.dim() - 2) + (0, short)) if short else x)

    def queries(self, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """`x` [B, T, H, D] as [B * blocks * G, rep * size, D]."""
        x = self._cut(x, first, last).unflatten(2, (self.groups, self.rep)).unflatten(1, (-1, self.size))
        return x.permute(0, 1, 3, 4, 2, 5).reshape(-1, self.rep * self.size, x.shape[-1])

    def put(self, out: torch.Tensor, x: torch.Tensor, first: int, last: int) -> None:
        """Write `x` [B * blocks * G, rep * size, D] to its place in `out` [B, T, H, D]."""
        x = x.view(self.batch, -1, self.groups, self.rep, self.size, x.shape[-1])
        x = x.permute(0, 1, 4, 2, 3, 5).reshape(self.batch, -1, self.heads, x.shape[-1])
        place = out[:, first * self.size : last * self.size]
        place.copy_(x[:, : place.shape[1]])

    def keys(self, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """`x` [B, T, G, D] as [B * blocks * G, size, D]."""
        x = self._cut(x, first, last).unflatten(1, (-1, self.size))
        return x.transpose(2, 3).reshape(-1, self.size, x.shape[-1])

    def add_keys(self, total: torch.Tensor, x: torch.Tensor, first: int, last: int) -> None:
        """Add `x`, shaped like the result of `keys`, to its place in `total` [B, T, G, D]."""
        x = x.view(self.batch, -1, self.groups, self.size, x.shape[-1]).transpose(2, 3).flatten(1, 2)
        place = total[:, first * self.size : last * self.size]
        place += x[:, : place.shape[1]]

    def spans(self, full: torch.Tensor, sinks: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """`full` [B, window + T, G, D] and `sinks` [B, S, G, D] as [B * blocks * G, span + S, D]."""
        spans = self._cut(full, first, last, self.window).transpose(1, 2).unfold(2, self.span, self.size)
        spans = spans.permute(0, 2, 1, 4, 3)
        if self.sinks:
            more = wide(sinks).transpose(1, 2)[:, None].expand(-1, last - first, -1, -1, -1)
            spans = torch.cat([spans, more], 3)
        return spans.reshape(-1, *spans.shape[3:])

    def add_spans(self, full: torch.Tensor, sinks: torch.Tensor, x: torch.Tensor, first: int, last: int) -> None:
        """Add `x`, shaped like the result of `spans`, to the places it was taken from."""
        x = x.view(self.batch, -1, self.groups, self.span + self.sinks, x.shape[-1]).transpose(2, 3)
        if self.sinks:
            sinks += x[:, :, self.span :].sum(1)
        for block, one in enumerate(x.unbind(1), first):
            place = full[:, block * self.size : block * self.size + self.span]
            place += one[:, : place.shape[1]]

    def inner_bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The `bias` of any pass far enough from the start; None if there is none."""
        if self.reach is not None or self.number * self.size < self.window + self.sinks:
            return None
        seen = F.pad(self._band(), (0, self.sinks), value=True)
        return _bias(seen, dtype).repeat(self.rep, 1)[None]

    def bias(self, first: int, last: int, inner: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query sees a key of its span, -inf elsewhere; broadcasts to [B * blocks * G, rep * size, span + S].

        Adding it in the matrix product that makes the logits costs nothing; masking them afterwards does. `inner`: the
        result of `inner_bias`.
        """
        if inner is not None and first * self.size >= self.window + self.sinks:
            return inner  # every key of the span is there, and every sink is older than the window
        i = torch.arange(self.size, device=self.device)[:, None]
        j = torch.arange(self.span, device=self.device)
        count = torch.zeros(1, dtype=torch.int64, device=self.device) if self.count is None else self.count
        start = torch.arange(first, last, device=self.device)[:, None] * self.size
        there = start + j - self.window >= -count[:, None, None]  # [B or 1, blocks, span]
        seen = self._band() & there[:, :, None]
        if self.sinks:
            rank = count[:, None, None] + start + i.T  # of the query in its text
            distance = rank[..., None] - torch.arange(self.sinks, device=self.device)
            seen = torch.cat([seen, (distance >= self.window) & within(distance, self.reach)], -1)
        bias = _bias(seen, dtype)[:, :, None, None]
        bias = bias.expand(self.batch, -1, self.groups, self.rep, -1, -1)
        return bias.reshape(-1, self.rep * self.size, bias.shape[-1])

    def _band(self) -> torch.Tensor:
        """[size, span]: the key is in the window of the query."""
        i = torch.arange(self.size, device=self.device)[:, None]
        j = torch.arange(self.span, device=self.device)
        return (j <= i + self.window) & (j > i)

    def causal(self, dtype: torch.dtype) -> torch.Tensor:
        """[rep * size, size]: 1 at the keys of its own block up to each query, 0 beyond."""
        return torch.ones(self.size, self.size, dtype=dtype, device=self.device).tril_().repeat(self.rep, 1)


def within(distance: torch.Tensor, reach: int | None) -> torch.Tensor:
    """Where `distance` is below `reach` (everywhere without one)."""
    return torch.ones_like(distance, dtype=torch.bool) if reach is None else distance < reach


def _bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def sums_before(sums: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`start` plus the `sums` [B, blocks, ...] before each block, and after the last. A loop beats cumsum here."""
    before = torch.empty_like(sums)
    for out, one in zip(before.unbind(1), sums.unbind(1), strict=True):
        out.copy_(start)
        start = start + one
    return before, start


def sums_after(sums: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`end` plus the `sums` [B, blocks, ...] after each block, and from the first on."""
    after = torch.empty_like(sums)
    for out, one in zip(reversed(after.unbind(1)), reversed(sums.unbind(1)), strict=True):
        out.copy_(end)
        end = end + one
    return after, end
