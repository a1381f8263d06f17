"""Selectors: each gives the layers a score for the mixer that would replace them; the allocator is the same for all.

A lower score converts first. Rankings differ between target mixers, so a choice is made per target.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from regraft.convert.layers import layer_strip, ruler
from regraft.errors import UserError, suggest
from regraft.select.scores import align_scores, kl_scores, recall_scores, uniform_scores

SELECTION_FORMAT = 1


@dataclass(frozen=True)
class Calibration:
    """What selectors may look at. `rows` [N, T]: calibration ids; `student`: every candidate converted and aligned.

    `layer_error`: the alignment error that stage 1 left, if there was one; without it `align` measures it on `rows`.
    `tokenizer`: the teacher's.
    """

    teacher: Any
    student: Any
    tokenizer: Any
    rows: torch.Tensor
    layer_error: dict[int, float] | None = None


@dataclass(frozen=True)
class Selector:
    """One row of the table. `needs_data`: it looks at a converted student, so all candidates are converted first.

    `passes(layers)`: forward passes over the calibration text beyond stage 1, counted in whole models.
    """

    name: str
    title: str
    meaning: str
    needs_data: bool
    score: Callable[[Calibration | None, int, int], dict[int, float]]
    passes: Callable[[int], float]


SELECTORS: dict[str, Selector] = {
    selector.name: selector
    for selector in (
        Selector(
            "align",
            "alignment error left after stage 1 (free)",
            "relative error of the head outputs",
            True,
            align_scores,
            lambda layers: 0.0,
        ),
        Selector(
            "kl",
            "KL to the teacher with one layer converted at a time",
            "KL in nats per token",
            True,
            kl_scores,
            # layer l is computed again from l upwards: half of the depth on average, and the teacher once
            lambda layers: 1 + (layers + 1) / 2,
        ),
        Selector(
            "recall",
            "the same KL, half on text and half at the answers of recall items",
            "KL in nats per token, text plus answers",
            True,
            recall_scores,
            lambda layers: 1 + (layers + 1) / 2,
        ),
        Selector(
            "uniform",
            "softmax layers evenly spaced (no data)",
            "0 for converted, 1 for kept",
            False,
            uniform_scores,
            lambda layers: 0.0,
        ),
    )
}


@dataclass(frozen=True)
class Selection:
    """A choice of layers and what it cost. `scores`: lower converts first; ties go to the lower layer."""

    by: str
    mixer: str
    num_layers: int
    converted: list[int]
    kept: list[int]
    scores: dict[int, float]
    meaning: str
    tokens: int
    passes: float
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)
    format: int = SELECTION_FORMAT

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "scores": {str(k): v for k, v in sorted(self.scores.items())}}

    def save(self, path: Path) -> None:
        """Write `layers.json`, appearing by one rename."""
        staging = path.with_name(f".{path.name}.writing")
        staging.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        os.replace(staging, path)

    @classmethod
    def load(cls, path: Path) -> Selection:
        """Read what `save` wrote; UserError for anything else."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw["format"] > SELECTION_FORMAT:
                raise UserError(f"layers.json format {raw['format']} is newer than this regraft", where=str(path))
            raw["scores"] = {int(k): v for k, v in raw["scores"].items()}
            return cls(**raw)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"not a layers.json: {error}", where=str(path), fix="write it with: regraft select"
            ) from None

    def render(self) -> str:
        """Strip and cost as text."""
        return (
            f"layers  {ruler(self.num_layers)}\n"
            f"        {layer_strip(self.converted, self.num_layers)}   "
            f"S softmax {len(self.kept)} · L {self.mixer} {len(self.converted)}\n"
            f"by      {self.by}: {SELECTORS[self.by].title if self.by in SELECTORS else 'given'}\n"
            f"cost    {self.tokens} tokens, {self.passes:.1f} passes, {self.seconds:.1f} s beyond stage 1"
        )


def get_selector(name: str) -> Selector:
    """The selector called `name`; UserError with a suggestion if there is none."""
    if name not in SELECTORS:
        raise UserError(f"unknown selector '{name}'", where="layers.by", fix=suggest(name, [*SELECTORS, "list"]))
    return SELECTORS[name]


def select_layers(
    by: str,
    keep: int,
    num_layers: int,
    mixer: str,
    options: dict[str, Any] | None = None,
    calibration: Calibration | None = None,
    log: Callable[[str], None] = lambda message: None,
) -> Selection:
    """Keep `keep` of `num_layers` softmax layers and convert the others, lowest score first.

    UserError if `keep` leaves nothing to convert, or a selector that measures gets no calibration.
    """
    selector = get_selector(by)
    if not 0 <= keep < num_layers:
        raise UserError(
            f"keep {keep} of {num_layers} layers leaves nothing to convert",
            where="layers.keep",
            fix=f"0 to {num_layers - 1}",
        )
    if selector.needs_data and calibration is None:
        raise UserError(f"selector {by} needs a converted student", where="layers.by", fix="convert and align first")
    tokens = calibration.rows.numel() if selector.passes(num_layers) and calibration is not None else 0
    passes = selector.passes(num_layers)
    log(f"select {by}: {tokens} tokens, {passes:.1f} passes")
    began = time.perf_counter()
    scores = selector.score(calibration, num_layers, keep)
    order = sorted(scores, key=lambda i: (scores[i], i))
    if len(order) < num_layers - keep:
        raise UserError(
            f"{len(order)} layers can be converted to {mixer}, {num_layers - keep} are asked for",
            where="layers.keep",
            fix=f"keep at least {num_layers - len(order)}",
        )
    converted = sorted(order[: num_layers - keep])
    return Selection(
        by=by,
        mixer=mixer,
        options=options or {},
        num_layers=num_layers,
        converted=converted,
        kept=[i for i in range(num_layers) if i not in converted],
        scores=scores,
        meaning=selector.meaning,
        tokens=tokens,
        passes=passes,
        seconds=round(time.perf_counter() - began, 3),
    )


def given(converted: list[int], num_layers: int, mixer: str, options: dict[str, Any] | None = None) -> Selection:
    """The record of a choice that the user made."""
    kept = [i for i in range(num_layers) if i not in converted]
    scores = {i: float(i in kept) for i in range(num_layers)}
    return Selection("list", mixer, num_layers, converted, kept, scores, "given", 0, 0.0, 0.0, options or {})
