"""Recipe files: found by name or path, changed by `--set`, validated with file, line and suggestion."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from regraft.errors import UserError, suggest
from regraft.recipes.schema import Recipe

SHIPPED = Path(__file__).parent / "shipped"


def shipped() -> dict[str, Path]:
    """The recipes that come with regraft, by name."""
    return {path.stem: path for path in sorted(SHIPPED.rglob("*.yaml"))}


def find(name: str) -> Path:
    """The file of a recipe given by path or shipped name; UserError with a suggestion if there is none."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    known = shipped()
    if name in known:
        return known[name]
    raise UserError(f"no recipe '{name}'", fix=f"give a YAML file, or {suggest(name, known)}")


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe `name` (path or shipped name) with `a.b=value` overrides applied; UserError at file:line."""
    path = find(name)
    return parse_recipe(path.read_text(encoding="utf-8"), str(path), overrides)


def parse_recipe(text: str, where: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from YAML text; `where` is what errors call it."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise UserError(
            f"not YAML: {getattr(error, 'problem', error)}", where=f"{where}{line}", fix="mend the file"
        ) from None
    if not isinstance(raw, dict):
        raise UserError("a recipe is a mapping of keys", where=where, fix="see: regraft cat quickstart")
    changed: dict[tuple[Any, ...], str] = {}
    for override in overrides:
        _override(raw, override, changed)
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, node, where, changed) from None


def check_recipe(recipe: Recipe, where: str = "recipe") -> None:
    """Check what the schema cannot: mixer, options and selector exist (this imports torch)."""
    from regraft.convert.mixers.registry import parse_options
    from regraft.select.registry import get_selector

    try:
        parse_options(recipe.convert.mixer, recipe.convert.options)
        if recipe.layers.by != "list":
            get_selector(recipe.layers.by)
    except UserError as error:
        raise UserError(error.what, where=where, fix=error.fix) from None


def dump(recipe: Recipe) -> str:
    """The recipe with every default written out, as YAML that loads to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _override(raw: dict[str, Any], text: str, changed: dict[tuple[Any, ...], str]) -> None:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise UserError(f"'{text}' is not key=value", where="--set", fix="for example: --set layers.keep=8")
    path = [int(part) if part.isdigit() else part for part in key.split(".")]
    at: Any = raw
    for part in path[:-1]:
        try:
            if isinstance(at, dict):
                at = at.setdefault(part, {})
            else:
                at = at[part]
        except (IndexError, TypeError):
            raise UserError(f"no '{part}' in the recipe", where=f"--set {key}", fix="see: regraft cat RECIPE") from None
    try:
        parsed = yaml.safe_load(value)
        if isinstance(at, list) and not (isinstance(path[-1], int) and path[-1] < len(at)):
            raise IndexError
        at[path[-1]] = parsed
    except yaml.YAMLError:
        raise UserError(f"'{value}' is not a YAML value", where=f"--set {key}", fix="quote it") from None
    except (TypeError, IndexError):
        raise UserError(f"no '{path[-1]}' to set", where=f"--set {key}", fix="see: regraft cat RECIPE") from None
    changed[tuple(path)] = key


def _explain(error: ValidationError, node: Any, where: str, changed: Mapping[tuple[Any, ...], str]) -> UserError:
    """One UserError that lists every mistake as file:line: key: message."""
    lines = []
    # a misspelt key comes with "is missing" for the right one: tell the misspelling first
    for mistake in sorted(error.errors(), key=lambda m: m["type"] != "extra_forbidden"):
        path = _plain(mistake["loc"], node)
        place = next((f"--set {changed[path[:n]]}" for n in range(len(path), 0, -1) if path[:n] in changed), None)
        if place is None:
            place = f"{where}:{_line(node, path)}"
        lines.append(f"{place}: {'.'.join(map(str, path)) or 'recipe'}: {_message(mistake, path)}")
    first, *others = lines
    place, _, rest = first.partition(": ")
    more = f" (and {len(others)} more: {'; '.join(others)})" if others else ""
    return UserError(rest + more, where=place, fix="correct it; the whole schema: regraft cat quickstart")


def _plain(location: tuple[Any, ...], node: Any) -> tuple[Any, ...]:
    """`location` without the union tags that pydantic puts in (they are no keys of the file)."""
    path: list[Any] = []
    at = node
    for part in location:
        if isinstance(at, yaml.SequenceNode) and isinstance(part, int):
            path.append(part)
            at = at.value[part] if part < len(at.value) else None
            continue
        if isinstance(at, yaml.MappingNode):
            below = {key.value: value for key, value in at.value}
            if part in below:
                path.append(part)
                at = below[part]
                continue
            if part in ("align", "logits", "finetune"):
                continue
        path.append(part)
        at = None
    return tuple(path)


def _line(node: Any, path: tuple[Any, ...]) -> int:
    """Line (from 1) of the deepest part of `path` that the file has."""
    line = node.start_mark.line + 1 if node is not None else 1
    at = node
    for part in path:
        if isinstance(at, yaml.MappingNode):
            pair = next(((k, v) for k, v in at.value if k.value == str(part)), None)
            if pair is None:
                return line
            line, at = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(at, yaml.SequenceNode) and isinstance(part, int) and part < len(at.value):
            at = at.value[part]
            line = at.start_mark.line + 1
        else:
            return line
    return line


def _message(mistake: Any, path: tuple[Any, ...]) -> str:
    kind = mistake["type"]
    if kind == "extra_forbidden":
        return f"unknown key '{path[-1]}'; {suggest(str(path[-1]), _keys_at(path))}"
    if kind == "missing":
        return f"'{path[-1]}' is missing"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return "`stage` must be align, logits or finetune"
    text = mistake["msg"].removeprefix("Value error, ")
    value = mistake.get("input")
    return f"{text} (got {value!r})" if isinstance(value, str | int | float) and not isinstance(value, bool) else text


def _keys_at(path: tuple[Any, ...]) -> list[str]:
    """The keys that the schema knows beside the last part of `path`."""
    schema = Recipe.model_json_schema()
    definitions = schema["$defs"]

    def expand(part: dict[str, Any]) -> list[dict[str, Any]]:
        if "$ref" in part:
            return expand(definitions[part["$ref"].rsplit("/", 1)[1]])
        options = [*part.get("anyOf", ()), *part.get("oneOf", ())]
        return [found for option in options for found in expand(option)] if options else [part]

    at = expand(schema)
    for part in path[:-1]:
        following: list[dict[str, Any]] = []
        for option in at:
            if isinstance(part, int):
                following += expand(option["items"]) if "items" in option else []
            elif part in option.get("properties", {}):
                following += expand(option["properties"][part])
            elif isinstance(option.get("additionalProperties"), dict):
                following += expand(option["additionalProperties"])
        at = following
    return sorted({name for option in at for name in option.get("properties", {})})


def json_schema() -> str:
    """The recipe's JSON schema, for editors."""
    return json.dumps(Recipe.model_json_schema(), indent=1)
