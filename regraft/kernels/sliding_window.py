"""Sliding-window attention with exact sinks: softmax over the last keys and the first ones.

Query t sees key j when 0 <= t - j < window, or j < sinks and j <= t; a sink inside the window counts once. With a
`reach`, sinks are seen only at t - j < reach (a source layer that slides itself). Positions count from the first token
of the sequence, earlier calls included. All three forms also return the log-sum-exp of the
scaled logits, so that the result merges exactly with other branches.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

_BLOCK = 64


class WindowState(NamedTuple):
    """What a sequence leaves behind for its next tokens; all zero means nothing seen yet.

    The window is right-aligned (newest last): slot `window - n` holds the n-th last token, and is zero where there was
    none. `count` tokens have been seen.
    """

    keys: torch.Tensor  # [B, W, G, D]
    values: torch.Tensor  # [B, W, G, Dv]
    sink_keys: torch.Tensor  # [B, S, G, D]
    sink_values: torch.Tensor  # [B, S, G, Dv]
    count: torch.Tensor  # [B] int64


def empty_state(
    batch: int,
    window: int,
    sinks: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> WindowState:
    """The state before the first token."""
    factory = {"dtype": dtype, "device": device}
    return WindowState(
        torch.zeros(batch, window, kv_heads, head_dim, **factory),
        torch.zeros(batch, window, kv_heads, value_dim, **factory),
        torch.zeros(batch, sinks, kv_heads, head_dim, **factory),
        torch.zeros(batch, sinks, kv_heads, value_dim, **factory),
        torch.zeros(batch, dtype=torch.int64, device=device),
    )


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None = None,
    reach: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: every query against every key, with a mask; out [B, T, H, Dv] and lse [B, T, H] in the input's dtype.

    Quadratic in T; for tests and verification, in float64.
    """
    rep = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(rep, 2), v.repeat_interleave(rep, 2)
    logits = bound(torch.einsum("bthd,bshd->bhts", q, k) * scale, softcap)
    t = torch.arange(q.shape[1], device=q.device)[:, None]
    j = torch.arange(q.shape[1], device=q.device)[None]
    seen = (j <= t) & ((t - j < window) | ((j < sinks) & within(t - j, reach)))
    logits = logits.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhts,bshd->bthd", logits.softmax(-1), v), logits.logsumexp(-1).transpose(1, 2)


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype of computation: fp32, or float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def within(distance: torch.Tensor, reach: int | None) -> torch.Tensor:
    """Where `distance` is below `reach` (everywhere without one)."""
    return torch.ones_like(distance, dtype=torch.bool) if reach is None else distance < reach


def bound(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """softcap * tanh(logits / softcap), or the logits themselves without a cap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def with_history(x: torch.Tensor, past: torch.Tensor | None, window: int, lengths: torch.Tensor | None) -> torch.Tensor:
    """The stored window before the new tokens: [B, window + T, ...]; trailing padding becomes zero."""
    if lengths is not None:
        real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        x = torch.where(real[:, :, None, None], x, torch.zeros((), dtype=x.dtype, device=x.device))
    if past is None:
        return F.pad(x, (0, 0, 0, 0, window, 0))
    return torch.cat([past.to(x.dtype), x], 1)


def last_window(full: torch.Tensor, window: int, lengths: torch.Tensor | None) -> torch.Tensor:
    """The last `window` real tokens of `full` [B, window + T, ...] (see `with_history`)."""
    if lengths is None:
        return full[:, full.shape[1] - window :]
    index = lengths[:, None] + torch.arange(window, device=full.device)
    return full.gather(1, index[:, :, None, None].expand(-1, -1, *full.shape[2:]))


def updated_sinks(
    past: torch.Tensor | None, x: torch.Tensor, sinks: int, count: torch.Tensor, lengths: torch.Tensor | None
) -> torch.Tensor:
    """The first `sinks` tokens of the sequence [B, S, G, D] after the new tokens `x` [B, T, G, D]; zero if not yet."""
    index = torch.arange(sinks, device=x.device) - count[:, None]  # index of sink s among the new tokens
    limit = x.shape[1] if lengths is None else lengths[:, None]
    new = (index >= 0) & (index < limit)
    pick = index.clamp(0, x.shape[1] - 1)[:, :, None, None].expand(-1, -1, *x.shape[2:])
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    fresh = torch.where(new[:, :, None, None], x.gather(1, pick), zero)
    if past is None:
        return fresh
    return torch.where((index < 0)[:, :, None, None], past.to(x.dtype), fresh)


def chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None = None,
    reach: int | None = None,
    state: WindowState | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, WindowState]:
    """Block-parallel form: q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv] -> out [B, T, H, Dv], lse [B, T, H], state.

    Time and memory are linear in T. `lengths` [B]: only the first lengths[b] tokens of row b are real.
    """
    batch, length, heads = q.shape[:3]
    groups, value_dim = k.shape[2], v.shape[3]
    rep = heads // groups
    count = torch.zeros(batch, dtype=torch.int64, device=q.device) if state is None else state.count
    keys = with_history(k, None if state is None else state.keys, window, lengths)
    values = with_history(v, None if state is None else state.values, window, lengths)
    sink_keys = updated_sinks(None if state is None else state.sink_keys, k, sinks, count, lengths)
    sink_values = updated_sinks(None if state is None else state.sink_values, v, sinks, count, lengths)

    blocks = Blocks.of(length, window, sinks)
    qb = blocks.queries(q, groups) * scale
    kb, vb = blocks.spans(keys, sink_keys), blocks.spans(values, sink_values)
    logits = bound(qb @ kb.transpose(-1, -2), softcap).view(batch, blocks.number, groups, rep, blocks.size, -1)
    logits = logits.masked_fill(~blocks.seen(count, reach, state is None), -torch.inf)
    top = logits.detach().amax(-1, keepdim=True)
    weights = (logits - top).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights.flatten(3, 4) @ vb).view(*total.shape[:-1], value_dim) / total
    lse = (top + total.log()).squeeze(-1)
    after = WindowState(
        last_window(keys, window, lengths),
        last_window(values, window, lengths),
        sink_keys,
        sink_values,
        count + (length if lengths is None else lengths),
    )
    return blocks.tokens(out).to(q.dtype), blocks.tokens(lse), after


class Blocks(NamedTuple):
    """A text of `length` tokens as `number` blocks of `size` queries, each with the span of keys that it may see.

    The span of a block holds the `window` keys before it, its own keys, then the sinks.
    """

    length: int
    size: int
    number: int
    window: int
    sinks: int

    @classmethod
    def of(cls, length: int, window: int, sinks: int) -> "Blocks":
        """Blocks for a text; the last one may be filled up."""
        size = min(_BLOCK, length)
        return cls(length, size, -(-length // size), window, sinks)

    def fill(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [B, n, h, d] with zeros up to the end of the last block."""
        return F.pad(x, (0, 0, 0, 0, 0, self.number * self.size - self.length))

    def queries(self, x: torch.Tensor, groups: int) -> torch.Tensor:
        """[B, T, H, D] as [B, N, G, r * C, D], the heads of a group one after the other."""
        batch, _, heads, dim = x.shape
        x = wide(self.fill(x)).view(batch, self.number, self.size, groups, heads // groups, dim)
        return x.permute(0, 1, 3, 4, 2, 5).reshape(batch, self.number, groups, -1, dim)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, G, D] as [B, N, G, C, D]."""
        return wide(self.fill(x)).view(x.shape[0], self.number, self.size, *x.shape[2:]).transpose(2, 3)

    def spans(self, full: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        """[B, window + T, G, D] and [B, S, G, D] as [B, N, G, window + C + S, D]."""
        spans = wide(self.fill(full)).transpose(1, 2).unfold(2, self.size + self.window, self.size)
        spans = spans.permute(0, 2, 1, 4, 3)  # [B, N, G, span, D]
        if not self.sinks:
            return spans
        return torch.cat([spans, wide(sinks).transpose(1, 2)[:, None].expand(-1, self.number, -1, -1, -1)], 3)

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, G, r, C, ...] back as [B, T, H, ...]."""
        x = x.movedim(4, 2)
        return x.reshape(x.shape[0], self.number * self.size, -1, *x.shape[5:])[:, : self.length]

    def seen(self, count: torch.Tensor, reach: int | None, fresh: bool) -> torch.Tensor:
        """Which keys of its span each query sees: bool, broadcasts to [B, N, G, r, C, window + C + S].

        `count` [B]: tokens before this text; `fresh`: there are none in any row.
        """
        device = count.device
        i = torch.arange(self.size, device=device)[:, None]
        j = torch.arange(self.size + self.window, device=device)[None]
        band = (j <= i + self.window) & (j > i)
        start = torch.arange(self.number, device=device)[:, None] * self.size
        place = start + j - self.window  # [N, span]: position of the key, the first new token being 0
        if fresh:
            exists = (place >= 0)[None]
            count = count[:1]
        else:
            exists = place >= -count[:, None, None]
        near = band & exists[:, :, None, None, None, :]
        if not self.sinks:
            return near
        rank = count[:, None, None] + start + i.T  # [B, N, C]: rank of the query
        distance = rank[..., None] - torch.arange(self.sinks, device=device)
        far = ((distance >= self.window) & within(distance, reach))[:, :, None, None]
        return torch.cat([near.expand(far.shape[0], -1, -1, -1, -1, -1), far], -1)


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None = None,
    reach: int | None = None,
    state: WindowState | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, WindowState]:
    """One token (T = 1) on top of `state`; a row whose `lengths` is 0 leaves its state as it is."""
    batch, _, heads, dim = q.shape
    groups = k.shape[2]
    if state is None:
        state = empty_state(batch, window, sinks, groups, dim, v.shape[3], k.dtype, k.device)
    keys = torch.cat([state.keys[:, 1:], k.to(state.keys.dtype)], 1)
    values = torch.cat([state.values[:, 1:], v.to(state.values.dtype)], 1)
    count = state.count
    slot = torch.arange(sinks, device=q.device)
    here = (slot == count[:, None])[:, :, None, None]
    sink_keys = torch.where(here, k.to(state.keys.dtype), state.sink_keys)
    sink_values = torch.where(here, v.to(state.values.dtype), state.sink_values)
    age = torch.arange(window - 1, -1, -1, device=q.device)
    distance = count[:, None] - slot
    seen = torch.cat([age <= count[:, None], (distance >= window) & within(distance, reach)], 1)  # [B, W + S]
    all_keys = wide(torch.cat([keys, sink_keys], 1))
    all_values = wide(torch.cat([values, sink_values], 1))
    qh = wide(q.view(batch, groups, heads // groups, dim)) * scale
    logits = bound(torch.einsum("bgrd,bngd->bgrn", qh, all_keys), softcap)
    logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
    lse = logits.logsumexp(-1)
    out = torch.einsum("bgrn,bngd->bgrd", (logits - lse[..., None]).exp(), all_values)
    after = WindowState(keys, values, sink_keys, sink_values, count + 1)
    if lengths is not None:
        after = keep_rows(lengths > 0, after, state)
    return out.reshape(batch, 1, heads, -1).to(q.dtype), lse.reshape(batch, 1, heads), after


def keep_rows(write: torch.Tensor, new, old):
    """Rows of state `new` where `write` [B], of `old` elsewhere."""
    pairs = zip(new, old, strict=True)
    return type(new)(*(torch.where(write.view(-1, *([1] * (n.dim() - 1))), n, o.to(n.dtype)) for n, o in pairs))
