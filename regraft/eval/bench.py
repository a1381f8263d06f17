"""Speed and cache by context, teacher and student interleaved in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from regraft.eval.results import Speed


def cache_bytes(cache: Any) -> int:
    """Bytes of all memory that a cache keeps alive: keys, values, and states; shared storage counts once."""
    seen: dict[int, int] = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            for tensor in _tensors(value):
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(seen.values())


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        # the scalar counters that transformers keeps in every layer are no cache
        if value.dim() > 0:
            yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


# seconds of prefill at one context after which its further rounds are left out: at 8k one round takes a minute
_PREFILL_SECONDS = 20.0


@torch.no_grad()
def bench(
    models: Mapping[str, Any], contexts: Iterable[int], *, repeats: int = 3, new_tokens: int = 16, seed: int = 0
) -> list[Speed]:
    """Prefill and decode speed and live cache bytes of every model at every context length.

    Per context, after an untimed short round, `repeats` rounds in which the models take turns: a prefill of random ids
    in one call, then `new_tokens` single steps on its cache. Once prefill has taken 20 s, later rounds decode only, on
    the cache that is there; `prefill_repeats` says how many there were. The cache is measured after the first decoded
    tokens. Medians; spread is (max - min) / median.
    """
    rows = []
    generator = torch.Generator().manual_seed(seed)
    for context in contexts:
        vocab = min(model.config.vocab_size for model in models.values())
        ids = torch.randint(3, vocab, (1, context), generator=generator)
        prefill: dict[str, list[float]] = {name: [] for name in models}
        decode: dict[str, list[float]] = {name: [] for name in models}
        size: dict[str, int] = {}
        last: dict[str, Any] = {}
        for model in models.values():
            _decode(model, _prefill(model, ids[:, :128])[0], 2)
        began = time.perf_counter()
        for turn in range(repeats):
            again = turn == 0 or time.perf_counter() - began < _PREFILL_SECONDS
            for name, model in models.items():
                if again:
                    last.pop(name, None)  # never two caches of one model
                    last[name], seconds = _prefill(model, ids)
                    prefill[name].append(context / seconds)
            for name, model in models.items():
                last[name], seconds = _decode(model, last[name], new_tokens)
                decode[name].append(new_tokens / seconds)
                # with the room that was made for further tokens
                size.setdefault(name, cache_bytes(last[name].cache))
        for name, model in models.items():
            rows.append(
                Speed(
                    name=name,
                    context=context,
                    prefill_tok_s=statistics.median(prefill[name]),
                    decode_tok_s=statistics.median(decode[name]),
                    prefill_spread=_spread(prefill[name]),
                    decode_spread=_spread(decode[name]),
                    cache_bytes=size[name],
                    cache_dtype=str(model.dtype).removeprefix("torch."),
                    repeats=repeats,
                    prefill_repeats=len(prefill[name]),
                )
            )
    return rows


def _prefill(model: Any, ids: torch.Tensor) -> tuple[Any, float]:
    """The model's output on `ids`, and the seconds it took."""
    ids = ids.to(model.device)
    began = _now(model)
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return out, _now(model) - began


def _decode(model: Any, out: Any, steps: int) -> tuple[Any, float]:
    """The output after `steps` greedy tokens more, and the seconds they took."""
    began = _now(model)
    for _ in range(steps):
        token = out.logits[:, -1:].argmax(-1)
        out = model(input_ids=token, cache=out.cache, use_cache=True)
    return out, _now(model) - began


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)
