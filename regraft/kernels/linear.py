"""Causal linear attention without its denominator's division: num_t = sum_{j<=t} (fq_t . fk_j) v_j, den_t likewise.

The state is kept in fp32 per KV head; the query heads of a group share it. Inside, a channel of ones beside the values
carries the denominator, and state and values have Dv + 1 channels.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from regraft.kernels.blocks import Blocks, exactly, real_tokens, sums_after, sums_before, wide
from regraft.kernels.dispatch import backend


class LinearState(NamedTuple):
    """Sums over all keys seen; all zero means none."""

    kv: torch.Tensor  # [B, G, F, Dv] fp32, sum of fk v^T
    norm: torch.Tensor  # [B, G, F] fp32, sum of fk


def naive(
    fq: torch.Tensor,
    fk: torch.Tensor,
    v: torch.Tensor,
    *,
    state: LinearState | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, LinearState]:
    """The oracle, token by token: S_t = S_{t-1} + fk_t v_t^T, num_t = fq_t^T S_t; likewise the denominator.

    Shapes as in `chunk`.
    """
    rep = fq.shape[2] // fk.shape[2]
    fq, fk, v = wide(fq), wide(fk), wide(v)
    if state is None:
        kv = v.new_zeros(v.shape[0], v.shape[2], fk.shape[3], v.shape[3])
        state = LinearState(kv, kv[..., 0])
    kv, norm = state
    nums, dens = [], []
    for t in range(fq.shape[1]):
        real = torch.ones_like(fk[:, t], dtype=torch.bool) if lengths is None else (t < lengths)[:, None, None]
        key = torch.where(real, fk[:, t], 0.0)
        value = torch.where(real[..., :1], v[:, t], 0.0)
        kv = kv + key[..., None] * value[..., None, :]
        norm = norm + key
        nums.append(torch.einsum("bhf,bhfd->bhd", fq[:, t], kv.repeat_interleave(rep, 1)))
        dens.append(torch.einsum("bhf,bhf->bh", fq[:, t], norm.repeat_interleave(rep, 1)))
    return torch.stack(nums, 1), torch.stack(dens, 1), LinearState(kv, norm)


def chunk(
    fq: torch.Tensor,
    fk: torch.Tensor,
    v: torch.Tensor,
    *,
    state: LinearState | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, LinearState]:
    """Block-parallel form, linear in T.

    fq [B, T, H, F], fk [B, T, G, F], v [B, T, G, Dv] -> num [B, T, H, Dv], den [B, T, H] and the new state. `lengths`
    [B]: only the first lengths[b] tokens of row b are real.
    """
    backend("linear")
    batch, length, heads = fq.shape[:3]
    fq, fk, v = real_tokens(lengths, fq, fk, v)
    blocks = Blocks(batch, length, heads, fk.shape[2], fq.device)
    out, after = _Linear.apply(fq, fk, F.pad(v, (0, 1), value=1.0), joined(state, fk, v), blocks)
    return out[..., :-1], out[..., -1], parted(after)


def step(
    fq: torch.Tensor,
    fk: torch.Tensor,
    v: torch.Tensor,
    *,
    state: LinearState | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, LinearState]:
    """One token (T = 1) on top of `state`; a row whose `lengths` is 0 leaves its state as it is."""
    batch, _, heads, features = fq.shape
    groups = v.shape[2]
    fq, fk, v = real_tokens(lengths, fq, fk, v)
    kv, norm = added(fk, v, parted(joined(None, fk, v)) if state is None else state)
    q = wide(fq).view(batch, groups, heads // groups, features)
    with exactly(fq.device):
        num = (q @ kv).view(batch, 1, heads, -1)
        den = (q * norm[:, :, None]).sum(-1).view(batch, 1, heads)
    return num, den, LinearState(kv, norm)


def added(fk: torch.Tensor, v: torch.Tensor, state: LinearState) -> LinearState:
    """The state after one key [B, 1, G, F] and value [B, 1, G, Dv] more."""
    key = wide(fk[:, 0])
    return LinearState(torch.addcmul(state.kv, key[..., None], wide(v[:, 0])[..., None, :]), state.norm + key)


def joined(state: LinearState | None, fk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The state as one tensor [B, G, F, Dv + 1]; zeros without one."""
    if state is None:
        return wide(v.new_zeros(v.shape[0], v.shape[2], fk.shape[3], v.shape[3] + 1))
    return torch.cat([state.kv, state.norm[..., None]], -1)


def parted(total: torch.Tensor) -> LinearState:
    """The inverse of `joined`."""
    return LinearState(total[..., :-1], total[..., -1])


def read_sums(x: torch.Tensor, v1: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What each block of a pass finds summed up, [B * blocks * G, F, Dv + 1], and the state after the pass.

    `x` [B * blocks * G, C, F] and `v1` [B * blocks * G, C, Dv + 1]: keys and values; `start` [B, G, F, Dv + 1].
    """
    own = torch.bmm(x.mT, v1)
    before, after = sums_before(own.view(start.shape[0], -1, *start.shape[1:]), start)
    return before.view_as(own), after


def block_gradients(
    f: torch.Tensor,
    x: torch.Tensor,
    v1: torch.Tensor,
    before: torch.Tensor,
    d_scores: torch.Tensor,
    d_out: torch.Tensor,
    d_after: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a pass: of its queries `f`, its keys `x`, its values through later blocks, and its start.

    `d_scores` [.., rep * C, C] is the gradient of f x^T inside a block, `d_out` [.., rep * C, Dv + 1] that of what f
    reads from `before`, `d_after` [B, G, F, Dv + 1] that of the state after the pass.
    """
    df = torch.bmm(d_out, before.mT).baddbmm_(d_scores, x)
    d_before = torch.bmm(f.mT, d_out)
    d_sums, d_start = sums_after(d_before.view(d_after.shape[0], -1, *d_after.shape[1:]), d_after)
    d_sums = d_sums.view_as(d_before)
    dx = torch.bmm(v1, d_sums.mT).baddbmm_(d_scores.mT, f)
    return df, dx, torch.bmm(x, d_sums), d_start


class _Linear(torch.autograd.Function):
    """(fq, fk, v1 [B, T, G, Dv + 1], start [B, G, F, Dv + 1]) -> out [B, T, H, Dv + 1], end; block by block."""

    @staticmethod
    def forward(
        ctx: Any, fq: torch.Tensor, fk: torch.Tensor, v1: torch.Tensor, start: torch.Tensor, blocks: Blocks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = start.new_empty(*fq.shape[:3], v1.shape[-1])
        causal = blocks.causal(start.dtype)
        starts = []
        with exactly(fq.device):
            for where in blocks.passes():
                f, x, v = blocks.queries(fq, *where), blocks.keys(fk, *where), blocks.keys(v1, *where)
                if any(ctx.needs_input_grad):
                    starts.append(start)
                before, start = read_sums(x, v, start)
                scores = torch.bmm(f, x.mT).mul_(causal)
                blocks.put(out, torch.bmm(f, before).baddbmm_(scores, v), *where)
        ctx.blocks = blocks
        ctx.save_for_backward(fq, fk, v1, *starts)
        return out, start

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, d_state: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        fq, fk, v1, *starts = ctx.saved_tensors
        blocks = ctx.blocks
        dfq, dfk, dv1 = torch.empty_like(fq), torch.zeros_like(wide(fk)), torch.zeros_like(wide(v1))
        causal = blocks.causal(d_state.dtype)
        with exactly(fq.device):
            for where, start in reversed(list(zip(blocks.passes(), starts, strict=True))):
                f, x, v = blocks.queries(fq, *where), blocks.keys(fk, *where), blocks.keys(v1, *where)
                d = blocks.queries(d_out, *where)
                before, _ = read_sums(x, v, start)
                d_scores = torch.bmm(d, v.mT).mul_(causal)
                df, dx, dv, d_state = block_gradients(f, x, v, before, d_scores, d, d_state)
                dv.baddbmm_(torch.bmm(f, x.mT).mul_(causal).mT, d)
                blocks.put(dfq, df, *where)
                blocks.add_keys(dfk, dx, *where)
                blocks.add_keys(dv1, dv, *where)
        return dfq, dfk.to(fk.dtype), dv1.to(v1.dtype), d_state, None
