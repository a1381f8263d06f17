"""How far a model's predictions are from its teacher's: KL, top-1 agreement and perplexity on held-out text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from regraft.data.text import dataset_root, documents
from regraft.distill.losses import Head
from regraft.errors import UserError
from regraft.eval.results import Quality, mean_and_stderr
from regraft.recipes.schema import DataConfig

# protocol -> (number of windows, tokens per window)
PROTOCOLS = {"core": (40, 512), "long": (8, 2048)}
_BATCH_TOKENS = 2048  # of a pass through a decoder: a few short windows at a time are a third faster than one by one
_CHUNK = 128  # tokens whose logits over the whole vocabulary exist at one time


def evaluation_texts(data: DataConfig) -> tuple[list[str], str]:
    """Held-out documents and what to call them. `source: workshop` names the text of the evaluation protocol."""
    if data.source != "workshop":
        return list(documents(data)), f"{data.source} ({data.split})"
    root = dataset_root()
    if root is None:
        raise UserError(
            "no evaluation data here", where="data.source: workshop", fix="set REGRAFT_DATA, or use source: corpus"
        )
    texts = []
    for name, field in (("wikitext2/test_pages.jsonl", "page"), ("text/valid_00.jsonl", "text")):
        with (root / name).open(encoding="utf-8") as handle:
            texts += [json.loads(line)[field] for line in handle]
    return texts, "wikitext2/test_pages + text/valid_00"


def windows(protocol: str, stream: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """The protocol's windows [N, T], evenly spaced over the stream; UserError if the text is too short.

    `core` is 40 windows of 512 tokens, `long` 8 of 2048; `count` asks for fewer or more.
    """
    number, length = PROTOCOLS[protocol]
    number = count or number
    have = stream.numel() // length
    if have < number:
        raise UserError(
            f"protocol {protocol} needs {number} windows of {length} tokens, the text gives {have}",
            where="eval",
            fix=f"give more text, or set eval.windows to at most {have}",
        )
    pick = [round(i * (have - number) / max(number - 1, 1)) + i for i in range(number)]
    return stream[: have * length].view(have, length)[pick]


def ids_hash(ids: torch.Tensor) -> str:
    """Hash of the evaluated token ids."""
    return hashlib.sha256(ids.to(torch.int64).numpy().tobytes()).hexdigest()[:16]


@torch.no_grad()
def compare(teacher: Any, models: Mapping[str, Any], ids: torch.Tensor, protocol: str) -> list[Quality]:
    """Every model against `teacher` on windows `ids` [N, T], all T - 1 predictions of each window.

    KL is KL(teacher || model) in nats per token; standard errors are over windows. The teacher itself is the first row.
    """
    names = ["teacher", *models]
    kl: dict[str, list[float]] = {name: [] for name in names}
    nll: dict[str, list[float]] = {name: [] for name in names}
    same: dict[str, list[float]] = {name: [] for name in names}
    teacher_head = Head.of(teacher)
    heads = {name: Head.of(model) for name, model in models.items()}
    for rows in ids.split(max(1, _BATCH_TOKENS // ids.shape[1])):
        finals = {
            name: model.get_decoder()(input_ids=rows.to(model.device), use_cache=False).last_hidden_state[:, :-1]
            for name, model in {"teacher": teacher, **models}.items()
        }
        for number, row in enumerate(rows.to(teacher.device)):
            labels = row[1:]
            sums = {name: torch.zeros(3, dtype=torch.float64) for name in names}
            for start in range(0, labels.numel(), _CHUNK):
                part = slice(start, start + _CHUNK)
                reference = teacher_head(finals["teacher"][number, part]).log_softmax(-1)
                weight, likeliest = reference.exp(), reference.argmax(-1)
                for name in names:
                    found = reference
                    if name != "teacher":
                        found = heads[name](finals[name][number, part]).log_softmax(-1).to(reference.device)
                    # cancel before summing: a model that equals its teacher has a KL of exactly 0
                    sums[name] += torch.stack(
                        [
                            (weight * (reference - found)).sum(dtype=torch.float64),
                            -found.gather(1, labels[part, None]).sum(dtype=torch.float64),
                            (found.argmax(-1) == likeliest).sum(dtype=torch.float64),
                        ]
                    ).cpu()
            for name in names:
                divergence, loss, agreed = (sums[name] / labels.numel()).tolist()
                kl[name].append(divergence)
                nll[name].append(loss)
                same[name].append(agreed)
    base = mean_and_stderr(nll["teacher"])[0]
    results = []
    for name in names:
        mean, stderr = mean_and_stderr(kl[name])
        loss = mean_and_stderr(nll[name])[0]
        results.append(
            Quality(
                name=name,
                protocol=protocol,
                kl=mean,
                kl_stderr=stderr,
                top1=mean_and_stderr(same[name])[0],
                ppl=float(torch.tensor(loss, dtype=torch.float64).exp()),
                ppl_ratio=float(torch.tensor(loss - base, dtype=torch.float64).exp()),
                windows=ids.shape[0],
                seq_len=ids.shape[1],
                tokens=ids.shape[0] * (ids.shape[1] - 1),
            )
        )
    return results
