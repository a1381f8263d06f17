"""Publish a converted checkpoint: a clean folder, or a Hub repository; a dry run first."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regraft.convert.export.card import public_name, write_card
from regraft.errors import UserError
from regraft.store import copy_folder, new_folder

_ALLOWED = re.compile(
    r"^(config\.json|generation_config\.json|.*\.safetensors|model\.safetensors\.index\.json|tokenizer.*|"
    r"special_tokens_map\.json|vocab.*|merges\.txt|chat_template\..*|added_tokens\.json|.*\.py|README\.md|LICENSE|"
    r"results\.json|recipe\.yaml)$"
)
_SECRET = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")
_LOCAL = re.compile(r"(?<![\w.:/])/(?:home|root|work|tmp|Users|mnt|data|var)/[^\s\"']+")


@dataclass(frozen=True)
class Manifest:
    """The files that are published, with their sizes in bytes, and where to."""

    repo: str | None
    files: dict[str, int]

    def render(self) -> str:
        """A list with sizes."""
        lines = [f"{size / 2**20:10.2f} MiB  {name}" for name, size in self.files.items()]
        return "\n".join([*lines, f"{sum(self.files.values()) / 2**20:10.2f} MiB  in {len(self.files)} files"])


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
    """Copy a converted checkpoint to `out` with card and public lineage, or push it to the Hub repository `push`.

    `dry_run` lists what would be published and touches nothing, not even the network. Optimizer states and
    intermediate checkpoints are never published; a file with a token or an absolute path of this machine is refused.
    """
    config = folder / "config.json"
    if not config.is_file() or "regraft" not in json.loads(config.read_text(encoding="utf-8")):
        raise UserError("not a converted checkpoint", where=str(folder), fix="give a folder that regraft wrote")
    if out is None and push is None:
        raise UserError("nowhere to export to", fix="give -o FOLDER, or --push OWNER/NAME")
    if dry_run:
        return Manifest(push, _listed(folder))
    if out is not None:
        with new_folder(out, sum(f.stat().st_size for f in folder.iterdir() if f.is_file())) as staging:
            _stage(folder, staging)
            manifest = Manifest(push, _listed(staging))
        if push is None:
            return manifest
        return _push(out, push, private, revision, create_pr, token)
    import tempfile

    with tempfile.TemporaryDirectory(dir=folder.parent) as staging_name:
        staging = Path(staging_name)
        _stage(folder, staging)
        return _push(staging, str(push), private, revision, create_pr, token)


def _listed(folder: Path) -> dict[str, int]:
    return {f.name: f.stat().st_size for f in sorted(folder.iterdir()) if f.is_file() and _ALLOWED.match(f.name)}


def _stage(folder: Path, staging: Path) -> None:
    skip = tuple(f.name for f in folder.iterdir() if not _ALLOWED.match(f.name))
    copy_folder(folder, staging, skip)
    config_path = staging / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    source = config["regraft"]["source"]
    if source.get("kind") != "hub" and source.get("ref"):
        source["ref"] = public_name(source)
    if str(config.get("_name_or_path", "")).startswith("/"):
        config["_name_or_path"] = public_name(source)
    config_path.unlink()
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if not (staging / "README.md").is_file():
        results = None
        if (staging / "results.json").is_file():
            from importlib import import_module

            # the file format belongs to the room above; only its tables are shown here
            results = import_module("regraft.eval.results").Results.load(staging / "results.json")
        write_card(staging, results=results)
    for file in sorted(staging.iterdir()):
        if file.suffix == ".safetensors":
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if _SECRET.search(text):
            raise UserError("a file holds an access token", where=file.name, fix="remove it before publishing")
        local = _LOCAL.search(text) if file.name in ("config.json", "README.md", "results.json") else None
        if local:
            raise UserError(
                f"a file names a path of this machine: {local[0]}", where=file.name, fix="replace it before publishing"
            )


def _push(folder: Path, repo: str, private: bool, revision: str | None, create_pr: bool, token: Any) -> Manifest:
    from huggingface_hub import HfApi, get_token

    token = token or get_token()
    if token is None:
        raise UserError("no access token for the Hub", where=repo, fix="hf auth login, or set HF_TOKEN")
    api = HfApi(token=token)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if revision and not create_pr:
            api.create_branch(repo, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            create_pr=create_pr,
            commit_message="Converted with regraft",
            delete_patterns=None,
        )
    except Exception as error:
        # the client raises its own, the HTTP library's and the operating system's kinds
        raise UserError(
            f"the Hub refused: {' '.join(str(error).split())[:200]}",
            where=repo,
            fix="check the name, token and network",
        ) from error
    return Manifest(repo, _listed(folder))
