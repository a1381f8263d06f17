"""Padding and documents as dense segments: every token lands where it came from, states stay with their rows."""

from typing import NamedTuple

import pytest
import torch

from regraft.kernels.ragged import build, run


class Sum(NamedTuple):
    total: torch.Tensor


def running_sum(x, *, state, lengths):
    """A kernel with a state: the sum so far."""
    if lengths is not None:
        real = torch.arange(x.shape[1]) < lengths[:, None]
        x = torch.where(real[..., None], x, torch.zeros(()))
    before = torch.zeros(x.shape[0], x.shape[2]) if state is None else state.total
    out = x.cumsum(1) + before[:, None]
    return out, Sum(out[:, -1])


def slowly(x, real, document, start):
    """The same by hand: token by token."""
    out = torch.zeros_like(x)
    final = start.clone()
    for b in range(x.shape[0]):
        total, last = start[b].clone(), None
        for t in range(x.shape[1]):
            if not real[b, t]:
                continue
            if last is not None and document[b, t] != last:
                total = torch.zeros_like(total)
            last = document[b, t]
            total = total + x[b, t]
            out[b, t] = total
        final[b] = total
    return out, final


@pytest.mark.parametrize("seed", range(12))
def test_any_padding_and_documents(seed):
    g = torch.Generator().manual_seed(seed)
    batch, length = 3, 150
    x = torch.randn(batch, length, 2, generator=g)
    real = torch.rand(batch, length, generator=g) < (0.3 if seed % 3 == 0 else 0.8)
    if seed % 4 == 0:
        real[1] = False  # a row of nothing but padding
    rate = 0.4 if seed % 2 else 0.02
    document = (torch.rand(batch, length, generator=g) < rate).cumsum(1)
    start = torch.randn(batch, 2, generator=g)
    x[~real] = float("nan")
    out, state = run(build(real, document), running_sum, (x,), Sum(start))
    wanted, final = slowly(x, real, document, start)
    torch.testing.assert_close(out[real], wanted[real], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(state.total, final, atol=1e-4, rtol=1e-5)
    assert torch.equal(out[~real], torch.zeros_like(out[~real]))


def test_nothing_to_do_costs_nothing():
    assert build(None, None) is None


def test_only_padding():
    x = torch.full((2, 5, 2), float("nan"))
    start = torch.ones(2, 2)
    out, state = run(build(torch.zeros(2, 5, dtype=torch.bool), None), running_sum, (x,), Sum(start))
    assert torch.equal(out, torch.zeros(2, 5, 2))
    assert torch.equal(state.total, start)


def test_gradients_reach_every_real_token_once():
    real = torch.tensor([[False, True, True, False, True]])
    x = torch.ones(1, 5, 1, requires_grad=True)
    out, _ = run(build(real, None), running_sum, (x,), None)
    out.sum().backward()
    assert x.grad.flatten().tolist() == [0, 3, 2, 0, 1]


def test_short_documents_do_not_cost_a_long_ones_width():
    """One long document and many short ones: the work stays within a small factor of the tokens."""
    document = torch.cat([torch.zeros(4000), 1 + torch.arange(500)]).long()[None]
    layout = build(None, document)
    assert sum(group.index.numel() for group in layout.groups) < 10 * document.numel()
