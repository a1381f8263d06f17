"""One page about a run: verdict, layers, quality, recall, cache and speed, samples, recipe, environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regraft.convert.layers import layer_strip, ruler
from regraft.errors import UserError
from regraft.eval import figures
from regraft.eval.environment import render as render_env
from regraft.eval.results import Results


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write report.html (self-contained) and report.md with figures/ for one or several run folders.

    They go into `out`, or into the run folder if there is one. UserError for a folder without results.
    """
    import jinja2

    folders = [Path(f) for f in folders]
    if out is None and len(folders) > 1:
        raise UserError("several runs need a folder for their report", fix="give one with -o")
    runs = [_read(folder) for folder in folders]
    target = Path(out) if out is not None else folders[0]
    target.mkdir(parents=True, exist_ok=True)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    title = runs[0]["title"] if len(runs) == 1 else f"{len(runs)} conversions side by side"
    page = environment.get_template("report.html").render(title=title, runs=runs)
    _write(target / "report.html", page)
    _write(target / "report.md", _markdown(title, runs, target))
    return target / "report.html"


def _write(path: Path, text: str) -> None:
    staging = path.with_name(f".{path.name}.writing")
    staging.write_text(text, encoding="utf-8")
    os.replace(staging, path)


def _read(folder: Path) -> dict[str, Any]:
    """Everything that the page shows of one run; parts that are not there are named in `missing`."""
    results_path = folder / "results.json"
    if not results_path.is_file():
        raise UserError(
            "no results.json in this folder", where=str(folder), fix="give a folder of `regraft run` or `eval`"
        )
    results = Results.load(results_path)
    missing: list[str] = []
    selection = _json(folder / "layers.json", missing, "the choice of layers")
    verify = _json(folder / "verify.json", missing, "the verification")
    recipe = folder / "recipe.yaml"
    stages = {
        path.stem.removeprefix("metrics-"): [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted(folder.glob("metrics-*.jsonl"))
    }
    depth, converted = results.layers.get("num_layers", 0), results.layers.get("converted", [])
    shown = []
    if selection is not None and selection["by"] != "list":
        shown.append(
            {
                "title": "Choice of layers",
                "name": "layers",
                "svg": figures.layer_bars(selection),
                "note": f"By {selection['by']}: {selection['meaning']}, lower converts first. "
                f"Cost beyond stage 1: {selection['tokens']} tokens, {selection['passes']:.1f} passes, "
                f"{selection['seconds']:.1f} s.",
            }
        )
    if stages:
        shown.append(
            {
                "title": "Training",
                "name": "training",
                "svg": figures.training(stages),
                "note": "One panel a stage, since each has its own kind of loss; thick line smoothed.",
            }
        )
    points = _frontier(results)
    if len(points) > 1:
        shown.append(
            {
                "title": "Quality against cache",
                "name": "frontier",
                "svg": figures.quality_against_cache(points),
                "note": f"KL on protocol {results.quality[0].protocol}; cache at the longest context benchmarked. "
                "Baselines are untrained; their cache is that of a window without far state.",
            }
        )
    return {
        "name": results.model,
        "title": f"{results.model}: {results.teacher} with {len(converted)} of {depth} attention layers replaced",
        "verdict": verdict(results),
        "strip": layer_strip(converted, depth) if depth else "",
        "ruler": ruler(depth) if depth else "",
        "chosen": "" if selection is None else f"Chosen by {selection['by']}.",
        "tables": _tables(results),
        "figures": shown,
        "samples": results.samples,
        "verify": _verified(verify),
        "final": "final" if (folder / "final").is_dir() else "THE FOLDER",
        "recipe": recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        "env": render_env(results.env) if results.env else "",
        "missing": missing,
        "results": results,
    }


def _json(path: Path, missing: list[str], what: str) -> Any:
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    missing.append(f"Not shown, since {path.name} is not there: {what}.")
    return None


def _verified(verify: Any) -> str:
    if verify is None:
        return ""
    checks = verify["checks"]
    failed = [c for c in checks if not c["passed"]]
    if not failed:
        return f"All {len(checks)} checks of `regraft verify` passed."
    names = ", ".join(sorted({c["name"] for c in failed}))
    return f"{len(failed)} of {len(checks)} checks of `regraft verify` FAILED: {names}."


def verdict(results: Results) -> str:
    """What was kept and lost, in plain sentences; says so where a baseline is better."""
    sentences = []
    rows = {(q.name, q.protocol): q for q in results.quality}
    protocol = results.quality[0].protocol if results.quality else ""
    student = rows.get(("student", protocol))
    if student is not None:
        sentences.append(
            f"Perplexity {student.ppl_ratio:.3f} x the teacher's, KL {student.kl:.4f} nats a token, "
            f"same top token in {student.top1:.1%} of {student.tokens} predictions."
        )
        base = rows.get(("sliding_window baseline", protocol))
        if base is not None:
            better = "lower than" if student.kl < base.kl else "NOT lower than"
            sentences.append(
                f"The KL is {better} that of an untrained sliding window on the same layers ({base.kl:.4f})."
            )
    if results.recall:
        shortest = min(r.length for r in results.recall)
        mean = {
            name: _mean([r.accuracy for r in results.recall if r.name == name and r.length == shortest])
            for name in ("teacher", "student")
        }
        sentences.append(f"Recall at {shortest} tokens {mean['student']:.1%}, the teacher's {mean['teacher']:.1%}.")
    if results.speed:
        longest = max(r.context for r in results.speed)
        pair = {r.name: r for r in results.speed if r.context == longest}
        if {"teacher", "student"} <= pair.keys():
            share = pair["student"].cache_bytes / pair["teacher"].cache_bytes
            faster = pair["student"].decode_tok_s / pair["teacher"].decode_tok_s
            sentences.append(
                f"At {longest} tokens of context its cache is {share:.1%} of the teacher's and "
                f"it decodes {faster:.2f} x as fast."
            )
    return " ".join(sentences) or "Nothing was measured."


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


def _frontier(results: Results) -> list[tuple[str, float, float]]:
    """(name, cache bytes, KL) of teacher, student and baselines."""
    if not results.speed or not results.quality:
        return []
    longest = max(r.context for r in results.speed)
    size = {r.name: r.cache_bytes for r in results.speed if r.context == longest}
    if not {"teacher", "student"} <= size.keys():
        return []
    protocol = results.quality[0].protocol
    points = []
    for q in results.quality:
        if q.protocol != protocol:
            continue
        if q.name in size:
            points.append((q.name, float(size[q.name]), q.kl))
        else:
            points.append((q.name, _baseline_cache(results, size), q.kl))
    return points


def _baseline_cache(results: Results, size: Mapping[str, int]) -> float:
    """Cache of an untrained window on as many layers: the student's without its far state."""
    states = 0.0
    layers = results.layers.get("mixers", {})
    for entry in layers.values():
        states += entry.get("far_state_bytes", 0)
    return float(size["student"]) - states


def _tables(results: Results) -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = []
    if results.quality:
        tables.append(
            {
                "title": "Quality",
                "head": ["model", "protocol", "KL", "top-1", "perplexity", "ratio", "windows"],
                "rows": [
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
                "note": f"Text: {results.protocol.get('text', 'unknown')}; all positions, no BOS, "
                f"{results.protocol.get('dtype', 'unknown dtype')}; KL in nats a token, standard error over windows. "
                "Baselines are untrained sliding windows with 4 sinks: on the same layers, and on evenly spaced ones.",
                "figure": "",
                "name": "quality",
            }
        )
    if results.recall:
        lengths = sorted({r.length for r in results.recall})
        kinds = list(dict.fromkeys((r.name, r.task) for r in results.recall))
        rows = []
        for name, task in kinds:
            cells = []
            for length in lengths:
                found = [r for r in results.recall if (r.name, r.task, r.length) == (name, task, length)]
                cells.append(f"{found[0].accuracy:.3f} ± {found[0].stderr:.3f}" if found else "")
            rows.append([name, task, *cells])
        tables.append(
            {
                "title": "Recall",
                "head": ["model", "task", *(f"at {length}" for length in lengths)],
                "rows": sorted(rows, key=lambda row: row[1]),
                "note": "Share of answers recalled (argmax, teacher-forced), with standard error over items; "
                "the same items for all models.",
                "figure": figures.recall(results.recall),
                "name": "recall",
            }
        )
    if results.speed:
        tables.append(
            {
                "title": "Cache and speed",
                "head": ["model", "context", "cache MiB", "prefill tok/s", "decode tok/s", "repeats"],
                "rows": [
                    [
                        r.name,
                        str(r.context),
                        f"{r.cache_bytes / 2**20:.1f} ({r.cache_dtype})",
                        f"{r.prefill_tok_s:.0f} (spread {r.prefill_spread:.0%})",
                        f"{r.decode_tok_s:.1f} (spread {r.decode_spread:.0%})",
                        str(r.repeats),
                    ]
                    for r in results.speed
                ],
                "note": "Models take turns in one process; medians; live cache bytes, batch 1.",
                "figure": figures.speed(results.speed) if len({r.context for r in results.speed}) > 1 else "",
                "name": "speed",
            }
        )
    if results.tasks:
        found = figures.task_rows(results.tasks["teacher"], results.tasks["student"])
        told = results.protocol.get("lm_eval", {})
        tables.append(
            {
                "title": "Benchmarks (lm-eval)",
                "head": ["task", "teacher", "student", "difference"],
                "rows": [
                    [name, f"{a:.3f} ± {ae:.3f}", f"{b:.3f} ± {be:.3f}", f"{b - a:+.3f}"]
                    for name, (a, ae), (b, be) in found
                ],
                "note": f"limit {told.get('limit')}, prefix token {told.get('prefix_token')}.",
                "figure": figures.tasks(results.tasks["teacher"], results.tasks["student"]) if found else "",
                "name": "tasks",
            }
        )
    return tables


def _markdown(title: str, runs: Sequence[Mapping[str, Any]], target: Path) -> str:
    """The same content for the Hub; figures as files under figures/."""
    lines = [f"# {title}", ""]
    folder = target / "figures"
    folder.mkdir(exist_ok=True)
    for number, run in enumerate(runs):
        prefix = "" if len(runs) == 1 else f"{number}-"
        if len(runs) > 1:
            lines += [f"# {run['name']}", ""]
        lines += [run["verdict"], ""]
        if run["strip"]:
            lines += ["```", run["ruler"], run["strip"], "```", ""]
        for table in run["tables"]:
            lines += [f"## {table['title']}", ""]
            lines.append("| " + " | ".join(table["head"]) + " |")
            lines.append("|" + "---|" * len(table["head"]))
            lines += ["| " + " | ".join(row) + " |" for row in table["rows"]]
            lines += ["", table["note"], ""]
            if table["figure"]:
                lines += [_figure(folder, f"{prefix}{table['name']}", table["figure"], table["title"]), ""]
        for figure in run["figures"]:
            lines += [f"## {figure['title']}", ""]
            lines += [
                _figure(folder, f"{prefix}{figure['name']}", figure["svg"], figure["title"]),
                "",
                figure["note"],
                "",
            ]
        if run["samples"]:
            lines += ["## Samples", ""]
            for s in run["samples"]:
                lines += [
                    f"**{s.prompt}**",
                    "",
                    "teacher:",
                    "",
                    _quoted(s.teacher),
                    "",
                    "student:",
                    "",
                    _quoted(s.student),
                    "",
                ]
        if run["verify"]:
            lines += ["## Verification", "", run["verify"], ""]
        if run["recipe"]:
            lines += ["## Recipe", "", "```yaml", run["recipe"].strip(), "```", ""]
        if run["env"]:
            lines += ["## Environment", "", "```", run["env"], "```", ""]
        lines += run["missing"]
    return "\n".join(lines) + "\n"


def _figure(folder: Path, name: str, svg: str, title: str) -> str:
    _write(folder / f"{name}.svg", '<?xml version="1.0" encoding="utf-8"?>\n' + svg)
    return f"![{title}](figures/{name}.svg)"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines() or [""])
