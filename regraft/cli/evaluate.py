"""regraft eval."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regraft.cli.common import Device, Json, Seed, parse_sizes, prepare, say, show
from regraft.errors import UserError, suggest

if TYPE_CHECKING:
    from regraft.eval.results import Results


def command(
    model: Annotated[str, typer.Argument(help="The converted model.")],
    against: Annotated[str | None, typer.Option("--against", help="The teacher (default: its source).")] = None,
    protocol: Annotated[str, typer.Option("--protocol", help="core, long, or core,long.")] = "core",
    data: Annotated[
        str, typer.Option("--data", help="corpus (held-out part), workshop (REGRAFT_DATA), a file or glob, hub:NAME.")
    ] = "corpus",
    windows: Annotated[int | None, typer.Option("--windows", min=1, help="Fewer or more windows.")] = None,
    recall: Annotated[str, typer.Option("--recall", help="Context lengths, or none.")] = "512,1k,2k",
    samples: Annotated[
        int,
        typer.Option(
            "--recall-samples",
            min=1,
            help="Pass-key items at the shortest length; tasks with more answers and longer lengths get fewer.",
        ),
    ] = 16,
    baselines: Annotated[bool, typer.Option("--baselines/--no-baselines", help="Measure both baselines too.")] = True,
    tasks: Annotated[str, typer.Option("--tasks", help="lm-eval tasks as a,b; quick for three local ones.")] = "",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="First rows of each task.")] = None,
    include_path: Annotated[str | None, typer.Option("--include-path", help="Folder with your own tasks.")] = None,
    bench: Annotated[str, typer.Option("--bench", help="Also time these context lengths.")] = "",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for results.json and the report.")] = None,
    device: Device = "auto",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure a converted model against its teacher: KL, perplexity, recall, benchmarks, speed.

    Examples:

        regraft eval runs/quickstart-1a2b3c4d/final

        regraft eval half --against demo:smollm2 --tasks quick --limit 100 -o half-eval
    """
    from regraft import api
    from regraft.eval.divergence import PROTOCOLS
    from regraft.recipes.schema import DataConfig, EvalConfig

    names = [p.strip() for p in protocol.split(",") if p.strip()]
    for name in names:
        if name not in PROTOCOLS:
            raise UserError(f"no protocol '{name}'", where="--protocol", fix=suggest(name, PROTOCOLS))
    if out is not None and out.exists():
        raise UserError("the output exists already", where=str(out), fix="remove it, or choose another with -o")
    config = EvalConfig.model_validate(
        {
            "protocols": names,
            "windows": windows,
            "recall": [] if recall == "none" else parse_sizes(recall, "--recall"),
            "recall_samples": samples,
            "baselines": baselines,
            "tasks": [t.strip() for t in tasks.split(",") if t.strip()],
            "limit": limit,
            "bench": parse_sizes(bench, "--bench") if bench else [],
        }
    )
    split = "all" if data == "workshop" else "heldout"
    prepare()
    results = api.evaluate(
        model,
        against=against,
        config=config,
        data=DataConfig(source=data, split=split),
        seed=seed,
        device=device,
        include_path=include_path,
        log=say,
    )
    if out is not None:
        from regraft.eval.report import report
        from regraft.store import new_folder

        with new_folder(out) as staging:
            results.save(staging / "results.json")
            report([staging])
    if as_json:
        import dataclasses

        from regraft.cli.common import show_json

        show_json(dataclasses.asdict(results))
    else:
        show(render(results))


def render(results: Results) -> str:
    """Tables of a result file, as text."""
    from regraft.eval.figures import task_rows
    from regraft.eval.report import verdict

    lines = []
    for q in results.quality:
        lines.append(
            f"{q.name:24} {q.protocol:5} KL {q.kl:.4f} ± {q.kl_stderr:.4f}  top-1 {q.top1:.3f}  "
            f"perplexity {q.ppl:.2f}  ratio {q.ppl_ratio:.4f}  ({q.windows} x {q.seq_len})"
        )
    for r in results.recall:
        lines.append(f"{r.name:24} {r.task:12} {r.length:6}  {r.accuracy:.3f} ± {r.stderr:.3f}  n {r.n}")
    for s in results.speed:
        lines.append(
            f"{s.name:24} context {s.context:6}  prefill {s.prefill_tok_s:.0f} tok/s  "
            f"decode {s.decode_tok_s:.1f} tok/s  "
            f"cache {s.cache_bytes / 2**20:.1f} MiB ({s.cache_dtype})"
        )
    if results.tasks:
        for name, (a, ae), (b, be) in task_rows(results.tasks["teacher"], results.tasks["student"]):
            lines.append(f"{name:36} teacher {a:.4f} ± {ae:.4f}  student {b:.4f} ± {be:.4f}")
    return "\n".join([*lines, verdict(results)])
