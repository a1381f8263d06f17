"""The Python interface: one function a command, with the command's meaning."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from regraft.errors import UserError
from regraft.recipes.load import load_recipe
from regraft.recipes.schema import DataConfig, EvalConfig, Recipe

# what an interrupted stage leaves in its folder
_STAGE_FILE = re.compile(r"^(metrics\.jsonl|checkpoint-\d+|\.writing-\d+|adapter|\.model\.writing-\d+)$")


def _recipe(recipe: str | Path | Recipe, overrides: Sequence[str] = ()) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load_recipe(str(recipe), overrides)


def load(ref: str, **options: Any) -> Any:
    """Load a source or converted model: LoadedModel(model, tokenizer, info). See convert.sources.load_source."""
    from regraft.convert.sources import load_source

    return load_source(ref, **options)


def inspect(ref: str, **options: Any) -> dict[str, Any]:
    """What a model is, its cache, and which mixers fit which layers; reads the configuration only."""
    from regraft.convert.plan import inspect_source

    return inspect_source(ref, **options)


def plan(
    recipe: str | Path | Recipe,
    *,
    overrides: Sequence[str] = (),
    measure: bool = False,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """What a recipe will do and cost, without reading weights (`measure` reads them, and times the model).

    Returns a Plan; UserError, at the recipe's line, for what `run` would refuse. See convert.plan.plan.
    """
    from regraft.pipeline import check

    resolved = _recipe(recipe, overrides)
    return check(resolved, measure=measure, device=device, trust_remote_code=trust_remote_code)


def convert(
    ref: str,
    out: str | Path | None = None,
    *,
    to: str,
    layers: str | Sequence[int] = "all",
    options: dict[str, Any] | None = None,
    dtype: str = "float32",
    **loading: Any,
) -> Any:
    """Replace the attention of `layers` of model `ref` by mixer `to`, without training.

    `layers`: the grammar of --layers, or indices. Returns GraftResult(model, reports); with `out` also writes a
    self-contained checkpoint there. UserError if `out` exists.
    """
    from regraft.convert.export.card import write_card
    from regraft.convert.graft import attention_slots, graft
    from regraft.convert.layers import parse_layers
    from regraft.convert.mixers.registry import parse_options
    from regraft.convert.sources import load_source
    from regraft.store import new_folder

    chosen_options = parse_options(to, options or {})
    if out is not None and Path(out).exists():
        raise UserError("the output exists already", where=str(out), fix="remove it, or choose another with -o")
    loaded = load_source(ref, dtype=dtype, **loading)
    depth = len(attention_slots(loaded.model))
    text = layers if isinstance(layers, str) else ",".join(map(str, layers))
    result = graft(loaded.model, {i: (to, chosen_options) for i in parse_layers(text, depth)}, info=loaded.info)
    if out is not None:
        size = sum(p.numel() * p.element_size() for p in result.model.parameters())
        with new_folder(Path(out), size) as staging:
            result.model.save_pretrained(staging)
            if loaded.tokenizer is not None:
                loaded.tokenizer.save_pretrained(staging)
            write_card(staging)
    return result


def select(
    ref: str,
    *,
    to: str,
    keep: int,
    by: str = "align",
    options: dict[str, Any] | None = None,
    data: DataConfig | None = None,
    tokens: int = 4096,
    align_tokens: int = 20_000,
    compare: Sequence[str] = (),
    seed: int = 0,
    device: str | None = None,
    log: Callable[[str], None] = print,
    work: Path | None = None,
) -> Any:
    """Choose the layers of `ref` to convert to mixer `to`, keeping `keep` softmax layers.

    Selectors that read a converted student get one whose layers are all converted and aligned on `align_tokens`.
    Returns a Selection; with `compare` (names of selectors) returns (selections, held-out quality of each choice).
    """
    import tempfile

    from regraft.convert.graft import attention_slots, fitting_layers, graft
    from regraft.convert.mixers.registry import get_mixer, parse_options
    from regraft.convert.sources import load_source
    from regraft.data.packing import calibration_rows, token_stream
    from regraft.data.text import documents
    from regraft.distill.loop import run_stage
    from regraft.eval.divergence import compare as measure
    from regraft.eval.divergence import windows
    from regraft.recipes.schema import AlignStage
    from regraft.select.compare import student_of
    from regraft.select.registry import Calibration, get_selector, select_layers

    names = list(compare) or [by]
    selectors = [get_selector(name) for name in names]
    chosen = parse_options(to, options or {})
    loaded = load_source(ref, device=device)
    teacher, depth = loaded.model, len(attention_slots(loaded.model))
    data = data or DataConfig()
    student, errors, rows = None, None, None
    fit = fitting_layers(teacher, to, chosen)
    lowest = depth - len(fit)
    if not lowest <= keep < depth:
        why = f", and {to} does not fit {lowest} of them" if lowest else ""
        raise UserError(
            f"cannot keep {keep} layers: the model has {depth}{why}",
            where="--keep",
            fix=f"{lowest} to {depth - 1}" if lowest < depth else f"see: regraft inspect {ref}",
        )
    if compare or any(s.needs_data for s in selectors):
        student = graft(teacher, {i: (to, chosen) for i in fit}, info=loaded.info).model
        if get_mixer(to).full_train:
            log(f"aligning {len(fit)} layers on {align_tokens} tokens")
            with tempfile.TemporaryDirectory() as folder:
                done = run_stage(
                    AlignStage(stage="align", tokens=align_tokens, lr=2e-2),
                    student=student,
                    teacher=teacher,
                    tokenizer=loaded.tokenizer,
                    data=data,
                    out_dir=Path(work or folder),
                    seed=seed,
                    device=device,
                    log=log,
                )
            student, errors = done.student, done.layer_error
        rows = calibration_rows(loaded.tokenizer, list(documents(data)), tokens)
    selections = []
    for selector in selectors:
        calibration = None if rows is None else Calibration(teacher, student, loaded.tokenizer, rows, errors)
        selections.append(select_layers(selector.name, keep, depth, to, chosen.to_dict(), calibration, log))
    if not compare:
        return selections[0]
    heldout = data.model_copy(update={"split": "heldout"})
    ids = windows("core", token_stream(loaded.tokenizer, documents(heldout)), 8)
    quality = {}
    for selection in selections:
        found = measure(teacher, {"student": student_of(selection, student, teacher)}, ids, "core")[1]
        quality[selection.by] = {"KL": found.kl, "ratio": found.ppl_ratio}
    return selections, quality


def distill(
    ref: str | Path,
    stage: Any,
    *,
    teacher: str,
    out: str | Path,
    data: DataConfig | None = None,
    seed: int = 0,
    device: str | None = None,
    log: Callable[[str], None] = print,
) -> Any:
    """Train converted model `ref` by one stage (a stage of the recipe schema) against `teacher`; writes `out`/model.

    An interrupted call goes on where it stopped when it is repeated; the checkpoints of a finished one are removed.
    Started by torchrun or accelerate, its processes share each step; the first one writes.
    UserError if `out` holds anything but this stage's own files. Returns the StageResult.
    """
    from regraft.convert.graft import converted_layers
    from regraft.convert.sources import load_source, load_tokenizer
    from regraft.distill.loop import run_stage
    from regraft.store import new_folder

    out = Path(out)
    target = out / "model"
    if target.exists():
        raise UserError("this stage is finished already", where=str(target), fix="choose another output folder")
    if out.exists() and not (out.is_dir() and all(_STAGE_FILE.match(entry.name) for entry in out.iterdir())):
        raise UserError(
            "the output folder exists and holds something else", where=str(out), fix="choose another with -o"
        )
    student = load_source(str(ref), device=device)
    if not converted_layers(student.model):
        raise UserError("no layer of this model is converted", where=str(ref), fix="convert it first: regraft convert")
    if stage.stage == "finetune":
        model, teacher_tokenizer = None, load_tokenizer(teacher)
    else:
        source = load_source(teacher, device=device)
        model, teacher_tokenizer = source.model, source.tokenizer
        if stage.stage == "align" and _shape(model) != _shape(student.model):
            raise UserError(
                "align fits layers to the ones they replace, and this teacher has layers of other shapes",
                where=teacher,
                fix="give the model that the student was made from, or use stage: logits",
            )
    measured: Callable[[Any], dict[str, Any]] | None = None
    if stage.eval_every:
        if model is None:
            model = load_source(teacher, device=device).model
        heldout = (data or DataConfig()).model_copy(update={"split": "heldout"})

        def measured(trained: Any) -> dict[str, Any]:
            from regraft.eval.evaluate import measure

            return measure(trained, model, student.tokenizer, EvalConfig(), heldout, seed)

    result = run_stage(
        stage,
        student=student.model,
        teacher=model,
        tokenizer=student.tokenizer,
        teacher_tokenizer=teacher_tokenizer,
        data=data or DataConfig(),
        out_dir=out,
        seed=seed,
        device=device,
        measure=measured,
        log=log,
    )
    from accelerate import PartialState

    if PartialState().is_main_process:
        size = sum(p.numel() * p.element_size() for p in result.student.parameters())
        with new_folder(target, size) as staging:
            result.student.save_pretrained(staging)
            student.tokenizer.save_pretrained(staging)
        for checkpoint in out.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    PartialState().wait_for_everyone()
    return result


def _shape(model: Any) -> tuple[Any, ...]:
    config = model.config
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return tuple(getattr(config, name, None) for name in names)


def run(
    recipe: str | Path | Recipe, out: str | Path | None = None, *, overrides: Sequence[str] = (), **options: Any
) -> Any:
    """Do all of a recipe: convert, align, select, distil, evaluate, verify, report. See pipeline.run.

    `options`: store, upto, device, trust_remote_code, log. Returns a RunResult.
    """
    from regraft.pipeline import run as run_pipeline
    from regraft.recipes.load import changed_text, read

    resolved = _recipe(recipe, overrides)
    text = None
    if not isinstance(recipe, Recipe):
        text, where = read(str(recipe))
        if overrides:
            try:
                text = changed_text(text, where, overrides)
            except UserError:  # it cannot be written into this layout: the resolved recipe says the same
                text = None
    return run_pipeline(resolved, out, recipe_text=text, **options)


def evaluate(
    ref: str,
    *,
    against: str | None = None,
    config: EvalConfig | None = None,
    data: DataConfig | None = None,
    seed: int = 0,
    device: str | None = None,
    include_path: str | None = None,
    log: Callable[[str], None] = print,
) -> Any:
    """Measure converted model `ref` against a teacher (default: the source it was made from). Returns Results."""
    from regraft.convert.sources import check_same_tokenizer, load_source
    from regraft.eval.evaluate import evaluate as measure

    config, data = config or EvalConfig(), data or DataConfig(split="heldout")
    if config.tasks:
        from regraft.eval.harness import check_tasks

        check_tasks(config.tasks, include_path)
    if data.source not in ("corpus", "workshop") and not data.source.startswith("hub:"):
        from regraft.data.text import local_files

        local_files(data.source)
    student = load_source(ref, device=device)
    name = against or _source_of(student.model, ref)
    teacher = load_source(name, device=device)
    for loaded, where in ((student, ref), (teacher, name)):
        if loaded.tokenizer is None:
            raise UserError("the model has no tokenizer", where=where, fix="save one beside it")
    check_same_tokenizer(student.tokenizer, teacher.tokenizer, name)
    source = None
    if config.baselines and _shape(teacher.model) != _shape(student.model):
        source = load_source(_source_of(student.model, ref), device=device).model
    return measure(
        student.model,
        teacher.model,
        student.tokenizer,
        config,
        data,
        names=(ref, name),
        source=source,
        seed=seed,
        include_path=include_path,
        log=log,
    )


def _source_of(model: Any, ref: str) -> str:
    source = (getattr(model.config, "regraft", None) or {}).get("source", {}).get("ref")
    if source is None:
        raise UserError("the checkpoint does not name its source", where=ref, fix="give the teacher: --against MODEL")
    return source


def verify(ref: str, *, reload: bool = True) -> Any:
    """Prove a converted checkpoint right on this machine's CPU; returns a VerifyReport. See eval.verify.verify."""
    from regraft.eval.verify import verify as check

    return check(ref, reload=reload)


def bench(
    ref: str,
    *,
    against: str | None = None,
    contexts: Sequence[int] = (1024, 4096),
    device: str | None = None,
    **options: Any,
) -> Any:
    """Prefill and decode speed and live cache bytes of `ref` and its teacher, interleaved; a list of Speed."""
    from regraft.convert.sources import load_source
    from regraft.eval.bench import bench as measure

    student = load_source(ref, device=device)
    teacher = load_source(against or _source_of(student.model, ref), device=device)
    return measure({"teacher": teacher.model, "student": student.model}, contexts, **options)


def report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write report.html and report.md for one or several run folders; returns the page's path."""
    from regraft.eval.report import report as write

    return write([Path(r) for r in runs], None if out is None else Path(out))


def export(ref: str | Path, out: str | Path | None = None, **options: Any) -> Any:
    """Copy a converted checkpoint to a clean folder, or push it to the Hub. See convert.export.hub.export."""
    from regraft.convert.export.hub import export as publish

    return publish(Path(ref), out=None if out is None else Path(out), **options)
