"""Sliding-window attention with exact sinks: softmax over the last keys and the first ones.

Query t sees key j when 0 <= t - j < window, or j < sinks and j <= t; a sink inside the window counts once. With a
`reach`, sinks are seen only at t - j < reach (a source layer that slides itself). Positions count from the first token
of the sequence, earlier calls included. All three forms also return the log-sum-exp of the scaled logits, so that the
result merges exactly with other branches.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from regraft.kernels.attend import Near, attend
from regraft.kernels.blocks import Blocks, exactly, real_tokens, wide, within
from regraft.kernels.dispatch import backend


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
    state: WindowState | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, WindowState]:
    """The oracle, row by row and token by token; arguments and results as of `chunk`. For tests, in float64."""
    rep, length, blank = q.shape[2] // k.shape[2], q.shape[1], v.new_zeros(q.shape[2], v.shape[3])
    if state is None:
        state = empty_state(q.shape[0], window, sinks, k.shape[2], k.shape[3], v.shape[3], k.dtype, k.device)
    rows = []
    for row in range(q.shape[0]):
        memory, now = remember(state, row), int(state.count[row])
        outs, sizes = [], []
        for t in range(length if lengths is None else int(lengths[row])):
            memory[now] = k[row, t], v[row, t]
            near = [j for j in memory if now - j < window or (j < sinks and (reach is None or now - j < reach))]
            keys = torch.stack([memory[j][0] for j in near], 1).repeat_interleave(rep, 0)
            values = torch.stack([memory[j][1] for j in near], 1).repeat_interleave(rep, 0)
            logits = bound(torch.einsum("hd,hnd->hn", q[row, t], keys) * scale, softcap)
            outs.append(torch.einsum("hn,hnd->hd", logits.softmax(-1), values))
            sizes.append(logits.logsumexp(-1))
            now += 1
        rows.append((filled(outs, length, blank), filled(sizes, length, blank[:, 0]), *store(memory, now, state, row)))
    out, lse, *after = (torch.stack(part) for part in zip(*rows, strict=True))
    return out, lse, WindowState(*after)


def remember(state: WindowState, row: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Position -> (key, value) of the tokens that a row's state still holds; for the oracles."""
    count, window, sinks = int(state.count[row]), state.keys.shape[1], state.sink_keys.shape[1]
    memory = {j: (state.sink_keys[row, j], state.sink_values[row, j]) for j in range(min(sinks, count))}
    for j in range(max(count - window, 0), count):
        memory[j] = state.keys[row, window - count + j], state.values[row, window - count + j]
    return memory


def store(
    memory: dict[int, tuple[torch.Tensor, torch.Tensor]], count: int, state: WindowState, row: int
) -> tuple[torch.Tensor, ...]:
    """The fields of the row's new state after `count` tokens; for the oracles."""
    blank = torch.zeros_like(state.keys[row, 0]), torch.zeros_like(state.values[row, 0])
    window, sinks = state.keys.shape[1], state.sink_keys.shape[1]
    keys, values = zip(*(memory.get(j, blank) for j in range(count - window, count)), strict=True)
    first = state.sink_keys[row], state.sink_values[row]
    if sinks:
        pairs = zip(*(memory.get(j, blank) for j in range(sinks)), strict=True)
        first = tuple(torch.stack(part) for part in pairs)
    return torch.stack(keys), torch.stack(values), *first, torch.full_like(state.count[row], count)


def filled(tokens: list[torch.Tensor], length: int, blank: torch.Tensor) -> torch.Tensor:
    """The tokens, and `blank` up to `length`; for the oracles."""
    return torch.stack(tokens + [blank] * (length - len(tokens)))


def bound(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """softcap * tanh(logits / softcap), or the logits themselves without a cap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


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
    backend("sliding_window")
    q, k, v = real_tokens(lengths, q, k, v)
    near, blocks, after = cut(q, k, v, window, sinks, reach, state, lengths)
    out, lse, _ = attend(q, near, None, blocks, scale, softcap)
    return out, lse, after


def cut(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int,
    sinks: int,
    reach: int | None,
    state: WindowState | None,
    lengths: torch.Tensor | None,
) -> tuple[Near, Blocks, WindowState]:
    """What a text sees, how it is cut into blocks, and the state after it. Padding in `q`, `k`, `v` must be zero."""
    batch, length, heads = q.shape[:3]
    count = torch.zeros(batch, dtype=torch.int64, device=q.device) if state is None else state.count
    after = WindowState(
        last_window(k, None if state is None else state.keys, window, lengths),
        last_window(v, None if state is None else state.values, window, lengths),
        updated_sinks(k, None if state is None else state.sink_keys, sinks, count, lengths),
        updated_sinks(v, None if state is None else state.sink_values, sinks, count, lengths),
        count + (length if lengths is None else lengths),
    )
    sink_keys, sink_values = after.sink_keys, after.sink_values
    if state is None and length <= window:  # nothing lies further back than the text is long
        window, sink_keys, sink_values = length, sink_keys[:, :0], sink_values[:, :0]
    blocks = Blocks(batch, length, heads, k.shape[2], q.device)
    blocks.see(window, sink_keys.shape[1], None if state is None else count, reach)
    near = Near(
        with_history(k, None if state is None else state.keys, window),
        with_ones(with_history(v, None if state is None else state.values, window)),
        sink_keys,
        with_ones(sink_values),
    )
    return near, blocks, after


def with_history(x: torch.Tensor, past: torch.Tensor | None, window: int) -> torch.Tensor:
    """The stored window before the new tokens: [B, window + T, ...]; zeros without one."""
    return F.pad(x, (0, 0, 0, 0, window, 0)) if past is None else torch.cat([past.to(x.dtype), x], 1)


def with_ones(x: torch.Tensor) -> torch.Tensor:
    """A channel of ones beside the values, see `attend`."""
    return F.pad(x, (0, 1), value=1.0)


def last_window(x: torch.Tensor, past: torch.Tensor | None, window: int, lengths: torch.Tensor | None) -> torch.Tensor:
    """The last `window` real tokens of the stored window and the new ones `x` [B, T, ...]."""
    length = x.shape[1]
    if lengths is None and length >= window:
        return x[:, length - window :]
    full = with_history(x, past, window)
    if lengths is None:
        return full[:, length:]
    index = lengths[:, None] + torch.arange(window, device=full.device)
    return full.gather(1, index[:, :, None, None].expand(-1, -1, *full.shape[2:]))


def updated_sinks(
    x: torch.Tensor, past: torch.Tensor | None, sinks: int, count: torch.Tensor, lengths: torch.Tensor | None
) -> torch.Tensor:
    """The first `sinks` tokens of the sequence [B, S, G, D] after the new tokens `x` [B, T, G, D]; zero if not yet."""
    index = torch.arange(sinks, device=x.device) - count[:, None]  # index of sink s among the new tokens
    limit = x.shape[1] if lengths is None else lengths[:, None]
    new = (index >= 0) & (index < limit)
    pick = index.clamp(0, x.shape[1] - 1)[:, :, None, None].expand(-1, -1, *x.shape[2:])
    fresh = torch.where(new[:, :, None, None], x.gather(1, pick), 0.0)
    return fresh if past is None else torch.where((index < 0)[:, :, None, None], past.to(x.dtype), fresh)


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
    q, k, v = real_tokens(lengths, q, k, v)
    if state is None:
        state = empty_state(q.shape[0], window, sinks, k.shape[2], k.shape[3], v.shape[3], k.dtype, k.device)
    top, weights, values, after = look(q, k, v, state, scale, softcap, reach, settled(state, reach))
    with exactly(q.device):
        total, out = weights.sum(-1, keepdim=True), torch.bmm(weights, values)
    lse = (top + total.log()).view(q.shape[:3])
    out = (out / total).view(*q.shape[:3], -1).to(q.dtype)
    return out, lse, after if lengths is None else keep_rows(lengths > 0, after, state)


def look(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: WindowState,
    scale: float,
    softcap: float | None,
    reach: int | None,
    unmasked: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, WindowState]:
    """One token: largest logit [B * G, r, 1], weights over it [B * G, r, W + S], their values, and the new state.

    A step is many small operations whose overhead is what it costs, so they are counted: the new window is a view of
    what the query sees, and without an empty slot there is nothing to mask.
    """
    window, sinks, groups = state.keys.shape[1], state.sink_keys.shape[1], k.shape[2]
    k, v, count = k.to(state.keys.dtype), v.to(state.values.dtype), state.count[:, None]
    sink_keys, sink_values, seen = state.sink_keys, state.sink_values, None
    if not unmasked:
        # from which token on a slot is seen: the window fills from its newest end, a sink is seen once it has left
        since = torch.arange(window - 1, -1, -1, device=q.device)
        if sinks:
            slot = torch.arange(sinks, device=q.device)
            here = (slot == count)[:, :, None, None]
            sink_keys, sink_values = torch.where(here, k, sink_keys), torch.where(here, v, sink_values)
            since = torch.cat([since, slot + window])
        seen = count >= since  # [B, W + S]
        if reach is not None:
            slots = torch.arange(-window, sinks, device=q.device)
            seen = seen & ((slots < 0) | within(count - slots, reach))
    keys = torch.cat([state.keys[:, 1:], k, sink_keys], 1)
    values = torch.cat([state.values[:, 1:], v, sink_values], 1)
    with exactly(q.device):
        grouped = wide(q).reshape(q.shape[0] * groups, -1, q.shape[3]) * scale
        logits = bound(torch.bmm(grouped, wide(keys).permute(0, 2, 3, 1).flatten(0, 1)), softcap)
        if seen is not None:
            logits = torch.where(seen.repeat_interleave(groups, 0)[:, None], logits, -torch.inf)
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top).exp_()
    after = WindowState(keys[:, :window], values[:, :window], sink_keys, sink_values, state.count + 1)
    return top, weights, wide(values).transpose(1, 2).flatten(0, 1), after


def settled(state: WindowState, reach: int | None) -> bool:
    """Whether every slot of the state is filled and seen, so that a step needs no mask.

    Asked only where the answer costs nothing: an accelerator would have to be waited for, a compiler would have to
    break its graph.
    """
    if reach is not None or state.count.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return bool((state.count >= state.keys.shape[1] + state.sink_keys.shape[1]).all())


def keep_rows(write: torch.Tensor, new, old):
    """Rows of state `new` where `write` [B], of `old` elsewhere."""
    pairs = zip(new, old, strict=True)
    return type(new)(*(torch.where(write.view(-1, *([1] * (n.dim() - 1))), n, o.to(n.dtype)) for n, o in pairs))
