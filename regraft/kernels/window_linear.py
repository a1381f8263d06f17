"""Softmax over window and sinks, linear attention over everything older, one shared normaliser.

With near = keys in the window and sinks, far = all older keys:

    out_t = (sum_near e^{s q.k} v + e^{log_far_t} num_t) / (sum_near e^{s q.k} + e^{log_far_t} den_t)

where num and den are causal linear attention over the sequence shifted by the window (k'_t = k_{t - window}), with the
features of sinks set to zero. So the mechanism is a composition of the two kernels, for any window and block size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from regraft.kernels.attend import MOST, Far, attend
from regraft.kernels.blocks import exactly, real_tokens, wide
from regraft.kernels.dispatch import backend
from regraft.kernels.linear import LinearState, joined, parted
from regraft.kernels.linear import added as linear_added
from regraft.kernels.sliding_window import (
    WindowState,
    bound,
    cut,
    empty_state,
    filled,
    keep_rows,
    look,
    remember,
    settled,
    store,
)
from regraft.kernels.sliding_window import chunk as window_chunk

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
    state: WindowLinearState | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, WindowLinearState]:
    """The oracle, row by row and token by token; arguments and results as of `chunk`. For tests, in float64."""
    rep, length, blank = q.shape[2] // k.shape[2], q.shape[1], v.new_zeros(q.shape[2], v.shape[3])
    state = start(q, k, v, fq, window, sinks) if state is None else state
    rows = []
    for row in range(q.shape[0]):
        near_state = WindowState(*state[:5])
        memory, now = remember(near_state, row), int(state.count[row])
        kv, norm = state.kv[row], state.norm[row]
        outs = []
        for t in range(length if lengths is None else int(lengths[row])):
            memory[now] = k[row, t], v[row, t]
            gone = now - window
            if gone >= sinks:
                key, value = memory[gone]
                feature = map_keys(key[None, None])[0, 0].to(kv.dtype)
                kv = kv + feature[:, :, None] * value[:, None, :]
                norm = norm + feature
            near = [j for j in memory if now - j < window or (j < sinks and (reach is None or now - j < reach))]
            keys = torch.stack([memory[j][0] for j in near], 1).repeat_interleave(rep, 0)
            values = torch.stack([memory[j][1] for j in near], 1).repeat_interleave(rep, 0)
            logits = bound(torch.einsum("hd,hnd->hn", q[row, t], keys) * scale, softcap)
            top = torch.maximum(logits.amax(-1), log_far[row, t])
            weights, far = (logits - top[:, None]).exp(), (log_far[row, t] - top).exp()
            num = torch.einsum("hf,hfd->hd", fq[row, t], kv.repeat_interleave(rep, 0))
            den = torch.einsum("hf,hf->h", fq[row, t], norm.repeat_interleave(rep, 0))
            total = weights.sum(-1) + far * den
            outs.append((torch.einsum("hn,hnd->hd", weights, values) + far[:, None] * num) / total[:, None])
            now += 1
        rows.append((filled(outs, length, blank), *store(memory, now, near_state, row), kv, norm))
    out, *after = (torch.stack(part) for part in zip(*rows, strict=True))
    return out, WindowLinearState(*after)


def start(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fq: torch.Tensor, window: int, sinks: int
) -> WindowLinearState:
    """The state before the first token."""
    near = empty_state(q.shape[0], window, sinks, k.shape[2], k.shape[3], v.shape[3], k.dtype, k.device)
    kv = wide(v.new_zeros(q.shape[0], v.shape[2], fq.shape[3], v.shape[3]))
    return WindowLinearState(*near, kv, torch.zeros_like(kv[..., 0]))


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
    backend("window_linear")
    length = q.shape[1]
    if state is None and length <= window:  # nothing is old enough to be far
        near = {"window": window, "sinks": sinks, "scale": scale, "softcap": softcap, "reach": reach}
        out, _, after = window_chunk(q, k, v, lengths=lengths, **near)
        return out, WindowLinearState(*after, *start(q, k, v, fq, window, sinks)[5:])
    q, k, v, fq, log_far = real_tokens(lengths, q, k, v, fq, log_far)
    near_state = None if state is None else WindowState(*state[:5])
    near, blocks, after = cut(q, k, v, window, sinks, reach, near_state, lengths)
    fk = map_keys(near.keys[:, :length])
    # of the key that leaves the window at each token: is it there, and no sink?
    rank = torch.arange(length, device=q.device) - window + (0 if state is None else state.count[:, None])
    leaves = rank.expand(q.shape[0], -1) >= sinks
    (fk,) = real_tokens(lengths, torch.where(leaves[..., None, None], fk, 0.0))
    far = Far(fq, fk, log_far, joined(None if state is None else LinearState(*state[5:]), fk, v))
    out, _, total = attend(q, near, far, blocks, scale, softcap)
    return out, WindowLinearState(*after, *parted(total))


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
    q, k, v, fq, log_far = real_tokens(lengths, q, k, v, fq, log_far)
    state = start(q, k, v, fq, window, sinks) if state is None else state
    fk, near = map_keys(state.keys[:, :1]), WindowState(*state[:5])
    full = settled(near, reach)
    if not full:
        leaves = state.count - window >= sinks  # the key that leaves as this token comes is there, and no sink
        fk = torch.where(leaves[:, None, None, None], fk, 0.0)
    top, weights, values, near_after = look(q, k, v, near, scale, softcap, reach, full)
    far_after = linear_added(fk, state.values[:, :1], LinearState(*state[5:]))
    kv, norm = (x.flatten(0, 1) for x in far_after)
    with exactly(q.device):
        far = (wide(log_far).reshape(top.shape) - top).clamp_(max=MOST).exp_()
        far = wide(fq).reshape(*top.shape[:2], -1) * far
        total = torch.baddbmm(weights.sum(-1, keepdim=True), far, norm[..., None])
        out = torch.baddbmm(torch.bmm(weights, values), far, kv) / total
    after = WindowLinearState(*near_after, *far_after)
    return out.view(*q.shape[:3], -1).to(q.dtype), after if lengths is None else keep_rows(lengths > 0, after, state)
