"""What every target mechanism shares: taking over a source attention, and running on ragged batches with a cache."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from regraft.convert.model.cache import MixerCacheLayer
from regraft.convert.model.context import Context
from regraft.convert.spec import AttentionSpec
from regraft.kernels.ragged import run


@dataclass(frozen=True)
class Options:
    """Options of a mixer: validated on construction (ValueError names the option), written to `config.regraft`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    def require(self, ok: bool, option: str, rule: str) -> None:
        """Raise ValueError unless `ok`, naming the option, its value and the rule."""
        if not ok:
            raise ValueError(f"{option} = {getattr(self, option)!r}: {rule}")


@dataclass(frozen=True)
class TransferReport:
    """Where the parameters of a mixer come from: `copied` from the teacher, `derived` from its weights, or `fresh`."""

    copied: list[str]
    derived: list[str]
    fresh: list[str]


class Mixer(nn.Module):
    """Base of all target mechanisms.

    A mixer takes over the children of the source attention under their own names (q_proj, k_proj, v_proj, o_proj,
    q_norm, ...), so biases, norms and adapter targets come along; a fused projection is split into q_proj, k_proj and
    v_proj. Subclasses give `Options`, `make_new`, `init_new_weights`, `mix` and `cache_bytes`.
    """

    Options: ClassVar[type[Options]] = Options
    layer_type: ClassVar[str] = "full_attention"
    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")
    full_train: ClassVar[tuple[str, ...]] = ()

    def __init__(self, attn: nn.Module, spec: AttentionSpec, options: Options):
        super().__init__()
        self.check_fit(spec, options)
        self.spec = spec
        self.options = options
        self.layer_idx = spec.layer_idx
        self.name = ""  # name in the registry, set by whoever installs the mixer
        for name, child in attn.named_children():
            for part, module in split_fused(child, spec).items() if name == spec.fused else [(name, child)]:
                self.add_module(part, module)
        for name, parameter in attn.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.make_new(self.o_proj.weight.device)

    @classmethod
    def check_fit(cls, spec: AttentionSpec, options: Options) -> None:
        """Raise ValueError, naming the layer, if this mechanism cannot replace such an attention."""

    def make_new(self, device: torch.device) -> None:
        """Create the parameters named in `full_train` (fp32, uninitialised is fine) on `device`."""

    def init_new_weights(self) -> None:
        """Set the new parameters to their start, through transformers.initialization (which respects loading)."""

    @classmethod
    def new_parameters(cls, spec: AttentionSpec, options: Options) -> int:
        """Number of fresh parameters."""
        return 0

    @classmethod
    def from_attention(cls, attn: nn.Module, spec: AttentionSpec, options: Options) -> tuple["Mixer", TransferReport]:
        """Take over `attn` (its children move; pass a copy if the source is still needed)."""
        source = {name for name, _ in attn.named_parameters()}
        mixer = cls(attn, spec, options)
        mixer.init_new_weights()
        names = [name for name, _ in mixer.named_parameters()]
        split = [name for name in names if spec.fused and name.partition(".")[0] in ("q_proj", "k_proj", "v_proj")]
        copied = [name for name in names if name in source]
        fresh = [name for name in names if name not in {*copied, *split}]
        return mixer, TransferReport(copied=copied, derived=split, fresh=fresh)

    def source_weights(self) -> dict[str, torch.Tensor]:
        """The weights that came from the source attention, under the names they have there."""
        weights = self.state_dict()
        if self.spec.fused:
            for kind in ("weight", "bias"):
                parts = [weights.pop(f"{name}_proj.{kind}", None) for name in "qkv"]
                if parts[0] is not None:
                    weights[f"{self.spec.fused}.{kind}"] = torch.cat(parts)
        return weights

    def inputs(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, ...]:
        """Per-token inputs of `mix`: q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv], normed and rotated."""
        shape = (*hidden_states.shape[:-1], -1)
        # while trained, a mixer's weights are fp32 inside a bf16 model
        hidden_states = hidden_states.to(self.v_proj.weight.dtype)
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        if self.spec.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.view(*shape, self.spec.head_dim), k.view(*shape, self.spec.head_dim)
        v = v.view(*shape, self.spec.value_dim)
        if self.spec.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.spec.rope is not None and position_embeddings is not None:
            cos, sin = position_embeddings
            q, k = self.spec.rope(q, k, cos, sin, unsqueeze_dim=2)
        return q, k, v

    def mix(
        self, *inputs: torch.Tensor, state: Any, lengths: torch.Tensor | None, step: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """The mechanism on dense segments: outputs per head [B, T, H, Dv] and the new state.

        `lengths` [B]: real tokens of each row (the rest is trailing padding); `step`: T is 1 and the state is given.
        """
        raise ValueError(f"{type(self).__name__} defines no mix()")

    def heads(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        regraft: Context,
        cache: Any = None,
    ) -> torch.Tensor:
        """Outputs per head before the output projection, [B, T, H, Dv]; reads and writes `cache` when given."""
        inputs = self.inputs(hidden_states, position_embeddings)
        layer = cache.layers[self.layer_idx] if cache is not None else None
        state = layer.state if layer is not None else None
        length = hidden_states.shape[1]
        if length == 1 and state is not None and regraft.layout is None:
            out, state = self.mix(*inputs, state=state, lengths=regraft.write, step=True)
        else:
            out, state = run(regraft.layout, self.mix, inputs, state)
        if layer is not None:
            layer.update_state(state, length)
        return out

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        regraft: Context | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Same call and result as a source attention: (output [B, T, hidden], None).

        `attention_mask` is not read: padding and documents come in `regraft`. Raises ValueError without it.
        """
        if regraft is None:
            raise ValueError(
                f"layer {self.layer_idx}: a converted attention needs the `regraft` context (padding and document "
                "boundaries); call the grafted model, or pass regraft=Context.plain()"
            )
        cache = cache if cache is not None else past_key_values
        out = self.heads(hidden_states, position_embeddings, regraft, cache)
        return self.o_proj(out.flatten(2).to(self.o_proj.weight.dtype)).to(hidden_states.dtype), None

    def cache_layer(self, max_cache_len: int | None = None) -> MixerCacheLayer:
        """An empty cache layer for this mixer; `max_cache_len` for a static cache."""
        return MixerCacheLayer(max_cache_len)

    @classmethod
    def cache_bytes(
        cls, spec: AttentionSpec, options: Options, length: int, batch: int = 1, dtype: torch.dtype = torch.float32
    ) -> int:
        """Bytes of the live cache of one layer after `length` tokens."""
        raise ValueError(f"{cls.__name__} defines no cache_bytes()")

    def reference(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The mechanism's oracle on `inputs` in float64: outputs per head [B, T, H, Dv], quadratic in T."""
        raise ValueError(f"{type(self).__name__} defines no reference()")

    def exact_options(self, length: int) -> Any:
        """The options at which this mixer equals its source attention on `length` tokens; None if there are none."""
        return None

    def start_candidates(self) -> list[dict[str, torch.Tensor]]:
        """Alternative starting values of new parameters whose first axis is the query head, to be chosen per head."""
        return []

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return ", ".join(f"{k}={v}" for k, v in self.options.to_dict().items())


@torch.no_grad()
def split_fused(projection: nn.Linear, spec: AttentionSpec) -> dict[str, nn.Linear]:
    """The parts of a projection that holds q, k and v one after the other, each with its own copy of its rows."""
    sizes = {
        "q_proj": spec.num_heads * spec.head_dim,
        "k_proj": spec.num_kv_heads * spec.head_dim,
        "v_proj": spec.num_kv_heads * spec.value_dim,
    }
    parts, start = {}, 0
    for name, rows in sizes.items():
        part = nn.Linear(projection.in_features, rows, bias=projection.bias is not None, device="meta")
        for kind, parameter in projection.named_parameters():
            piece = nn.Parameter(parameter[start : start + rows].clone(), requires_grad=parameter.requires_grad)
            setattr(part, kind, piece)
        parts[name] = part
        start += rows
    return parts


@torch.no_grad()
def choose_start(
    mixer: Mixer,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    target: torch.Tensor,
    regraft: Context,
) -> None:
    """Set the new parameters, head by head, to the candidate with the lowest alignment error.

    `hidden_states` [B, T, hidden] is the teacher's input of this layer, `target` [B, T, H, Dv] its head outputs.
    """
    candidates = mixer.start_candidates()
    if not candidates:
        return
    errors = []
    for candidate in candidates:
        for name, value in candidate.items():
            getattr(mixer, name).copy_(value)
        out = mixer.heads(hidden_states, position_embeddings, regraft)
        errors.append((out.float() - target.float()).square().sum((0, 1, 3)))
    best = torch.stack(errors).argmin(0)
    for name in candidates[0]:
        values = torch.stack([c[name] for c in candidates])  # [candidates, H, ...]
        getattr(mixer, name).copy_(values[best, torch.arange(best.numel(), device=best.device)])
