"""Everything that is measured about a converted model, in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regraft.convert.graft import converted_layers, decoder_layers
from regraft.convert.mixers.sliding_window import window_bytes
from regraft.data.packing import token_stream
from regraft.eval.baselines import SINKS, interleave_baseline, sliding_window_baseline
from regraft.eval.bench import bench
from regraft.eval.divergence import compare, evaluation_texts, ids_hash, windows
from regraft.eval.environment import environment
from regraft.eval.harness import lm_eval_tasks
from regraft.eval.recall import recall
from regraft.eval.results import Results
from regraft.eval.samples import samples
from regraft.recipes.schema import DataConfig, EvalConfig


def evaluate(
    student: Any,
    teacher: Any,
    tokenizer: Any,
    config: EvalConfig,
    data: DataConfig,
    *,
    names: tuple[str, str] = ("student", "teacher"),
    source: Any = None,
    seed: int = 0,
    include_path: str | None = None,
    log: Callable[[str], None] = print,
) -> Results:
    """Quality, recall, speed, tasks and samples of `student` against `teacher`, with both baselines.

    `names`: what to call the two in the file (paths or ids). `source`: the model whose layers were converted, if it is
    not the teacher; the baselines are made from it. They need converted layers; without any they are left out.
    """
    layers = converted_layers(student)
    depth = len(decoder_layers(student))
    texts, told = evaluation_texts(data)
    stream = token_stream(tokenizer, texts)
    own = teacher if source is None else source
    models = {"student": student}
    if config.baselines and layers:
        window = max((m.options.window for m in layers.values() if hasattr(m.options, "window")), default=64)
        models["sliding_window baseline"] = sliding_window_baseline(own, list(layers), window)
        models["interleave baseline"] = interleave_baseline(own, len(layers), window)
    results = Results(model=names[0], teacher=names[1])
    results.layers = {
        "num_layers": depth,
        "converted": sorted(layers),
        "mixers": {
            str(i): {"name": m.name, "options": m.options.to_dict(), "far_state_bytes": _far_bytes(m)}
            for i, m in layers.items()
        },
    }
    results.protocol = {
        "text": told,
        "dtype": str(student.dtype).removeprefix("torch."),
        "bos": "none",
        "seed": seed,
        "baselines": f"untrained sliding_window with {SINKS} sinks and the same window",
        "ids": {},
    }
    for protocol in config.protocols:
        ids = windows(protocol, stream, config.windows)
        results.protocol["ids"][protocol] = ids_hash(ids)
        log(f"eval {protocol}: {ids.shape[0]} windows of {ids.shape[1]} tokens, {len(models) + 1} models")
        results.quality += compare(teacher, models, ids, protocol)
    if config.recall:
        log(f"eval recall: {config.recall_samples} samples at {min(config.recall)}, lengths {config.recall}")
        probed = {"teacher": teacher, **models}
        probed.pop("interleave baseline", None)  # the stronger baseline is enough, and recall is the dearest probe
        results.recall = recall(probed, tokenizer, stream.tolist(), config.recall, config.recall_samples, seed=seed)
    if config.tasks:
        for name, model in (("teacher", teacher), ("student", student)):
            log(f"eval tasks ({name}): {', '.join(config.tasks)}")
            found = lm_eval_tasks(
                model, tokenizer, config.tasks, limit=config.limit, include_path=include_path, seed=seed
            )
            results.tasks[name] = found["results"]
            results.protocol["lm_eval"] = found["protocol"]
    if config.bench:
        log(f"eval speed: contexts {', '.join(map(str, config.bench))}")
        results.speed = bench({"teacher": teacher, "student": student}, config.bench, seed=seed)
    results.samples = samples(teacher, student, tokenizer)
    results.env = environment()
    return results


_MEASURED_WINDOWS = 16  # of the first protocol, while training


def measure(
    student: Any, teacher: Any, tokenizer: Any, config: EvalConfig, data: DataConfig, seed: int = 0
) -> dict[str, float]:
    """A short form of `evaluate` for use while training: KL, top-1, perplexity ratio, recall at the shortest length."""
    texts, _ = evaluation_texts(data)
    stream = token_stream(tokenizer, texts)
    protocol = config.protocols[0] if config.protocols else "core"
    ids = windows(protocol, stream, min(_MEASURED_WINDOWS, config.windows or _MEASURED_WINDOWS))
    found = compare(teacher, {"student": student}, ids, protocol)[1]
    told = {"kl": found.kl, "top1": found.top1, "ppl_ratio": found.ppl_ratio}
    if config.recall:
        shortest = [min(config.recall)]
        rows = recall({"student": student}, tokenizer, stream.tolist(), shortest, config.recall_samples, seed=seed)
        told |= {row.task: row.accuracy for row in rows}
    return told


def _far_bytes(mixer: Any) -> int:
    """What the mixer's cache holds beyond an untrained window of the same size."""
    dtype = next(mixer.parameters()).dtype
    own = type(mixer).cache_bytes(mixer.spec, mixer.options, 0, 1, dtype)
    return own - window_bytes(mixer.spec, mixer.options, 1, dtype) if hasattr(mixer.options, "window") else 0
