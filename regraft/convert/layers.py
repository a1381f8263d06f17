"""The grammar of `--layers`: which layers to convert, 0-based.

0,2,5-9     lists and ranges
every:4     layers 3, 7, 11, ... (i % 4 == 3)
all
SSSL        S keeps softmax, L converts; tiled over the depth
FILE        a layers.json that `regraft select` wrote, or a text file holding any of the above
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from regraft.errors import UserError

_PATTERN = re.compile(r"^[SL]+$")


def parse_layers(text: str, num_layers: int) -> list[int]:
    """The layers that `text` names, sorted; UserError for what is not in the grammar or out of range.

    Layers named twice count once. At least one layer must be named.
    """
    text = text.strip()
    valid = f"valid: 0 to {num_layers - 1}, as 0,2,5-9, every:N, all, a pattern such as SSSL, or a file"
    if not text:
        raise UserError("no layers given", where="--layers", fix=valid)
    if text == "all":
        return list(range(num_layers))
    if text.startswith("every:"):
        step = text.removeprefix("every:")
        if not step.isdigit() or not 1 <= int(step) <= num_layers:
            raise UserError(f"'{text}' is not every:N with N from 1 to {num_layers}", where="--layers", fix=valid)
        return [i for i in range(num_layers) if i % int(step) == int(step) - 1]
    if _PATTERN.match(text):
        if len(text) > num_layers:
            raise UserError(
                f"wrong depth: the pattern has {len(text)} letters, the model {num_layers} layers",
                where="--layers",
                fix="give at most one letter a layer",
            )
        chosen = [i for i in range(num_layers) if text[i % len(text)] == "L"]
        if not chosen:
            raise UserError(f"'{text}' converts no layer", where="--layers", fix="use L for the layers to convert")
        return chosen
    if re.match(r"^[\d\s,-]+$", text):
        return _numbers(text, num_layers, valid)
    path = Path(text).expanduser()
    if path.is_file():
        return _file(path, num_layers)
    raise UserError(f"'{text}' is neither layers nor a file", where="--layers", fix=valid)


def _numbers(text: str, num_layers: int, valid: str) -> list[int]:
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.match(r"^\s*(\d+)\s*(?:-\s*(\d+)\s*)?$", part)
        if not match:
            raise UserError(f"'{part.strip()}' is not a layer or a range", where="--layers", fix=valid)
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise UserError(f"the range {part.strip()} runs backwards", where="--layers", fix=f"write {last}-{first}")
        if last >= num_layers:
            raise UserError(f"layer {last} is out of range", where=f"--layers {part.strip()}", fix=valid)
        chosen.update(range(first, last + 1))
    return sorted(chosen)


def _file(path: Path, num_layers: int) -> list[int]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        if _is_file_name(text.strip()):
            raise UserError(
                "a layers file must hold layers, not another file", where=str(path), fix="write 0-9 or SSSL"
            )
        return parse_layers(text, num_layers)
    try:
        content = json.loads(text)
        depth, chosen = content["num_layers"], content["converted"]
    except (ValueError, KeyError, TypeError):
        raise UserError(
            "not a layers.json that `regraft select` wrote",
            where=str(path),
            fix="write it with: regraft select MODEL -o FILE",
        ) from None
    if depth != num_layers:
        raise UserError(
            f"wrong depth: the choice was made for {depth} layers, the model has {num_layers}",
            where=str(path),
            fix="select layers of this model: regraft select MODEL",
        )
    bad = [i for i in chosen if not isinstance(i, int) or not 0 <= i < num_layers]
    if bad or not chosen:
        raise UserError(f"layers out of range: {bad or 'none'}", where=str(path), fix=f"valid: 0 to {num_layers - 1}")
    return sorted(set(chosen))


def _is_file_name(text: str) -> bool:
    return bool(text) and "\n" not in text and not _PATTERN.match(text) and Path(text).is_file()


def evenly(num_layers: int, count: int) -> list[int]:
    """`count` of `num_layers` layers, as evenly spaced as they can be."""
    return [(2 * i + 1) * num_layers // (2 * count) for i in range(count)]


def layer_strip(converted: Iterable[int], num_layers: int) -> str:
    """One letter a layer: S softmax, L converted."""
    chosen = set(converted)
    return "".join("L" if i in chosen else "S" for i in range(num_layers))


def ruler(num_layers: int) -> str:
    """Layer numbers every ten, to print above a strip."""
    return "".join(str(i).ljust(10) for i in range(0, num_layers, 10))[: max(num_layers, 2)].rstrip()
