"""Kernels against their rivals, in one process, taking turns: CPU milliseconds, median of n, spread, load.

    python benchmarks/kernels.py [LENGTH,LENGTH,...]

Rivals: PyTorch's causal softmax attention (SDPA) on the same heads, and the quadratic form of the same mechanism, which
`window_linear` must also agree with. Memory: what forward and backward add to the peak of a process of their own.
"""

import os
import statistics
import subprocess
import sys
import time

import torch

from regraft.kernels import linear, sliding_window, window_linear

HEADS, GROUPS, DIM, FEATURES, WINDOW, SINKS, REPEATS = 9, 3, 64, 128, 64, 4, 5
NEAR = {"window": WINDOW, "sinks": SINKS, "scale": DIM**-0.5}
QUADRATIC_LIMIT = 4096  # the quadratic form needs gigabytes beyond


def tensors(length):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, length, HEADS, DIM, generator=g, requires_grad=True)
    k, v = (torch.randn(1, length, GROUPS, DIM, generator=g, requires_grad=True) for _ in range(2))
    fq = torch.rand(1, length, HEADS, FEATURES, generator=g).softmax(-1).requires_grad_()
    far = torch.randn(1, length, HEADS, generator=g, requires_grad=True)
    weights = (torch.randn(GROUPS, FEATURES // 2, DIM, generator=g) * 0.3).requires_grad_()

    def map_keys(keys):
        u = torch.einsum("bngd,gfd->bngf", keys, weights)
        return torch.cat([u.softmax(-1), (-u).softmax(-1)], -1)

    return q, k, v, fq, far, map_keys


def sdpa(q, k, v, fq, far, map_keys):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def quadratic(q, k, v, fq, far, map_keys):
    """window_linear with the weight of every key for every query written out."""
    rep, length = HEADS // GROUPS, q.shape[1]
    fk = map_keys(k).transpose(1, 2).repeat_interleave(rep, 1)
    k, v = (x.transpose(1, 2).repeat_interleave(rep, 1) for x in (k, v))
    q, fq, far = q.transpose(1, 2), fq.transpose(1, 2), far.transpose(1, 2)[..., None]
    age = torch.arange(length)[:, None] - torch.arange(length)
    sink = torch.arange(length) < SINKS
    near = (age >= 0) & ((age < WINDOW) | sink)
    logits = (q @ k.mT * NEAR["scale"]).masked_fill(~near, -torch.inf)
    top = torch.maximum(logits.amax(-1, keepdim=True), far)
    old = (fq @ fk.mT).masked_fill((age < WINDOW) | sink, 0.0)
    weights = (logits - top).exp() + old * (far - top).exp()
    return (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2)


# name -> function of the tensors; one line adds an operation
REGISTRY = {
    "sdpa": sdpa,
    "sliding_window": lambda q, k, v, fq, far, map_keys: sliding_window.chunk(q, k, v, **NEAR)[0],
    "linear": lambda q, k, v, fq, far, map_keys: linear.chunk(fq, map_keys(k), v)[0],
    "window_linear": lambda q, k, v, fq, far, map_keys: window_linear.chunk(
        q, k, v, fq, far, map_keys=map_keys, **NEAR
    )[0],
    "window_linear quadratic": quadratic,
}


def measure(lengths):
    torch.set_num_threads(1)
    print(f"1 thread, load {os.getloadavg()[0]:.2f}, n {REPEATS}, torch {torch.__version__}; CPU ms (spread)")
    medians = {}
    for length in lengths:
        inputs = tensors(length)
        names = [n for n in REGISTRY if "quadratic" not in n or length <= QUADRATIC_LIMIT]
        times = {(n, kind): [] for n in names for kind in ("forward", "both")}
        for turn in range(REPEATS + 1):
            for name in names:
                with torch.no_grad():
                    began = time.process_time()
                    REGISTRY[name](*inputs)
                    times[name, "forward"].append(time.process_time() - began)
                if "quadratic" in name and length > 2048:
                    continue
                began = time.process_time()
                REGISTRY[name](*inputs).sum().backward()
                times[name, "both"].append(time.process_time() - began)
            if turn == 0:
                for values in times.values():
                    values.clear()
        for (name, kind), values in times.items():
            if values:
                medians[name, kind, length] = statistics.median(values) * 1e3
        for name in names:
            told = [
                f"{kind} {medians[name, kind, length]:9.1f} ({(max(t) - min(t)) / statistics.median(t):.0%})"
                for kind in ("forward", "both")
                if (t := times[name, kind])
            ]
            print(f"T {length:6}  {name:24} {'   '.join(told)}", flush=True)
        if "window_linear quadratic" in names:
            with torch.no_grad():
                gap = REGISTRY["window_linear"](*inputs) - REGISTRY["window_linear quadratic"](*inputs)
            print(f"T {length:6}  chunked and quadratic differ by at most {gap.abs().max():.1e}")
    for length in lengths:
        ours = medians["window_linear", "forward", length], medians["window_linear", "both", length]
        line = f"T {length:6}  window_linear against sdpa: forward {medians['sdpa', 'forward', length] / ours[0]:.2f} x"
        line += f", forward and backward {medians['sdpa', 'both', length] / ours[1]:.2f} x"
        slow = medians.get(("window_linear quadratic", "forward", length))
        line += f"; against its quadratic form: forward {slow / ours[0]:.1f} x" if slow else ""
        half = medians.get(("window_linear", "both", length // 2))
        if half:
            line += (
                f"; time over half the length: forward {ours[0] / medians['window_linear', 'forward', length // 2]:.2f}"
            )
            line += f", both {ours[1] / half:.2f}"
        print(line)
    sizes = {}
    for length in lengths if sys.platform == "linux" else []:
        for name in ("sdpa", "window_linear"):
            call = [sys.executable, __file__, "--memory", name, str(length)]
            sizes[name, length] = float(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
        told = "   ".join(f"{name} {sizes[name, length]:8.1f}" for name in ("sdpa", "window_linear"))
        half = sizes.get(("window_linear", length // 2))
        print(f"T {length:6}  MiB at the peak of forward and backward: {told}", end="")
        print(f"; window_linear over half the length: {sizes['window_linear', length] / half:.2f}" if half else "")


def memory(name, length):
    """MiB that one forward and backward add to the memory of this process at their peak. Needs Linux."""

    def status(key):
        with open("/proc/self/status", encoding="utf-8") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(key))

    torch.set_num_threads(1)
    REGISTRY[name](*tensors(256)).sum().backward()  # libraries and their buffers
    inputs = tensors(length)
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as handle:
        handle.write("5")  # the peak starts anew
    REGISTRY[name](*inputs).sum().backward()
    return (status("VmHWM") - before) / 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        print(memory(sys.argv[2], int(sys.argv[3])))
    else:
        measure([int(n) for n in sys.argv[1].split(",")] if len(sys.argv) > 1 else [512, 1024, 2048, 4096, 8192, 16384])
