"""The result file of an evaluation (`results.json`): what every judge writes and every report reads."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS_FORMAT = 1


@dataclass(frozen=True)
class Quality:
    """One model on one protocol. KL in nats per token, teacher to model; `*_stderr` over windows."""

    name: str  # "teacher", "student", "sliding_window baseline", "interleave baseline"
    protocol: str  # "core" or "long"
    kl: float
    kl_stderr: float
    top1: float  # share of positions where the model's argmax is the teacher's
    ppl: float
    ppl_ratio: float  # model / teacher
    windows: int
    seq_len: int
    tokens: int


@dataclass(frozen=True)
class Recall:
    """One model on one recall task at one context length. `accuracy` in 0..1, `n` scored answers."""

    name: str
    task: str  # "copy", "passkey", "associative"
    length: int
    accuracy: float
    stderr: float
    n: int


@dataclass(frozen=True)
class Speed:
    """One model at one context length: tokens per second (medians), live cache bytes.

    `repeats`: rounds of decoding; `prefill_repeats`: of prefill, fewer where it is slow.
    """

    name: str
    context: int
    prefill_tok_s: float
    decode_tok_s: float
    prefill_spread: float  # (max - min) / median
    decode_spread: float
    cache_bytes: int
    cache_dtype: str
    repeats: int
    prefill_repeats: int


@dataclass(frozen=True)
class Sample:
    """A greedy continuation of the same prompt by both models."""

    prompt: str
    teacher: str
    student: str


@dataclass
class Results:
    """Everything measured about one converted model."""

    model: str
    teacher: str
    quality: list[Quality] = field(default_factory=list)
    recall: list[Recall] = field(default_factory=list)
    speed: list[Speed] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    tasks: dict[str, Any] = field(default_factory=dict)  # lm-eval's own `results` block per model name
    layers: dict[str, Any] = field(default_factory=dict)  # {"num_layers", "converted": [...], "mixer": {...}}
    protocol: dict[str, Any] = field(default_factory=dict)  # text, hash of the ids, dtype, BOS policy, prefix token
    env: dict[str, Any] = field(default_factory=dict)  # versions, machine, threads, load
    format: int = RESULTS_FORMAT

    def save(self, path: Path) -> None:
        """Write as JSON; NaN and infinity are refused rather than written."""
        text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file that `save` wrote; a newer format raises ValueError."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] > RESULTS_FORMAT:
            raise ValueError(f"{path}: results format {raw['format']} is newer than this regraft ({RESULTS_FORMAT})")
        for key, kind in (("quality", Quality), ("recall", Recall), ("speed", Speed), ("samples", Sample)):
            raw[key] = [kind(**row) for row in raw[key]]
        return cls(**raw)


def mean_and_stderr(values: list[float]) -> tuple[float, float]:
    """Mean and standard error of the mean of `values` (standard error 0 for a single value)."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
