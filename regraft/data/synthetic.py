"""Recall tasks in natural text: what a short-context perplexity cannot show.

Every generator returns token ids of an exact length and the answers in it; the same seed gives the same item. Scoring
is teacher-forced: a model recalls an answer if the argmax before each of the answer's tokens is that token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_KEYS = [
    "apple",
    "bridge",
    "candle",
    "desert",
    "engine",
    "forest",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kitchen",
    "ladder",
    "mirror",
    "needle",
    "ocean",
    "pencil",
    "quarter",
    "river",
    "silver",
    "table",
    "umbrella",
    "village",
    "window",
    "yellow",
    "zebra",
    "anchor",
    "basket",
    "copper",
    "dragon",
    "elbow",
]


@dataclass(frozen=True)
class RecallItem:
    """`ids` [T]; each answer is the list of positions of its tokens (logits at p - 1 predict ids[p])."""

    ids: torch.Tensor
    answers: list[list[int]]


def copy_task(tokenizer: Any, haystack: Sequence[int], length: int, seed: int | str) -> RecallItem:
    """A passage, other text, the passage again: every token of the second copy but the first is an answer."""
    rng = random.Random(f"copy {length} {seed}")
    size = 2 * length // 5
    text = _slice(haystack, length - size, rng)
    passage = text[:size]
    begin = length - size
    return RecallItem(torch.tensor(text + passage), [[p] for p in range(begin + 1, length)])


def passkey_task(tokenizer: Any, haystack: Sequence[int], length: int, seed: int | str) -> RecallItem:
    """A five-digit pass key hidden at a random depth of other text, asked for at the end."""
    rng = random.Random(f"passkey {length} {seed}")
    key = "".join(rng.choices("0123456789", k=5))
    said = _encode(tokenizer, f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n")
    question = _encode(tokenizer, "\nWhat is the pass key? The pass key is")
    answer = _encode(tokenizer, f" {key}")
    room = length - len(said) - len(question) - len(answer)
    if room < 0:
        raise ValueError(f"a pass key needs {length - room} tokens, the length is {length}")
    text = _slice(haystack, room, rng)
    depth = rng.randint(0, room)
    ids = text[:depth] + said + text[depth:] + question + answer
    return RecallItem(torch.tensor(ids), [list(range(length - len(answer), length))])


def associative_task(tokenizer: Any, haystack: Sequence[int], length: int, seed: int | str) -> RecallItem:
    """Eight key-value pairs, other text, then four of the pairs again: the values there are the answers."""
    rng = random.Random(f"associative {length} {seed}")
    keys = rng.sample(_KEYS, 8)
    values = [str(rng.randint(10, 99)) for _ in keys]
    pairs = _encode(tokenizer, "\nValues:\n" + "".join(f"{k} = {v}\n" for k, v in zip(keys, values, strict=True)))
    tail: list[int] = _encode(tokenizer, "\nValues:\n")
    relative = []
    for i in rng.sample(range(8), 4):
        tail += _encode(tokenizer, f"{keys[i]} =")
        answer = _encode(tokenizer, f" {values[i]}")
        relative.append(range(len(tail), len(tail) + len(answer)))
        tail += answer + _encode(tokenizer, "\n")
    room = length - len(pairs) - len(tail)
    if room < 0:
        raise ValueError(f"associative recall needs {length - room} tokens, the length is {length}")
    ids = pairs + _slice(haystack, room, rng) + tail
    return RecallItem(torch.tensor(ids), [[p + length - len(tail) for p in answer] for answer in relative])


@dataclass(frozen=True)
class RecallTask:
    """A generator of items, and how many one-answer items one of its items is worth.

    Answers of one item are not independent (they share its text), so that is fewer than its answers.
    """

    make: Callable[[Any, Sequence[int], int, int | str], RecallItem]
    worth: int


TASKS = {
    "copy": RecallTask(copy_task, 4),
    "passkey": RecallTask(passkey_task, 1),
    "associative": RecallTask(associative_task, 2),
}


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _slice(haystack: Sequence[int], size: int, rng: random.Random) -> list[int]:
    if size > len(haystack):
        raise ValueError(f"the haystack has {len(haystack)} tokens, {size} are needed")
    start = rng.randint(0, len(haystack) - size)
    return list(haystack[start : start + size])
