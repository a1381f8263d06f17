"""Selections side by side: do the selectors agree, and what does each choice cost the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from regraft.convert.graft import converted_layers, ungraft
from regraft.convert.layers import layer_strip
from regraft.select.registry import Selection


def rank_agreement(a: Selection, b: Selection) -> float:
    """Spearman correlation of two selections' scores over the layers both scored; ties share their mean rank."""
    layers = sorted(a.scores.keys() & b.scores.keys())
    x, y = (_ranks([s.scores[i] for i in layers]) for s in (a, b))
    x, y = x - x.mean(), y - y.mean()
    spread = (x.square().sum() * y.square().sum()).sqrt()
    return float((x * y).sum() / spread) if spread > 0 else 0.0


def _ranks(values: Sequence[float]) -> torch.Tensor:
    v = torch.tensor(values, dtype=torch.float64)
    below = (v[None] < v[:, None]).sum(1)
    equal = (v[None] == v[:, None]).sum(1)
    return below + (equal - 1) / 2.0


def student_of(selection: Selection, aligned: Any, teacher: Any) -> Any:
    """A copy of the aligned all-converted student with the kept layers of `selection` put back to the teacher's."""
    student = copy.deepcopy(aligned)
    return ungraft(student, [i for i in selection.kept if i in converted_layers(student)], teacher)


def render(selections: Sequence[Selection], quality: dict[str, dict[str, float]] | None = None) -> str:
    """Strips, cost, measured quality where given ({selector: {"kl": ..., ...}}), and rank agreement, as text."""
    width = max(len(s.by) for s in selections)
    lines = []
    for s in selections:
        cost = f"{s.tokens} tokens, {s.passes:.1f} passes, {s.seconds:.1f} s"
        measured = "".join(f"  {k} {v:.4f}" for k, v in (quality or {}).get(s.by, {}).items())
        lines.append(f"{s.by.ljust(width)}  {layer_strip(s.converted, s.num_layers)}  {cost}{measured}")
    lines.append("")
    lines.append("rank agreement (Spearman), and converted layers in common")
    for i, a in enumerate(selections):
        for b in selections[i + 1 :]:
            common = len(set(a.converted) & set(b.converted))
            lines.append(f"{a.by} ~ {b.by}: {rank_agreement(a, b):+.2f}, {common} of {len(a.converted)}")
    return "\n".join(lines)
