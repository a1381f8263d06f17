"""Figures of a run as SVG text: softmax and teacher in red, converted and student in blue, baselines in grey.

The same input gives the same bytes. Text stays text. Everything that is neither a colour with a meaning nor background
has the colour INK, so that a page can replace it by its own; the background is the element with the id "background".
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SOFTMAX, CONVERTED, BASELINE, INK = "#c44e52", "#4c72b0", "#8c8c8c", "#1c1c1e"

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "regraft",
    "text.parse_math": False,  # names are shown as they are, dollar signs included
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    **{
        key: INK
        for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    },
}


def _styled(draw: Callable[..., Any]) -> Callable[..., str]:
    """A function that returns a matplotlib figure, as one that returns SVG text, in our style and nobody else's."""

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> str:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            figure = draw(*args, **kwargs)
            figure.patch.set_gid("background")
            out = io.StringIO()
            # no date, no version: the same figure is the same file
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        return text[text.index("<svg") :]

    return drawn


def standalone(svg: str) -> str:
    """The text of an .svg file."""
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg


def _plot(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    # no pyplot: it would keep every figure and choose a backend for the whole process
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _colour(name: str) -> str:
    if name == "teacher":
        return SOFTMAX
    return BASELINE if name.endswith("baseline") else CONVERTED


def _legend(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Above the axes, never on the data."""
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))


def _contexts(axis: Any, lengths: Sequence[int]) -> None:
    """A logarithmic axis of context lengths whose ticks are the lengths measured."""
    ticks = sorted(set(lengths))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{t // 1024}k" if t % 1024 == 0 else str(t) for t in ticks])
    axis.minorticks_off()
    axis.margins(x=0.08)
    axis.set_xlabel("context, tokens")


def _amount(value: float, _: Any = None) -> str:
    """Tokens as 500, 20k, 1.5M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


@_styled
def layer_bars(selection: Mapping[str, Any]) -> Any:
    """Score of every layer (a `layers.json`): converted layers blue, kept ones red; below, the choice as a strip."""
    from matplotlib.patches import Patch

    scores = {int(k): float(v) for k, v in selection["scores"].items()}
    converted, depth = set(selection["converted"]), selection["num_layers"]
    colours = [CONVERTED if i in converted else SOFTMAX for i in range(depth)]
    figure, (axis,) = _plot(8.5, 2.9)
    # a layer that the mixer does not fit has no score; it is kept
    axis.bar(range(depth), [scores.get(i, 0.0) for i in range(depth)], color=colours, width=0.8)
    top = max(scores.values(), default=1.0) or 1.0
    # low scores make bars that are hardly there: the strip shows their colour too
    axis.bar(range(depth), [0.05 * top] * depth, bottom=-0.09 * top, color=colours, width=0.8)
    axis.set_ylim(-0.11 * top, 1.06 * top)
    axis.set_xlabel("layer")
    axis.set_ylabel(selection["meaning"].replace(" of the ", "\nof the "))
    axis.set_xticks(range(0, depth, max(1, math.ceil(depth / 16))))
    axis.set_xlim(-0.7, depth - 0.3)
    handles = [Patch(color=CONVERTED), Patch(color=SOFTMAX)]
    labels = [
        f"converted to {selection['mixer']} ({len(converted)})",
        f"softmax kept ({depth - len(converted)})",
    ]
    _legend(figure, handles, labels)
    return figure


@_styled
def training(stages: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """Loss against tokens, one panel a stage ({name: rows of metrics.jsonl}): stages have losses of different kinds."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure, axes = _plot(max(4.5 * len(stages), 5.5), 2.8, len(stages))
    for axis, (name, rows) in zip(axes, stages.items(), strict=True):
        tokens, losses = [r["tokens"] for r in rows], [r["loss"] for r in rows]
        axis.plot(tokens, losses, color=CONVERTED, alpha=0.35, linewidth=0.9)
        axis.plot(tokens, _smooth(losses), color=CONVERTED, linewidth=1.8)
        axis.set_title(name)
        axis.set_xlabel("tokens")
        axis.set_ylabel("loss")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(FuncFormatter(_amount))
        axis.grid(axis="y")
    return figure


@_styled
def while_training(points: Sequence[tuple[int, Mapping[str, float]]], tasks: Sequence[str]) -> Any:
    """KL, and beside it recall by task, against the tokens trained on."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure, axes = _plot(9.0 if tasks else 5.5, 2.8, 2 if tasks else 1)
    tokens = [at for at, _ in points]
    axes[0].plot(tokens, [found["kl"] for _, found in points], "o-", color=CONVERTED, markersize=4)
    axes[0].set_ylabel("KL to the teacher")
    for task, marker in zip(tasks, "os^Dvp", strict=False):
        axes[1].plot(tokens, [found[task] for _, found in points], marker=marker, markersize=4, label=task)
        axes[1].set_ylabel("share recalled")
        axes[1].legend()
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.set_xlabel("tokens")
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(FuncFormatter(_amount))
        axis.grid(axis="y")
    return figure


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean over about a tenth of the run (2 to 20 steps), unbiased at the start."""
    share = 1 - 1 / min(max(len(values) / 10, 2), 20)
    smoothed, at, weight = [], 0.0, 0.0
    for value in values:
        at, weight = share * at + (1 - share) * value, share * weight + (1 - share)
        smoothed.append(at / weight)
    return smoothed


@_styled
def quality_against_cache(points: Sequence[tuple[str, float, float]]) -> Any:
    """Labelled dots (name, cache bytes, KL): down and to the left is better; the teacher has KL 0."""
    figure, (axis,) = _plot(7.0, 3.2 + 0.2 * max(0, len(points) - 8))
    right = max(size for _, size, _ in points) / 2**20 or 1.0
    heights, top = _label_heights(points, 0.6 * right * 2**20)
    axis.set_xlim(0, 1.12 * right)
    axis.set_ylim(-0.06 * top, top)
    for (name, size, kl), height in zip(points, heights, strict=True):
        x = size / 2**20
        # to the right of the dot, in the right part of the figure to the left
        flipped = x > 0.6 * right
        axis.scatter([x], [kl], color=_colour(name), s=45, zorder=3 if name.endswith("baseline") else 4)
        axis.annotate(
            name,
            (x, kl),
            xytext=(x + (-0.03 if flipped else 0.03) * right, height),
            ha="right" if flipped else "left",
            va="center",
            fontsize=9,
            arrowprops={
                "arrowstyle": "-",
                "color": INK,
                "alpha": 0.4,
                "linewidth": 0.7,
                "shrinkB": 4,
                "relpos": (1.0 if flipped else 0.0, 0.5),
            },
        )
    axis.set_xlabel("decode cache, MiB (left is smaller)")
    axis.set_ylabel("KL to the teacher, nats a token")
    axis.grid()
    return figure


def _label_heights(points: Sequence[tuple[str, float, float]], middle: float) -> tuple[list[float], float]:
    """Heights of the labels, each clear of those below it on its side of `middle`, and the top of the axis."""
    top = 1.12 * (max(kl for _, _, kl in points) or 1.0)
    while True:
        step = min(0.085, 0.9 / len(points)) * top
        heights, below = [0.0] * len(points), {False: -math.inf, True: -math.inf}
        for i in sorted(range(len(points)), key=lambda i: points[i][2]):
            side = points[i][1] > middle
            heights[i] = below[side] = max(points[i][2], below[side] + step)
        needed = max(heights) + 0.5 * step
        if needed <= top:
            return heights, top
        top = 1.05 * max(needed, top)


@_styled
def speed(rows: Sequence[Any]) -> Any:
    """Decode speed, prefill speed and cache against context, teacher and student (Speed rows)."""
    figure, axes = _plot(10.5, 3.0, 3)
    kinds: tuple[tuple[str, Callable[[Any], float]], ...] = (
        ("decode, tokens a second", lambda r: r.decode_tok_s),
        ("prefill, tokens a second", lambda r: r.prefill_tok_s),
        ("cache, MiB", lambda r: r.cache_bytes / 2**20),
    )
    for axis, (title, read) in zip(axes, kinds, strict=True):
        for name in dict.fromkeys(r.name for r in rows):
            own = sorted((r for r in rows if r.name == name), key=lambda r: r.context)
            axis.plot([r.context for r in own], [read(r) for r in own], marker="o", color=_colour(name), label=name)
        _contexts(axis, [r.context for r in rows])
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.grid(axis="y")
    _legend(figure, *axes[0].get_legend_handles_labels())
    return figure


@_styled
def recall(rows: Sequence[Any]) -> Any:
    """Recall by context length, one panel a task, with standard errors (Recall rows)."""
    tasks = list(dict.fromkeys(r.task for r in rows))
    figure, axes = _plot(max(3.5 * len(tasks), 6.0), 3.0, len(tasks))
    for axis, task in zip(axes, tasks, strict=True):
        for name in dict.fromkeys(r.name for r in rows):
            own = sorted((r for r in rows if r.name == name and r.task == task), key=lambda r: r.length)
            axis.errorbar(
                [r.length for r in own],
                [r.accuracy for r in own],
                yerr=[r.stderr for r in own],
                color=_colour(name),
                linestyle="--" if name.endswith("baseline") else "-",
                marker="o",
                markersize=4,
                capsize=2,
                label=name,
            )
        _contexts(axis, [r.length for r in rows])
        axis.set_ylim(-0.03, 1.05)
        axis.set_title(task)
        axis.grid(axis="y")
    axes[0].set_ylabel("share recalled")
    _legend(figure, *axes[0].get_legend_handles_labels())
    return figure


@_styled
def tasks(rows: Sequence[tuple[str, tuple[float, float], tuple[float, float]]]) -> Any:
    """lm-eval scores with standard errors, teacher and student on one row a task (rows of `task_rows`)."""
    figure, (axis,) = _plot(8.0, 1.2 + 0.42 * len(rows))
    handles = []
    for name, column, shift in (("teacher", 1, 0.12), ("student", 2, -0.12)):
        drawn = axis.errorbar(
            [row[column][0] for row in rows],
            [len(rows) - 1 - number + shift for number in range(len(rows))],
            xerr=[row[column][1] for row in rows],
            fmt="o",
            markersize=5,
            color=_colour(name),
            capsize=2,
        )
        handles.append(drawn)
    axis.set_yticks(range(len(rows)), [row[0] for row in reversed(rows)])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_xlabel("score, with standard error")
    axis.grid(axis="x")
    _legend(figure, handles, ["teacher", "student"])
    return figure


# the metric shown of a task, the first that it has
_METRICS = ("acc_norm,none", "acc,none", "exact_match,strict-match", "exact_match,none", "f1,none")
_UNBOUNDED = ("word_perplexity,none", "perplexity,none", "bits_per_byte,none")


def task_rows(
    teacher: Mapping[str, Any], student: Mapping[str, Any], bounded: bool = False
) -> list[tuple[str, tuple[float, float], tuple[float, float]]]:
    """(task and metric, (score, stderr) of the teacher, the same of the student) from lm-eval's result blocks.

    `bounded`: only scores from 0 to 1, which fit one axis.
    """
    rows = []
    for task, found in student.items():
        for metric in _METRICS if bounded else _METRICS + _UNBOUNDED:
            if metric in found and metric in teacher.get(task, {}):
                error = metric.replace(",", "_stderr,")
                pair = [
                    (float(block[metric]), float(block[error]) if _number(block.get(error)) else 0.0)
                    for block in (teacher[task], found)
                ]
                rows.append((f"{task} {metric.split(',')[0]}", pair[0], pair[1]))
                break
    return rows


def _number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
