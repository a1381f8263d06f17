"""Recall probes: can the model still find what stood far back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from regraft.data.synthetic import TASKS, RecallItem
from regraft.eval.results import Recall, mean_and_stderr


@torch.no_grad()
def score(model: Any, item: RecallItem) -> list[bool]:
    """For each answer of the item, whether the model's argmax is right at all of its tokens (teacher-forced)."""
    ids = item.ids[None].to(model.device)
    before = torch.tensor([p - 1 for answer in item.answers for p in answer], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=before).logits[0]
    right = (logits.argmax(-1) == ids[0, before + 1]).tolist()
    found, at = [], 0
    for answer in item.answers:
        found.append(all(right[at : at + len(answer)]))
        at += len(answer)
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

    `samples` items at the shortest length, fewer at longer ones so that each length costs about the same (but at least
    four). `haystack`: token ids of held-out text. Standard errors are over items.
    """
    rows = []
    lengths = list(lengths)
    for length in lengths:
        count = min(samples, max(4, samples * min(lengths) // length))
        for task in tasks:
            items = [TASKS[task](tokenizer, haystack, length, seed * 1000 + i) for i in range(count)]
            for name, model in models.items():
                found = [score(model, item) for item in items]
                mean, stderr = mean_and_stderr([sum(f) / len(f) for f in found])
                rows.append(Recall(name, task, length, mean, stderr, sum(len(f) for f in found)))
    return rows
