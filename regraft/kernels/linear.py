"""Causal linear attention without its denominator's division: num_t = sum_{j<=t} (fq_t . fk_j) v_j, den_t likewise.

The state is kept in fp32 per KV head; the query heads of a group share it.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from regraft.kernels.sliding_window import Blocks, wide


class LinearState(NamedTuple):
    """Sums over all keys seen; all zero means none."""

    kv: torch.Tensor  # [B, G, F, Dv] fp32, sum of fk v^T
    norm: torch.Tensor  # [B, G, F] fp32, sum of fk


def naive(fq: torch.Tensor, fk: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle, token by token: S_t = S_{t-1} + fk_t v_t^T, num_t = fq_t^T S_t; likewise the denominator.

    Shapes as in `chunk`; computes in the input's dtype.
    """
    rep = fq.shape[2] // fk.shape[2]
    kv = v.new_zeros(v.shape[0], v.shape[2], fk.shape[3], v.shape[3])
    norm = v.new_zeros(v.shape[0], v.shape[2], fk.shape[3])
    nums, dens = [], []
    for query, key, value in zip(fq.unbind(1), fk.unbind(1), v.unbind(1), strict=True):
        kv = kv + key[..., None] * value[..., None, :]
        norm = norm + key
        nums.append(torch.einsum("bhf,bhfd->bhd", query, kv.repeat_interleave(rep, 1)))
        dens.append(torch.einsum("bhf,bhf->bh", query, norm.repeat_interleave(rep, 1)))
    return torch.stack(nums, 1), torch.stack(dens, 1)


def chunk(
    fq: torch.Tensor, fk: torch.Tensor, v: torch.Tensor, *, state: LinearState | None = None
) -> tuple[torch.Tensor, torch.Tensor, LinearState]:
    """Block-parallel form.

    fq [B, T, H, F], fk [B, T, G, F], v [B, T, G, Dv] -> num [B, T, H, Dv], den [B, T, H] and the new state.
    """
    groups = v.shape[2]
    blocks = Blocks.of(fq.shape[1], 0, 0)
    q, k = blocks.queries(fq, groups), blocks.keys(fk)
    # a column of ones beside the values makes the denominator one more value channel
    v1 = blocks.keys(F.pad(wide(v), (0, 1), value=1.0))
    before, after = prefix_sums(k, v1, state)
    scores = (q @ k.transpose(-1, -2)).unflatten(3, (-1, blocks.size)).tril()
    out = scores.flatten(3, 4) @ v1 + q @ before
    out = blocks.tokens(out.unflatten(3, (-1, blocks.size)))
    return out[..., :-1], out[..., -1], after


def prefix_sums(k: torch.Tensor, v1: torch.Tensor, state: LinearState | None) -> tuple[torch.Tensor, LinearState]:
    """Sums of k v1^T before each block, [B, N, G, F, Dv + 1], and the state after the last one.

    `k` [B, N, G, C, F]; `v1` [B, N, G, C, Dv + 1] are values with a column of ones.
    """
    sums = (k.transpose(-1, -2) @ v1).cumsum(1)
    before = F.pad(sums[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
    total = sums[:, -1]
    if state is not None:
        carried = torch.cat([state.kv, state.norm[..., None]], -1)
        before, total = before + carried[:, None], total + carried
    return before, LinearState(total[..., :-1], total[..., -1])


def step(
    fq: torch.Tensor, fk: torch.Tensor, v: torch.Tensor, *, state: LinearState
) -> tuple[torch.Tensor, torch.Tensor, LinearState]:
    """One token (T = 1) on top of `state`."""
    batch, _, heads, features = fq.shape
    groups = v.shape[2]
    kv = state.kv + wide(fk[:, 0])[..., None] * wide(v[:, 0])[..., None, :]
    norm = state.norm + wide(fk[:, 0])
    q = wide(fq).view(batch, groups, heads // groups, features)
    num = (q @ kv).reshape(batch, 1, heads, -1)
    den = (q @ norm[..., None]).reshape(batch, 1, heads)
    return num, den, LinearState(kv, norm)
