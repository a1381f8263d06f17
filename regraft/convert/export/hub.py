"""Publish a converted checkpoint: a clean folder, or a Hub repository; a dry run first."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regraft.convert.export.bundle import code_files
from regraft.convert.export.card import REPOSITORY, public_name, render_card, source_id
from regraft.errors import UserError
from regraft.store import link_or_copy, new_folder

_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"^model(-\d{5}-of-\d{5})?\.safetensors$")
# Files of a tokenizer and of a model that are published when they are there. Everything else stays at home.
_BESIDE = {
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja",
    "chat_template.json", "results.json", "recipe.yaml", "README.md", "LICENSE", "LICENSE.txt", "NOTICE",
}  # fmt: skip
# A vocabulary is full of odd strings, and some files are no text.
_NOT_SCANNED = {"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt"}
_SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bapi_org_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bgithub_pat_\w{30,}|\bAKIA[0-9A-Z]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_LOCAL = re.compile(
    r"file:///?[^\s\"'`<>)]+"
    r"|(?<![\w.:/~-])/(?:home|root|work|workspace|tmp|Users|mnt|media|data|var|opt|srv|scratch|content|private)"
    r"/[^\s\"'`<>),;]+"
    r"|(?<![\w/])~/[^\s\"'`<>),;]+"
    r"|\b[A-Za-z]:\\{1,2}(?:Users|Documents)[^\s\"'`<>),;]*"
)


@dataclass(frozen=True)
class Manifest:
    """The files that are published, with their sizes in bytes, and where to; and what of the folder stays at home."""

    repo: str | None
    files: dict[str, int]
    left_out: list[str] = field(default_factory=list)
    url: str | None = None  # of the commit or pull request, once pushed

    def render(self) -> str:
        """A list with sizes."""
        lines = [f"{_told(size)}  {name}" for name, size in self.files.items()]
        lines.append(f"{_told(sum(self.files.values()))}  in {len(self.files)} files")
        if self.left_out:
            lines.append(f"left out: {', '.join(self.left_out)}")
        return "\n".join([*lines, self.url] if self.url else lines)


def _told(size: int) -> str:
    return f"{size / 2**20:10.2f} MiB" if size >= 2**20 else f"{size / 2**10:10.2f} KiB"


def export(
    folder: Path,
    *,
    out: Path | None = None,
    push: str | None = None,
    dry_run: bool = False,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
) -> Manifest:
    """Copy a converted checkpoint to `out` with card and public lineage, and/or push it to the Hub repository `push`.

    Published are weights, config, code, tokenizer, card, results and recipe; optimizer states, checkpoints and
    anything else never. UserError, before anything is written or sent, for an incomplete checkpoint and for a file
    with an access token or a path of this machine. `dry_run` makes all these checks, lists what would be published,
    and touches neither disk nor network. `revision`: the branch to push to; `create_pr`: open a pull request instead.
    """
    if out is None and push is None:
        raise UserError("nowhere to export to", fix="give -o FOLDER, or --push OWNER/NAME")
    contents = _contents(folder, push)
    _scan(contents)
    sizes = {name: _size(what) for name, what in contents.items()}
    left_out = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir() if p.name not in contents)
    manifest = Manifest(push, sizes, left_out)
    if dry_run:
        return manifest
    if push is not None:
        token = _token(push, token)
    if out is not None:
        with new_folder(out, sum(sizes.values())) as staging:
            for name, what in contents.items():
                if isinstance(what, str):
                    (staging / name).write_text(what, encoding="utf-8")
                elif what.suffix == ".safetensors":
                    link_or_copy(what, staging / name)
                else:
                    shutil.copyfile(what, staging / name)
    if push is None:
        return manifest
    return Manifest(push, sizes, left_out, _push(contents, push, private, revision, create_pr, token))


def _contents(folder: Path, repo: str | None) -> dict[str, Path | str]:
    """What is published, by name: a file as it is, or the text that takes its place."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "regraft" not in config:
        inside = folder / "final"
        found = f"give {inside}" if (inside / "config.json").is_file() else "give a folder that regraft wrote"
        raise UserError("not a converted checkpoint", where=str(folder), fix=found)
    source = config["regraft"]["source"]
    public = {}
    if source_id(source) is None and source.get("ref"):
        public = _names(source["ref"], public_name(source))
        source["ref"] = public_name(source)
    config.pop("_name_or_path", None)
    contents: dict[str, Path | str] = {"config.json": json.dumps(config, indent=2) + "\n"}
    for name in [*_weights(folder), *_code(folder)]:
        contents[name] = folder / name
    for file in sorted(folder.iterdir()):
        if file.name in _BESIDE and file.is_file():
            contents[file.name] = file if file.name in _NOT_SCANNED else _replaced(file, public)
    if "README.md" not in contents:
        contents["README.md"] = render_card(config, results=_results(contents.get("results.json")))
    if repo is not None:
        contents["README.md"] = str(contents["README.md"]).replace(REPOSITORY, repo)
    return dict(sorted(contents.items()))


def _names(ref: str, public: str) -> dict[str, str]:
    """How a local source may be written in a file, and what to call it in public."""
    return {name: public for name in {ref, str(Path(ref).resolve())} if Path(name).is_absolute()}


def _replaced(file: Path, public: dict[str, str]) -> str:
    """The text of a file, with the local name of the source replaced by its public one."""
    text = file.read_text(encoding="utf-8")
    if file.name == "tokenizer_config.json":
        config = json.loads(text)
        if config.pop("name_or_path", None) is not None:
            text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    for local in sorted(public, key=len, reverse=True):
        text = text.replace(json.dumps(local)[1:-1], public[local])
    return text


def _results(text: Any) -> Any:
    if text is None:
        return None
    import tempfile
    from importlib import import_module

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        path.write_text(text, encoding="utf-8")
        # the file format belongs to the room above; only its tables are shown here
        return import_module("regraft.eval.results").Results.load(path)


def _weights(folder: Path) -> list[str]:
    """The weight files of a checkpoint; UserError for a shard that is missing or cut short."""
    from safetensors import SafetensorError, safe_open

    index = folder / _INDEX
    names = [p.name for p in sorted(folder.iterdir()) if _WEIGHTS.match(p.name)]
    extra = []
    if "model.safetensors" in names:
        names = ["model.safetensors"]  # what transformers loads when both forms are there
    elif index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        extra = [_INDEX]
    fix = "write the checkpoint again, or get a complete copy"
    if not names:
        raise UserError("the checkpoint has no weights (model.safetensors)", where=str(folder), fix=fix)
    for name in names:
        try:
            with safe_open(str(folder / name), framework="pt") as handle:
                handle.keys()
        except FileNotFoundError:
            raise UserError(f"a shard is missing: {name}", where=str(folder), fix=fix) from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{name} is truncated or corrupt: {error}", where=str(folder), fix=fix) from None
    return [*names, *extra]


def _code(folder: Path) -> list[str]:
    try:
        return code_files(folder)
    except FileNotFoundError as error:
        raise UserError(
            f"the checkpoint's code is incomplete: {Path(error.filename).name} is missing",
            where=str(folder),
            fix="load the checkpoint with regraft.load and save it again",
        ) from None


def _texts(contents: dict[str, Path | str]) -> Iterable[tuple[str, str]]:
    """Everything readable that would be published, headers of weight files included."""
    from safetensors import safe_open

    for name, what in contents.items():
        if isinstance(what, str):
            yield name, what
        elif name.endswith(".safetensors"):
            with safe_open(str(what), framework="pt") as handle:
                yield name, json.dumps(handle.metadata() or {})
        else:
            yield name, what.read_text(encoding="utf-8", errors="replace")


def _scan(contents: dict[str, Path | str]) -> None:
    """UserError for a file with an access token or a path of this machine."""
    home = f"{Path.home()}/"
    for name, text in _texts(contents):
        if _SECRET.search(text):
            raise UserError("a file holds an access token", where=name, fix="remove it before publishing")
        if name in _NOT_SCANNED:
            continue
        local = _LOCAL.search(text)
        told = local[0] if local else home if len(home) > 2 and home in text else None
        if told:
            raise UserError(
                f"a file names a path of this machine: {told}", where=name, fix="replace it there before publishing"
            )


def _size(what: Path | str) -> int:
    return len(what.encode()) if isinstance(what, str) else what.stat().st_size


def _token(repo: str, token: str | None) -> str:
    from huggingface_hub import get_token

    token = token or get_token()
    if token is None:
        raise UserError("no access token for the Hub", where=repo, fix="hf auth login, or set HF_TOKEN")
    return token


def _push(
    contents: dict[str, Path | str], repo: str, private: bool, revision: str | None, create_pr: bool, token: str | None
) -> str:
    """One commit with all files; returns its address. Weights and code of an earlier push that are gone are removed."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    api = HfApi(token=token)
    operations: list[Any] = [
        CommitOperationAdd(name, what.encode() if isinstance(what, str) else what) for name, what in contents.items()
    ]
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        if revision and not create_pr:
            api.create_branch(repo, branch=revision, exist_ok=True)
        there = api.list_repo_files(repo, revision=revision)
        # a model.safetensors left over from a smaller push would be loaded instead of the new shards
        stale = [
            name
            for name in there
            if name not in contents and (_WEIGHTS.match(name) or name == _INDEX or re.match(r"regraft_\w+\.py$", name))
        ]
        operations += [CommitOperationDelete(name) for name in stale]
        done = api.create_commit(
            repo,
            operations,
            commit_message="Converted with regraft",
            revision=revision,
            create_pr=create_pr,
        )
    except HFValidationError as error:
        raise UserError(f"not a repository name: {_short(error)}", where=repo, fix="use OWNER/NAME") from None
    except ValueError as error:  # the Hub's own check of the card, before anything is sent
        raise UserError(
            f"the Hub refuses the card's front matter: {_short(error)}", where="README.md", fix="correct or delete it"
        ) from None
    except (HTTPError, OSError) as error:
        raise UserError(
            f"the Hub refused: {_short(error)}", where=repo, fix="check the name, the token's rights and the network"
        ) from error
    return done.pr_url or done.commit_url


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
