"""The recipe file: what `regraft run` does, as validated data.

Pydantic models only; nothing here imports torch. Mixer options stay raw dicts (the mixer registry validates them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

SCHEMA_VERSION = 1

_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kKmMgG]?)\s*$")


def parse_size(value: Any) -> Any:
    """`50M`, `2k`, `1e6` or a number as an int (decimal k/M/G); anything else is refused."""
    if isinstance(value, bool) or not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if not match:
        raise ValueError(f"'{value}' is not a size; write a number such as 300000, 300k or 2M")
    return int(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2].lower()])


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]


def parse_layer_text(value: Any) -> Any:
    """`layers: 9` and `layers: [0, 2]` as the grammar's text: YAML makes numbers and lists of what people write."""
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return ",".join(map(str, value))
    return str(value) if type(value) is int else value


class Strict(BaseModel):
    """Base: unknown keys are errors, values are frozen, infinity and NaN are no numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Origin:
    """Where a recipe was written, so that what is found wrong later can still be told at file and line.

    `lines`: line of every key, by its path; `changed`: the --set argument that gave a key. No part of what a recipe
    says: any two are equal.
    """

    name: str = field(default="recipe", compare=False)
    lines: Mapping[tuple[Any, ...], int] = field(default_factory=dict, compare=False)
    changed: Mapping[tuple[Any, ...], str] = field(default_factory=dict, compare=False)

    def place(self, path: tuple[Any, ...]) -> str:
        """`--set key` if that gave `path` or a part of it, else `file:line` of its deepest part that the file has."""
        upwards = [path[:n] for n in range(len(path), 0, -1)]
        below = [key for key in self.changed if path and key[: len(path)] == path]
        for key in [*upwards, *below]:
            if key in self.changed:
                return f"--set {self.changed[key]}"
        line = next((self.lines[key] for key in upwards if key in self.lines), 1)
        return f"{self.name}:{line}" if self.lines else self.name


class DataConfig(Strict):
    """A text source.

    `source`: `corpus` (embedded: the Python documentation in every CPython), a local .txt/.jsonl/.parquet file or
    a glob of them, or `hub:NAME` (a Hub data set, streamed). `field` names the text column of rows.
    """

    source: str = "corpus"
    split: str = "train"
    field: str = "text"
    config: str | None = None
    bos: bool = False
    eos: bool = True


class LayersConfig(Strict):
    """Which layers are converted: `by` a selector of the registry, or an explicit grammar string in `layers`.

    `keep` is the number of layers that stay softmax. `tokens` is the calibration budget of selectors that measure.
    """

    by: str = "align"
    keep: int | None = Field(default=None, ge=0)
    layers: Annotated[str | None, BeforeValidator(parse_layer_text)] = None
    tokens: Size = 4096

    @model_validator(mode="after")
    def _one_way(self) -> LayersConfig:
        if self.by == "list" and self.layers is None:
            raise ValueError("by: list needs `layers`, for example layers: 0-14")
        if self.by == "list" and self.keep is not None:
            raise ValueError("`keep` is not read with by: list; leave it out (--set layers.keep=null)")
        if self.by != "list" and self.layers is not None:
            raise ValueError("`layers` is only read with by: list")
        if self.by != "list" and self.keep is None:
            raise ValueError(f"by: {self.by} needs `keep`, the number of softmax layers kept")
        return self


class LoraConfig(Strict):
    """LoRA through peft; `targets` defaults to the mixer's own `lora_targets`."""

    r: int = Field(default=8, gt=0)
    alpha: float = Field(default=16.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: list[str] | None = None


class _Training(Strict):
    """What all stages have. `eval_every`: tokens between measurements of the student on held-out text."""

    tokens: Size
    seq_len: Size = 512
    batch_size: int = Field(default=1, gt=0)
    accumulate: int = Field(default=1, gt=0)
    lr: float = Field(gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    warmup: int = Field(default=10, ge=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = Field(default=1.0, gt=0)
    data: str = "train"
    checkpoint_every: int = Field(default=50, gt=0)
    eval_every: Size | None = None
    gradient_checkpointing: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"


class AlignStage(_Training):
    """Teacher-forced: every converted layer gets the teacher's input and is fitted to the teacher's output."""

    stage: Literal["align"]
    lr: float = Field(default=1e-2, gt=0)
    loss: Literal["mse_over_variance", "mse", "l2norm"] = "mse_over_variance"
    train: Literal["new", "mixers"] = "new"


class LogitsStage(_Training):
    """Student-forced: KL(teacher || student) on next-token distributions, optionally plus cross-entropy.

    `positions`: number of random positions per row on which the loss is taken; null takes all. `chunk`: tokens whose
    logits over the whole vocabulary exist at one time.
    """

    stage: Literal["logits"]
    lr: float = Field(default=1e-4, gt=0)
    new_lr: float | None = Field(default=None, gt=0)
    train: Literal["new", "mixers", "all", "lora"] = "mixers"
    lora: LoraConfig | None = None
    kl: float = Field(default=1.0, ge=0)
    ce: float = Field(default=0.0, ge=0)
    temperature: float = Field(default=1.0, gt=0)
    positions: int | None = Field(default=None, gt=0)
    chunk: int = Field(default=64, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> LogitsStage:
        if (self.train == "lora") != (self.lora is not None):
            raise ValueError("`train: lora` and the `lora:` block belong together; give both or neither")
        if self.kl == 0 and self.ce == 0:
            raise ValueError("kl and ce are both 0: there is nothing to train on")
        return self


class FinetuneStage(_Training):
    """Next-token cross-entropy without a teacher."""

    stage: Literal["finetune"]
    lr: float = Field(default=1e-4, gt=0)
    new_lr: float | None = Field(default=None, gt=0)
    train: Literal["new", "mixers", "all", "lora"] = "lora"
    lora: LoraConfig | None = None
    chunk: int = Field(default=64, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> FinetuneStage:
        if (self.train == "lora") != (self.lora is not None):
            raise ValueError("`train: lora` and the `lora:` block belong together; give both or neither")
        return self


Stage = Annotated[AlignStage | LogitsStage | FinetuneStage, Field(discriminator="stage")]


class ConvertConfig(Strict):
    """The target mixer and its options (validated by the mixer's own Options class)."""

    mixer: str
    options: dict[str, Any] = Field(default_factory=dict)


class EvalConfig(Strict):
    """What is measured at the end: protocols, recall lengths, lm-eval tasks, and speed by context.

    `recall_samples`: pass-key items at the shortest length. Longer ones get fewer, and so do tasks of several answers.
    """

    protocols: list[Literal["core", "long"]] = ["core"]
    data: str = "eval"
    windows: int | None = Field(default=None, gt=0)
    recall: list[Size] = [512, 1024, 2048]
    recall_samples: int = Field(default=16, gt=0)
    baselines: bool = True
    tasks: list[str] = []
    limit: int | None = Field(default=None, gt=0)
    bench: list[Size] = []


class Recipe(Strict):
    """A whole conversion, from a source model to a judged checkpoint."""

    version: int = SCHEMA_VERSION
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    title: str = ""
    source_of_method: str = ""
    base: str
    revision: str | None = None
    teacher: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    convert: ConvertConfig
    layers: LayersConfig
    distill: list[Stage] = []
    data: dict[str, DataConfig] = Field(
        default_factory=lambda: {"train": DataConfig(split="train"), "eval": DataConfig(split="heldout")}
    )
    eval: EvalConfig = Field(default_factory=EvalConfig)
    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def origin(self) -> Origin:
        """Where it was written."""
        return self._origin

    @field_validator("version")
    @classmethod
    def _known_version(cls, value: int) -> int:
        if value > SCHEMA_VERSION:
            raise ValueError(
                f"recipe version {value} is newer than this regraft knows ({SCHEMA_VERSION}); update regraft"
            )
        return value

    @model_validator(mode="after")
    def _names_exist(self) -> Recipe:
        names = [(("distill", i, "data"), stage.data) for i, stage in enumerate(self.distill)]
        for path, name in [*names, (("eval", "data"), self.eval.data)]:
            if name not in self.data:
                told = f"no data source '{name}'; known: {', '.join(sorted(self.data))}"
                raise PydanticCustomError("no_such_data", "{told}", {"told": told, "path": path})
        return self
