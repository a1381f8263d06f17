"""What a stage trains: parameters by name, their learning rates, and LoRA through peft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from regraft.convert.graft import converted_layers, decoder_layers
from regraft.convert.mixers.base import Mixer
from regraft.errors import UserError
from regraft.recipes.schema import AlignStage, FinetuneStage, LogitsStage

AnyStage = AlignStage | LogitsStage | FinetuneStage


@dataclass(frozen=True)
class Trainable:
    """The parameters that a stage trains, by name in the student, and the peft wrapper if there is one."""

    new: dict[str, nn.Parameter]
    rest: dict[str, nn.Parameter]
    peft: Any = None

    def named(self) -> dict[str, nn.Parameter]:
        """Both groups."""
        return {**self.new, **self.rest}


def new_parameters(mixer: Mixer) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a mixer that the teacher does not have (its `full_train`), with their names inside it."""
    for name, parameter in mixer.named_parameters():
        if any(name == n or name.startswith(n + ".") for n in mixer.full_train):
            yield name, parameter


def make_trainable(student: Any, stage: AnyStage) -> Trainable:
    """Freeze everything but what `stage` trains.

    "new": the mixers' new parameters. "mixers": every parameter of the converted attentions. "all": the whole model.
    "lora": adapters on the converted attentions' linears, and their new parameters. UserError if nothing would train.
    """
    mixers = converted_layers(student)
    if not mixers:
        raise UserError(
            "no layer is converted: there is nothing to train", fix="convert layers first (regraft convert)"
        )
    peft_model = _attach_lora(student, stage) if stage.train == "lora" else None
    fresh = {id(p) for mixer in mixers.values() for _, p in new_parameters(mixer)}
    inside = {id(p) for mixer in mixers.values() for p in mixer.parameters()}
    new, rest = {}, {}
    for name, parameter in student.named_parameters():
        is_new = id(parameter) in fresh
        wanted = {
            "new": is_new,
            "mixers": id(parameter) in inside,
            "all": True,
            "lora": is_new or "lora_" in name,
        }[stage.train]
        parameter.requires_grad_(wanted)
        if wanted:
            (new if is_new else rest)[name] = parameter
    if not new and not rest:
        kinds = sorted({mixer.name for mixer in mixers.values()})
        raise UserError(
            f"stage {stage.stage}, train: {stage.train} trains nothing: {', '.join(kinds)} has no new parameters",
            where="distill",
            fix="use train: mixers, all or lora, or leave the stage out",
        )
    return Trainable(new, rest, peft_model)


def lora_names(student: Any, targets: list[str] | None) -> list[str]:
    """Full names of the linears that LoRA goes on: `targets` (default: each mixer's own) in converted layers only.

    UserError for a target that no converted layer has.
    """
    base = next(n for n, m in student.named_modules() if m is decoder_layers(student))
    found, unmatched = [], set(targets or ())
    for index, mixer in converted_layers(student).items():
        for name in targets or mixer.lora_targets:
            if isinstance(getattr(mixer, name, None), nn.Linear):
                found.append(f"{base}.{index}.self_attn.{name}")
                unmatched.discard(name)
    if unmatched or not found:
        raise UserError(
            f"LoRA targets match nothing: {', '.join(sorted(unmatched)) or 'none given'}",
            where="lora.targets",
            fix=f"linears of the converted layers: {', '.join(_linears(student))}",
        )
    return found


def _linears(student: Any) -> list[str]:
    mixer = next(iter(converted_layers(student).values()))
    return [name for name, child in mixer.named_children() if isinstance(child, nn.Linear)]


def _attach_lora(student: Any, stage: AnyStage) -> Any:
    import peft

    settings = stage.lora
    config = peft.LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=lora_names(student, settings.targets),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(student, config)


def trainable_summary(student: Any, stage: AnyStage) -> dict[str, Any]:
    """What `stage` would train, without changing `student`: counts by group, learning rates, LoRA targets."""
    mixers = converted_layers(student)
    fresh = {id(p): p.numel() for mixer in mixers.values() for _, p in new_parameters(mixer)}
    inside = {id(p): p.numel() for mixer in mixers.values() for p in mixer.parameters()}
    total = sum(p.numel() for p in student.parameters())
    new = sum(fresh.values())
    rest, targets = 0, []
    if stage.train == "mixers":
        rest = sum(inside.values()) - new
    elif stage.train == "all":
        rest = total - new
    elif stage.train == "lora":
        targets = lora_names(student, stage.lora.targets)
        modules = dict(student.named_modules())
        rest = sum(stage.lora.r * (modules[t].in_features + modules[t].out_features) for t in targets)
    new_lr = getattr(stage, "new_lr", None) or stage.lr
    return {
        "stage": stage.stage,
        "train": stage.train,
        "new": {"parameters": new, "lr": new_lr, "names": sorted({n for m in mixers.values() for n in m.full_train})},
        "rest": {"parameters": rest, "lr": stage.lr, "lora_targets": targets},
        "frozen": total - new - (rest if stage.train != "lora" else 0),
    }
