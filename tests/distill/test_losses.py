"""Losses against what they say they are, by hand."""

import pytest
import torch
from torch.nn import functional as F

from regraft.distill.losses import Head, align_loss, distill_loss


def test_alignment_losses_by_hand():
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 3, 4, generator=g), torch.randn(2, 5, 3, 4, generator=g) * 3
    error = student - teacher
    assert torch.allclose(align_loss("mse", student, teacher), (error**2).mean())
    relative = (error**2).mean() / ((teacher - teacher.mean()) ** 2).mean()
    assert torch.allclose(align_loss("mse_over_variance", student, teacher), relative)
    norm = (error.reshape(2, 5, 12).norm(dim=-1) / 12**0.5).mean()
    assert torch.allclose(align_loss("l2norm", student, teacher), norm, atol=1e-5)
    assert abs(align_loss("mse_over_variance", teacher.mean().expand_as(teacher), teacher) - 1) < 1e-5
    exact = teacher.clone().requires_grad_()
    align_loss("l2norm", exact, teacher).backward()
    assert torch.isfinite(exact.grad).all()
    with pytest.raises(ValueError, match="unknown"):
        align_loss("mae", student, teacher)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("softcap,scale", [(None, 1.0), (5.0, 0.5)])
def test_chunked_distillation_equals_the_naive_one(chunk, softcap, scale):
    g = torch.Generator().manual_seed(0)
    linear, other = torch.nn.Linear(8, 50), torch.nn.Linear(8, 48).requires_grad_(False)
    hidden, target = torch.randn(37, 8, generator=g, requires_grad=True), torch.randn(37, 8, generator=g)
    labels = torch.randint(0, 50, (37,), generator=g)
    student, teacher = Head(linear, scale, softcap), Head(other)
    loss, kl, ce = distill_loss(
        hidden, target, student, teacher, labels, kl_weight=0.7, ce_weight=0.3, temperature=2.0, chunk=chunk
    )
    (3 * loss).backward()
    found = [hidden.grad, linear.weight.grad, linear.bias.grad]
    hidden.grad, linear.weight.grad, linear.bias.grad = None, None, None
    logits = linear(hidden) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    p, q = (other(target) / 2).log_softmax(-1), (logits[:, :48] / 2).log_softmax(-1)
    kl_wanted = 4 * (p.exp() * (p - q)).sum()
    ce_wanted = F.cross_entropy(logits, labels, reduction="sum")
    (3 * (0.7 * kl_wanted + 0.3 * ce_wanted)).backward()
    torch.testing.assert_close(torch.stack([kl, ce]), torch.stack([kl_wanted, ce_wanted]), rtol=1e-5, atol=1e-4)
    for a, b in zip(found, [hidden.grad, linear.weight.grad, linear.bias.grad], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_equal_models_no_loss():
    linear = torch.nn.Linear(8, 20).requires_grad_(False)
    hidden = torch.randn(9, 8, requires_grad=True)
    loss, kl, _ = distill_loss(hidden, hidden.detach(), Head(linear), Head(linear))
    loss.backward()
    assert abs(kl) < 1e-5 and hidden.grad.abs().max() < 1e-5 and linear.weight.grad is None


def test_logits_of_the_whole_text_never_exist_at_once():
    """Peak of live logits: counted in tensors saved and in the largest one made, not in time."""
    vocab, tokens, chunk = 4096, 512, 32
    linear = torch.nn.Linear(8, vocab)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    hidden = torch.randn(tokens, 8, requires_grad=True)
    with Watch():
        distill_loss(hidden, torch.randn(tokens, 8), Head(linear), Head(linear), chunk=chunk)[0].backward()
    assert max(sizes) <= max(chunk * vocab, vocab * 8)
    assert max(sizes) < tokens * vocab / 4
