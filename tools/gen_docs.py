"""Write the parts of the documentation that come from registries; with --check, fail if they are out of date."""

from __future__ import annotations

import sys
from pathlib import Path

from regraft.convert.mixers.registry import MIXERS
from regraft.convert.spec import FAMILIES
from regraft.select.registry import SELECTORS

DOCS = Path(__file__).resolve().parents[1] / "docs"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def mechanisms() -> str:
    """docs/mechanisms.md."""
    mixers = [
        [f"`{e.name}`", e.title, e.state_growth, e.training, e.exact_at or "no setting", e.paper]
        for e in MIXERS.values()
    ]
    families = [[f"`{f.model_type}`", f.title] for f in FAMILIES.values()]
    selectors = [[f"`{s.name}`", s.title, s.meaning, f"{s.passes(30):.1f}"] for s in SELECTORS.values()]
    return "\n".join(
        [
            "# Mechanisms, families, selectors",
            "",
            "Generated from the registries by `make docs`; do not edit.",
            "",
            "## Mixers",
            "",
            table(["name", "what", "state", "training", "equals the teacher at", "paper"], mixers),
            "",
            "## Source families",
            "",
            table(["model_type", "what"], families),
            "",
            "## Selectors",
            "",
            "Passes: whole-model forward passes over the calibration text, for 30 layers, beyond stage 1.",
            "",
            table(["name", "what", "score (lower converts first)", "passes"], selectors),
            "",
        ]
    )


def main() -> int:
    """Write or check; returns the exit code."""
    path, text = DOCS / "mechanisms.md", mechanisms()
    if "--check" in sys.argv[1:]:
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{path.name} is out of date: run `make docs`", file=sys.stderr)
            return 1
        return 0
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
