"""Configuration and model classes of grafted models, made from the classes of the source family.

A grafted model is a subclass of its source model: same parameter names for everything kept, so weights, adapters,
losses and generation are inherited. The saved config is honest (`layer_types` says what each layer is now); inside,
the base model runs on a *source view* of that config, in which layer types and sliding window are the source's, so
that rotary tables and masks of the kept layers are exactly the source's.
"""

import copy
import os
import shutil
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from transformers import MODEL_MAPPING, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import (
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
)

from regraft.convert.mixers.base import Mixer
from regraft.convert.model.cache import AppendingLayer, MixerCacheLayer
from regraft.convert.model.context import Context, documents_from_boundaries, documents_from_positions
from regraft.convert.spec import attention_spec

FORMAT = 1

_SOURCE_FIELDS = ("layer_types", "sliding_window")


class GraftedConfigMixin:
    """Adds `regraft` (format, source, mixers) to a source config."""

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse a format that this code does not know."""
        super().__post_init__(**kwargs)
        found = (self.regraft or {}).get("format", FORMAT)
        if found > FORMAT:
            raise ValueError(
                f"this checkpoint has regraft format {found}, the installed code knows {FORMAT}: update regraft"
            )
        if (self.regraft or {}).get("cache_window") is not None:
            # some families (Qwen) drop the window of a config whose own layers do not slide
            self.sliding_window = self.regraft["cache_window"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Config and source view share one dict of attributes; their copies share the copied one."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        object.__setattr__(new, "__dict__", copy.deepcopy(self.__dict__, memo))
        return new


def source_view(config: Any) -> Any:
    """`config` as the source family's own code should see it: a live view that differs only in the source's fields."""
    view_class = type(config).__dict__.get("_view_class") or type(config)
    view = object.__new__(view_class)
    object.__setattr__(view, "__dict__", config.__dict__)
    return view


def _source_property(name: str, exists: bool) -> property:
    def read(self: Any) -> Any:
        if not exists:
            raise AttributeError(name)
        return self.regraft["source"][name]

    return property(read)


class GraftedModelMixin:
    """Goes in front of a source base model: installs the mixers, and gives every forward its context and cache."""

    def __init__(self, config: Any):
        super().__init__(source_view(config))
        self.install_mixers(config)
        self.post_init()

    def install_mixers(self, config: Any) -> None:
        """Replace the attention of the layers named in `config.regraft` (their weights are set by whoever loads)."""
        self.__dict__["_grafted_config"] = config
        for index, entry in config.regraft["mixers"].items():
            layer = self.layers[int(index)]
            mixer_class = self._mixers[entry["name"]]
            spec = attention_spec(layer.self_attn, self.config)
            options = mixer_class.Options(**entry["options"])
            layer.self_attn, _ = mixer_class.from_attention(layer.self_attn, spec, options)
            layer.self_attn.name = entry["name"]

    def _init_weights(self, module: Any) -> None:
        super()._init_weights(module)
        if hasattr(module, "init_new_weights"):
            module.init_new_weights()

    def converted(self) -> dict[int, Any]:
        """The mixers by layer index."""
        return {i: layer.self_attn for i, layer in enumerate(self.layers) if isinstance(layer.self_attn, Mixer)}

    def adopt_cache(self, cache: Any) -> Any:
        """Give the layers of a fresh cache the kind each needs; ValueError for another model's cache."""
        converted = self.converted()
        if not converted:
            return cache
        if len(cache.layers) < len(self.layers):
            if cache.layers:
                raise ValueError(f"the cache has {len(cache.layers)} layers, the model {len(self.layers)}")
            cache.layers = DynamicCache(config=self.config).layers
            cache.layer_class_to_replicate = None
        # a static sliding layer is no longer than its window: the longest layer tells the length of the whole cache
        sizes = [getattr(layer, "max_cache_len", None) for layer in cache.layers]
        size = max((size for size in sizes if size is not None), default=None)
        for index, mixer in converted.items():
            layer = cache.layers[index]
            if isinstance(layer, MixerCacheLayer):
                continue
            if getattr(layer, "is_initialized", False):
                raise ValueError(f"cache layer {index} already holds keys of another model: pass a fresh cache")
            cache.layers[index] = mixer.cache_layer(size)
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and not layer.is_initialized:
                cache.layers[index] = AppendingLayer()
        return cache

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Any = None,
        cu_seqlens: torch.Tensor | None = None,
        regraft: Context | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the source's forward. `cu_seqlens` (or `cu_seq_lens_q`): explicit document boundaries over B * T."""
        cache = cache if cache is not None else past_key_values
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is None:
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        batch, length = tokens.shape[:2]
        if use_cache is None:
            use_cache = bool(self.config.use_cache)
        if self.training and self.gradient_checkpointing:
            use_cache = False
        boundaries = cu_seqlens if cu_seqlens is not None else kwargs.get("cu_seq_lens_q")
        document = None
        if boundaries is not None:
            if cache is not None and cache.get_seq_length() > 0:
                raise ValueError("packed documents cannot continue a cache: call without `cache`, use_cache=False")
            document, position_ids = documents_from_boundaries(boundaries.to(tokens.device), batch, length)
        real, write, attention_mask = _read_mask(attention_mask, length, cache)
        if document is None and position_ids is not None and attention_mask is None and cache is None and length > 1:
            document = documents_from_positions(position_ids.expand(batch, -1))
        if document is not None:
            cache, use_cache = None, False
        if regraft is None:
            regraft = Context.of(real, document)
            regraft.write = write
        if document is not None and real is not None:
            embeds = inputs_embeds if inputs_embeds is not None else self.get_input_embeddings()(input_ids)
            attention_mask = self._packed_and_padded(embeds, attention_mask, position_ids, document)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None:
            cache = self.adopt_cache(cache)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            regraft=regraft,
            **kwargs,
        )

    def _packed_and_padded(self, embeds: Any, attention_mask: Any, position_ids: Any, document: Any) -> Any:
        """Masks of the kept layers when a batch is both packed and padded (transformers does one or the other)."""
        arguments = {
            "config": self.config,
            "inputs_embeds": embeds,
            "attention_mask": attention_mask,
            "cache": None,
            "position_ids": position_ids,
            "and_mask_function": packed_sequence_mask_function(document),
        }
        types = getattr(self.config, "layer_types", None)
        slides = getattr(self.config, "sliding_window", None) is not None
        if types is None:
            return (create_sliding_window_causal_mask if slides else create_causal_mask)(**arguments)
        make = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        return {name: make[name](**arguments) for name in set(types)}

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> Any:
        """As transformers', with the code beside the weights."""
        view, self.config = self.config, self._grafted_config
        try:
            return _save_with_code(self, super().save_pretrained, save_directory, kwargs)
        finally:
            self.config = view


def _read_mask(mask: Any, length: int, cache: Any) -> tuple[Any, Any, Any]:
    """(real [B, T] or None, write [B] or None, mask for the kept layers) from what the caller passed."""
    if mask is None:
        return None, None, None
    if isinstance(mask, dict) or mask.dim() != 2:
        raise ValueError(
            "converted layers read padding from a 2-D attention mask [batch, length]; a prepared 4-D mask (or a dict "
            "of them) hides it. Pass the 2-D mask, or document boundaries as cu_seqlens"
        )
    if length == 1 and cache is not None:
        return None, mask[:, -1].long(), mask
    if mask.shape[1] < length:
        raise ValueError(f"attention mask covers {mask.shape[1]} positions, the input has {length}")
    if bool(mask.all()):
        return None, None, None
    real = mask[:, -length:].bool()
    return (None if bool(real.all()) else real), None, mask


class GraftedForCausalLMMixin:
    """Goes in front of a source causal-LM class: swaps in the grafted base model, saves code, checks what it loads."""

    def __init__(self, config: Any):
        super().__init__(source_view(config))
        self.config = config
        setattr(self, self.base_model_prefix, self._base_class(config))
        self._is_stateful = bool(config.regraft["mixers"])
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        super()._init_weights(module)
        if hasattr(module, "init_new_weights"):
            module.init_new_weights()

    @staticmethod
    def create_masks_for_generate(attention_mask: Any = None, **kwargs: Any) -> Any:
        """The 2-D mask as it is: the model builds the masks of the kept layers itself."""
        return attention_mask

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers', but a checkpoint with missing, superfluous or misshapen tensors is refused by name."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        faults = {
            kind: sorted(str(key) for key in info.get(kind) or ())
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        }
        if any(faults.values()):
            told = "; ".join(
                f"{kind.replace('_', ' ')}: {', '.join(keys[:5])}" for kind, keys in faults.items() if keys
            )
            raise ValueError(f"the checkpoint does not hold this model: {told}")
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> Any:
        """As transformers', with the code beside the weights, so that it loads without regraft."""
        return _save_with_code(self, super().save_pretrained, save_directory, kwargs)


def _save_with_code(model: Any, save: Any, folder: Any, kwargs: dict[str, Any]) -> Any:
    names = type(model)._family_names
    model.config.auto_map = {
        "AutoConfig": f"modeling_regraft.{names['config']}",
        "AutoModel": f"modeling_regraft.{names['base']}",
        "AutoModelForCausalLM": f"modeling_regraft.{names['causal']}",
    }
    result = save(folder, **kwargs)
    if not kwargs.get("is_main_process", True):
        return result
    if __name__.startswith("regraft."):
        import_module("regraft.convert.export.bundle").write_code(model, folder)
    else:
        here = os.path.dirname(sys.modules[__name__].__file__)
        for name in sorted(os.listdir(here)):
            if name.endswith(".py") and name != "__init__.py":
                shutil.copyfile(os.path.join(here, name), os.path.join(folder, name))
    return result


def make_classes(
    source: type, mixers: Mapping[str, type[Mixer]], module: str
) -> tuple[type[PreTrainedConfig], type, type]:
    """(config, base model, causal LM) classes of the grafted form of a source causal-LM class.

    `mixers` maps names to classes. `module` is the module that binds the classes as globals (they are found there by
    name when a checkpoint is loaded).
    """
    source_config = source.config_class
    source_base = MODEL_MAPPING[source_config]
    stem = "Regraft" + source.__name__.removesuffix("ForCausalLM")
    names = {"config": stem + "Config", "base": stem + "Model", "causal": stem + "ForCausalLM"}
    fields = {"regraft": dict | None}
    if "layer_types" not in source_config.__dataclass_fields__:
        fields["layer_types"] = list[str] | None
    if "sliding_window" not in source_config.__dataclass_fields__:
        fields["sliding_window"] = int | None
    plan = {k: v for k, v in (source_config.base_model_tp_plan or {}).items() if ".self_attn." not in k}
    config_class = type(
        names["config"],
        (GraftedConfigMixin, source_config),
        {
            "__module__": module,
            "__annotations__": fields,
            **dict.fromkeys(fields),
            "model_type": "regraft_" + source_config.model_type,
            # a tensor-parallel plan would split q, k, v but not the new parameters: attention stays whole
            "base_model_tp_plan": plan,
        },
    )
    view = {name: _source_property(name, name in source_config.__dataclass_fields__) for name in _SOURCE_FIELDS}
    config_class._view_class = type(names["config"] + "SourceView", (config_class,), {"__module__": module, **view})
    shared = {
        "__module__": module,
        "config_class": config_class,
        "_mixers": mixers,
        "_family_names": names,
        "_keep_in_fp32_modules_strict": set(source_base._keep_in_fp32_modules_strict or ())
        | {name for mixer in mixers.values() for name in mixer.full_train},
    }
    base_class = type(names["base"], (GraftedModelMixin, source_base), dict(shared))
    causal_class = type(names["causal"], (GraftedForCausalLMMixin, source), {**shared, "_base_class": base_class})
    return config_class, base_class, causal_class
