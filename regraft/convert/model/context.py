"""What every layer of one forward pass has to know: where the real tokens and the documents are."""

from dataclasses import dataclass, field
from typing import Any

import torch

from regraft.kernels.ragged import Layout, build


@dataclass
class Context:
    """Travels to every mixer as the keyword `regraft`.

    `layout`: padding and documents of this forward (None: none). `write`: [B] long, 0 or 1, for a one-token step in
    which some rows hold padding (None: all real). `aux`: auxiliary terms that mixers leave for the training loop.
    """

    layout: Layout | None = None
    write: torch.Tensor | None = None
    aux: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def plain(cls) -> "Context":
        """No padding, one document a row."""
        return cls()

    @classmethod
    def of(cls, real: torch.Tensor | None = None, document: torch.Tensor | None = None) -> "Context":
        """From `real` [B, T] bool (False at padding) and `document` [B, T] ids; either may be None."""
        return cls(layout=build(real, document))


def documents_from_positions(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Document ids [B, T] where positions do not go on by one, or None if every row is one document.

    The same rule by which transformers isolates packed documents in softmax layers.
    """
    jump = position_ids.diff(dim=-1) != 1
    if not bool(jump.any()):
        return None
    return torch.nn.functional.pad(jump, (1, 0)).cumsum(-1)


def documents_from_boundaries(cu_seqlens: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Document ids and restarted positions, both [B, T], from cumulative lengths over the flattened batch.

    `cu_seqlens`: 1-D, from 0 to B * T, non-decreasing (equal neighbours are empty documents). Raises ValueError on
    anything else. A document never reaches from one row into the next: rows always begin a new one.
    """
    total = batch * length
    edges = cu_seqlens.to(torch.long)
    if edges.dim() != 1 or edges[0] != 0 or edges[-1] != total or bool((edges.diff() < 0).any()):
        raise ValueError(
            f"document boundaries must rise from 0 to batch x length = {total}; got {cu_seqlens.tolist()[:8]}..."
        )
    start = torch.zeros(total + 1, dtype=torch.bool, device=edges.device)
    start[edges] = True
    start = start[:total].view(batch, length)
    start[:, 0] = True
    document = start.cumsum(-1)
    where = torch.arange(length, device=edges.device).expand(batch, length)
    begin = torch.where(start, where, torch.zeros_like(where)).cummax(-1).values
    return document, where - begin
