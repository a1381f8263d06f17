"""Softmax over the window and the sinks, linear attention over everything older, one shared normaliser.

The far branch uses a learned Hedgehog feature map (Zhang et al. 2024, arXiv 2402.04347) as in LoLCATs (Zhang et al.
2024, arXiv 2410.10254), with three changes: sinks stay exact; the branches are merged by their log-sum-exp, so the far
weight does not depend on the size of the window's largest logit; the map of the keys is shared inside a KV group, so
that the state is kept per KV head.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from regraft.convert.mixers.base import Mixer, Options
from regraft.convert.mixers.sliding_window import near_settings, window_bytes
from regraft.convert.spec import AttentionSpec
from regraft.kernels.window_linear import chunk, naive
from regraft.kernels.window_linear import step as one_step


@dataclass(frozen=True)
class WindowLinearOptions(Options):
    """Options of `window_linear`.

    `window`, `sinks`: keys that stay exact. `feature_dim`: rows of the learned map per head; the map has twice as many
    features. `query_map`: "softmax" (bounded features, the far weight has one learned scale per head) or "exp"
    (unbounded, so that the far weight grows with the query as softmax weights do). `start`: log of the far branch's
    starting weight, before the alignment stage chooses a better one per head. `over_sliding`: also convert a layer
    that slides in the source; beyond the source's window the far branch then adds keys that the layer never saw.
    """

    window: int = 64
    sinks: int = 4
    feature_dim: int = 64
    query_map: str = "exp"
    start: float = -4.0
    over_sliding: bool = False

    def __post_init__(self) -> None:
        """Refuse values outside their range."""
        self.require(isinstance(self.window, int) and self.window >= 1, "window", "must be a whole number, at least 1")
        self.require(isinstance(self.sinks, int) and self.sinks >= 0, "sinks", "must be a whole number, at least 0")
        self.require(isinstance(self.feature_dim, int) and self.feature_dim >= 1, "feature_dim", "must be at least 1")
        self.require(self.query_map in ("softmax", "exp"), "query_map", "must be softmax or exp")


class WindowLinear(Mixer):
    """y = (sum_near e^{s q.k} v + e^{far} phi(q)^T S) / (sum_near e^{s q.k} + e^{far} phi(q)^T z).

    S = sum phi(k) v^T and z = sum phi(k) run over the keys that have left the window and are not sinks. Equals the
    teacher when window >= length.
    """

    Options = WindowLinearOptions
    layer_type = "hybrid_sliding"
    full_train = ("feature_q", "feature_k", "far_logit")

    @classmethod
    def check_fit(cls, spec: AttentionSpec, options: Options) -> None:
        """A layer that slides in the source has nothing far to approximate."""
        if spec.sliding_window is not None and not options.over_sliding:
            raise ValueError(
                f"layer {spec.layer_idx} slides over {spec.sliding_window} tokens in the source already: "
                "window_linear would add keys that it never saw; convert the other layers, use sliding_window, or set "
                "over_sliding=true for texts no longer than that"
            )

    def make_new(self, device: torch.device) -> None:
        """Feature maps per query head and per KV head, and the far weight per query head."""
        spec, rows = self.spec, self.options.feature_dim
        factory = {"device": device, "dtype": torch.float32}
        self.feature_q = nn.Parameter(torch.empty(spec.num_heads, rows, spec.head_dim, **factory))
        self.feature_k = nn.Parameter(torch.empty(spec.num_kv_heads, rows, spec.head_dim, **factory))
        self.far_logit = nn.Parameter(torch.empty(spec.num_heads, **factory))

    def init_new_weights(self) -> None:
        """Identity maps scaled so that the features' product follows the teacher's logits, and a small far branch."""
        eye = torch.eye(self.options.feature_dim, self.spec.head_dim)
        for parameter in (self.feature_q, self.feature_k):
            init.copy_(parameter, (eye * abs(self.spec.scaling) ** 0.5).expand_as(parameter))
        init.constant_(self.far_logit, self.options.start)

    @classmethod
    def new_parameters(cls, spec: AttentionSpec, options: Options) -> int:
        """Number of fresh parameters."""
        return (spec.num_heads + spec.num_kv_heads) * options.feature_dim * spec.head_dim + spec.num_heads

    def map_keys(self, k: torch.Tensor) -> torch.Tensor:
        """Features of keys [B, n, G, D] -> [B, n, G, F], each half sums to one."""
        u = _rows(k.float(), self.feature_k)
        return torch.stack([u, -u], -2).softmax(-1).flatten(-2)

    def map_queries(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of queries [B, T, H, D] -> [B, T, H, F], and the log of their weight [B, T, H]."""
        u = _rows(q.float(), self.feature_q)
        if self.options.query_map == "softmax":
            return torch.stack([u, -u], -2).softmax(-1).flatten(-2), self.far_logit.expand(u.shape[:3])
        # exp of the largest is taken out of the features and put into the weight; the product does not know it
        most = torch.linalg.vector_norm(u.detach(), torch.inf, -1, keepdim=True)
        return torch.cat([u, -u], -1).sub_(most).exp_(), self.far_logit + most.squeeze(-1)

    def mix(
        self, *inputs: torch.Tensor, state: Any, lengths: torch.Tensor | None, step: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Window, sinks and far branch under one normaliser; see Mixer.mix."""
        q, k, v = inputs
        fq, log_far = self.map_queries(q)
        fn = one_step if step else chunk
        near = near_settings(self.spec, self.options)
        return fn(q, k, v, fq, log_far, map_keys=self.map_keys, state=state, lengths=lengths, **near)

    def reference(self, *inputs: torch.Tensor) -> torch.Tensor:
        """All weights of all keys, normalised once, in float64."""
        q, k, v = inputs
        fq, log_far = (x.double() for x in self.map_queries(q))
        near = near_settings(self.spec, self.options)
        return naive(q.double(), k.double(), v.double(), fq, log_far, map_keys=self.map_keys, **near)[0]

    def exact_options(self, length: int) -> WindowLinearOptions:
        """A window that covers the text."""
        return replace(self.options, window=max(length, self.options.window))

    def start_candidates(self) -> list[dict[str, torch.Tensor]]:
        """Far weights from nearly off to strong; none once they have been trained."""
        if bool((self.far_logit != self.options.start).any()):
            return []
        return [{"far_logit": torch.full_like(self.far_logit, value)} for value in (-12.0, -8.0, -6.0, -4.0, -2.0, 0.0)]

    @classmethod
    def cache_bytes(
        cls, spec: AttentionSpec, options: Options, length: int, batch: int = 1, dtype: torch.dtype = torch.float32
    ) -> int:
        """Constant in `length`: window, sinks and counter, and the fp32 state per KV head."""
        state = spec.num_kv_heads * 2 * options.feature_dim * (spec.value_dim + 1) * 4
        return window_bytes(spec, options, batch, dtype) + batch * state


def _rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [B, T, H, D] times each head's `weight` [H, F, D]: [B, T, H, F]. An einsum costs twice as much in a step."""
    return torch.bmm(x.flatten(0, 1).transpose(0, 1), weight.mT).transpose(0, 1).unflatten(0, x.shape[:2])
