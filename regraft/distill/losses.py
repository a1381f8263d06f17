"""Losses of alignment and distillation: pure functions of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F


def align_loss(
    kind: str, student: torch.Tensor, teacher: torch.Tensor, variance: torch.Tensor | None = None
) -> torch.Tensor:
    """Distance of head outputs [B, T, H, Dv], averaged over tokens.

    "mse_over_variance": mean squared error over `variance`, by default that of the teacher's outputs in this batch (1
    is as bad as always saying their mean); a given one makes the loss of a batch the mean of its parts'. "mse": mean
    squared error. "l2norm": mean over tokens of ||student - teacher||_2 / sqrt(H Dv), the norm of RADLADS (Goldstein
    et al. 2025, arXiv 2505.03005), not squared.
    """
    student, teacher = student.float().flatten(2), teacher.float().flatten(2)
    if kind == "l2norm":
        # the gradient of a norm at 0 is undefined; the eps keeps an already exact layer finite
        return ((student - teacher).square().mean(-1) + 1e-12).sqrt().mean()
    error = (student - teacher).square().mean()
    if kind == "mse":
        return error
    if kind == "mse_over_variance":
        variance = teacher.var(unbiased=False) if variance is None else variance
        return error / variance.clamp(min=1e-12)
    raise ValueError(f"unknown alignment loss '{kind}'")


@dataclass(frozen=True)
class Head:
    """How a causal LM turns final hidden states into logits: its own linear head, then the family's bounds.

    `scale` divides (Granite) or multiplies (Cohere) the logits; `softcap` is Gemma 2's final tanh bound.
    """

    linear: torch.nn.Module
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Head:
        """Read off a causal LM."""
        config = model.config
        scale = getattr(config, "logit_scale", None) or 1.0
        if getattr(config, "logits_scaling", None):
            scale = 1.0 / config.logits_scaling
        return cls(model.get_output_embeddings(), scale, getattr(config, "final_logit_softcapping", None))

    def parameters(self) -> list[torch.Tensor]:
        """The head's own parameters (with tied embeddings: the embedding matrix)."""
        return list(self.linear.parameters())

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] in fp32."""
        logits = self.linear(hidden).float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def distill_loss(
    student_hidden: torch.Tensor,
    teacher_hidden: torch.Tensor | None,
    student_head: Head,
    teacher_head: Head | None,
    labels: torch.Tensor | None = None,
    *,
    kl_weight: float = 1.0,
    ce_weight: float = 0.0,
    temperature: float = 1.0,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, KL, cross-entropy), each a sum over tokens in nats; loss = kl_weight * KL + ce_weight * cross-entropy.

    KL is KL(teacher || student) at `temperature`, times temperature squared. `student_hidden`, `teacher_hidden`
    [N, D] are final hidden states of the counted tokens, `labels` [N] their next tokens (None: no cross-entropy;
    `teacher_hidden` None: no KL). Gradients flow into `student_hidden` and the head's parameters through the loss only.

    The gradient is computed together with the loss, `chunk` tokens at a time, so no more than chunk x V logits of each
    model ever exist, and each head runs once. Vocabularies of different size are compared on the shared ids.
    """
    parameters = [p for p in student_head.parameters() if p.requires_grad]
    settings = (student_head, teacher_head, kl_weight, ce_weight, temperature, chunk, parameters)
    return _DistillLoss.apply(settings, student_hidden, teacher_hidden, labels, *parameters)


class _DistillLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, hidden, teacher_hidden, labels, *parameters):
        head, teacher_head, kl_weight, ce_weight, temperature, chunk, live = settings
        total = hidden.new_zeros(3, dtype=torch.float32)  # loss, KL, cross-entropy
        grad_hidden = torch.zeros_like(hidden) if hidden.requires_grad else None
        grads = [torch.zeros_like(p, dtype=torch.float32) for p in live]
        wanted = grad_hidden is not None or bool(live)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            target = None if teacher_hidden is None else teacher_head(teacher_hidden[part])
            with torch.set_grad_enabled(wanted):
                h = hidden[part].detach().requires_grad_(grad_hidden is not None)
                kl, ce = _chunk_sums(head(h), target, None if labels is None else labels[part], temperature)
                loss = kl_weight * kl + ce_weight * ce
                if wanted:
                    inputs = ([h] if grad_hidden is not None else []) + live
                    found = list(torch.autograd.grad(loss, inputs))
            if wanted:
                if grad_hidden is not None:
                    grad_hidden[part] = found.pop(0)
                for kept, new in zip(grads, found, strict=True):
                    kept += new
            total += torch.stack([loss.detach(), kl.detach(), ce.detach()])
        ctx.save_for_backward(*([] if grad_hidden is None else [grad_hidden]), *grads)
        ctx.has_hidden = grad_hidden is not None
        ctx.dtypes = [p.dtype for p in live]
        loss, kl, ce = total.unbind()
        ctx.mark_non_differentiable(kl, ce)
        return loss, kl, ce

    @staticmethod
    def backward(ctx, upstream, _kl, _ce):
        saved = list(ctx.saved_tensors)
        grad_hidden = saved.pop(0) * upstream if ctx.has_hidden else None
        grads = [(g * upstream).to(dtype) for g, dtype in zip(saved, ctx.dtypes, strict=True)]
        return None, grad_hidden, None, None, *grads


def _chunk_sums(
    logits: torch.Tensor, target: torch.Tensor | None, labels: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    kl = ce = logits.new_zeros(())
    if labels is not None:
        ce = F.cross_entropy(logits, labels, reduction="sum")
    if target is not None:
        shared = min(logits.shape[-1], target.shape[-1])
        p = (target[:, :shared] / temperature).log_softmax(-1)
        q = (logits[:, :shared] / temperature).log_softmax(-1)
        kl = F.kl_div(q, p, reduction="sum", log_target=True) * temperature**2
    return kl, ce
