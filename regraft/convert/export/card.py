"""The model card of a converted checkpoint: what it is, what was kept, how it was made, what to beware of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from regraft.convert.export.bundle import MIN_TRANSFORMERS
from regraft.convert.layers import layer_strip
from regraft.convert.mixers.registry import MIXERS

REPOSITORY = "THIS_REPOSITORY"  # what a card says until the folder is pushed somewhere
_TAGS = {"hybrid_sliding": "linear-attention", "linear_attention": "linear-attention"}


def write_card(folder: Path, *, recipe_text: str | None = None, results: Any = None) -> Path:
    """Write README.md into a checkpoint folder from its config.json, and from `results` and the recipe if given."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    path = folder / "README.md"
    path.write_text(render_card(config, recipe_text, results), encoding="utf-8")
    return path


def render_card(config: dict[str, Any], recipe_text: str | None = None, results: Any = None) -> str:
    """The card as Markdown with front matter. `config`: config.json as a dict; `results`: eval.results.Results."""
    graft = config["regraft"]
    source = graft["source"]
    depth = config["num_hidden_layers"]
    layers = sorted(int(i) for i in graft["mixers"])
    hub_id = source_id(source)
    data = ModelCardData(
        base_model=hub_id,
        base_model_relation="finetune" if hub_id else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        license=source.get("license"),
        tags=_tags(graft, len(layers) == depth),
    )
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {public_name(source)} with {len(layers)} of {depth} attention layers replaced\n",
        f"```\n{layer_strip(layers, depth)}\n```\n",
        f"S: the source's own softmax attention ({depth - len(layers)} layers). "
        f"L: converted ({len(layers)} layers). Layers count from 0.\n",
        _mixer_table(graft),
        "## Load\n",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{REPOSITORY}", trust_remote_code=True)\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{REPOSITORY}")\n```\n',
        f"Needs transformers >= {MIN_TRANSFORMERS} and torch. The model's code is in this repository; "
        "regraft is not needed.\n",
    ]
    if results is not None:
        parts += ["## What was kept, what was gained\n", *_result_tables(results)]
    parts += ["## Lineage\n", "\n".join(_lineage(config)) + "\n"]
    parts += ["## Limits\n", "\n".join(_limits(graft, depth - len(layers))) + "\n"]
    if recipe_text:
        parts += [
            "## How it was made\n",
            "With the recipe below, saved as `recipe.yaml`: `regraft run recipe.yaml`\n",
            f"```yaml\n{recipe_text.strip()}\n```\n",
        ]
    return "\n".join(parts)


def public_name(source: dict[str, Any]) -> str:
    """What to call the source in public: a Hub id as it is, the last part of a local path."""
    ref = source.get("ref") or source.get("model_type", "unknown")
    return source_id(source) or Path(ref).name


def source_id(source: dict[str, Any]) -> str | None:
    """The Hub id of the source, None if it came from a file or folder."""
    from regraft.convert.sources import DEMO_MODELS

    ref = source.get("ref") or ""
    if ref.startswith("demo:"):
        return DEMO_MODELS[ref.removeprefix("demo:")][2]
    return ref if source.get("kind") == "hub" else None


def _tags(graft: dict[str, Any], all_layers: bool) -> list[str]:
    names = sorted({entry["name"] for entry in graft["mixers"].values()})
    kinds = {_TAGS[MIXERS[name].layer_type] for name in names if name in MIXERS and MIXERS[name].layer_type in _TAGS}
    hybrid = [] if all_layers else ["hybrid-attention"]
    return ["regraft", *sorted(kinds), *hybrid, *(name.replace("_", "-") for name in names)]


def _mixer_table(graft: dict[str, Any]) -> str:
    """One row a mechanism with the same options: its layers, what it is, its settings."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index in sorted(graft["mixers"], key=int):
        entry = graft["mixers"][index]
        settings = ", ".join(f"{key} {value}" for key, value in entry["options"].items())
        groups.setdefault((entry["name"], settings), []).append(int(index))
    rows = ["| mixer | what it is | layers | options |", "|---|---|---|---|"]
    for (name, settings), where in groups.items():
        known = MIXERS.get(name)
        what = f"{known.title} ({known.paper})" if known else ""
        rows.append(f"| `{name}` | {what} | {_ranges(where)} | {settings} |")
    return "\n".join(rows) + "\n"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _lineage(config: dict[str, Any]) -> list[str]:
    source = config["regraft"]["source"]
    lines = [
        f"- source: {public_name(source)}" + (f", revision {source['revision']}" if source.get("revision") else ""),
        f"- fingerprint of its weights: {source.get('fingerprint') or 'not recorded'}",
    ]
    if source.get("quantized_from"):
        lines.append(
            f"- the source was quantised ({source['quantized_from']}) and dequantised before conversion: "
            "its errors are in these weights, and comparisons are against the dequantised source"
        )
    if not source.get("license"):
        lines.append("- licence of the source: not recorded; its terms apply to these weights")
    return lines


def _limits(graft: dict[str, Any], kept: int) -> list[str]:
    found = {MIXERS[e["name"]].state_growth for e in graft["mixers"].values() if e["name"] in MIXERS}
    lines = []
    if "constant" in found:
        lines.append(
            "- Converted layers keep a state of fixed size: what stands far back is recalled less exactly than by the "
            "source. Measure it at the lengths you need."
        )
    lines += [
        "- The decode state cannot be rolled back: assisted (speculative) decoding and cache cropping are refused.",
        "- Inference servers: switch prefix caching off. A cached prefix holds keys and values of "
        + ("the softmax layers only" if kept else "softmax layers")
        + ", not the state of the converted layers, and answers would silently be wrong.",
    ]
    return lines


def _result_tables(results: Any) -> list[str]:
    """Markdown tables of quality, recall, cache and speed, and tasks, each only if there are figures."""
    tables = []
    if results.quality:
        rows = ["| model | protocol | KL | top-1 | perplexity | ratio | n |", "|---|---|---|---|---|---|---|"]
        rows += [
            f"| {q.name} | {q.protocol} | {q.kl:.4f} ± {q.kl_stderr:.4f} | {q.top1:.3f} | {q.ppl:.2f} | "
            f"{q.ppl_ratio:.3f} | {q.windows} windows of {q.seq_len} |"
            for q in results.quality
        ]
        tables.append("KL in nats per token, source to model; ± standard error over windows.\n")
        tables.append("\n".join(rows) + "\n")
    if results.recall:
        rows = ["| model | task | length | recall | n |", "|---|---|---|---|---|"]
        rows += [
            f"| {r.name} | {r.task} | {r.length} | {r.accuracy:.3f} ± {r.stderr:.3f} | {r.n} |" for r in results.recall
        ]
        tables.append("\n".join(rows) + "\n")
    if results.speed:
        rows = ["| model | context | cache | prefill tok/s | decode tok/s | n |", "|---|---|---|---|---|---|"]
        rows += [
            f"| {s.name} | {s.context} | {s.cache_bytes / 2**20:.2f} MiB ({s.cache_dtype}) | {s.prefill_tok_s:.0f} | "
            f"{s.decode_tok_s:.1f} | {s.prefill_repeats} + {s.repeats} |"
            for s in results.speed
        ]
        tables.append("\n".join(rows) + "\n")
        machine = results.env.get("machine", {})
        if machine:
            told = machine.get("processor") if machine.get("device") == "cpu" else machine.get("device")
            tables.append(f"Speed on {told}, {machine.get('torch_threads')} threads; medians.\n")
    if results.tasks:
        tables.append(_task_table(results.tasks))
    return tables


def _task_table(tasks: dict[str, Any]) -> str:
    """lm-eval's metrics, one row a model, task and metric."""
    rows = ["| model | task | metric | value |", "|---|---|---|---|"]
    for model, found in tasks.items():
        for task, metrics in found.items():
            for key, value in metrics.items():
                name, _, kind = key.partition(",")
                if name.endswith("_stderr") or not isinstance(value, float):
                    continue
                spread = metrics.get(f"{name}_stderr,{kind}")
                told = f"{value:.4f}" + (f" ± {spread:.4f}" if isinstance(spread, float) else "")
                rows.append(f"| {model} | {task} | {name} | {told} |")
    return "\n".join(rows) + "\n"
