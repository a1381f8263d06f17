"""`regraft run`: a recipe from source to judged checkpoint, step by step, each step stored once."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regraft.errors import UserError, suggest
from regraft.recipes.load import check_recipe, dump, told_at
from regraft.recipes.schema import AlignStage, DataConfig, Recipe
from regraft.store import Store, check_space, copy_folder, key_of

PIPELINE_FORMAT = 2
STEPS = ("align", "select", "distill", "eval", "verify", "report")


@dataclass(frozen=True)
class RunResult:
    """Where a run ended: its folder, the checkpoint in it, the choice of layers, and what was measured.

    After `upto`, what was not reached is None.
    """

    folder: Path
    final: Path | None = None
    selection: Any = None
    results: Any = None
    verified: Any = None


@dataclass(frozen=True)
class _Step:
    """One output of the store: `inputs` decide everything in it, and `key` is their hash."""

    name: str
    inputs: tuple[Any, ...]

    @property
    def key(self) -> str:
        return key_of(self.name, *self.inputs)


def run_folder(recipe: Recipe, root: Path = Path("runs")) -> Path:
    """The folder that a run of `recipe` uses unless told otherwise."""
    return root / f"{recipe.name}-{key_of(recipe.model_dump(mode='json'))[:8]}"


def check(recipe: Recipe, *, device: str | None = None, trust_remote_code: bool = False, measure: bool = False) -> Any:
    """The plan of `recipe`, after checking all that can be checked against the model's configuration alone.

    UserError, at the recipe's line, for a mixer, option, selector or model that does not exist, layers out of range or
    that the mixer does not fit, and rows longer than the model's positions.
    """
    from regraft.convert.graft import fitting_layers
    from regraft.convert.layers import parse_layers
    from regraft.convert.mixers.registry import parse_options
    from regraft.convert.plan import meta_model, plan
    from regraft.convert.sources import load_config, pick_device
    from regraft.convert.spec import FAMILIES

    check_recipe(recipe)
    pick_device(device)
    mixer, layers = recipe.convert.mixer, recipe.layers
    with told_at(recipe, "base"):
        config = load_config(recipe.base, revision=recipe.revision, trust_remote_code=trust_remote_code)
        if config.model_type not in FAMILIES:
            again = config.model_type.removeprefix("regraft_") in FAMILIES
            told = "the model is converted already" if again else f"no source family '{config.model_type}'"
            raise UserError(told, fix=f"give a source model of one of: {', '.join(sorted(FAMILIES))}")
    if recipe.teacher is not None:
        with told_at(recipe, "teacher"):
            load_config(recipe.teacher, trust_remote_code=trust_remote_code)
    depth = config.num_hidden_layers
    fit = fitting_layers(meta_model(config), mixer, parse_options(mixer, recipe.convert.options))
    misfits = [i for i in range(depth) if i not in fit]
    if layers.by == "list":
        with told_at(recipe, "layers", "layers"):
            bad = [i for i in parse_layers(str(layers.layers), depth) if i in misfits]
            if bad:
                raise UserError(f"{mixer} does not fit layers {bad}", fix=f"see: regraft inspect {recipe.base}")
    else:
        with told_at(recipe, "layers", "keep"):
            keep = int(layers.keep or 0)
            if keep >= depth:
                raise UserError(f"keep {keep} of {depth} layers leaves nothing to convert", fix=f"0 to {depth - 1}")
            if keep < len(misfits):
                raise UserError(f"{mixer} does not fit layers {misfits}", fix=f"keep at least {len(misfits)}")
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    for number, stage in enumerate(recipe.distill):
        if stage.seq_len > positions:
            with told_at(recipe, "distill", number, "seq_len"):
                raise UserError(
                    f"rows of {stage.seq_len} tokens, but the model has {positions} positions",
                    fix=f"give at most {positions}",
                )
    made = plan(recipe, device=device, measure=measure)
    bad = [i for i in made.converted or () if i in misfits]
    if bad:
        with told_at(recipe, "layers", "by"):
            raise UserError(f"{mixer} does not fit layers {bad}", fix="use by: align or kl, or list the layers")
    return made


def check_data(recipe: Recipe) -> None:
    """UserError, at the recipe's line, for text or benchmark tasks that are not there. The Hub is not asked."""
    from regraft.data.text import SPLITS, dataset_root, documents

    for name in dict.fromkeys([*(stage.data for stage in recipe.distill), recipe.eval.data]):
        data = recipe.data[name]
        with told_at(recipe, "data", name):
            if data.source.startswith("hub:"):
                continue
            if data.source in ("corpus", "workshop"):
                if data.split not in SPLITS:
                    raise UserError(f"no split '{data.split}' in {data.source}", fix=suggest(data.split, SPLITS))
                if data.source == "workshop" and dataset_root() is None:
                    raise UserError("no evaluation data here", fix="set REGRAFT_DATA, or use source: corpus")
            elif next(iter(documents(data)), None) is None:
                raise UserError(f"no text in {data.source}, split {data.split}", fix="use split: all, or more text")
    if recipe.eval.tasks:
        from regraft.eval.harness import check_tasks

        with told_at(recipe, "eval", "tasks"):
            check_tasks(recipe.eval.tasks)


def run(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    store: str | Path | None = None,
    upto: str | None = None,
    recipe_text: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    log: Callable[[str], None] = print,
) -> RunResult:
    """Convert, align, select, distil, evaluate, verify and report, as `recipe` says.

    `out`: the run folder (runs/NAME-HASH). `store`: where step outputs lie (`.store` beside the run folder). `upto`:
    stop after one of STEPS. `recipe_text`: what goes into recipe.yaml. Finished steps are reused, an interrupted one
    goes on where it stopped. UserError, before any work and with nothing written, for everything that can be known
    before: see `check`; an output folder that holds something else; a disk that is too small; broken model files.
    """
    return _Pipeline(recipe, out, store, upto, recipe_text, device, trust_remote_code, log).run()


class _Pipeline:
    def __init__(self, recipe, out, store, upto, recipe_text, device, trust_remote_code, log):
        from regraft.convert.sources import check_same_tokenizer, load_source, pick_device

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(
                "a whole run is one process",
                where="WORLD_SIZE",
                fix="train its stages with several: torchrun --nproc_per_node N -m regraft distill RECIPE ...",
            )
        if upto is not None and upto not in STEPS:
            raise UserError(f"no step '{upto}'", where="--upto", fix=suggest(upto, STEPS))
        began = time.perf_counter()
        self.recipe = recipe
        self.log = lambda line: log(f"{_clock(time.perf_counter() - began)}  {line}")
        self.recipe_text = recipe_text or dump(recipe)
        self.last = STEPS.index(upto or STEPS[-1])
        self.folder = Path(out) if out is not None else run_folder(recipe)
        self._check_folder()
        self.plan = check(recipe, device=device, trust_remote_code=trust_remote_code)
        check_data(recipe)
        self.store = Store(Path(store) if store is not None else self.folder.parent / ".store")
        self.device = pick_device(device)
        settings = {"dtype": recipe.dtype, "device": self.device, "trust_remote_code": trust_remote_code}
        with told_at(recipe, "base"):
            self.source = load_source(recipe.base, revision=recipe.revision, **settings)
            if self.source.tokenizer is None:
                raise UserError("the source has no tokenizer", fix="save one beside the model")
        self.teacher = self.source
        if recipe.teacher is not None:
            with told_at(recipe, "teacher"):
                self.teacher = load_source(recipe.teacher, **settings)
                if self.teacher.tokenizer is None:
                    raise UserError("the teacher has no tokenizer", fix="save one beside the model")
                check_same_tokenizer(self.source.tokenizer, self.teacher.tokenizer, "teacher")
        self.options = _options(recipe)
        self.candidates = self._candidates()
        self.aligning, self.selecting, self.distilling = self._chain()
        self._check_space()
        self.student: Any = None  # the model after the newest step, when it is in memory
        self.student_path: Path | None = None  # and where it is stored

    def _check_folder(self) -> None:
        """A folder that exists must hold a run of this very recipe."""
        if not self.folder.exists():
            return
        resolved = self.folder / "resolved.yaml"
        if not resolved.is_file() or resolved.read_text(encoding="utf-8") != dump(self.recipe):
            raise UserError(
                "the output folder exists and holds something else",
                where=str(self.folder),
                fix="choose another with -o, or remove it",
            )

    def _check_space(self) -> None:
        """Room for what the plan says, less what finished steps hold already."""
        model = sum(p.numel() * p.element_size() for p in self.source.model.parameters())
        done = sum(self.store.has(step.name, step.key) for _, _, step in (*self.aligning, *self.distilling))
        check_space(self.store.root, max(self.plan.disk_bytes - done * model, model), "this run")
        check_space(self.folder, model, "the final checkpoint")

    def _chain(self) -> tuple[list[Any], _Step, list[Any]]:
        """The steps before the choice of layers, the choice, and those after it; each has the one before as input."""
        from regraft.convert.sources import tokenizer_fingerprint

        recipe, source = self.recipe, self.source
        parent = key_of(
            PIPELINE_FORMAT,
            _identity(source),
            tokenizer_fingerprint(source.tokenizer),
            recipe.convert.model_dump(mode="json"),
            self.options.to_dict(),
            self.candidates,
            recipe.seed,
            recipe.dtype,
        )

        def chained(numbered: list[tuple[int, Any]]) -> list[Any]:
            nonlocal parent
            steps = []
            for number, stage in numbered:
                data = recipe.data[stage.data]
                # how often it is saved does not change what comes out
                asked = stage.model_dump(mode="json", exclude={"checkpoint_every", "data"})
                teacher = _identity(self.teacher) if stage.stage == "logits" else None
                inputs = (parent, number, asked, teacher, data.model_dump(mode="json"), _data_stamp(data), recipe.seed)
                steps.append((number, stage, _Step(f"{number}-{stage.stage}", inputs)))
                parent = steps[-1][2].key
            return steps

        before, after = self._split_stages()
        aligning = chained(before)
        data = self._calibration_data()
        inputs = (parent, recipe.layers.model_dump(mode="json"), data.model_dump(mode="json"), _data_stamp(data))
        selecting = _Step("select", inputs)
        parent = selecting.key
        return aligning, selecting, chained(after)

    def run(self) -> RunResult:
        recipe, folder = self.recipe, self.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(self.recipe_text, encoding="utf-8")
        (folder / "resolved.yaml").write_text(dump(recipe), encoding="utf-8")
        _write_json(folder / "plan.json", self.plan.to_dict())
        self.log(f"1 convert   {len(self.candidates)} layers to {recipe.convert.mixer}")
        errors = None
        for number, stage, step in self.aligning:
            self.log(f"2 align     {stage.tokens} tokens")
            errors = self._stage(number, stage, step)["layer_error"]
        self._gather_metrics()
        if self.last < STEPS.index("select"):
            return RunResult(folder)
        self.log(f"3 select    by {recipe.layers.by}")
        selection = self._select(errors)
        for line in selection.render().splitlines():
            self.log("            " + line)
        if self.last < STEPS.index("distill"):
            return RunResult(folder, selection=selection)
        for number, stage, step in self.distilling:
            self.log(f"4 distill   {stage.stage}, {stage.tokens} tokens, train: {stage.train}")
            self._stage(number, stage, step)
        self._gather_metrics()
        key = (self.distilling[-1][2] if self.distilling else self.selecting).key
        if self.last < STEPS.index("eval"):
            return RunResult(folder, selection=selection)
        self.log("5 evaluate")
        results = self._evaluate(key)
        if self.last < STEPS.index("verify"):
            return RunResult(folder, selection=selection, results=results)
        self.log("6 verify")
        verified = self._verify(key)
        if self.last < STEPS.index("report"):
            return RunResult(folder, selection=selection, results=results, verified=verified)
        self.log("7 report")
        final = self._final(results)
        from regraft.eval.report import report

        page = report([folder])
        self.log(f"done        {final}")
        self.log(f"report      {page}")
        return RunResult(folder, final, selection, results, verified)

    def _split_stages(self) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
        """A first stage of alignment is done with all candidates, before the choice, which may read what it left.

        The stages after it train the chosen layers only, further alignment too: it costs less and helps as much.
        """
        stages = list(enumerate(self.recipe.distill))
        first = int(bool(stages) and isinstance(stages[0][1], AlignStage))
        return stages[:first], stages[first:]

    def _depth(self) -> int:
        return self.source.model.config.num_hidden_layers

    def _candidates(self) -> list[int]:
        """The layers to convert before the choice: the chosen ones if they are known already, else all that fit."""
        from regraft.convert.graft import fitting_layers
        from regraft.convert.layers import parse_layers
        from regraft.select.registry import get_selector, select_layers

        layers, mixer = self.recipe.layers, self.recipe.convert.mixer
        if layers.by == "list":
            return parse_layers(str(layers.layers), self._depth())
        if not get_selector(layers.by).needs_data:
            return select_layers(layers.by, int(layers.keep or 0), self._depth(), mixer).converted
        return fitting_layers(self.source.model, mixer, self.options)

    def _load_student(self) -> Any:
        """The student after the newest step; before any it is the source with all candidates converted."""
        if self.student is None and self.student_path is None:
            import torch

            from regraft.convert.graft import graft

            chosen = {i: (self.recipe.convert.mixer, self.options) for i in self.candidates}
            torch.manual_seed(self.recipe.seed)
            self.student = graft(self.source.model, chosen, info=self.source.info).model
        elif self.student is None:
            from regraft.convert.sources import load_source

            self.student = load_source(str(self.student_path), dtype=self.recipe.dtype, device=self.device).model
        return self.student

    def _stage(self, number: int, stage: Any, step: _Step) -> dict[str, Any]:
        """Train one stage, or find it done; returns its record. The student is then the one that was stored."""
        recipe = self.recipe
        path = self.store.path(step.name, step.key)
        if not self.store.has(step.name, step.key):
            from regraft.distill.loop import run_stage

            with self.store.make(step.name, step.key, step.inputs) as folder:
                result = run_stage(
                    stage,
                    student=self._load_student(),
                    # layers are aligned to what they replace, even where a larger model is the teacher of logits
                    teacher={"align": self.source.model, "logits": self.teacher.model}.get(stage.stage),
                    tokenizer=self.source.tokenizer,
                    data=recipe.data[stage.data],
                    out_dir=folder / "train",
                    seed=recipe.seed,
                    device=self.device,
                    measure=self._measure,
                    log=lambda line: self.log("            " + line),
                )
                result.student.save_pretrained(folder / "model")
                self.source.tokenizer.save_pretrained(folder / "model")
                shutil.copyfile(result.metrics_path, folder / "metrics.jsonl")
                if (folder / "train" / "adapter").is_dir():
                    copy_folder(folder / "train" / "adapter", folder / "adapter")
                record = {
                    "stage": stage.stage,
                    "tokens": result.tokens,
                    "steps": result.steps,
                    "seconds": result.seconds,
                    "final_loss": result.final_loss,
                    "layer_error": result.layer_error,
                    "start_error": result.start_error,
                }
                _write_json(folder / "result.json", record)
        else:
            self.log("            done before, reused")
        self.store.trim(step.name, step.key, "train")  # its checkpoints
        # read again even if it is in memory: so an interrupted run and one without a break go on from the same bytes
        self.student, self.student_path = None, path / "model"
        record = json.loads((path / "result.json").read_text(encoding="utf-8"))
        if record["layer_error"] is not None:
            record["layer_error"] = {int(k): v for k, v in record["layer_error"].items()}
        shutil.copyfile(path / "metrics.jsonl", self.folder / f"metrics-{step.name}.jsonl")
        if (path / "adapter").is_dir():
            copy_folder(path / "adapter", self.folder / "adapter")
        return record

    def _measure(self, student: Any) -> dict[str, float]:
        from regraft.eval.evaluate import measure

        recipe = self.recipe
        data = recipe.data[recipe.eval.data]
        return measure(student, self.teacher.model, self.source.tokenizer, recipe.eval, data, recipe.seed)

    def _gather_metrics(self) -> None:
        """All stages' steps in one file, beside the files per stage."""
        files = [self.folder / f"metrics-{step.name}.jsonl" for _, _, step in (*self.aligning, *self.distilling)]
        text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        (self.folder / "metrics.jsonl").write_text(text, encoding="utf-8")

    def _select(self, errors: dict[int, float] | None) -> Any:
        """Choose the layers, put the kept ones back, and write layers.json."""
        from regraft.convert.graft import converted_layers, ungraft
        from regraft.convert.layers import parse_layers
        from regraft.data.packing import calibration_rows
        from regraft.data.text import documents
        from regraft.select.registry import Calibration, Selection, get_selector, given, select_layers

        layers, mixer, step = self.recipe.layers, self.recipe.convert.mixer, self.selecting
        path = self.store.path(step.name, step.key) / "layers.json"
        if not self.store.has(step.name, step.key):
            options = self.options.to_dict()
            with self.store.make(step.name, step.key, step.inputs) as folder:
                if layers.by == "list":
                    chosen = given(parse_layers(str(layers.layers), self._depth()), self._depth(), mixer, options)
                else:
                    calibration = None
                    if get_selector(layers.by).needs_data:
                        rows = calibration_rows(
                            self.source.tokenizer, list(documents(self._calibration_data())), layers.tokens
                        )
                        calibration = Calibration(
                            self.source.model, self._load_student(), self.source.tokenizer, rows, errors
                        )
                    chosen = select_layers(layers.by, int(layers.keep or 0), self._depth(), mixer, options, calibration)
                chosen.save(folder / "layers.json")
        else:
            self.log("            done before, reused")
        selection = Selection.load(path)
        shutil.copyfile(path, self.folder / "layers.json")
        student = self._load_student()
        kept = [i for i in selection.kept if i in converted_layers(student)]
        if kept:
            ungraft(student, kept, self.source.model)
        return selection

    def _calibration_data(self) -> DataConfig:
        """The text that selectors measure on: that of the first stage, else the recipe's first source."""
        names = [*(stage.data for stage in self.recipe.distill), *self.recipe.data]
        return self.recipe.data[names[0]]

    def _evaluate(self, key: str) -> Any:
        from regraft.eval.evaluate import evaluate
        from regraft.eval.results import RESULTS_FORMAT, Results

        recipe = self.recipe
        data = recipe.data[recipe.eval.data]
        asked = recipe.eval.model_dump(mode="json", exclude={"data"})
        # speed is that of a device; all else is the same on each, up to rounding
        device = self.device if recipe.eval.bench else None
        text = (data.model_dump(mode="json"), _data_stamp(data))
        inputs = (key, asked, _identity(self.teacher), *text, recipe.seed, device, RESULTS_FORMAT)
        step = _Step("eval", inputs)
        path = self.store.path(step.name, step.key) / "results.json"
        if not self.store.has(step.name, step.key):
            with self.store.make(step.name, step.key, step.inputs) as folder:
                evaluate(
                    self._load_student(),
                    self.teacher.model,
                    self.source.tokenizer,
                    recipe.eval,
                    data,
                    source=self.source.model,
                    seed=recipe.seed,
                    log=lambda line: self.log("            " + line),
                ).save(folder / "results.json")
        else:
            self.log("            done before, reused")
        results = Results.load(path)
        # the measurements may be those of another recipe with the same steps: only the names are this one's
        results.model, results.teacher = recipe.name, recipe.teacher or recipe.base
        results.save(self.folder / "results.json")
        _write_json(self.folder / "env.json", results.env)
        return results

    def _verify(self, key: str) -> Any:
        """Verify the student; a pass is kept, a failure is looked into again each time."""
        from importlib.metadata import version

        from regraft import __version__
        from regraft.eval.verify import Check, VerifyReport, verify

        inputs = (key, __version__, version("torch"), version("transformers"))
        step = _Step("verify", inputs)
        path = self.store.path(step.name, step.key) / "verify.json"
        if self.store.has(step.name, step.key):
            self.log("            done before, reused")
            found = json.loads(path.read_text(encoding="utf-8"))
            report = VerifyReport([Check(**{**c, "value": float(c["value"])}) for c in found["checks"]])
        else:
            report = verify(self._load_student(), teacher=self.source.model)
            if report.passed:
                with self.store.make(step.name, step.key, step.inputs) as folder:
                    _write_json(folder / "verify.json", report.to_dict())
        _write_json(self.folder / "verify.json", report.to_dict())
        self.log("            " + report.summary())
        return report

    def _final(self, results: Any) -> Path:
        """The checkpoint of the run: a real, self-contained folder with card and results."""
        from regraft.convert.export.card import write_card

        final = self.folder / "final"
        staging = self.folder / ".final.writing"
        shutil.rmtree(staging, ignore_errors=True)
        student = self._load_student()
        student.save_pretrained(staging)
        self.source.tokenizer.save_pretrained(staging)
        results.save(staging / "results.json")
        write_card(staging, recipe_text=self.recipe_text, results=results)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(staging, final)
        return final


def _clock(seconds: float) -> str:
    """Minutes and seconds since the run began."""
    return f"{int(seconds) // 60:3d}:{int(seconds) % 60:02d}"


def _options(recipe: Recipe) -> Any:
    from regraft.convert.mixers.registry import parse_options

    return parse_options(recipe.convert.mixer, recipe.convert.options)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _identity(loaded: Any) -> list[Any]:
    """What decides how a loaded model computes: its weights, and its configuration without names and versions."""
    told = loaded.model.config.to_dict()
    config = {key: v for key, v in told.items() if key not in ("_name_or_path", "transformers_version", "dtype")}
    return [dataclasses.asdict(loaded.info), config]


def _data_stamp(data: DataConfig) -> Any:
    """What identifies a text beyond its name: size and time of files, the Python whose documentation it is."""
    from regraft.data.text import dataset_root, local_files

    if data.source == "corpus":
        return platform.python_version()
    if data.source == "workshop":
        return str(dataset_root())
    if data.source.startswith("hub:"):
        return None
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in local_files(data.source)]
