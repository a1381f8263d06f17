"""`regraft run`: a recipe from source to judged checkpoint, step by step, each step stored once."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regraft.errors import UserError
from regraft.recipes.load import dump
from regraft.recipes.schema import AlignStage, Recipe
from regraft.store import Store, check_space, copy_folder, key_of

PIPELINE_FORMAT = 1
_CALIBRATION_LENGTH = 512


@dataclass(frozen=True)
class RunResult:
    """Where a run ended: its folder, the checkpoint in it, the choice of layers, and what was measured."""

    folder: Path
    final: Path
    selection: Any
    results: Any
    verified: Any


def run_folder(recipe: Recipe, root: Path = Path("runs")) -> Path:
    """The folder that a run of `recipe` uses unless told otherwise."""
    return root / f"{recipe.name}-{key_of(recipe.model_dump(mode='json'))[:8]}"


def run(
    recipe: Recipe,
    *,
    recipe_text: str | None = None,
    out: Path | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    log: Callable[[str], None] = print,
) -> RunResult:
    """Convert, align, select, distil, evaluate, verify and report, as `recipe` says.

    Finished steps are reused, an interrupted one goes on where it stopped. UserError for an output folder that belongs
    to something else, a full disk, and everything that the steps refuse.
    """
    return _Pipeline(recipe, recipe_text, out, device, trust_remote_code, log).run()


class _Pipeline:
    def __init__(self, recipe, recipe_text, out, device, trust_remote_code, log):
        from regraft.convert.sources import load_source, pick_device
        from regraft.recipes.load import check_recipe

        check_recipe(recipe)
        self.recipe, self.log = recipe, log
        self.recipe_text = recipe_text or dump(recipe)
        self.folder = Path(out) if out is not None else run_folder(recipe)
        self._check_folder()
        self.store = Store(self.folder.parent / ".store")
        self.device = pick_device(device)
        settings = {"dtype": recipe.dtype, "device": self.device, "trust_remote_code": trust_remote_code}
        self.source = load_source(recipe.base, revision=recipe.revision, **settings)
        self.teacher = self.source
        if recipe.teacher is not None:
            from regraft.convert.sources import check_same_tokenizer

            self.teacher = load_source(recipe.teacher, **settings)
            check_same_tokenizer(self.source.tokenizer, self.teacher.tokenizer, recipe.teacher)
        if self.source.tokenizer is None:
            raise UserError("the source has no tokenizer", where=recipe.base, fix="save one beside the model")
        self.bytes = sum(p.numel() * p.element_size() for p in self.source.model.parameters())
        self.options = _options(recipe)
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

    def run(self) -> RunResult:
        recipe, folder = self.recipe, self.folder
        check_space(folder.parent, 6 * self.bytes, "this run")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(self.recipe_text, encoding="utf-8")
        (folder / "resolved.yaml").write_text(dump(recipe), encoding="utf-8")
        aligned, rest = self._split_stages()
        candidates = self._candidates()
        self.log(f"1 convert   {len(candidates)} layers to {recipe.convert.mixer}")
        self._graft(candidates)
        key = key_of(
            PIPELINE_FORMAT,
            dataclasses.asdict(self.source.info),
            dataclasses.asdict(self.teacher.info),
            recipe.convert.model_dump(),
            candidates,
            recipe.seed,
            recipe.dtype,
        )
        errors = None
        for number, stage in enumerate(aligned):
            self.log(f"2 align     {stage.tokens} tokens")
            key, record = self._stage(number, stage, key)
            errors = record["layer_error"]
        self.log(f"3 select    by {recipe.layers.by}")
        key, selection = self._select(key, errors)
        self.log(selection.render())
        for number, stage in enumerate(rest, len(aligned)):
            self.log(f"4 distill   {stage.stage}, {stage.tokens} tokens, train: {stage.train}")
            key, _ = self._stage(number, stage, key)
        self.log("5 evaluate")
        results = self._evaluate(key)
        self.log("6 verify")
        verified = self._verify(key)
        self.log("7 report")
        final = self._final(results, selection, verified)
        from regraft.eval.report import report

        page = report([folder])
        self.log(f"done        {final}\nreport      {page}")
        return RunResult(folder, final, selection, results, verified)

    def _split_stages(self) -> tuple[list[Any], list[Any]]:
        """Alignment stages that come first are done before the layers are chosen, since the choice may read them."""
        stages = list(self.recipe.distill)
        first = next((i for i, s in enumerate(stages) if not isinstance(s, AlignStage)), len(stages))
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
            return parse_layers(layers.layers, self._depth())
        if not get_selector(layers.by).needs_data:
            return select_layers(layers.by, layers.keep, self._depth(), mixer).converted
        fit = fitting_layers(self.source.model, mixer, self.options)
        if not fit:
            raise UserError(
                f"no layer of {self.recipe.base} fits {mixer}", fix=f"see: regraft inspect {self.recipe.base}"
            )
        return fit

    def _graft(self, candidates: list[int]) -> None:
        from regraft.convert.graft import graft

        chosen = {i: (self.recipe.convert.mixer, self.options) for i in candidates}
        self.student = graft(self.source.model, chosen, info=self.source.info).model

    def _load_student(self) -> Any:
        """The student after the newest step."""
        if self.student is None:
            from regraft.convert.sources import load_source

            self.student = load_source(str(self.student_path), dtype=self.recipe.dtype, device=self.device).model
        return self.student

    def _stage(self, number: int, stage: Any, key: str) -> tuple[str, dict[str, Any]]:
        """Train one stage, or find it done; returns its key and its record."""
        recipe = self.recipe
        data = recipe.data[stage.data]
        inputs = (
            key,
            number,
            stage.model_dump(mode="json"),
            data.model_dump(mode="json"),
            _data_stamp(data),
            recipe.seed,
        )
        key = key_of(*inputs)
        name = f"{number}-{stage.stage}"
        if not self.store.has(name, key):
            from regraft.distill.loop import run_stage

            with self.store.make(name, key, inputs) as folder:
                result = run_stage(
                    stage,
                    student=self._load_student(),
                    teacher=None if stage.stage == "finetune" else self.teacher.model,
                    tokenizer=self.source.tokenizer,
                    data=data,
                    out_dir=folder / "train",
                    seed=recipe.seed,
                    device=self.device,
                    log=lambda line: self.log("            " + line),
                )
                self.student = result.student
                self.student.save_pretrained(folder / "model")
                self.source.tokenizer.save_pretrained(folder / "model")
                shutil.copyfile(result.metrics_path, folder / "metrics.jsonl")
                adapter = folder / "train" / "adapter"
                if adapter.is_dir():
                    shutil.rmtree(folder / "adapter", ignore_errors=True)
                    os.replace(adapter, folder / "adapter")
                record = {
                    "stage": stage.stage,
                    "tokens": result.tokens,
                    "steps": result.steps,
                    "seconds": result.seconds,
                    "final_loss": result.final_loss,
                    "layer_error": result.layer_error,
                    "start_error": result.start_error,
                }
                (folder / "result.json").write_text(json.dumps(record), encoding="utf-8")
                shutil.rmtree(folder / "train")
        else:
            self.log("            done before, reused")
            self.student = None
        path = self.store.path(name, key)
        self.student_path = path / "model"
        record = json.loads((path / "result.json").read_text(encoding="utf-8"))
        if record["layer_error"] is not None:
            record["layer_error"] = {int(k): v for k, v in record["layer_error"].items()}
        shutil.copyfile(path / "metrics.jsonl", self.folder / f"metrics-{name}.jsonl")
        if record["stage"] != "align" and (path / "adapter").is_dir():
            copy_folder(path / "adapter", self.folder / "adapter")
        return key, record

    def _select(self, key: str, errors: dict[int, float] | None) -> tuple[str, Any]:
        """Choose the layers, put the kept ones back, and write layers.json."""
        from regraft.convert.graft import converted_layers, ungraft
        from regraft.convert.layers import parse_layers
        from regraft.select.registry import Calibration, Selection, get_selector, given, select_layers

        layers, mixer = self.recipe.layers, self.recipe.convert.mixer
        data = self.recipe.data[next(iter(s.data for s in self.recipe.distill), next(iter(self.recipe.data)))]
        inputs = (key, layers.model_dump(mode="json"), data.model_dump(mode="json"))
        key = key_of(*inputs)
        path = self.store.path("select", key) / "layers.json"
        if not self.store.has("select", key):
            options = self.options.to_dict()
            if layers.by == "list":
                chosen = given(parse_layers(layers.layers, self._depth()), self._depth(), mixer, options)
            else:
                calibration = None
                if get_selector(layers.by).needs_data:
                    rows = self._calibration_rows(data, layers.tokens)
                    calibration = Calibration(self.source.model, self._load_student(), rows, errors)
                chosen = select_layers(layers.by, layers.keep, self._depth(), mixer, options, calibration)
            with self.store.make("select", key, inputs) as folder:
                chosen.save(folder / "layers.json")
        selection = Selection.load(path)
        shutil.copyfile(path, self.folder / "layers.json")
        student = self._load_student()
        kept = [i for i in selection.kept if i in converted_layers(student)]
        if kept:
            ungraft(student, kept, self.source.model)
        return key, selection

    def _calibration_rows(self, data: Any, tokens: int) -> Any:
        """Rows for selectors that measure: training text, from its far end so that stage 1 has hardly seen it."""
        import torch

        from regraft.data.text import documents
        from regraft.eval.divergence import token_stream

        texts = list(documents(data))[::-1]
        picked, size = [], 0
        for text in texts:
            picked.append(text)
            size += len(text)
            if size > 8 * tokens + 8 * _CALIBRATION_LENGTH:
                break
        stream = token_stream(self.source.tokenizer, picked)
        rows = max(1, tokens // _CALIBRATION_LENGTH)
        if stream.numel() < rows * _CALIBRATION_LENGTH:
            rows = stream.numel() // _CALIBRATION_LENGTH
        if rows == 0:
            raise UserError("too little text to calibrate on", where="data", fix="give at least 512 tokens")
        return torch.as_tensor(stream[: rows * _CALIBRATION_LENGTH]).view(rows, _CALIBRATION_LENGTH)

    def _evaluate(self, key: str) -> Any:
        from regraft.eval.evaluate import evaluate
        from regraft.eval.results import Results

        recipe = self.recipe
        data = recipe.data[recipe.eval.data]
        inputs = (key, recipe.eval.model_dump(mode="json"), data.model_dump(mode="json"), _data_stamp(data), "eval 1")
        key = key_of(*inputs)
        if not self.store.has("eval", key):
            with self.store.make("eval", key, inputs) as folder:
                results = evaluate(
                    self._load_student(),
                    self.teacher.model,
                    self.source.tokenizer,
                    recipe.eval,
                    data,
                    names=(recipe.name, recipe.teacher or recipe.base),
                    seed=recipe.seed,
                    log=lambda line: self.log("            " + line),
                )
                results.save(folder / "results.json")
        path = self.store.path("eval", key) / "results.json"
        shutil.copyfile(path, self.folder / "results.json")
        results = Results.load(path)
        (self.folder / "env.json").write_text(json.dumps(results.env, indent=1), encoding="utf-8")
        return results

    def _verify(self, key: str) -> Any:
        from regraft.eval.verify import verify

        report = verify(self._load_student(), teacher=self.source.model)
        (self.folder / "verify.json").write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8")
        self.log("            " + report.summary())
        return report

    def _final(self, results: Any, selection: Any, verified: Any) -> Path:
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


def _options(recipe: Recipe) -> Any:
    from regraft.convert.mixers.registry import parse_options

    return parse_options(recipe.convert.mixer, recipe.convert.options)


def _data_stamp(data: Any) -> Any:
    """Size and time of local text files, so that a changed file is another input."""
    if data.source in ("corpus", "workshop") or data.source.startswith("hub:"):
        return data.source
    from regraft.data.text import local_files

    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in local_files(data.source)]
