"""What a source attention looks like, as data: one row per source family, one record per attention module."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """One row of the table of source families.

    `model_type` is transformers' name. `qk_norm`: "none", or "head" for a norm over each head's own channels, applied
    to q and k before the rotary embedding.
    """

    model_type: str
    title: str
    qk_norm: str = "none"


FAMILIES: dict[str, Family] = {
    row.model_type: row
    for row in (
        Family("llama", "Llama 2/3, SmolLM2 and everything with their layout"),
        Family("mistral", "Mistral"),
        Family("qwen2", "Qwen 2 and 2.5 (biases on q, k, v)"),
        Family("qwen3", "Qwen 3 (norm per head on q and k)", qk_norm="head"),
        Family("gemma3_text", "Gemma 3, text (norm per head, sliding layers, two rotary bases)", qk_norm="head"),
    )
}


@dataclass(frozen=True)
class AttentionSpec:
    """Shapes and settings of one source attention.

    `num_heads` query heads share `num_kv_heads` key/value heads in groups of `num_heads // num_kv_heads`; query head h
    uses key/value head h // group. `scaling` multiplies q.k; `softcap` (or None) bounds the scaled logits by
    softcap * tanh(logits / softcap); `sliding_window` (or None) is the source layer's own window. `rope` is the
    family's own rotary function, called as rope(q, k, cos, sin, unsqueeze_dim=2) on [B, T, heads, D].
    """

    layer_idx: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    softcap: float | None = None
    sliding_window: int | None = None
    qk_norm: str = "none"
    rope: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads


def attention_spec(attn: Any, config: Any) -> AttentionSpec:
    """Read the spec off a source attention module `attn` built from `config`.

    Raises ValueError for a family that is not in FAMILIES or a module without the four projections.
    """
    model_type = config.model_type.removeprefix("regraft_")
    family = FAMILIES.get(model_type)
    if family is None:
        raise ValueError(f"no source family '{model_type}'; known: {', '.join(sorted(FAMILIES))}")
    missing = [name for name in ("q_proj", "k_proj", "v_proj", "o_proj") if not hasattr(attn, name)]
    if missing:
        raise ValueError(f"layer {attn.layer_idx}: {type(attn).__name__} has no {', '.join(missing)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return AttentionSpec(
        layer_idx=attn.layer_idx,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=attn.q_proj.out_features // heads,
        value_dim=attn.v_proj.out_features // kv_heads,
        scaling=float(attn.scaling),
        softcap=getattr(attn, "attn_logit_softcapping", None),
        sliding_window=_own_window(attn, config),
        qk_norm=family.qk_norm,
        rope=sys.modules[type(attn).__module__].apply_rotary_pos_emb,
    )


def _own_window(attn: Any, config: Any) -> int | None:
    """The window of this layer in the source: families with layer types keep it on the module, others in the config."""
    if hasattr(attn, "sliding_window"):
        return attn.sliding_window
    return getattr(config, "sliding_window", None) if getattr(config, "layer_types", None) is None else None
