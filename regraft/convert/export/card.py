"""The model card of a converted checkpoint: what it is, what was kept, how it was made, what to beware of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from regraft.convert.layers import layer_strip

_MIN_TRANSFORMERS = "5.24"


def write_card(folder: Path, *, recipe_text: str | None = None, results: Any = None) -> Path:
    """Write README.md into a checkpoint folder from its config.json, and from `results` and the recipe if given."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    path = folder / "README.md"
    path.write_text(render_card(config, recipe_text, results), encoding="utf-8")
    return path


def render_card(config: dict[str, Any], recipe_text: str | None = None, results: Any = None) -> str:
    """The card as Markdown with front matter."""
    graft = config["regraft"]
    source = graft["source"]
    base = public_name(source)
    data = ModelCardData(
        base_model=base,
        base_model_relation="finetune",
        library_name="transformers",
        pipeline_tag="text-generation",
        license=source.get("license") or "other",
        tags=["regraft", "linear-attention" if _has(graft, "window_linear") else "hybrid-attention"],
    )
    depth = config["num_hidden_layers"]
    layers = sorted(int(i) for i in graft["mixers"])
    kinds: dict[str, list[int]] = {}
    for index in layers:
        entry = graft["mixers"][str(index)]
        kinds.setdefault(f"{entry['name']} {json.dumps(entry['options'])}", []).append(index)
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {base} with {len(layers)} of {depth} attention layers replaced\n",
        f"```\n{layer_strip(layers, depth)}   S softmax, L converted\n```\n",
        "\n".join(f"- `{name}`: layers {', '.join(map(str, where))}" for name, where in kinds.items()) + "\n",
        "## Load\n",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("THIS_REPOSITORY", trust_remote_code=True)\n'
        'tokenizer = AutoTokenizer.from_pretrained("THIS_REPOSITORY")\n```\n',
        f"Needs transformers >= {_MIN_TRANSFORMERS} and torch; the code is in this folder, regraft is not needed.\n",
    ]
    if results is not None:
        parts += ["## What was kept\n", *_result_tables(results)]
    parts += [
        "## Lineage\n",
        f"- source: {base}" + (f", revision {source['revision']}" if source.get("revision") else ""),
        f"- fingerprint of its weights: {source.get('fingerprint', 'unknown')}",
    ]
    if source.get("quantized_from"):
        parts.append(f"- the source was quantised ({source['quantized_from']}) and dequantised before conversion")
    parts += [
        "\n## Limits\n",
        "- Recall of what stands far back is weaker than the source's wherever all layers that carry it are converted; "
        "see the recall table, and measure it on your own lengths.\n"
        "- The decode state cannot be rolled back: assisted (speculative) decoding and cache cropping are refused.\n"
        "- Servers must not use prefix caching with such a hybrid: a cached prefix has no recurrent state.\n",
    ]
    if recipe_text:
        parts += ["## Recipe\n", f"```yaml\n{recipe_text.strip()}\n```\n"]
    return "\n".join(parts)


def public_name(source: dict[str, Any]) -> str:
    """What to call the source in public: a Hub id as it is, the last part of a local path."""
    from regraft.convert.sources import DEMO_MODELS

    ref = source.get("ref") or source.get("model_type", "unknown")
    if ref.startswith("demo:"):
        return DEMO_MODELS[ref.removeprefix("demo:")][2]
    return ref if source.get("kind") == "hub" else Path(ref).name


def _has(graft: dict[str, Any], name: str) -> bool:
    return any(entry["name"] == name for entry in graft["mixers"].values())


def _result_tables(results: Any) -> list[str]:
    lines = ["| model | protocol | KL | top-1 | perplexity | ratio | n |", "|---|---|---|---|---|---|---|"]
    for q in results.quality:
        lines.append(
            f"| {q.name} | {q.protocol} | {q.kl:.4f} ± {q.kl_stderr:.4f} | {q.top1:.3f} | {q.ppl:.2f} | "
            f"{q.ppl_ratio:.3f} | {q.tokens} tokens |"
        )
    tables = ["\n".join(lines) + "\n"]
    if results.recall:
        lines = ["| model | task | length | recall | n |", "|---|---|---|---|---|"]
        lines += [
            f"| {r.name} | {r.task} | {r.length} | {r.accuracy:.3f} ± {r.stderr:.3f} | {r.n} |" for r in results.recall
        ]
        tables.append("\n".join(lines) + "\n")
    return tables
