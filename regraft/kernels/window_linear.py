"""Softmax over window and sinks, linear attention over everything older, one shared normaliser.

With near = keys in the window and sinks, far = all older keys:

    out_t = (sum_near e^{s q.k} v + e^{log_far_t} num_t) / (sum_near e^{s q.k} + e^{log_far_t} den_t)

where num and den are causal linear attention over the sequence shifted by the window (k'_t = k_{t - window}), with the
features of sinks set to zero. So the mechanism is a composition of the two kernels, for any window and block size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from regraft.kernels.linear import LinearState, prefix_sums
from regraft.kernels.linear import step as linear_step
from regraft.kernels.sliding_window import (
    Blocks,
    WindowState,
    bound,
    empty_state,
    keep_rows,
    last_window,
    updated_sinks,
    wide,
    with_history,
    within,
)
from regraft.kernels.sliding_window import chunk as window_chunk
from regraft.kernels.sliding_window import step as window_step

# The far branch weighs at most e^60 times the window, so that the window never underflows: where no key is far, or the
# features of all far keys vanish, the window is all there is to normalise by.
_MOST = 60.0

KeyMap = Callable[[torch.Tensor], torch.Tensor]


class WindowLinearState(NamedTuple):
    """The fields of a WindowState, then those of a LinearState."""

    keys: torch.Tensor  # [B, W, G, D]
    values: torch.Tensor  # [B, W, G, Dv]
    sink_keys: torch.Tensor  # [B, S, G, D]
    sink_values: torch.Tensor  # [B, S, G, Dv]
    count: torch.Tensor  # [B] int64
    kv: torch.Tensor  # [B, G, F, Dv] fp32
    norm: torch.Tensor  # [B, G, F] fp32


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fq: torch.Tensor,
    log_far: torch.Tensor,
    *,
    map_keys: KeyMap,
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None = None,
    reach: int | None = None,
) -> torch.Tensor:
    """The oracle: weight of every key for every query, then one normalisation; out [B, T, H, Dv].

    Quadratic in T; for tests and verification, in float64.
    """
    rep = q.shape[2] // k.shape[2]
    fk = map_keys(k).to(q.dtype).repeat_interleave(rep, 2)
    k, v = k.repeat_interleave(rep, 2), v.repeat_interleave(rep, 2)
    t = torch.arange(q.shape[1], device=q.device)[:, None]
    j = torch.arange(q.shape[1], device=q.device)[None]
    near = (j <= t) & ((t - j < window) | ((j < sinks) & within(t - j, reach)))
    far = (t - j >= window) & (j >= sinks)
    logits = bound(torch.einsum("bthd,bshd->bhts", q, k) * scale, softcap)
    similar = torch.einsum("bthf,bshf->bhts", fq, fk)
    top = torch.maximum(logits.masked_fill(~near, -torch.inf).amax(-1), log_far.transpose(1, 2))[..., None]
    weights = (logits.masked_fill(~near, -torch.inf) - top).exp()
    weights = weights + similar.masked_fill(~far, 0) * (log_far.transpose(1, 2)[..., None] - top).exp()
    return torch.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdim=True), v)


def merge(
    out: torch.Tensor, lse: torch.Tensor, num: torch.Tensor, den: torch.Tensor, log_far: torch.Tensor
) -> torch.Tensor:
    """Near (out [..., Dv], lse) and far sums (num [..., Dv], den) under one normaliser; exactly `out` if den = 0."""
    log_far = torch.minimum(log_far, lse.detach() + _MOST)
    top = torch.maximum(lse, log_far).detach()
    far = (log_far - top).exp()
    share = far / ((lse - top).exp() + far * den)
    return out + share[..., None] * (num - den[..., None] * out)


def chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fq: torch.Tensor,
    log_far: torch.Tensor,
    *,
    map_keys: KeyMap,
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None = None,
    reach: int | None = None,
    state: WindowLinearState | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, WindowLinearState]:
    """Block-parallel form, linear in T.

    q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv], fq [B, T, H, F] >= 0, log_far [B, T, H]; `map_keys` turns keys
    [B, n, G, D] into features [B, n, G, F] >= 0. `lengths` [B]: real tokens of each row. Returns out [B, T, H, Dv] and
    the new state.
    """
    batch, length, groups = q.shape[0], q.shape[1], k.shape[2]
    fresh = state is None
    if fresh and length <= window:  # nothing is old enough to be far
        near = {"window": window, "sinks": sinks, "scale": scale, "softcap": softcap, "reach": reach}
        out, _, near_after = window_chunk(q, k, v, lengths=lengths, **near)
        kv = wide(q.new_zeros(batch, groups, fq.shape[-1], v.shape[3]))
        return out, WindowLinearState(*near_after, kv, kv[..., 0])
    count = torch.zeros(batch, dtype=torch.int64, device=q.device) if fresh else state.count
    keys = with_history(k, None if fresh else state.keys, window, lengths)
    values = with_history(v, None if fresh else state.values, window, lengths)
    sink_keys = updated_sinks(None if fresh else state.sink_keys, k, sinks, count, lengths)
    sink_values = updated_sinks(None if fresh else state.sink_values, v, sinks, count, lengths)
    blocks = Blocks.of(length, window, sinks)
    fk = map_keys(keys[:, :length])
    fk = torch.where(_leaves(count, length, window, sinks, lengths)[..., None, None], fk, torch.zeros_like(fk[:1, :1]))
    fkb = blocks.keys(fk)
    vb = blocks.spans(values, sink_values)
    # a column of ones beside the values makes the normaliser one more value channel
    vb = torch.cat([vb, vb.new_ones(*vb.shape[:-1], 1)], -1)
    before, far_after = prefix_sums(fkb, vb[..., : blocks.size, :], None if fresh else LinearState(*state[5:]))

    qb = blocks.queries(q, groups) * scale
    logits = bound(qb @ blocks.spans(keys, sink_keys).transpose(-1, -2), softcap)
    logits = logits.unflatten(3, (-1, blocks.size)).masked_fill(~blocks.seen(count, reach, fresh), -torch.inf)
    far = blocks.queries(log_far[..., None], groups).unflatten(3, (-1, blocks.size))
    # every weight is divided by one factor per query, the largest of its near weights and of the far branch
    top = logits.detach().amax(-1, keepdim=True)
    far = torch.minimum(far, top + _MOST)
    top = torch.maximum(top, far.detach())
    weights = (logits - top).exp()
    scaled = blocks.queries(fq, groups) * (far - top).exp().flatten(3, 4)
    # the first `size` keys of a span are, for query i, far up to key i and near beyond it: one matrix holds both
    old = (scaled @ fkb.transpose(-1, -2)).unflatten(3, (-1, blocks.size)).tril()
    weights = weights + F.pad(old, (0, window + sinks))
    total = weights.flatten(3, 4) @ vb + scaled @ before
    out = blocks.tokens((total[..., :-1] / total[..., -1:]).unflatten(3, (-1, blocks.size)))
    near_after = WindowState(
        last_window(keys, window, lengths),
        last_window(values, window, lengths),
        sink_keys,
        sink_values,
        count + (length if lengths is None else lengths),
    )
    return out.to(q.dtype), WindowLinearState(*near_after, *far_after)


def _leaves(count: torch.Tensor, length: int, window: int, sinks: int, lengths: torch.Tensor | None) -> torch.Tensor:
    """[B, T] bool: the key that leaves the window at each token is there, and is no sink."""
    place = torch.arange(length, device=count.device)
    rank = count[:, None] + place - window
    leaves = rank >= sinks
    return leaves if lengths is None else leaves & (place < lengths[:, None])


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fq: torch.Tensor,
    log_far: torch.Tensor,
    *,
    map_keys: KeyMap,
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None = None,
    reach: int | None = None,
    state: WindowLinearState | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, WindowLinearState]:
    """One token (T = 1) on top of `state`; a row whose `lengths` is 0 leaves its state as it is."""
    if state is None:
        kv = wide(q.new_zeros(q.shape[0], k.shape[2], fq.shape[-1], v.shape[3]))
        empty = empty_state(q.shape[0], window, sinks, k.shape[2], k.shape[3], v.shape[3], k.dtype, k.device)
        state = WindowLinearState(*empty, kv, kv[..., 0])
    rank = state.count - window  # of the key that leaves as this token comes
    fk = map_keys(state.keys[:, :1])
    fk = fk * (rank >= sinks)[:, None, None, None].to(fk.dtype)
    num, den, far_after = linear_step(fq, fk, state.values[:, :1], state=LinearState(*state[5:]))
    near = {"window": window, "sinks": sinks, "scale": scale, "softcap": softcap, "reach": reach}
    out, lse, near_after = window_step(q, k, v, state=WindowState(*state[:5]), **near)
    out = merge(wide(out), lse, num, den, wide(log_far)).to(out.dtype)
    after = WindowLinearState(*near_after, *far_after)
    if lengths is not None:
        after = keep_rows(lengths > 0, after, state)
    return out, after
