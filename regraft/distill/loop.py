"""The training loop of all stages: own, small, on accelerate; exact resume after a kill at any moment.

Nothing that a step does depends on the steps before it except the trained tensors and the optimizer: rows are numbered,
and every step seeds its own randomness. So a checkpoint holds the trained tensors, AdamW's moments and the step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from regraft.convert.graft import attention_slots, converted_layers
from regraft.convert.mixers.base import choose_start
from regraft.convert.model.context import Context, documents_from_positions
from regraft.convert.sources import check_same_tokenizer, pick_device
from regraft.data.packing import IGNORE, Batch, PackedText
from regraft.data.text import documents
from regraft.distill.losses import Head, align_loss, distill_loss
from regraft.distill.stages import AnyStage, Trainable, make_trainable
from regraft.errors import UserError
from regraft.recipes.schema import AlignStage, DataConfig

_KEEP = 2  # checkpoints
_START_ROWS = 2  # the first rows, on which starts are chosen and the teacher's variance is taken
_ERROR_ROWS = 4  # rows after the training ones on which the error that is left is measured
_WEIGHTS, _STATE = "trainer.safetensors", "trainer.json"


@dataclass(frozen=True)
class StageResult:
    """What a stage did. `start_error`, `layer_error`: alignment error per converted layer before and after training, on
    rows that were not trained on.
    """

    student: Any
    steps: int
    tokens: int
    final_loss: float
    layer_error: dict[int, float] | None
    start_error: dict[int, float] | None
    seconds: float
    metrics_path: Path


def steps_of(stage: AnyStage, processes: int = 1) -> int:
    """Optimiser steps that the stage's token budget pays for."""
    return max(1, math.ceil(stage.tokens / (stage.seq_len * stage.batch_size * stage.accumulate * processes)))


def learning_rate(stage: AnyStage, peak: float, step: int, steps: int) -> float:
    """Rate at `step` (from 0): linear warm-up, then the stage's schedule down to `min_lr`."""
    warmup = min(stage.warmup, max(steps - 1, 0))
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if stage.schedule == "constant":
        return peak
    done = (step - warmup) / max(steps - warmup, 1)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if stage.schedule == "cosine" else 1 - done
    return stage.min_lr + (peak - stage.min_lr) * shape


def run_stage(
    stage: AnyStage,
    *,
    student: Any,
    teacher: Any,
    tokenizer: Any,
    data: DataConfig,
    out_dir: Path,
    seed: int = 0,
    device: str | None = "cpu",
    teacher_tokenizer: Any = None,
    measure: Callable[[Any], dict[str, Any]] | None = None,
    log: Callable[[str], None] = print,
) -> StageResult:
    """Train `student` in place as `stage` says; resumes by itself from the newest checkpoint in `out_dir`.

    `measure` (student -> numbers) is called every `stage.eval_every` tokens; its numbers go into metrics.jsonl.
    `teacher` is frozen and never saved (None for a fine-tuning stage). UserError if `out_dir` holds a checkpoint of
    another configuration (the difference is told), if a loss is not finite, or if the tokenizers differ.
    """
    if teacher_tokenizer is not None:
        check_same_tokenizer(tokenizer, teacher_tokenizer, "distill")
    if stage.stage != "finetune" and teacher is None:
        raise UserError(f"stage {stage.stage} needs a teacher", fix="give one, or use stage: finetune")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=pick_device(device) == "cpu")
    run = _Run(stage, student, teacher, tokenizer, data, Path(out_dir), seed, accelerator, measure, log)
    return run.train()


class _Run:
    """One stage being trained."""

    def __init__(self, stage, student, teacher, tokenizer, data, out_dir, seed, accelerator, measure, log):
        self.stage, self.student, self.teacher, self.tokenizer = stage, student, teacher, tokenizer
        self.out_dir, self.seed, self.accelerator, self.log = out_dir, seed, accelerator, log
        self.measure = measure if stage.eval_every else None
        self.rows = PackedText(documents(data), tokenizer, stage.seq_len, bos=data.bos, eos=data.eos, seed=seed)
        self.steps = steps_of(stage, accelerator.num_processes)
        self.config = self._configuration(data)
        # adapters start at random: the same for a stage that follows another and for one that starts afresh
        torch.manual_seed(seed)
        self.trainable: Trainable = make_trainable(student, stage)
        self.exact: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # frozen weights before they were cast
        self._place()
        self.optimizer = torch.optim.AdamW(self._groups(), betas=stage.betas, weight_decay=stage.weight_decay)
        self.start_error: dict[int, float] | None = None
        self.variance: dict[int, torch.Tensor] = {}

    def _configuration(self, data: DataConfig) -> dict[str, Any]:
        """Everything that decides the result; a checkpoint of a different one is refused."""
        return {
            "stage": self.stage.model_dump(mode="json", exclude={"checkpoint_every", "eval_every"}),
            "seed": self.seed,
            "data": self.rows.fingerprint(),
            "mixers": self.student.config.regraft["mixers"],
            "student": _digest(self.student),
            "teacher": None if self.teacher is None else _digest(self.teacher),
            "processes": self.accelerator.num_processes,
        }

    def _place(self) -> None:
        """Devices and dtypes: frozen weights in the stage's dtype, trained ones in fp32."""
        device = self.accelerator.device
        self.student.to(device)
        if self.teacher is not None:
            self.teacher.to(device).eval().requires_grad_(False)
        if self.stage.dtype == "bfloat16":
            if self.stage.train == "all":
                raise UserError(
                    "dtype: bfloat16 is for frozen weights, and train: all leaves none",
                    where=f"stage {self.stage.stage}",
                    fix="use dtype: float32, or train: mixers, new or lora",
                )
            models = [self.student] + ([] if self.teacher is None else [self.teacher])
            for parameter in (p for model in models for p in model.parameters() if not p.requires_grad):
                self.exact.append((parameter, parameter.data))
                parameter.data = parameter.data.to(torch.bfloat16)
        for parameter in self.trainable.named().values():
            parameter.data = parameter.data.float()
        self.student.train()
        if self.stage.gradient_checkpointing:
            self.student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def _groups(self) -> list[dict[str, Any]]:
        new_lr = getattr(self.stage, "new_lr", None) or self.stage.lr
        groups = [(self.trainable.new, new_lr), (self.trainable.rest, self.stage.lr)]
        return [{"params": list(named.values()), "peak": lr, "lr": lr} for named, lr in groups if named]

    def train(self) -> StageResult:
        """Run from the newest checkpoint (or the start) to the end."""
        began = time.perf_counter()
        self.out_dir.mkdir(parents=True, exist_ok=True)
        first = self._resume()
        metrics = self.out_dir / "metrics.jsonl"
        self._truncate(metrics, first)
        if isinstance(self.stage, AlignStage):
            self._look(choose=first == 0)
        epochs = self.rows.epochs(self.steps * self._rows_per_step())
        if epochs > 1 and first == 0:
            self.log(f"note: the text is read {epochs:.1f} times for {self.stage.tokens} tokens")
        value = math.nan
        with metrics.open("a", encoding="utf-8") as out:
            for step in self._progress(first):
                before = self._measured(0) if step == 0 else {}
                row = self._step(step)
                value = row["loss"]
                row |= {**({"before": before} if before else {}), **self._measured(step + 1)}
                if self.accelerator.is_main_process:
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                done = step + 1
                if done % self.stage.checkpoint_every == 0 and done < self.steps:
                    self._checkpoint(done)
        if first == self.steps:
            value = json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])["loss"]
        errors = self._layer_errors() if isinstance(self.stage, AlignStage) else None
        self._finish()
        tokens = self.steps * self._rows_per_step() * self.stage.seq_len
        seconds = time.perf_counter() - began
        return StageResult(self.student, self.steps, tokens, value, errors, self.start_error, seconds, metrics)

    def _measured(self, done: int) -> dict[str, Any]:
        """What `measure` finds after `done` steps, where it is due: at the start, every `eval_every`, at the end."""
        if self.measure is None or not self.accelerator.is_main_process:
            return {}
        tokens = self._rows_per_step() * self.stage.seq_len
        due = done * tokens // self.stage.eval_every > (done - 1) * tokens // self.stage.eval_every
        if not (due or done == self.steps):
            return {}
        self.student.eval()
        with self._merged():
            found = self.measure(self.student)
        self.student.train()
        told = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
        self.log(f"held-out text after {done * tokens} tokens: {told}")
        return {"heldout": found} if done else found

    def _rows_per_step(self) -> int:
        return self.stage.batch_size * self.stage.accumulate * self.accelerator.num_processes

    def _progress(self, first: int) -> Iterator[int]:
        name = f"{self.stage.stage} ({self.stage.train})"
        if sys.stderr.isatty() and self.accelerator.is_main_process:
            from tqdm import tqdm

            yield from tqdm(range(first, self.steps), initial=first, total=self.steps, desc=name, unit="step")
            return
        every = max(1, self.steps // 10)
        began = time.perf_counter()
        for step in range(first, self.steps):
            yield step
            done = step + 1
            if (done % every == 0 or done == self.steps) and self.accelerator.is_main_process:
                rate = (done - first) * self._rows_per_step() * self.stage.seq_len / (time.perf_counter() - began)
                left = (self.steps - done) * self._rows_per_step() * self.stage.seq_len / rate
                self.log(
                    f"{name}: step {done}/{self.steps}, loss {self._last:.4f}, {rate:.0f} tok/s, {left:.0f} s left"
                )

    def _batches(self, step: int) -> list[Batch]:
        """This process's micro-batches of a step."""
        stage, processes = self.stage, self.accelerator.num_processes
        first = step * self._rows_per_step() + self.accelerator.process_index * stage.batch_size
        stride = stage.batch_size * processes
        return [_to(self.rows.batch(first + m * stride, stage.batch_size), self.accelerator.device)
                for m in range(stage.accumulate)]  # fmt: skip

    def _step(self, step: int) -> dict[str, Any]:
        began = time.perf_counter()
        # every step has randomness of its own, so that a resumed run goes on as if it had never stopped
        torch.manual_seed(self.seed * 1_000_003 + step * 131 + self.accelerator.process_index)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.stage, group["peak"], step, self.steps)
        batches = self._batches(step)
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.stage, AlignStage):
            detail = self._align(batches)
        else:
            detail = self._logits(batches)
        self._share_gradients()
        norm = self._clip(step)
        self.optimizer.step()
        self._last = detail["loss"]
        return {
            "stage": self.stage.stage,
            "step": step + 1,
            "tokens": (step + 1) * self._rows_per_step() * self.stage.seq_len,
            **detail,
            "lr": self.optimizer.param_groups[-1]["lr"],
            "grad_norm": norm,
            "seconds": round(time.perf_counter() - began, 4),
        }

    def _check_finite(self, value: float, where: str) -> None:
        if not math.isfinite(value):
            kept = _checkpoints(self.out_dir)
            raise UserError(
                f"the loss is {value}: stopped",
                where=where,
                fix=f"lower the learning rate; last good checkpoint: {kept[-1] if kept else 'none yet'}",
            )

    def _align(self, batches: list[Batch]) -> dict[str, Any]:
        """Every converted layer on the teacher's input; one layer's graph at a time."""
        layers = converted_layers(self.student)
        totals = dict.fromkeys(layers, 0.0)
        share = 1.0 / (len(batches) * self.accelerator.num_processes)
        for batch in batches:
            taps = teacher_taps(self.teacher, batch, list(layers))
            context = Context.of(None, documents_from_positions(batch.position_ids))
            for index, mixer in layers.items():
                hidden, position, target = taps[index]
                loss = align_loss(self.stage.loss, mixer.heads(hidden, position, context), target, self.variance[index])
                self._check_finite(loss.item(), f"stage align, layer {index}")
                (loss * share).backward()
                totals[index] += loss.item() * share
        values = torch.tensor(list(totals.values()), device=self.accelerator.device, dtype=torch.float64)
        values = self.accelerator.reduce(values, "sum").tolist()
        return {
            "loss": sum(values) / len(values),
            "layers": {str(i): round(v, 6) for i, v in zip(totals, values, strict=True)},
        }

    def _logits(self, batches: list[Batch]) -> dict[str, Any]:
        """Student-forced KL and cross-entropy over the counted tokens of all processes."""
        stage = self.stage
        kl_weight, ce_weight = getattr(stage, "kl", 0.0), getattr(stage, "ce", 1.0)
        chosen = [self._positions(batch) for batch in batches]
        count = torch.tensor(float(sum(int(c.sum()) for c in chosen)), device=self.accelerator.device)
        count = self.accelerator.reduce(count, "sum").item()
        sums = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        for batch, mask in zip(batches, chosen, strict=True):
            arguments = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
            teacher_hidden = teacher_head = None
            if kl_weight:
                with torch.no_grad():
                    teacher_hidden = self.teacher.get_decoder()(**arguments).last_hidden_state[:, :-1][mask]
                teacher_head = Head.of(self.teacher)
            hidden = self.student.get_decoder()(**arguments).last_hidden_state[:, :-1][mask]
            loss, kl, ce = distill_loss(
                hidden,
                teacher_hidden,
                Head.of(self.student),
                teacher_head,
                batch.labels[:, 1:][mask] if ce_weight else None,
                kl_weight=kl_weight,
                ce_weight=ce_weight,
                temperature=getattr(stage, "temperature", 1.0),
                chunk=stage.chunk,
            )
            self._check_finite(loss.item(), f"stage {stage.stage}")
            (loss / count).backward()
            sums += torch.stack([loss.detach(), kl, ce]).double() / count
        loss, kl, ce = self.accelerator.reduce(sums, "sum").tolist()
        return {"loss": loss, **({"kl": kl} if kl_weight else {}), **({"ce": ce} if ce_weight else {})}

    def _positions(self, batch: Batch) -> torch.Tensor:
        """[B, T - 1] bool: predictions that count, at most `positions` random ones a row."""
        mask = batch.labels[:, 1:] != IGNORE
        limit = getattr(self.stage, "positions", None)
        if limit is not None:
            order = torch.rand(mask.shape).to(mask.device).masked_fill(~mask, -1.0)
            top = order.topk(min(limit, mask.shape[1]), dim=1).indices
            mask = mask & torch.zeros_like(mask).scatter(1, top, True)
        return mask

    def _share_gradients(self) -> None:
        if self.accelerator.num_processes > 1:
            for parameter in self.trainable.named().values():
                if parameter.grad is not None:
                    parameter.grad = self.accelerator.reduce(parameter.grad, "sum")

    def _clip(self, step: int) -> float:
        """Clip to the stage's norm; layers that are aligned on their own are clipped on their own."""
        if isinstance(self.stage, AlignStage):
            mixers = converted_layers(self.student).values()
            sets = [[p for p in mixer.parameters() if p.grad is not None] for mixer in mixers]
        else:
            sets = [[p for p in self.trainable.named().values() if p.grad is not None]]
        limit = math.inf if self.stage.clip is None else self.stage.clip
        norms = [torch.nn.utils.clip_grad_norm_(s, limit).item() for s in sets if s]
        norm = math.sqrt(math.fsum(n * n for n in norms))
        self._check_finite(norm, f"stage {self.stage.stage}, step {step + 1}, gradient")
        return norm

    @torch.no_grad()
    def _look(self, choose: bool) -> None:
        """Variance of the teacher's outputs; with `choose`, of several starts that a mixer offers the best one.

        Both on the same rows in every process, whatever the batch: so neither changes what is learned.
        """
        batch = _to(self.rows.batch(0, _START_ROWS), self.accelerator.device)
        layers = converted_layers(self.student)
        taps = teacher_taps(self.teacher, batch, list(layers))
        context = Context.of(None, documents_from_positions(batch.position_ids))
        self.variance = {index: taps[index][2].float().var(unbiased=False) for index in layers}
        if choose:
            for index, mixer in layers.items():
                choose_start(mixer, *taps[index], context)
            del taps
            self.start_error = self._layer_errors()

    @torch.no_grad()
    def _layer_errors(self) -> dict[int, float]:
        """Relative error per layer, on rows that come after the training rows.

        Relative whatever the stage's loss is: absolute errors do not compare between layers of different size.
        """
        layers = converted_layers(self.student)
        totals = dict.fromkeys(layers, 0.0)
        first = self.steps * self._rows_per_step()
        for number in range(first, first + _ERROR_ROWS):
            batch = _to(self.rows.batch(number, 1), self.accelerator.device)
            taps = teacher_taps(self.teacher, batch, list(layers))
            context = Context.of(None, documents_from_positions(batch.position_ids))
            for index, mixer in layers.items():
                hidden, position, target = taps[index]
                out = mixer.heads(hidden, position, context)
                totals[index] += align_loss("mse_over_variance", out, target, self.variance[index]).item()
        return {index: total / _ERROR_ROWS for index, total in totals.items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, parameter in self.trainable.named().items():
            tensors[f"p:{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{key}:{name}"] = torch.as_tensor(value)
        return {name: t.contiguous() for name, t in tensors.items()}

    def _checkpoint(self, step: int) -> None:
        """A loadable model folder with the trained tensors and AdamW's moments, appearing by one rename."""
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        staging = self.out_dir / f".writing-{step}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        save_file(self._tensors(), staging / _WEIGHTS)
        state = {"step": step, "config": self.config, "start_error": self.start_error}
        (staging / _STATE).write_text(json.dumps(state), encoding="utf-8")
        with self._merged():
            self.student.save_pretrained(staging)
        self.tokenizer.save_pretrained(staging)
        target = self.out_dir / f"checkpoint-{step:06d}"
        shutil.rmtree(target, ignore_errors=True)
        os.replace(staging, target)
        for old in _checkpoints(self.out_dir)[:-_KEEP]:
            shutil.rmtree(old)

    @contextlib.contextmanager
    def _merged(self) -> Iterator[None]:
        """The student as a plain model in full precision for the time of a save, with adapters folded in."""
        cast = [(parameter, parameter.data) for parameter, _ in self.exact]
        for parameter, data in self.exact:
            parameter.data = data
        kept = {}
        for name, module in list(self.student.named_modules()):
            if self.trainable.peft is not None and hasattr(module, "lora_A") and hasattr(module, "base_layer"):
                parent, _, leaf = name.rpartition(".")
                kept[(parent, leaf)] = module
        try:
            for (parent, leaf), module in kept.items():
                linear = module.get_base_layer()
                plain = torch.nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
                delta = module.get_delta_weight("default")
                plain.weight = torch.nn.Parameter((linear.weight.float() + delta.float()).to(linear.weight.dtype))
                plain.bias = linear.bias
                setattr(self.student.get_submodule(parent), leaf, plain)
            yield
        finally:
            for (parent, leaf), module in kept.items():
                setattr(self.student.get_submodule(parent), leaf, module)
            for parameter, data in cast:
                parameter.data = data

    def _resume(self) -> int:
        """Load the newest checkpoint; returns its step, or 0."""
        found = _checkpoints(self.out_dir)
        if not found:
            return 0
        newest = found[-1]
        state = json.loads((newest / _STATE).read_text(encoding="utf-8"))
        differences = _differences(state["config"], self.config)
        if differences:
            raise UserError(
                f"the checkpoint belongs to another configuration: {'; '.join(differences[:3])}",
                where=str(newest),
                fix="restore the old setting, or choose another output folder",
            )
        tensors = load_file(newest / _WEIGHTS)
        for name, parameter in self.trainable.named().items():
            parameter.data.copy_(tensors[f"p:{name}"])
            self.optimizer.state[parameter] = {
                key: tensors[f"{key}:{name}"].to(parameter.device if key != "step" else "cpu")
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
        errors = state["start_error"]
        self.start_error = None if errors is None else {int(k): v for k, v in errors.items()}
        self.log(f"resuming {self.stage.stage} at step {state['step']} of {self.steps}")
        return state["step"]

    def _truncate(self, metrics: Path, step: int) -> None:
        if not self.accelerator.is_main_process:
            return
        lines = metrics.read_text(encoding="utf-8").splitlines()[:step] if metrics.is_file() else []
        metrics.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def _finish(self) -> None:
        """Back to a plain model in eval mode and full precision; an adapter is saved, then folded in."""
        for parameter, data in self.exact:
            parameter.data = data
        if self.trainable.peft is not None:
            if self.accelerator.is_main_process:
                self.trainable.peft.save_pretrained(self.out_dir / "adapter")
            self.student = self.trainable.peft.merge_and_unload()
        if self.stage.gradient_checkpointing:
            self.student.gradient_checkpointing_disable()
        self.student.requires_grad_(False).eval()


class _Stop(Exception):
    """The last layer that is wanted has been reached."""


@torch.no_grad()
def teacher_taps(teacher: Any, batch: Batch, layers: list[int]) -> dict[int, tuple[Any, Any, torch.Tensor]]:
    """Input and head outputs of the teacher's attention: layer -> (hidden [B, T, D], (cos, sin), heads [B, T, H, Dv]).

    The layers above the last wanted one are not computed, nor are logits.
    """
    slots = attention_slots(teacher)
    taken: dict[int, list[Any]] = {index: [None, None, None] for index in layers}
    handles = []

    def before(index: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            taken[index][0] = kwargs["hidden_states"]
            taken[index][1] = kwargs["position_embeddings"]

        return hook

    def output(index: int) -> Any:
        def hook(module: Any, args: Any) -> None:
            dim = slots[index].v_proj.out_features // teacher.config.num_key_value_heads
            taken[index][2] = args[0].unflatten(-1, (-1, dim))
            if index == max(layers):
                raise _Stop

        return hook

    for index in layers:
        handles.append(slots[index].register_forward_pre_hook(before(index), with_kwargs=True))
        handles.append(slots[index].o_proj.register_forward_pre_hook(output(index)))
    try:
        with contextlib.suppress(_Stop):
            teacher.get_decoder()(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {index: (h, p, o) for index, (h, p, o) in taken.items()}


def _to(batch: Batch, device: Any) -> Batch:
    return Batch(batch.input_ids.to(device), batch.position_ids.to(device), batch.labels.to(device))


def _checkpoints(out_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in out_dir.glob("checkpoint-*") if (p / _STATE).is_file())


def _digest(model: Any) -> str:
    """Hash of names, shapes and the first values of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().flatten()[:256].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """`path: old -> new` for every leaf that differs."""
    new = json.loads(json.dumps(new)) if path == "" else new
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            found += _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        return found
    return [] if old == new else [f"{path}: {old} -> {new}"]
