"""Documents to rows of exactly `seq_len` tokens, with the boundaries kept.

A document longer than what is left of a row goes on in the next one, as a new piece. Every piece restarts its
positions at 0, which is how softmax layers and mixers alike are told to isolate it; its first token is no target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from regraft.errors import UserError

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """Rows of a training step: all [B, T] int64. labels[b, t] is input_ids[b, t], or -100 where it is no target."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor

    @property
    def targets(self) -> int:
        """Number of tokens that are predicted (labels shifted by one, the first position predicts nothing)."""
        return int((self.labels[:, 1:] != IGNORE).sum())


class PackedText:
    """Rows addressable by number: row n is the same in every run, however it was reached.

    `bos`/`eos`: put the tokenizer's token before/after each document; nothing else is added. Documents are shuffled
    anew (by `seed`) in each epoch; rows beyond the first epoch go on with the next. The tokens that do not fill the
    last row of an epoch lead the next one, so none is lost.
    """

    def __init__(
        self, documents: Iterable[str], tokenizer, seq_len: int, *, bos: bool = False, eos: bool = True, seed: int = 0
    ):
        if seq_len < 2:
            raise UserError(f"seq_len {seq_len} leaves nothing to predict", fix="use at least 2")
        self.seq_len = seq_len
        self.seed = seed
        before = [_special(tokenizer, "bos")] if bos else []
        after = [_special(tokenizer, "eos")] if eos else []
        self._documents = []
        for text in documents:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if ids:
                self._documents.append(torch.tensor([*before, *ids, *after], dtype=torch.int32))
        self.tokens_per_epoch = sum(len(d) for d in self._documents)
        if self.tokens_per_epoch < seq_len:
            raise UserError(
                f"the text has {self.tokens_per_epoch} tokens, one row needs {seq_len}",
                where="data",
                fix="give more text, or a shorter seq_len",
            )
        self._ids = torch.empty(0, dtype=torch.int32)
        self._starts = torch.empty(0, dtype=torch.bool)
        self._epochs = 0

    def fingerprint(self) -> str:
        """Hash of all tokens, the length of rows and the seed: equal if and only if the rows are."""
        digest = hashlib.sha256(f"{self.seq_len} {self.seed}".encode())
        for ids in self._documents:
            digest.update(ids.numpy().tobytes())
            digest.update(b"|")
        return digest.hexdigest()[:16]

    def epochs(self, rows: int) -> float:
        """How often the text is read for this many rows."""
        return rows * self.seq_len / self.tokens_per_epoch

    def row(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row `number`: input_ids, position_ids, labels, each [T] int64."""
        end = (number + 1) * self.seq_len
        while self._ids.numel() < end:
            self._read_epoch()
        ids = self._ids[end - self.seq_len : end].long()
        starts = self._starts[end - self.seq_len : end].clone()
        starts[0] = True
        where = torch.arange(self.seq_len)
        begin = torch.where(starts, where, 0).cummax(0).values
        labels = torch.where(starts, IGNORE, ids)
        return ids, where - begin, labels

    def batch(self, first: int, size: int, stride: int = 1) -> Batch:
        """Rows first, first + stride, ... as one batch of `size` rows."""
        rows = [self.row(first + i * stride) for i in range(size)]
        return Batch(*(torch.stack(column) for column in zip(*rows, strict=True)))

    def _read_epoch(self) -> None:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self._epochs)
        order = torch.randperm(len(self._documents), generator=generator).tolist()
        pieces = [self._documents[i] for i in order]
        starts = []
        for piece in pieces:
            flags = torch.zeros(len(piece), dtype=torch.bool)
            flags[0] = True
            starts.append(flags)
        self._ids = torch.cat([self._ids, *pieces])
        self._starts = torch.cat([self._starts, *starts])
        self._epochs += 1


def token_stream(tokenizer: Any, texts: Iterable[str]) -> torch.Tensor:
    """All documents as one stream of ids, joined by blank lines, without BOS, EOS or other special tokens."""
    ids: list[int] = []
    joint = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    for number, text in enumerate(texts):
        if number:
            ids += joint
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids)


def calibration_rows(tokenizer: Any, texts: Sequence[str], tokens: int, length: int = 512) -> torch.Tensor:
    """About `tokens` tokens as rows [N, length] for selectors that measure; UserError if the text gives no row.

    Taken from the far end of `texts`, in whole documents.
    """
    wanted = max(1, tokens // length) * length
    ids: list[torch.Tensor] = []
    for text in reversed(texts):
        ids.append(token_stream(tokenizer, [text]))
        if sum(map(len, ids)) >= wanted:
            break
    stream = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
    rows = min(stream.numel(), wanted) // length
    if rows == 0:
        raise UserError("too little text to calibrate on", where="data", fix=f"give at least {length} tokens")
    return stream[: rows * length].view(rows, length)


def _special(tokenizer, kind: str) -> int:
    token = getattr(tokenizer, f"{kind}_token_id")
    if token is None:
        raise UserError(
            f"the tokenizer has no {kind.upper()} token", where=f"data.{kind}", fix=f"set data.{kind}: false"
        )
    return token
