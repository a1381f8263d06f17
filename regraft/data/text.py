"""Text sources: the embedded corpus, local files, and Hub data sets."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regraft.data.corpus import embedded_documents, held_out
from regraft.errors import UserError, suggest
from regraft.recipes.schema import DataConfig

SPLITS = ("train", "heldout", "all")


def dataset_root() -> Path | None:
    """Folder with real evaluation text: REGRAFT_DATA, or `../shared/data` beside the checkout; None if absent."""
    named = os.environ.get("REGRAFT_DATA")
    if named:
        path = Path(named)
        if not path.is_dir():
            raise UserError("REGRAFT_DATA is not a folder", where=named, fix="unset it, or give the data folder")
        return path
    path = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    return path if path.is_dir() else None


def documents(config: DataConfig) -> Iterator[str]:
    """The documents of a source, in a fixed order.

    Local files have no split of their own: `heldout` takes the tenth of the documents whose text hashes to it, `train`
    the other nine, `all` everything. UserError names the file and line of what is wrong.
    """
    if config.source == "corpus":
        _check_split(config)
        yield from embedded_documents(config.split)
    elif config.source.startswith("hub:"):
        yield from _hub(config)
    else:
        _check_split(config)
        for text in _local(config):
            if config.split == "all" or held_out(text) == (config.split == "heldout"):
                yield text


def _check_split(config: DataConfig) -> None:
    if config.split not in SPLITS:
        raise UserError(
            f"no split '{config.split}' in {config.source}", where="data.split", fix=suggest(config.split, SPLITS)
        )


def local_files(source: str) -> list[Path]:
    """The files that `source` (a path or a glob) names, sorted; UserError if there are none or of another kind."""
    files = sorted(Path(p) for p in glob.glob(str(Path(source).expanduser()), recursive=True))
    files = [f for f in files if f.is_file()]
    if not files:
        raise UserError(f"no text at '{source}'", where="data.source", fix="give corpus, a file or glob, or hub:NAME")
    for file in files:
        if file.suffix not in (".txt", ".md", ".jsonl", ".parquet"):
            raise UserError(
                f"unknown kind of text file: {file.name}", where=str(file), fix="use .txt .md .jsonl .parquet"
            )
    return files


def _local(config: DataConfig) -> Iterator[str]:
    for file in local_files(config.source):
        if file.suffix in (".txt", ".md"):
            yield file.read_text(encoding="utf-8")
        elif file.suffix == ".jsonl":
            with file.open(encoding="utf-8") as handle:
                for number, line in enumerate(handle, 1):
                    if line.strip():
                        yield _text_of(_parse(line, file, number), config.field, f"{file}:{number}")
        else:
            import pyarrow.parquet

            rows = pyarrow.parquet.ParquetFile(file)
            if config.field not in rows.schema_arrow.names:
                _no_field(config.field, rows.schema_arrow.names, str(file))
            for batch in rows.iter_batches(columns=[config.field]):
                for number, text in enumerate(batch.column(0).to_pylist()):
                    yield _text_of({config.field: text}, config.field, f"{file}: row {number}")


def _parse(line: str, file: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"not JSON: {error}", where=f"{file}:{number}", fix="one JSON object a line") from None
    if not isinstance(row, dict):
        raise UserError("not a JSON object", where=f"{file}:{number}", fix="one JSON object a line")
    return row


def _text_of(row: dict[str, Any], field: str, where: str) -> str:
    if field not in row:
        _no_field(field, list(row), where)
    if not isinstance(row[field], str):
        raise UserError(
            f"field '{field}' holds {type(row[field]).__name__}, not text", where=where, fix="set data.field"
        )
    return row[field]


def _no_field(field: str, known: list[str], where: str) -> None:
    raise UserError(f"no field '{field}'", where=where, fix=f"set data.field; {suggest(field, known)}")


def _hub(config: DataConfig) -> Iterator[str]:
    import datasets

    name = config.source.removeprefix("hub:")
    try:
        rows = datasets.load_dataset(name, config.config, split=config.split, streaming=True)
        for number, row in enumerate(rows):
            yield _text_of(row, config.field, f"{config.source}: row {number}")
    except UserError:
        raise
    except Exception as error:
        # datasets raises a dozen kinds, from its own to the HTTP client's: all mean that the rows cannot be had
        raise UserError(
            f"the data set does not load: {' '.join(str(error).split())[:200]}",
            where=config.source,
            fix="check the name, split and network, or use a local file",
        ) from error
