"""One page about a run, or about several side by side: verdict, quality, layers, training, speed, samples, recipe.

report.html is self-contained (inline SVG, no scripts); report.md is its twin for the Hub, with figures/ beside it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regraft.convert.layers import layer_strip, ruler
from regraft.errors import UserError
from regraft.eval import figures
from regraft.eval.environment import render as render_env
from regraft.eval.results import Results
from regraft.eval.sections import (
    Section,
    at_longest,
    first_protocol,
    frontier,
    mean_recall,
    sections,
    verdict,
    verified_text,
)


@dataclass(frozen=True)
class Run:
    """What the page shows of one run; `missing` names the parts that are not there."""

    name: str
    title: str
    results: Results
    verdict: str
    strip: str
    ruler: str
    chosen: str
    sections: list[Section]
    verified: str
    load: str
    recipe: str
    env: str
    missing: list[str]


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write report.html and report.md with figures/ for one or several run folders; returns the page's path.

    They go into `out`, or into the run folder if there is only one. UserError for a folder without readable results.
    """
    import jinja2

    folders = [Path(f) for f in folders]
    if out is None and len(folders) > 1:
        raise UserError("several runs need a folder for their report", where="report", fix="give one with -o")
    runs = [read_run(folder) for folder in folders]
    target = Path(out) if out is not None else folders[0]
    target.mkdir(parents=True, exist_ok=True)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = _inline
    title = runs[0].title if len(runs) == 1 else f"{len(runs)} conversions side by side"
    across = compare_runs(runs) if len(runs) > 1 else []
    page = environment.get_template("report.html").render(title=title, runs=runs, across=across)
    _write(target / "report.html", page)
    _write(target / "report.md", _markdown(title, runs, across, target / "figures"))
    return target / "report.html"


def _write(path: Path, text: str) -> None:
    staging = path.with_name(f".{path.name}.writing")
    staging.write_text(text, encoding="utf-8")
    os.replace(staging, path)


def _inline(svg: str, prefix: str) -> str:
    """A figure for the page: ids of its own, in the page's ink and font."""
    import markupsafe

    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    return markupsafe.Markup(svg.replace(figures.INK, "currentColor"))


def read_run(folder: Path) -> Run:
    """Everything that the page shows of the run in `folder`."""
    path = folder / "results.json"
    if not path.is_file():
        raise UserError(
            "no results.json in this folder", where=str(folder), fix="give a folder of `regraft run` or `eval -o`"
        )
    try:
        results = Results.load(path)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"not a results file: {error}", where=str(path), fix="repeat `regraft eval -o`") from None
    missing: list[str] = []
    selection = _json(folder / "layers.json", missing, "the choice of layers")
    stages = _stages(folder)
    if not stages:
        missing.append("Not shown, since there are no metrics-*.jsonl here: training.")
    parts = sections(results, selection, stages, missing)
    verified = verified_text(_json(folder / "verify.json", missing, "the verification"))
    recipe = folder / "recipe.yaml"
    if not recipe.is_file():
        missing.append("Not shown, since recipe.yaml is not there: the recipe.")
    depth, converted = results.layers.get("num_layers", 0), results.layers.get("converted", [])
    final = folder / "final"
    return Run(
        name=results.model,
        title=f"{results.model}: {results.teacher} with {len(converted)} of {depth} attention layers replaced",
        results=results,
        verdict=verdict(results),
        strip=layer_strip(converted, depth) if depth else "",
        ruler=ruler(depth) if depth else "",
        chosen="" if selection is None else f"Chosen by {selection['by']}.",
        sections=parts,
        verified=verified,
        load=load_code(str(final) if final.is_dir() else results.model),
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        env=render_env(results.env) if results.env else "",
        missing=missing,
    )


def _json(path: Path, missing: list[str], what: str) -> Any:
    if path.is_file():
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"not JSON: {error}", where=str(path), fix="remove it, and repeat the command") from None
    missing.append(f"Not shown, since {path.name} is not there: {what}.")
    return None


def _stages(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of metrics-NUMBER-STAGE.jsonl by title, in the order of the stages."""
    found = {}
    for path in folder.glob("metrics-*.jsonl"):
        number, _, stage = path.stem.removeprefix("metrics-").partition("-")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if number.isdigit() and rows:
            found[int(number)] = (f"stage {number}: {stage}", rows)
    return {found[number][0]: found[number][1] for number in sorted(found)}


def compare_runs(runs: Sequence[Run]) -> list[Section]:
    """The section that puts several runs into one table, and into one figure where they can be compared."""
    rows = []
    for run in runs:
        results = run.results
        student = first_protocol(results).get("student")
        length, recalled = mean_recall(results)
        speed = at_longest(results)
        names = sorted({entry["name"] for entry in results.layers.get("mixers", {}).values()})
        rows.append(
            [
                run.name,
                f"{len(results.layers.get('converted', []))} of {results.layers.get('num_layers', 0)}",
                ", ".join(names),
                f"{student.kl:.4f} ± {student.kl_stderr:.4f}" if student else "",
                f"{student.ppl_ratio:.3f}" if student else "",
                f"{recalled['student']:.1%} at {length}" if "student" in recalled else "",
                f"{speed[1]:.1%} at {speed[0]}" if speed else "",
                f"{speed[2]:.2f} x" if speed else "",
            ]
        )
    head = ["run", "converted", "mixer", "KL", "ratio", "recall", "cache", "decode"]
    note = "KL and perplexity ratio on the first protocol of each run; recall: mean over tasks at the shortest length."
    # the same text, teacher and context, or the dots would lie
    same = {(_ids(run.results), run.results.teacher, (at_longest(run.results) or (None,))[0]) for run in runs}
    if len(same) > 1 or None in next(iter(same)):
        differ = "No common figure: the runs differ in text, teacher or context length, or were not all benchmarked."
        return [Section("Side by side", "runs", head, rows, note=f"{note} {differ}")]
    points = [p for p in frontier(runs[0].results) if p[0] == "teacher"]
    points += [(run.name, p[1], p[2]) for run in runs for p in frontier(run.results) if p[0] == "student"]
    return [Section("Side by side", "runs", head, rows, figures.quality_against_cache(points), note)]


def _ids(results: Results) -> str | None:
    """The hash of the text that the first protocol was measured on."""
    if not results.quality:
        return None
    return results.protocol.get("ids", {}).get(results.quality[0].protocol)


def _markdown(title: str, runs: Sequence[Run], across: Sequence[Section], folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    lines = [f"# {_text(title)}", ""]
    for section in across:
        lines += _section(section, folder, "")
    for number, run in enumerate(runs):
        several = len(runs) > 1
        if several:
            lines += [f"# {_text(run.title)}", ""]
        lines += [run.verdict, ""]
        if run.strip:
            lines += _fenced(f"{run.ruler}\n{run.strip}")
        for section in run.sections:
            lines += _section(section, folder, f"{number}-" if several else "")
        if run.results.samples:
            lines += ["## Samples", ""]
            for s in run.results.samples:
                for who, text in (("prompt", s.prompt), ("teacher", s.teacher), ("student", s.student)):
                    lines += [f"{who}:", "", *_fenced(text)]
        if run.verified:
            lines += ["## Verification", "", run.verified, ""]
        lines += ["## Load it", "", *_fenced(run.load, "python")]
        if run.recipe:
            lines += ["## Recipe", "", *_fenced(run.recipe.strip(), "yaml")]
        if run.env:
            lines += ["## Environment", "", *_fenced(run.env)]
        lines += [f"{note}\n" for note in run.missing]
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section, folder: Path, prefix: str) -> list[str]:
    lines = [f"## {section.title}", ""]
    if section.rows:
        lines += ["| " + " | ".join(section.head) + " |", "|" + "---|" * len(section.head)]
        lines += ["| " + " | ".join(_text(cell).replace("|", "\\|") for cell in row) + " |" for row in section.rows]
        lines.append("")
    if section.svg:
        name = f"{prefix}{section.name}.svg"
        _write(folder / name, figures.standalone(section.svg))
        lines += [f"![{section.title}](figures/{name})", ""]
    return [*lines, _text(section.note), ""]


def _text(text: str) -> str:
    """Text in which nothing is taken for an HTML tag."""
    return text.replace("<", "&lt;")


def _fenced(text: str, language: str = "") -> list[str]:
    """A code block; its fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"{fence}{language}", text, fence, ""]


def load_code(where: str) -> str:
    """The Python that loads the checkpoint."""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({where!r}, trust_remote_code=True)\n"
        f"tokenizer = AutoTokenizer.from_pretrained({where!r})"
    )
