"""Figures of a run as SVG text: softmax and teacher in red, converted and student in blue, baselines in grey."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

SOFTMAX, CONVERTED, BASELINE = "#c44e52", "#4c72b0", "#8c8c8c"
_COLOURS = {"teacher": SOFTMAX, "student": CONVERTED}


def _plot(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "regraft",
            "font.family": "sans-serif",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
        }
    )
    figure, axes = pyplot.subplots(1, columns, figsize=(width, height), squeeze=False)
    return figure, list(axes[0])


def _svg(figure: Any) -> str:
    from matplotlib import pyplot

    figure.tight_layout()
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    pyplot.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _colour(name: str) -> str:
    return _COLOURS.get(name, BASELINE)


def layer_bars(selection: Mapping[str, Any]) -> str:
    """Score of every layer (a `layers.json`): converted layers blue, kept ones red."""
    from matplotlib.patches import Patch

    scores = {int(k): float(v) for k, v in selection["scores"].items()}
    converted = set(selection["converted"])
    figure, (axis,) = _plot(8.5, 2.8)
    layers = sorted(scores)
    axis.bar(
        layers, [scores[i] for i in layers], color=[CONVERTED if i in converted else SOFTMAX for i in layers], width=0.8
    )
    axis.set_xlabel("layer")
    axis.set_ylabel(selection["meaning"].replace(" of the ", "\nof the "))
    axis.set_xticks(range(0, selection["num_layers"], max(1, selection["num_layers"] // 15)))
    axis.margins(x=0.01)
    handles = [
        Patch(color=CONVERTED, label=f"converted to {selection['mixer']} ({len(converted)})"),
        Patch(color=SOFTMAX, label=f"softmax kept ({selection['num_layers'] - len(converted)})"),
    ]
    axis.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return _svg(figure)


def training(stages: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Loss against tokens, one panel a stage ({name: rows of metrics.jsonl}): stages have losses of different kinds."""
    figure, axes = _plot(4.2 * len(stages), 2.8, len(stages))
    for axis, (name, rows) in zip(axes, stages.items(), strict=True):
        tokens, losses = [r["tokens"] for r in rows], [r["loss"] for r in rows]
        axis.plot(tokens, losses, color=CONVERTED, alpha=0.35, linewidth=0.9)
        axis.plot(tokens, _smooth(losses), color=CONVERTED, linewidth=1.8)
        axis.set_title(name)
        axis.set_xlabel("tokens")
        axis.set_ylabel("loss")
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f}k")
    return _svg(figure)


def _smooth(values: Sequence[float], share: float = 0.9) -> list[float]:
    smoothed, at, weight = [], 0.0, 0.0
    for value in values:
        at, weight = share * at + (1 - share) * value, share * weight + (1 - share)
        smoothed.append(at / weight)
    return smoothed


def quality_against_cache(points: Sequence[tuple[str, float, float]]) -> str:
    """Labelled dots (name, cache bytes, KL): down and to the left is better; the teacher has KL 0."""
    figure, (axis,) = _plot(6.0, 3.4)
    for name, size, kl in points:
        axis.scatter([size / 2**20], [kl], color=_colour(name), s=45, zorder=3)
    span = max(kl for _, _, kl in points) or 1.0
    placed: list[tuple[float, float]] = []
    for name, size, kl in sorted(points, key=lambda p: p[2]):
        x, y = size / 2**20, kl
        while any(abs(x - px) < 1e-9 + 0.3 * x and abs(y - py) < 0.07 * span for px, py in placed):
            y += 0.07 * span
        placed.append((x, y))
        axis.annotate(name, (x, y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
    right = max(size for _, size, _ in points) / 2**20
    axis.set_xlim(0, right * 1.45)
    axis.set_ylim(-0.06 * span, span * 1.25)
    axis.set_xlabel("decode cache, MiB (left is smaller)")
    axis.set_ylabel("KL to the teacher, nats a token")
    axis.grid(alpha=0.25)
    return _svg(figure)


def speed(rows: Sequence[Any]) -> str:
    """Decode speed, prefill speed and cache against context, teacher and student (Speed rows)."""
    figure, axes = _plot(10.5, 2.9, 3)
    kinds = (
        ("decode, tokens a second", lambda r: r.decode_tok_s),
        ("prefill, tokens a second", lambda r: r.prefill_tok_s),
        ("cache, MiB", lambda r: r.cache_bytes / 2**20),
    )
    for axis, (title, read) in zip(axes, kinds, strict=True):
        for name in dict.fromkeys(r.name for r in rows):
            own = sorted((r for r in rows if r.name == name), key=lambda r: r.context)
            axis.plot([r.context for r in own], [read(r) for r in own], marker="o", color=_colour(name), label=name)
        axis.set_xscale("log", base=2)
        ticks = sorted({r.context for r in rows})
        axis.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
        axis.minorticks_off()
        axis.set_title(title)
        axis.set_xlabel("context")
        axis.set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    return _svg(figure)


def recall(rows: Sequence[Any]) -> str:
    """Recall by context length, one panel a task, with standard errors (Recall rows)."""
    tasks = list(dict.fromkeys(r.task for r in rows))
    figure, axes = _plot(3.5 * len(tasks), 2.9, len(tasks))
    styles = ("-", "-", "--", ":")
    for axis, task in zip(axes, tasks, strict=True):
        for number, name in enumerate(dict.fromkeys(r.name for r in rows)):
            own = sorted((r for r in rows if r.name == name and r.task == task), key=lambda r: r.length)
            axis.errorbar(
                [r.length for r in own],
                [r.accuracy for r in own],
                yerr=[r.stderr for r in own],
                color=_colour(name),
                linestyle=styles[min(number, 3)],
                marker="o",
                markersize=4,
                capsize=2,
                label=name,
            )
        ticks = sorted({r.length for r in rows})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(t) for t in ticks])
        axis.minorticks_off()
        axis.set_ylim(-0.03, 1.05)
        axis.set_title(task)
        axis.set_xlabel("context")
    axes[0].set_ylabel("recall")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="lower center", bbox_to_anchor=(0.5, -0.12), ncols=4, frameon=False
    )
    text = _svg_tight(figure)
    return text


def _svg_tight(figure: Any) -> str:
    from matplotlib import pyplot

    figure.tight_layout()
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True, bbox_inches="tight")
    pyplot.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def tasks(teacher: Mapping[str, Any], student: Mapping[str, Any]) -> str:
    """lm-eval scores with standard errors, teacher and student on one row a task."""
    rows = task_rows(teacher, student)
    figure, (axis,) = _plot(6.5, 0.6 + 0.45 * len(rows))
    for number, (_, base, found) in enumerate(reversed(rows)):
        for (value, error), name, shift in ((base, "teacher", 0.1), (found, "student", -0.1)):
            axis.errorbar([value], [number + shift], xerr=[error], fmt="o", color=_COLOURS[name], capsize=2)
    axis.set_yticks(range(len(rows)), [name for name, _, _ in reversed(rows)])
    axis.set_xlabel("score ± standard error (teacher red, student blue)")
    axis.grid(axis="x", alpha=0.25)
    return _svg(figure)


def task_rows(
    teacher: Mapping[str, Any], student: Mapping[str, Any]
) -> list[tuple[str, tuple[float, float], tuple[float, float]]]:
    """(task and metric, (score, stderr) of the teacher, the same of the student) from lm-eval's result blocks."""
    rows = []
    for task, found in student.items():
        for metric in ("acc_norm,none", "acc,none", "exact_match,strict-match", "perplexity,none"):
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
