"""The parts of a report about one run: the verdict in words, and every table and figure with its note."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from regraft.eval import figures
from regraft.eval.results import Quality, Results

WINDOW, INTERLEAVE = "sliding_window baseline", "interleave baseline"


@dataclass(frozen=True)
class Section:
    """A part of the page: a table, a figure, or both, with the note that belongs under them."""

    title: str
    name: str
    head: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    svg: str = ""
    note: str = ""


def verdict(results: Results) -> str:
    """What was kept and lost, in plain sentences; says so where a baseline is better."""
    sentences = []
    quality = first_protocol(results)
    student = quality.get("student")
    if student is not None:
        sentences.append(
            f"Perplexity {student.ppl_ratio:.3f} x the teacher's, KL {student.kl:.4f} nats a token, "
            f"same top token in {student.top1:.1%} of {student.tokens} predictions."
        )
        sentences += [
            f"The KL is {_against(student, quality[name])} that of {told} ({quality[name].kl:.4f})."
            for name, told in (
                (WINDOW, "an untrained sliding window on the same layers"),
                (INTERLEAVE, "the same window on evenly spaced layers"),
            )
            if name in quality
        ]
    length, recalled = mean_recall(results)
    if "student" in recalled:
        sentence = f"Recall at {length} tokens {recalled['student']:.1%}"
        sentence += f", the teacher's {recalled['teacher']:.1%}" if "teacher" in recalled else ""
        if WINDOW in recalled:
            better = recalled[WINDOW] > recalled["student"]
            sentence += f", the untrained window's {recalled[WINDOW]:.1%}{', which is BETTER' if better else ''}"
        sentences.append(sentence + ".")
    speed = at_longest(results)
    if speed is not None:
        context, cache, faster = speed
        sentences.append(
            f"At {context} tokens of context its cache is {cache:.1%} of the teacher's and "
            f"it decodes {faster:.2f} x as fast."
        )
    return " ".join(sentences) or "Nothing was measured."


def _against(student: Quality, base: Quality) -> str:
    """Lower, or not, or too close to tell: within the standard error of the difference."""
    if abs(student.kl - base.kl) <= math.hypot(student.kl_stderr, base.kl_stderr):
        return "NOT clearly different from"
    return "lower than" if student.kl < base.kl else "NOT lower than"


def first_protocol(results: Results) -> dict[str, Quality]:
    """Rows of the first protocol by model name."""
    return {q.name: q for q in results.quality if q.protocol == results.quality[0].protocol}


def mean_recall(results: Results) -> tuple[int, dict[str, float]]:
    """The shortest length, and the mean over tasks there by model name."""
    if not results.recall:
        return 0, {}
    shortest = min(r.length for r in results.recall)
    found: dict[str, list[float]] = {}
    for r in results.recall:
        if r.length == shortest:
            found.setdefault(r.name, []).append(r.accuracy)
    return shortest, {name: math.fsum(values) / len(values) for name, values in found.items()}


def at_longest(results: Results) -> tuple[int, float, float] | None:
    """(context, cache share, decode speed ratio) of the student at the longest context benchmarked."""
    if not results.speed:
        return None
    longest = max(r.context for r in results.speed)
    pair = {r.name: r for r in results.speed if r.context == longest}
    if not {"teacher", "student"} <= pair.keys():
        return None
    student, teacher = pair["student"], pair["teacher"]
    return longest, student.cache_bytes / teacher.cache_bytes, student.decode_tok_s / teacher.decode_tok_s


def sections(
    results: Results, selection: Any, stages: dict[str, list[dict[str, Any]]], missing: list[str]
) -> list[Section]:
    """All sections that there is something to show for; what was not measured is added to `missing`.

    `selection`: a layers.json, or None. `stages`: rows of metrics by title.
    """
    return [
        *_quality(results, missing),
        *_layers(selection),
        *_training(stages),
        *_while_training(stages, results),
        *_recall(results, missing),
        *_speed(results, missing),
        *_tasks(results, missing),
    ]


def _quality(results: Results, missing: list[str]) -> list[Section]:
    if not results.quality:
        missing.append("Not measured: KL and perplexity.")
        return []
    protocol = results.protocol
    table = Section(
        "Quality",
        "quality",
        ["model", "protocol", "KL", "top-1", "perplexity", "ratio", "windows"],
        [
            [
                q.name,
                q.protocol,
                f"{q.kl:.4f} ± {q.kl_stderr:.4f}",
                f"{q.top1:.3f}",
                f"{q.ppl:.2f}",
                f"{q.ppl_ratio:.3f}",
                f"{q.windows} x {q.seq_len}",
            ]
            for q in results.quality
        ],
        note=f"Text: {protocol.get('text', 'unknown')}; all positions, BOS: {protocol.get('bos', 'unknown')}, "
        f"{protocol.get('dtype', 'unknown dtype')}. KL in nats a token, with standard error over windows. "
        f"Baselines: {protocol.get('baselines', 'none')}, on the same layers and on evenly spaced ones.",
    )
    points = frontier(results)
    if len(points) < 2:
        return [table]
    figure = Section(
        "Quality against cache",
        "frontier",
        svg=figures.quality_against_cache(points),
        note=f"KL on protocol {results.quality[0].protocol}; cache at the longest context benchmarked. "
        "The baselines' cache is the student's without its far state.",
    )
    return [table, figure]


def frontier(results: Results) -> list[tuple[str, float, float]]:
    """(name, cache bytes, KL) of teacher, student and baselines; empty without speed rows of both."""
    if at_longest(results) is None or not results.quality:
        return []
    longest = max(r.context for r in results.speed)
    size = {r.name: float(r.cache_bytes) for r in results.speed if r.context == longest}
    far = sum(entry.get("far_state_bytes", 0) for entry in results.layers.get("mixers", {}).values())
    return [(q.name, size.get(q.name, size["student"] - far), q.kl) for q in first_protocol(results).values()]


def _layers(selection: Any) -> list[Section]:
    # a choice without a measurement has no scores worth a figure
    if selection is None or set(selection["scores"].values()) <= {0.0, 1.0}:
        return []
    return [
        Section(
            "Choice of layers",
            "layers",
            svg=figures.layer_bars(selection),
            note=f"By {selection['by']}: {selection['meaning']}; the lowest are converted. "
            + (
                f"Cost beyond stage 1: {selection['tokens']} tokens, {selection['passes']:.1f} passes, "
                f"{selection['seconds']:.1f} s."
                if selection["tokens"]
                else "This cost nothing beyond stage 1."
            ),
        )
    ]


def _training(stages: dict[str, list[dict[str, Any]]]) -> list[Section]:
    if not stages:
        return []
    head = ["stage", "steps", "tokens", "first loss", "last loss", "seconds"]
    rows = []
    for title, metrics in stages.items():
        few = max(1, len(metrics) // 10)
        first, last = (math.fsum(r["loss"] for r in part) / few for part in (metrics[:few], metrics[-few:]))
        seconds = math.fsum(r.get("seconds", 0.0) for r in metrics)
        tokens, steps = metrics[-1]["tokens"], str(metrics[-1]["step"])
        rows.append([title, steps, f"{tokens:,}", f"{first:.4f}", f"{last:.4f}", f"{seconds:.0f}"])
    note = (
        "First and last loss: means over a tenth of the steps. One panel a stage, since each has a loss of its own kind"
    )
    return [Section("Training", "training", head, rows, figures.training(stages), f"{note}; thick line smoothed.")]


def _while_training(stages: dict[str, list[dict[str, Any]]], results: Results) -> list[Section]:
    """What `eval_every` measured, over the tokens of all stages."""
    points: list[tuple[str, int, dict[str, float]]] = []
    trained = 0
    for title, metrics in stages.items():
        points += [(title, trained, metrics[0]["before"])] if "before" in metrics[0] else []
        points += [(title, trained + row["tokens"], row["heldout"]) for row in metrics if "heldout" in row]
        trained += metrics[-1]["tokens"]
    if not points:
        return []
    tasks = [key for key in points[0][2] if key not in ("kl", "top1", "ppl_ratio")]
    head = ["stage", "tokens", "KL", "perplexity ratio", "top-1", *tasks]
    rows = [
        [
            title,
            f"{tokens:,}",
            f"{found['kl']:.4f}",
            f"{found['ppl_ratio']:.3f}",
            f"{found['top1']:.3f}",
            *(f"{found[task]:.3f}" for task in tasks),
        ]
        for title, tokens, found in points
    ]
    length = min((r.length for r in results.recall), default=None)
    note = "On fewer windows than the table of quality. A new stage starts from the model that the one before wrote"
    note += f"; recall at {length} tokens." if tasks and length else "."
    figure = figures.while_training([(tokens, found) for _, tokens, found in points], tasks)
    return [Section("Quality against tokens", "tokens", head, rows, figure, note)]


def _recall(results: Results, missing: list[str]) -> list[Section]:
    if not results.recall:
        missing.append("Not measured: recall.")
        return []
    lengths = sorted({r.length for r in results.recall})
    cells = {(r.task, r.name, r.length): f"{r.accuracy:.3f} ± {r.stderr:.3f}" for r in results.recall}
    rows = [
        [name, task, *(cells.get((task, name, length), "") for length in lengths)]
        for task in dict.fromkeys(r.task for r in results.recall)
        for name in dict.fromkeys(r.name for r in results.recall)
    ]
    told = (
        f"{length}: {', '.join(dict.fromkeys(str(r.n) for r in results.recall if r.length == length))}"
        for length in lengths
    )
    return [
        Section(
            "Recall",
            "recall",
            ["model", "task", *(f"at {length}" for length in lengths)],
            rows,
            figures.recall(results.recall),
            "Share of answers recalled (argmax, teacher-forced) with standard error over items, the same items for "
            f"all models. Answers scored, by length and task: {'; '.join(told)}.",
        )
    ]


def _speed(results: Results, missing: list[str]) -> list[Section]:
    if not results.speed:
        missing.append("Not measured: speed and cache.")
        return []
    machine = results.env.get("machine", {})
    device = machine.get("device", "an unknown device")
    where = machine.get("processor") if device == "cpu" else device
    return [
        Section(
            "Cache and speed",
            "speed",
            ["model", "context", "cache, MiB", "prefill, tokens/s", "decode, tokens/s", "rounds"],
            [
                [
                    r.name,
                    str(r.context),
                    f"{r.cache_bytes / 2**20:.1f} ({r.cache_dtype})",
                    f"{r.prefill_tok_s:.0f} (spread {r.prefill_spread:.0%})",
                    f"{r.decode_tok_s:.1f} (spread {r.decode_spread:.0%})",
                    f"{r.prefill_repeats} + {r.repeats}",
                ]
                for r in results.speed
            ],
            figures.speed(results.speed) if len({r.context for r in results.speed}) > 1 else "",
            f"On {where}, threads: {machine.get('torch_threads', 'unknown')}, load at the end: "
            f"{machine.get('load_average', 'unknown')}. The models take turns in one process; medians; live cache "
            "bytes; batch 1.",
        )
    ]


def _tasks(results: Results, missing: list[str]) -> list[Section]:
    teacher, student = (results.tasks.get(name, {}) for name in ("teacher", "student"))
    found = figures.task_rows(teacher, student)
    if not found:
        missing.append("Not measured: benchmarks of lm-eval (`--tasks`).")
        return []
    told = results.protocol.get("lm_eval", {})
    drawn = figures.task_rows(teacher, student, bounded=True)
    return [
        Section(
            "Benchmarks (lm-eval)",
            "tasks",
            ["task", "teacher", "student", "difference"],
            [[name, f"{a:.3f} ± {ae:.3f}", f"{b:.3f} ± {be:.3f}", f"{b - a:+.3f}"] for name, (a, ae), (b, be) in found],
            figures.tasks(drawn) if drawn else "",
            f"With standard errors. Limit: {told.get('limit') or 'none'}; "
            f"rows: {', '.join(f'{task} {n}' for task, n in told.get('samples', {}).items()) or 'unknown'}; "
            f"prefix token {told.get('prefix_token', 'unknown')}.",
        )
    ]


def verified_text(verify: Any) -> str:
    """One sentence about a verify.json (None: nothing)."""
    if verify is None:
        return ""
    checks = verify["checks"]
    failed = [c for c in checks if not c["passed"]]
    if not failed:
        return f"All {len(checks)} checks of `regraft verify` passed."
    names = ", ".join(sorted({c["name"] for c in failed}))
    return f"{len(failed)} of {len(checks)} checks of `regraft verify` FAILED: {names}."
