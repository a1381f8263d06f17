"""Padding and packed documents as dense segments, so that no kernel ever meets either.

A batch `[B, T]` with padding (left, right, interior) or several documents per row is a set of segments: maximal runs
of real tokens of one document in one row, with the padding squeezed out. Segments are gathered into dense batches
`[n, L]` with trailing padding only, the kernel runs on those, and the results are scattered back. Segments of very
different length are put into separate batches (by powers of two), so that at most half of the work is wasted.

States are NamedTuples of batch-first tensors in which all-zero means "nothing seen yet".
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Group(NamedTuple):
    """Segments of similar length as one dense batch."""

    index: torch.Tensor  # [n, L] position of each token in the flattened [B * T] batch (padding repeats a real one)
    mask: torch.Tensor  # [n, L] True at real tokens
    lengths: torch.Tensor  # [n] number of real tokens
    rows: torch.Tensor  # [n] row of the batch that the segment lies in
    fresh: torch.Tensor  # [n] True where the segment starts a new document (its state starts empty)
    last: torch.Tensor  # [n] True where the segment is the last of its row (its state is the row's final state)


class Layout(NamedTuple):
    """Where the real tokens of a batch `[B, T]` lie. Made by `build`."""

    groups: tuple[Group, ...]
    batch: int
    length: int


_SMALLEST_BUCKET = 64


def build(real: torch.Tensor | None, document: torch.Tensor | None) -> Layout | None:
    """The layout of a batch, or None when every row is one document without padding.

    `real`: [B, T] bool, False at padding (None: no padding). `document`: [B, T] integer, a different value for each
    document of a row (None: one document a row); the first segment of a row continues the row's cached state.
    """
    if real is None and document is None:
        return None
    shape = (real if real is not None else document).shape
    batch, length = shape
    device = (real if real is not None else document).device
    flat_real = torch.ones(batch * length, dtype=torch.bool, device=device) if real is None else real.reshape(-1)
    tokens = flat_real.nonzero().squeeze(-1)
    if tokens.numel() == 0:
        return Layout((), batch, length)
    row = tokens // length
    starts = torch.ones_like(row, dtype=torch.bool)
    starts[1:] = row[1:] != row[:-1]
    first_of_row = starts.clone()
    if document is not None:
        doc = document.reshape(-1)[tokens]
        starts[1:] |= doc[1:] != doc[:-1]
    begin = starts.nonzero().squeeze(-1)
    end = torch.cat([begin[1:], begin.new_tensor([tokens.numel()])])
    lengths = end - begin
    rows = row[begin]
    last = torch.ones_like(rows, dtype=torch.bool)
    last[:-1] = rows[1:] != rows[:-1]
    fresh = ~first_of_row[begin]
    if begin.numel() <= batch:
        buckets = [torch.arange(begin.numel(), device=device)]
    else:
        size = lengths.clamp(min=_SMALLEST_BUCKET).log2().ceil()
        buckets = [(size == value).nonzero().squeeze(-1) for value in size.unique()]
    groups = []
    for pick in buckets:
        span = torch.arange(int(lengths[pick].max()), device=device)
        mask = span < lengths[pick, None]
        position = begin[pick, None] + torch.minimum(span, lengths[pick, None] - 1)
        groups.append(Group(tokens[position], mask, lengths[pick], rows[pick], fresh[pick], last[pick]))
    return Layout(tuple(groups), batch, length)


def run(
    layout: Layout | None, fn: Callable[..., tuple[torch.Tensor, Any]], inputs: tuple[torch.Tensor, ...], state: Any
) -> tuple[torch.Tensor, Any]:
    """Run `fn(*inputs, state=, lengths=) -> (out, state)` on every segment of the batch.

    `inputs`: tensors [B, T, ...]. `state`: NamedTuple of tensors [B, ...], or None for empty. Returns the output
    [B, T, ...] (zero at padding) and the state of every row after its last segment (rows without real tokens keep
    theirs).
    """
    if layout is None:
        return fn(*inputs, state=state, lengths=None)
    flat = [x.flatten(0, 1) for x in inputs]
    out = None
    final = list(state) if state is not None else None
    for group in layout.groups:
        gathered = [x.index_select(0, group.index.reshape(-1)).unflatten(0, group.index.shape) for x in flat]
        before = None
        if state is not None:
            keep = ~group.fresh
            before = type(state)(*(_where_rows(keep, s.index_select(0, group.rows)) for s in state))
        y, after = fn(*gathered, state=before, lengths=group.lengths)
        if out is None:
            out = y.new_zeros(layout.batch * layout.length, *y.shape[2:])
        out = out.index_put((group.index[group.mask],), y[group.mask])
        if final is None:
            final = [s.new_zeros(layout.batch, *s.shape[1:]) for s in after]
            state_type = type(after)
        else:
            state_type = type(state) if state is not None else type(after)
        rows = group.rows[group.last]
        final = [f.index_copy(0, rows, a[group.last].to(f.dtype)) for f, a in zip(final, after, strict=True)]
    if out is None:  # nothing but padding: ask the kernel for the shapes, on one token whose result is dropped
        y, after = fn(*(x[:, :1] for x in inputs), state=state, lengths=inputs[0].new_zeros(layout.batch).long())
        return y.new_zeros(layout.batch, layout.length, *y.shape[2:]), after
    return out.unflatten(0, (layout.batch, layout.length)), state_type(*final)


def _where_rows(keep: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Rows of `x` [n, ...] where `keep` [n], zero elsewhere (a NaN in a dropped row does not survive)."""
    return torch.where(keep.view(-1, *([1] * (x.dim() - 1))), x, torch.zeros((), dtype=x.dtype, device=x.device))
