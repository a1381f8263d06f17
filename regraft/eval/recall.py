"""Recall probes: can the model still find what stood far back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from regraft.data.synthetic import TASKS, RecallItem
from regraft.eval.results import Recall, mean_and_stderr

# tokens of a batch of items: a few short items at a time are a third faster than one by one
_BATCH_TOKENS = 2048


@torch.no_grad()
def score(model: Any, items: Sequence[RecallItem]) -> list[list[bool]]:
    """For each answer of each item, whether the model's argmax is right at all of its tokens (teacher-forced).

    The items have one length.
    """
    found = []
    size = max(1, _BATCH_TOKENS // items[0].ids.numel())
    for start in range(0, len(items), size):
        part = items[start : start + size]
        ids = torch.stack([item.ids for item in part]).to(model.device)
        # the answers of one task stand at nearly the same places in all items
        before = sorted({p - 1 for item in part for answer in item.answers for p in answer})
        kept = torch.tensor(before, device=model.device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits
        right = (logits.argmax(-1) == ids[:, kept + 1]).tolist()
        at = {p + 1: i for i, p in enumerate(before)}
        for row, item in zip(right, part, strict=True):
            found.append([all(row[at[p]] for p in answer) for answer in item.answers])
    return found


def recall(
    models: Mapping[str, Any],
    tokenizer: Any,
    haystack: Sequence[int],
    lengths: Iterable[int],
    samples: int,
    *,
    tasks: Iterable[str] = tuple(TASKS),
    seed: int = 0,
) -> list[Recall]:
    """Accuracy of every model on every task and length: the same items for all models.

    `samples` items at the shortest length of a task with one answer an item; fewer of one with more answers, and fewer
    at longer lengths so that each costs about the same (but at least two). `haystack`: token ids of held-out text.
    Standard errors are over items.
    """
    rows = []
    lengths = list(lengths)
    for length in lengths:
        for name in tasks:
            task = TASKS[name]
            count = max(2, 4 // task.worth, samples * min(lengths) // (length * task.worth))
            items = [task.make(tokenizer, haystack, length, seed * 1000 + i) for i in range(count)]
            for label, model in models.items():
                found = score(model, items)
                mean, stderr = mean_and_stderr([sum(f) / len(f) for f in found])
                rows.append(Recall(label, name, length, mean, stderr, sum(len(f) for f in found)))
    return rows
