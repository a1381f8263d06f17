"""What produced a figure: versions, machine, threads, load."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "lm-eval", "safetensors", "triton")


def environment() -> dict[str, Any]:
    """Versions of what matters, the machine, its threads and its load at this moment."""
    import torch

    from regraft import __version__
    from regraft.kernels.dispatch import report

    versions = {"regraft": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    device = "cpu"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    elif torch.backends.mps.is_available():
        device = "mps"
    return {
        "versions": versions,
        "machine": {
            "platform": sys.platform,
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": _memory_gib(),
            "device": device,
            "torch_threads": torch.get_num_threads(),
            "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        },
        "kernels": report(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            for line in handle:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        return platform.processor()
    return platform.processor()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def render(env: dict[str, Any]) -> str:
    """The block to paste into a bug report."""
    lines = [f"{name:14} {version}" for name, version in env["versions"].items()]
    lines += [f"{name:14} {value}" for name, value in env["machine"].items()]
    lines += [f"kernel {name:20} {told}" for name, told in env["kernels"].items()]
    return "\n".join(lines)
