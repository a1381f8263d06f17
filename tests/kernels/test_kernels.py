"""Every kernel against its float64 oracle: forward, all gradients, any split, any state, any trailing padding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regraft.kernels import linear, sliding_window, window_linear
from regraft.kernels.window_linear import WindowLinearState

FEATURES = 6
# batch, length, heads, kv heads, head dim, value dim, window, sinks, reach
SIZES = [
    (2, 1, 2, 1, 8, 8, 4, 2, None),
    (1, 15, 2, 2, 3, 5, 4, 0, None),
    (2, 16, 6, 3, 8, 8, 16, 1, None),
    (1, 17, 3, 1, 17, 8, 1, 4, None),
    (2, 63, 4, 2, 8, 3, 64, 4, None),
    (1, 64, 4, 2, 8, 8, 16, 20, None),
    (2, 65, 2, 1, 8, 8, 7, 4, 30),
    (1, 130, 3, 1, 8, 8, 64, 4, None),
    (2, 130, 2, 2, 8, 8, 5, 3, None),
    (1, 40, 2, 1, 8, 8, 200, 4, None),
]
every_size = pytest.mark.parametrize("size", SIZES, ids=[f"T{s[1]}-w{s[6]}-s{s[7]}" for s in SIZES])


def make(size, dtype=torch.float64, seed=0, grad=False):
    batch, length, heads, groups, dim, value_dim, window, sinks, reach = size
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad)

    q, k = rand(batch, length, heads, dim), rand(batch, length, groups, dim)
    v, raw, log_far = (
        rand(batch, length, groups, value_dim),
        rand(batch, length, heads, FEATURES),
        rand(batch, length, heads),
    )
    weights = torch.randn(groups, FEATURES, dim, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad)

    def map_keys(keys):
        return torch.einsum("bngd,gfd->bngf", keys.to(weights.dtype), weights).softmax(-1)

    near = {"window": window, "sinks": sinks, "scale": 0.6, "reach": reach}
    return q, k, v, raw, log_far, weights, map_keys, near


def run_chunk(name, q, k, v, raw, log_far, map_keys, near, **more):
    if name == "sliding_window":
        out, _, state = sliding_window.chunk(q, k, v, **near, **more)
        return out, state
    return window_linear.chunk(q, k, v, raw.softmax(-1), log_far, map_keys=map_keys, **near, **more)


def run_naive(name, q, k, v, raw, log_far, map_keys, near):
    if name == "sliding_window":
        return sliding_window.naive(q, k, v, **near)[0]
    return window_linear.naive(q, k, v, raw.softmax(-1), log_far, map_keys=map_keys, **near)[0]


both = pytest.mark.parametrize("name", ["sliding_window", "window_linear"])


@both
@every_size
def test_chunk_equals_the_oracle_forward_and_backward(name, size):
    gradients, outputs = [], []
    for run in (run_chunk, run_naive):
        q, k, v, raw, log_far, weights, map_keys, near = make(size, grad=True)
        out = run(name, q, k, v, raw, log_far, map_keys, near)
        out = out[0] if isinstance(out, tuple) else out
        # an uneven loss, so that no gradient cancels; scaled, so that a dropped upstream factor shows
        (3 * (out * torch.arange(1, out.numel() + 1, dtype=out.dtype).view_as(out).cos()).sum()).backward()
        outputs.append(out)
        gradients.append([x.grad for x in (q, k, v, raw, log_far, weights)])
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-10, rtol=1e-10)
    for found, wanted in zip(*gradients, strict=True):
        if found is None:  # nothing is far in a short text, so the far branch gets no gradient
            assert wanted is None or wanted.abs().max() < 1e-12
        else:
            wanted = torch.zeros_like(found) if wanted is None else wanted
            torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)


@every_size
def test_log_sum_exp_and_its_gradient(size):
    gradients = []
    for form in (sliding_window.chunk, sliding_window.naive):
        q, k, v, *_, near = make(size, grad=True)
        lse = form(q, k, v, **near)[1]
        (lse * torch.arange(1, lse.numel() + 1, dtype=lse.dtype).view_as(lse).sin()).sum().backward()
        gradients.append((lse, q.grad, k.grad))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


@both
@every_size
def test_single_precision_stays_close_to_the_oracle(name, size):
    q, k, v, raw, log_far, _, map_keys, near = make(size)
    wanted = run_naive(name, q, k, v, raw, log_far, map_keys, near)
    q, k, v, raw, log_far, _, map_keys, near = make(size, torch.float32)
    found = run_chunk(name, q, k, v, raw, log_far, map_keys, near)[0]
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=2e-5)


def step_through(name, q, k, v, raw, log_far, map_keys, near, state):
    outs = []
    for t in range(q.shape[1]):
        at = slice(t, t + 1)
        if name == "sliding_window":
            out, _, state = sliding_window.step(q[:, at], k[:, at], v[:, at], state=state, **near)
        else:
            fq = raw[:, at].softmax(-1)
            out, state = window_linear.step(
                q[:, at], k[:, at], v[:, at], fq, log_far[:, at], map_keys=map_keys, state=state, **near
            )
        outs.append(out)
    return torch.cat(outs, 1), state


@both
@every_size
def test_steps_equal_the_whole_and_leave_the_same_state(name, size):
    q, k, v, raw, log_far, _, map_keys, near = make(size)
    whole, wanted = run_chunk(name, q, k, v, raw, log_far, map_keys, near)
    out, state = step_through(name, q, k, v, raw, log_far, map_keys, near, None)
    torch.testing.assert_close(out, whole, atol=1e-10, rtol=1e-10)
    for found, kept in zip(state, wanted, strict=True):
        torch.testing.assert_close(found, kept, atol=1e-10, rtol=1e-10)


@both
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_split_equals_the_whole(name, data):
    length = data.draw(st.integers(1, 90))
    window, sinks = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 6))
    size = (2, length, 4, 2, 4, 4, window, sinks, None)
    q, k, v, raw, log_far, _, map_keys, near = make(size)
    whole, wanted = run_chunk(name, q, k, v, raw, log_far, map_keys, near)
    state, parts, at = None, [], 0
    while at < length:
        end = at + data.draw(st.integers(1, length - at))
        part = [x[:, at:end] for x in (q, k, v, raw, log_far)]
        out, state = run_chunk(name, *part, map_keys, near, state=state)
        parts.append(out)
        at = end
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-9, rtol=1e-9)
    for found, kept in zip(state, wanted, strict=True):
        torch.testing.assert_close(found, kept, atol=1e-9, rtol=1e-9)


@both
@pytest.mark.parametrize("window,sinks", [(5, 2), (16, 4), (70, 3)])
def test_trailing_padding_and_rows_of_different_age(name, window, sinks):
    """Two rows of different length, then more tokens on top: each row as if it were alone, NaN in the padding."""
    first, second = [23, 9], [4, 17]
    size = (1, 40, 4, 2, 4, 4, window, sinks, None)
    rows = [make(size, seed=row) for row in range(2)]
    map_keys, near = rows[0][6], rows[0][7]
    state, batch_out = None, []
    for lengths, offset in ((first, [0, 0]), (second, first)):
        width = max(lengths)
        parts = []
        for which in range(5):
            stack = []
            for row in range(2):
                x = rows[row][which][:, offset[row] : offset[row] + lengths[row]]
                blank = torch.full((1, width - lengths[row], *x.shape[2:]), math.nan, dtype=x.dtype)
                stack.append(torch.cat([x, blank], 1))
            parts.append(torch.cat(stack))
        out, state = run_chunk(name, *parts, map_keys, near, state=state, lengths=torch.tensor(lengths))
        batch_out.append(out)
    for row in range(2):
        total = first[row] + second[row]
        alone, alone_state = run_chunk(name, *(x[:, :total] for x in rows[row][:5]), map_keys, near)
        found = torch.cat([batch_out[0][row, : first[row]], batch_out[1][row, : second[row]]])
        torch.testing.assert_close(found, alone[0], atol=1e-10, rtol=1e-10)
        for got, kept in zip(state, alone_state, strict=True):
            torch.testing.assert_close(got[row], kept[0], atol=1e-10, rtol=1e-10)
    frozen, _ = step_state(name, rows[0], map_keys, near, state)
    for got, kept in zip(frozen, state, strict=True):
        assert torch.equal(got[0], kept[0])


def step_state(name, row, map_keys, near, state):
    """One step in which row 0 holds padding (NaN) and row 1 does not."""
    part = [torch.cat([torch.full_like(x[:, :1], math.nan), x[:, :1]]) for x in row[:5]]
    lengths = torch.tensor([0, 1])
    if name == "sliding_window":
        _, _, after = sliding_window.step(*part[:3], state=state, lengths=lengths, **near)
    else:
        _, after = window_linear.step(
            *part[:3], part[3].softmax(-1), part[4], map_keys=map_keys, state=state, lengths=lengths, **near
        )
    return after, None


@pytest.mark.parametrize("heads,groups", [(4, 4), (6, 2), (3, 1)])
def test_a_window_that_covers_the_text_is_softmax_attention(heads, groups):
    size = (2, 50, heads, groups, 8, 8, 50, 3, None)
    q, k, v, raw, log_far, _, map_keys, near = make(size, torch.float32)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.repeat_interleave(heads // groups, 2).transpose(1, 2),
        v.repeat_interleave(heads // groups, 2).transpose(1, 2),
        is_causal=True,
        scale=0.6,
    ).transpose(1, 2)
    for name in ("sliding_window", "window_linear"):
        found = run_chunk(name, q, k, v, raw, log_far + 50, map_keys, near)[0]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@every_size
def test_linear_equals_its_oracle(size):
    batch, length, heads, groups, _, value_dim, *_ = size
    g = torch.Generator().manual_seed(1)
    results = []
    tensors = [
        torch.rand(batch, length, heads, FEATURES, generator=g, dtype=torch.float64),
        torch.rand(batch, length, groups, FEATURES, generator=g, dtype=torch.float64),
        torch.randn(batch, length, groups, value_dim, generator=g, dtype=torch.float64),
    ]
    for form in (linear.chunk, linear.naive):
        fq, fk, v = (x.clone().requires_grad_() for x in tensors)
        num, den = form(fq, fk, v)[:2]
        (num.sin().sum() + den.cos().sum()).backward()
        results.append((num, den, fq.grad, fk.grad, v.grad))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)
    fq, fk, v = tensors
    half = length // 2
    if half:
        _, _, state = linear.chunk(fq[:, :half], fk[:, :half], v[:, :half])
        num, _, _ = linear.chunk(fq[:, half:], fk[:, half:], v[:, half:], state=state)
        torch.testing.assert_close(num, results[0][0][:, half:], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("level", [-80.0, 0.0, 80.0])
def test_extreme_weights_stay_finite(level):
    """A far branch that dwarfs the window, or is dwarfed by it, and large logits: no overflow, no NaN gradient."""
    q, k, v, raw, log_far, weights, map_keys, near = make((1, 70, 2, 1, 8, 8, 8, 2, None), torch.float32, grad=True)
    near = {**near, "scale": 30.0}
    out, _ = window_linear.chunk(q, k, v, raw.softmax(-1), log_far + level, map_keys=map_keys, **near)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v, raw, log_far, weights))


def test_half_precision_keeps_its_sums_in_fp32():
    q, k, v, raw, log_far, _, map_keys, near = make((1, 100, 2, 1, 8, 8, 8, 2, None), torch.float32)
    wanted = run_naive("window_linear", *(x.double() for x in (q, k, v, raw, log_far)), map_keys, near)
    q16, k16, v16 = (x.bfloat16() for x in (q, k, v))
    out, state = window_linear.chunk(q16, k16, v16, raw.softmax(-1), log_far, map_keys=map_keys, **near)
    assert out.dtype == torch.bfloat16 and state.keys.dtype == torch.bfloat16
    assert state.kv.dtype == torch.float32 and state.norm.dtype == torch.float32
    torch.testing.assert_close(out.double(), wanted, atol=0.05, rtol=0.05)


@both
def test_memory_saved_for_backward_is_linear_in_length(name):
    def saved(length):
        total = 0

        def pack(x):
            nonlocal total
            total += x.numel() * x.element_size()
            return x

        q, k, v, raw, log_far, _, map_keys, near = make((1, length, 2, 1, 8, 8, 16, 4, None), torch.float32, grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run_chunk(name, q, k, v, raw, log_far, map_keys, near)
        return total

    assert saved(4096) / saved(2048) < 2.1


@both
def test_softcap_bounds_the_logits(name):
    q, k, v, raw, log_far, _, map_keys, near = make((1, 40, 2, 1, 8, 8, 9, 2, None))
    near = {**near, "softcap": 2.0, "scale": 5.0}
    found = run_chunk(name, q, k, v, raw, log_far, map_keys, near)[0]
    wanted = run_naive(name, q, k, v, raw, log_far, map_keys, near)
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)
    assert not torch.allclose(found, run_chunk(name, q, k, v, raw, log_far, map_keys, {**near, "softcap": None})[0])


def test_a_step_compiles_without_graph_breaks():
    q, k, v, raw, log_far, _, map_keys, near = make((1, 20, 2, 1, 4, 4, 5, 2, None), torch.float32)
    _, state = run_chunk("window_linear", q, k, v, raw, log_far, map_keys, near)

    def one(q, k, v, fq, log_far, *state):
        return window_linear.step(q, k, v, fq, log_far, map_keys=map_keys, state=WindowLinearState(*state), **near)[0]

    part = [x[:, :1] for x in (q, k, v)] + [raw[:, :1].softmax(-1), log_far[:, :1]]
    compiled = torch.compile(one, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*part, *state), one(*part, *state))


def test_an_unknown_backend_is_refused(monkeypatch):
    from regraft.kernels.dispatch import backend, report

    assert report()["window_linear"] == "torch"
    monkeypatch.setenv("REGRAFT_BACKEND", "fla")
    with pytest.raises(ValueError, match="implemented in torch"):
        backend("linear")
