"""Recipe files: found by name or path, changed by `--set`, validated with file, line and suggestion."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from regraft.errors import UserError, suggest
from regraft.recipes.schema import Origin, Recipe

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


def read(name: str) -> tuple[str, str]:
    """Text of a recipe (path or shipped name), and what errors call it."""
    path = find(name)
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except UnicodeDecodeError as error:
        raise UserError(
            f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(path), fix="give a YAML file"
        ) from None


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe `name` (path or shipped name) with `a.b=value` overrides applied; UserError at file:line."""
    return parse_recipe(*read(name), overrides)


def parse_recipe(text: str, where: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from YAML text; `where` is what errors call it."""
    node, raw = _yaml(text, where)
    _refuse_duplicates(node, where)
    changed: dict[tuple[Any, ...], str] = {}
    for override in overrides:
        _override(raw, override, changed)
    origin = Origin(where, dict(_lines(node)), changed)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, node, origin) from None
    recipe._origin = origin
    return recipe


def changed_text(text: str, where: str, overrides: Iterable[str]) -> str:
    """The YAML `text` of a recipe with `a.b=value` overrides written into it, comments kept; it is validated."""
    overrides = list(overrides)
    recipe = parse_recipe(text, where, overrides)
    for override in overrides:
        path, value = _parsed(override)
        text = _written(text, yaml.compose(text, Loader=yaml.SafeLoader), path, value)
    try:
        right = parse_recipe(text, where) == recipe
    except UserError:
        right = False
    if not right:
        raise UserError(
            "this recipe's layout (anchors, merged keys) keeps the change from being written into it",
            where=where,
            fix="edit the file by hand, or print the result with: regraft cat RECIPE --set ...",
        )
    return text


def check_recipe(recipe: Recipe) -> None:
    """Check what the schema cannot: mixer, options and selector exist (this imports torch). UserError at file:line."""
    from regraft.convert.mixers.registry import get_mixer, parse_options
    from regraft.select.registry import get_selector

    mixer, options = recipe.convert.mixer, recipe.convert.options
    with told_at(recipe, "convert", "mixer"):
        get_mixer(mixer)
    with told_at(recipe, "convert", "options"):
        try:
            parse_options(mixer, options)
        except UserError as error:
            with told_at(recipe, "convert", "options", *_culprit(mixer, options, error)):
                raise
    if recipe.layers.by != "list":
        with told_at(recipe, "layers", "by"):
            get_selector(recipe.layers.by)


@contextmanager
def told_at(recipe: Recipe, *path: str | int) -> Iterator[None]:
    """A UserError inside is told at this key of the recipe, unless it names a file of its own, which says more."""
    try:
        yield
    except UserError as error:
        inside = error.where.startswith((recipe.origin.name, "--set"))
        if inside or Path(error.where.split(":")[0]).exists():
            raise
        key = ".".join(map(str, path))
        raise UserError(f"{key}: {error.what}", where=recipe.origin.place(path), fix=error.fix) from error


def _culprit(mixer: str, options: dict[str, Any], error: UserError) -> list[str]:
    """The option without which this error is not there, if a single one is to blame."""
    from regraft.convert.mixers.registry import parse_options

    for name in options:
        try:
            parse_options(mixer, {key: value for key, value in options.items() if key != name})
        except UserError as other:
            if other.what == error.what:
                continue
        return [name]
    return []


def dump(recipe: Recipe) -> str:
    """The recipe with every default written out, as YAML that loads to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _yaml(text: str, where: str) -> tuple[yaml.MappingNode, dict[str, Any]]:
    """Node tree (for lines) and values of a recipe's text."""
    try:
        node, raw = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        told = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"not YAML: {told}", where=f"{where}{line}", fix="mend the file") from None
    except ValueError as error:  # a date that is none
        raise UserError(f"not YAML: {error}", where=where, fix="quote it") from None
    if not isinstance(raw, dict):
        raise UserError("a recipe is a mapping of keys", where=where, fix="see: regraft cat quickstart")
    return node, raw


def _lines(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Every key's path with its line, from 1."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, key.value)
            yield here, key.start_mark.line + 1
            yield from _lines(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _lines(value, (*path, index))


def _refuse_duplicates(node: Any, where: str) -> None:
    """YAML lets the last of two equal keys win; here that is an error."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise UserError(
                    f"'{key.value}' is given twice, first in line {seen[key.value]}",
                    where=f"{where}:{line}",
                    fix="remove one",
                )
            seen[key.value] = line
            _refuse_duplicates(value, where)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_duplicates(value, where)


def _parsed(override: str) -> tuple[list[str | int], Any]:
    """`a.b=value` as path and value."""
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise UserError(f"'{override}' is not key=value", where="--set", fix="for example: --set layers.keep=8")
    try:
        return [int(part) if part.isdigit() else part for part in key.split(".")], yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        raise UserError(f"'{value}' is not a YAML value", where=f"--set {key}", fix="quote it") from None


def _override(raw: dict[str, Any], text: str, changed: dict[tuple[Any, ...], str]) -> None:
    path, value = _parsed(text)
    key = text.partition("=")[0]
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
        if isinstance(at, list) and not (isinstance(path[-1], int) and path[-1] < len(at)):
            raise IndexError
        at[path[-1]] = value
    except (TypeError, IndexError):
        raise UserError(f"no '{path[-1]}' to set", where=f"--set {key}", fix="see: regraft cat RECIPE") from None
    changed[tuple(path)] = key


def _written(text: str, node: Any, path: list[str | int], value: Any) -> str:
    """`text` with `value` at `path`: in the place of the old value, or as a new key before the first of its mapping."""
    at = node
    for depth, part in enumerate(path):
        if isinstance(at, yaml.SequenceNode):
            at = at.value[int(part)]
            continue
        found = next((below for key, below in at.value if key.value == str(part)), None)
        if found is not None:
            at = found
            continue
        for missing in reversed(path[depth + 1 :]):
            value = {missing: value}
        if not at.value:  # {}
            return _replaced(text, at, {part: value})
        start = at.value[0][0].start_mark
        between = ", " if at.flow_style else "\n" + " " * start.column
        return f"{text[: start.index]}{_flow(part)}: {_flow(value)}{between}{text[start.index :]}"
    return _replaced(text, at, value)


def _replaced(text: str, node: Any, value: Any) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    old = text[start:end]
    # an empty value has no place of its own, and a block ends after the line break
    before = " " if start == end else ""
    after = old[len(old.rstrip()) :]
    return f"{text[:start]}{before}{_flow(value)}{after}{text[end:]}"


def _flow(value: Any) -> str:
    """A value on one line, as YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _explain(error: ValidationError, node: Any, origin: Origin) -> UserError:
    """One UserError that lists every mistake as file:line: key: message."""
    lines = []
    # a misspelt key comes with "is missing" for the right one: tell the misspelling first
    for mistake in sorted(error.errors(), key=lambda m: m["type"] != "extra_forbidden"):
        path = mistake.get("ctx", {}).get("path") or _plain(mistake["loc"], node)
        key = ".".join(map(str, path)) or "recipe"
        lines.append((origin.place(path), f"{key}: {_message(mistake, path)}"))
    (place, first), *others = lines
    rest = "; ".join(f"{where}: {what}" for where, what in others)
    more = f" (and {len(others)} more: {rest})" if others else ""
    return UserError(first + more, where=place, fix="correct it; the whole schema: regraft cat quickstart")


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


def _message(mistake: Any, path: tuple[Any, ...]) -> str:
    kind = mistake["type"]
    if kind == "extra_forbidden":
        return f"unknown key '{path[-1]}'; {suggest(str(path[-1]), _keys_at(path))}"
    if kind == "invalid_key":
        return f"{path[-1]!r} is not a key; a value with a comma in it needs quotes"
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
