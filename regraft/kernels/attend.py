"""Softmax over a span of keys, alone or with linear attention over older keys under one normaliser; block by block.

    out_t = (sum_near e^{l_tj} v_j + e^{far_t} num_t) / (sum_near e^{l_tj} + e^{far_t} den_t)

The span of a block of queries begins `window` keys before it. Its first `size` keys are, for query i of the block, old
up to key i and near beyond it: so one matrix holds both kinds of weight, and the far branch costs no second pass over
the values. Backward recomputes the weights instead of keeping them. Logits are to the base 2: exp2 costs a third of
exp. A channel of ones beside the values carries the far branch's denominator.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from regraft.kernels.blocks import LOG2E, Blocks, exactly
from regraft.kernels.linear import block_gradients, read_sums

# Log of the most that the far branch weighs against the window, so that the window never underflows: where no key
# is far, or the features of all far keys vanish, the window is all there is to normalise by.
MOST = 60.0


class Near(NamedTuple):
    """Keys and values for the near branch of a text of T tokens."""

    keys: torch.Tensor  # [B, window + T, G, D]
    values: torch.Tensor  # [B, window + T, G, Dv + 1], the last channel is 1
    sink_keys: torch.Tensor  # [B, S, G, D]
    sink_values: torch.Tensor  # [B, S, G, Dv + 1]


class Far(NamedTuple):
    """Queries, keys and state of the far branch. Its keys are those that leave the window; zero where there is none."""

    fq: torch.Tensor  # [B, T, H, F]
    fk: torch.Tensor  # [B, T, G, F]
    log_far: torch.Tensor  # [B, T, H]
    start: torch.Tensor  # [B, G, F, Dv + 1]


def attend(
    q: torch.Tensor, near: Near, far: Far | None, blocks: Blocks, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q [B, T, H, D] -> out [B, T, H, Dv], log of the normaliser [B, T, H], state of the far branch."""
    rest = far if far is not None else (None,) * 4
    return _Attend.apply(blocks, scale, softcap, q, *near, *rest)


def _logits(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits to the base 2, -inf at unseen keys; and tanh of the capped ones."""
    if softcap is None:
        return torch.baddbmm(bias, q, k.mT, alpha=scale * LOG2E), None
    bent = torch.bmm(q, k.mT).mul_(scale / softcap).tanh_()
    return torch.add(bias, bent, alpha=softcap * LOG2E), bent


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        blocks: Blocks,
        scale: float,
        softcap: float | None,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sink_keys: torch.Tensor,
        sink_values: torch.Tensor,
        fq: torch.Tensor | None,
        fk: torch.Tensor | None,
        log_far: torch.Tensor | None,
        start: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        out = q.new_empty(*q.shape[:3], values.shape[-1] - 1)
        norm = wide_empty(q, 1)  # log2 of the normaliser
        far = wide_empty(q, 1) if fq is not None else None  # weight of the far branch over the normaliser
        causal, inner = blocks.causal(norm.dtype), blocks.inner_bias(norm.dtype)
        starts = []
        with exactly(q.device):
            for where in blocks.passes():
                k = blocks.spans(keys, sink_keys, *where)
                v1 = blocks.spans(values, sink_values, *where)
                p, _ = _logits(blocks.queries(q, *where), k, blocks.bias(*where, inner, norm.dtype), scale, softcap)
                top = p.amax(-1, keepdim=True)
                p.sub_(top).exp2_()
                total = p.sum(-1, keepdim=True)
                if fq is None:
                    o = torch.bmm(p, v1[..., :-1])
                else:
                    f, x = blocks.queries(fq, *where), blocks.keys(fk, *where)
                    log_w = (blocks.queries(log_far[..., None], *where) * LOG2E - top).clamp_(max=MOST * LOG2E)
                    w = log_w.exp2()
                    if any(ctx.needs_input_grad):
                        starts.append(start)
                    before, start = read_sums(x, v1[:, : blocks.size], start)
                    old = torch.bmm(f, x.mT).mul_(causal).mul_(w)
                    read = torch.bmm(f, before).mul_(w)
                    total += old.sum(-1, keepdim=True) + read[..., -1:]
                    p[..., : blocks.size] += old
                    o = torch.bmm(p, v1[..., :-1]).add_(read[..., :-1])
                blocks.put(out, o.div_(total), *where)
                total.log2_()
                blocks.put(norm, top + total, *where)
                if far is not None:
                    blocks.put(far, (log_w - total).exp2_(), *where)
        ctx.blocks, ctx.scale, ctx.softcap = blocks, scale, softcap
        ctx.save_for_backward(q, keys, values, sink_keys, sink_values, fq, fk, log_far, out, norm, far, *starts)
        return out, norm.squeeze(-1) / LOG2E, start

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_out: torch.Tensor, d_lse: torch.Tensor, d_state: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, keys, values, sink_keys, sink_values, fq, fk, log_far, out, norm, far, *starts = ctx.saved_tensors
        blocks, size = ctx.blocks, ctx.blocks.size
        # while only feature maps are trained, queries, keys and values need no gradient
        _, _, _, *needed = ctx.needs_input_grad
        near_needed = needed[0] or needed[1] or needed[3]
        values_needed = needed[2] or needed[4]
        dq = torch.empty_like(q)
        d_near = [torch.zeros_like(x, dtype=norm.dtype) for x in (keys, values, sink_keys, sink_values)]
        dk, dv, dk_sinks, dv_sinks = d_near
        if fq is not None:
            dfq, dfk, d_far = torch.empty_like(fq), torch.zeros_like(fk, dtype=norm.dtype), torch.empty_like(log_far)
        causal, inner = blocks.causal(norm.dtype), blocks.inner_bias(norm.dtype)
        with exactly(q.device):
            for index, where in reversed(list(enumerate(blocks.passes()))):
                d = blocks.queries(d_out, *where)
                # out = sum p v with p = weight over normaliser: dp = d (v - out) + d_lse. The last channel of d meets
                # the ones beside the values.
                own = (d * blocks.queries(out, *where)).sum(-1, keepdim=True)
                d = torch.cat([d, blocks.queries(d_lse[..., None], *where) - own], -1)
                v1 = blocks.spans(values, sink_values, *where)
                dp = torch.bmm(d, v1.mT)
                if near_needed or values_needed:
                    qb, k = blocks.queries(q, *where), blocks.spans(keys, sink_keys, *where)
                    p, bent = _logits(qb, k, blocks.bias(*where, inner, norm.dtype), ctx.scale, ctx.softcap)
                    p.sub_(blocks.queries(norm, *where)).exp2_()
                if fq is not None:
                    f, x, w = blocks.queries(fq, *where), blocks.keys(fk, *where), blocks.queries(far, *where)
                    before, _ = read_sums(x, v1[:, :size], starts[index])
                    # by weighting scores and values, and not the features, the wide matrices stay untouched
                    weighted = causal * w
                    d_old = dp[..., :size] * weighted
                    df, dx, dv_later, d_state = block_gradients(f, x, v1[:, :size], before, d_old, d * w, d_state)
                    blocks.put(d_far[..., None], (df * f).sum(-1, keepdim=True), *where)
                    blocks.put(dfq, df, *where)
                    blocks.add_keys(dfk, dx, *where)
                    if values_needed:
                        blocks.add_keys(dv, dv_later, *where)
                if near_needed:
                    dp.mul_(p)
                    if bent is not None:
                        dp.mul_(1 - bent.square_())
                    blocks.put(dq, torch.bmm(dp, k).mul_(ctx.scale), *where)
                    blocks.add_spans(dk, dk_sinks, torch.bmm(dp.mT, qb).mul_(ctx.scale), *where)
                if values_needed:
                    if fq is not None:
                        p[..., :size].addcmul_(torch.bmm(f, x.mT), weighted)
                    blocks.add_spans(dv[..., :-1], dv_sinks[..., :-1], torch.bmm(p.mT, d[..., :-1]), *where)
        d_near = [summed.to(x.dtype) for summed, x in zip(d_near, (keys, values, sink_keys, sink_values), strict=True)]
        if fq is None:
            return None, None, None, dq, *d_near, None, None, None, None
        return None, None, None, dq, *d_near, dfq, dfk.to(fk.dtype), d_far, d_state


def wide_empty(q: torch.Tensor, channels: int) -> torch.Tensor:
    """An uninitialised [B, T, H, channels] in the dtype of computation."""
    return q.new_empty(*q.shape[:3], channels, dtype=torch.promote_types(q.dtype, torch.float32))
