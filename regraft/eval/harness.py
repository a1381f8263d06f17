"""Benchmarks through lm-eval, on the model object: the same digits as `lm_eval --model hf` on the saved folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from regraft.data.text import dataset_root
from regraft.errors import UserError

QUICK = ("local_piqa", "local_arc_easy", "local_lambada_openai")

# task -> (stock task file that it includes, split -> data file, settings that the local rows need)
_LOCAL: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "piqa": ("piqa/piqa.yaml", {"validation": "piqa/validation.jsonl"}, {"training_split": None}),
    "arc_easy": (
        "arc/arc_easy.yaml",
        {"test": "arc_easy/test.jsonl"},
        {"training_split": None, "validation_split": None},
    ),
    "lambada_openai": ("lambada/lambada_openai.yaml", {"test": "lambada/test.jsonl"}, {}),
    "openbookqa": (
        "openbookqa/openbookqa.yaml",
        {"test": "openbookqa/test.jsonl"},
        {"training_split": None, "validation_split": None},
    ),
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        {"validation": "hellaswag/validation.jsonl"},
        {"training_split": None, "process_docs": None, "doc_to_target": "gold"},
    ),
}


def local_tasks(folder: Path) -> list[str]:
    """Write task files for the evaluation data of this machine into `folder`; returns their names (none without data).

    Each includes lm-eval's own task and changes only where the rows come from.
    """
    import lm_eval

    root = dataset_root()
    if root is None:
        return []
    stock = Path(lm_eval.__file__).parent / "tasks"
    names = []
    for name, (file, rows, extra) in _LOCAL.items():
        if not all((root / row).is_file() for row in rows.values()):
            continue
        config = {
            "include": str(stock / file),
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(root / row) for split, row in rows.items()}},
            **extra,
        }
        (folder / f"local_{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        names.append(f"local_{name}")
    return names


def check_tasks(tasks: Sequence[str], include_path: str | None = None) -> None:
    """UserError for a task that lm-eval does not know, before anything is measured."""
    with tempfile.TemporaryDirectory() as folder:
        _manager(tasks, include_path, folder)


def _manager(tasks: Sequence[str], include_path: str | None, folder: str) -> tuple[Any, list[str]]:
    """lm-eval's table of tasks with ours in `folder`, and the names that `tasks` stand for."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise UserError("no such folder", where=f"--include-path {include_path}", fix="give the folder of your tasks")
    names = [name for task in tasks for name in (QUICK if task == "quick" else (task,))]
    local_tasks(Path(folder))
    manager = TaskManager(include_path=[folder, *([include_path] if include_path else [])])
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        near = get_close_matches(unknown[0], manager.all_tasks, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise UserError(
            f"no task {', '.join(unknown)}",
            where="--tasks",
            fix=f"{hint}see: regraft ls tasks (local_* tasks need the evaluation data: REGRAFT_DATA)",
        )
    return manager, names


def lm_eval_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    include_path: str | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """lm-eval's `results` for `tasks`, with `protocol` telling the prefix token, limit and versions.

    `tasks`: lm-eval's names, `local_*` on the evaluation data of this machine, or tasks in `include_path`; "quick"
    stands for three local ones. `limit` takes the first rows of each task, as lm-eval's own option does.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    with tempfile.TemporaryDirectory() as folder:
        manager, names = _manager(tasks, include_path, folder)
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        out = lm_eval.simple_evaluate(
            lm,
            tasks=names,
            limit=limit,
            task_manager=manager,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
            bootstrap_iters=1000,
        )
    prefix = lm.prefix_token_id
    return {
        "results": json.loads(json.dumps(out["results"], default=str)),
        "protocol": {
            "prefix_token_id": prefix,
            "prefix_token": tokenizer.convert_ids_to_tokens(prefix) if prefix is not None else None,
            "add_bos_token": bool(lm.add_bos_token),
            "max_length": lm.max_length,
            "limit": limit,
            "versions": out.get("versions", {}),
            "samples": {name: n["effective"] for name, n in out["n-samples"].items()},
        },
    }
