"""Softmax over window and sinks, linear attention over everything older, one shared normaliser.

With near = keys in the window and sinks, far = all older keys:

    out_t = (sum_near e^{s q.k} v + e^{log_far_t} num_t) / (sum_near e^{s q.k} + e^{log_far_t} den_t)

where num and den are causal linear attention over the sequence shifted by the window (k'_t = k_{t - window}), with the
features of sinks set to zero. So the mechanism is a composition of the two kernels, for any window and block size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from regraft.kernels.linear import LinearState
from regraft.kernels.linear import chunk as linear_chunk
from regraft.kernels.linear import step as linear_step
from regraft.kernels.sliding_window import WindowState, bound, empty_state, keep_rows, wide, with_history, within
from regraft.kernels.sliding_window import chunk as window_chunk
from regraft.kernels.sliding_window import step as window_step

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
    length = q.shape[1]
    near_state = None if state is None else WindowState(*state[:5])
    near = {"window": window, "sinks": sinks, "scale": scale, "softcap": softcap, "reach": reach}
    out, lse, near_after = window_chunk(q, k, v, state=near_state, lengths=lengths, **near)
    skip = window if state is None else 0  # without history nothing is far before token `window`
    if length <= skip:
        width = fq.shape[-1]
        kv = wide(q.new_zeros(q.shape[0], k.shape[2], width, v.shape[3]))
        return out, WindowLinearState(*near_after, kv, kv[..., 0])
    if state is None:
        old_k, old_v = k[:, : length - window], v[:, : length - window]
        rank = torch.arange(length - window, device=q.device)[None]
    else:
        old_k = with_history(k, state.keys, window, lengths)[:, :length]
        old_v = with_history(v, state.values, window, lengths)[:, :length]
        rank = state.count[:, None] + torch.arange(-window, length - window, device=q.device)
    leaves = rank >= sinks
    if lengths is not None:
        # beyond the last real token nothing leaves the window
        leaves = leaves & (torch.arange(skip, length, device=q.device) < lengths[:, None])
        zero = torch.zeros((), dtype=v.dtype, device=v.device)
        old_v = torch.where(leaves[..., None, None], old_v, zero)
        old_k = torch.where(leaves[..., None, None], old_k, zero)
    fk = map_keys(old_k)
    fk = fk * leaves[..., None, None].to(fk.dtype)
    far_state = None if state is None else LinearState(*state[5:])
    num, den, far_after = linear_chunk(fq[:, skip:], fk, old_v, state=far_state)
    merged = merge(wide(out[:, skip:]), lse[:, skip:], num, den, wide(log_far[:, skip:])).to(out.dtype)
    if skip:
        merged = torch.cat([out[:, :skip], merged], 1)
    return merged, WindowLinearState(*near_after, *far_after)


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
