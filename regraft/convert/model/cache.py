"""The cache layer of a converted attention: holds the mixer's decode state inside transformers' cache."""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


class MixerCacheLayer(CacheLayerMixin):
    """A fixed-size decode state (a NamedTuple of batch-first tensors) that also counts tokens.

    It counts so that a model without any softmax layer still knows its length, and answers mask questions as a full
    attention layer of the same cache kind would. `max_cache_len` is the length of a static cache, None for a dynamic
    one. With a static cache the state tensors keep their addresses.
    """

    is_compileable = True
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, max_cache_len: int | None = None):
        super().__init__()
        self.max_cache_len = max_cache_len
        self.state: Any = None
        self.cumulative_length = 0 if max_cache_len is None else torch.tensor(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the first state is what allocates."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refused: a softmax attention has been handed the cache of a converted layer."""
        raise ValueError(
            "this cache layer holds the state of a converted attention and takes no keys and values; "
            "the cache belongs to another model"
        )

    def update_state(self, state: Any, tokens: int) -> None:
        """Store `state` after `tokens` further positions (padding counts: it takes room in the mask)."""
        self.batch_size = state[0].shape[0]
        self.device = state[0].device
        if self.max_cache_len is None:
            self.state = type(state)(*map(_own, state))
            self.cumulative_length += tokens
        elif self.state is None:
            self.state = type(state)(*(s.detach().clone(memory_format=torch.contiguous_format) for s in state))
            self.cumulative_length = self.cumulative_length.to(self.device) + tokens
            for tensor in (*self.state, self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)
        else:
            for kept, new in zip(self.state, state, strict=True):
                kept.copy_(new)
            self.cumulative_length.add_(tokens)
        self.is_initialized = True

    def get_seq_length(self) -> Any:
        """Positions seen, padding included."""
        return self.cumulative_length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(key length, offset) as a softmax layer of this cache would answer."""
        if self.max_cache_len is not None:
            return self.max_cache_len, 0
        return self.cumulative_length + query_length, 0

    def get_max_length(self) -> int:
        """Longest sequence a static cache was made for, -1 for a dynamic one."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    def reset(self) -> None:
        """Forget everything; the tensors stay."""
        if self.state is not None:
            for tensor in self.state:
                tensor.zero_()
        if isinstance(self.cumulative_length, int):
            self.cumulative_length = 0
        else:
            self.cumulative_length.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, except for 0: a recurrent state or an evicted window cannot be rolled back."""
        if tokens_to_remove != 0:
            raise ValueError("a converted attention cannot forget tokens: crop, assisted decoding and rollback need it")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Rows by beam index."""
        self._map(lambda s: s.index_select(0, beam_idx.to(s.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._map(lambda s: s.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows."""
        self._map(lambda s: s[indices.to(s.device), ...])

    def offload(self) -> None:
        """To the CPU."""
        self._map(lambda s: s.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Back to the device."""
        self._map(lambda s: s.to(self.device, non_blocking=True))

    def _map(self, fn: Any) -> None:
        if self.state is not None:
            self.state = type(self.state)(*(fn(s) for s in self.state))
            self.batch_size = self.state[0].shape[0]


class AppendingLayer(DynamicLayer):
    """The cache of a softmax layer that is kept; new tokens are written behind the old ones.

    transformers' own layer copies all it holds for every new token, which costs more than attending to it. Here the
    first token after a prefill makes room for the next ones. Other operations (crop, beams, ...) are inherited: they
    replace or shorten `keys` and `values`, and the next token finds out whether these still lie in the room.
    """

    room: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values [B, G, N + T, D], the new ones included. With gradients it copies, as its parent does."""
        if not self.get_seq_length() or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        new = key_states, value_states
        old = self.keys, self.values
        if self.room is None or not all(map(_fits, old, new, self.room)):
            self.room = _with_room(old[0], new[0]), _with_room(old[1], new[1])
        start, stop = old[0].shape[-2], old[0].shape[-2] + new[0].shape[-2]
        for room, x in zip(self.room, new, strict=True):
            room[..., start:stop, :] = x
        self.keys, self.values = (room[..., :stop, :] for room in self.room)
        return self.keys, self.values

    def reset(self) -> None:
        """Forget everything, the room too."""
        self.room = None
        super().reset()

    def offload(self) -> None:
        """To the CPU; the room is given back."""
        self.room = None
        super().offload()


_ROOM = 64  # tokens: one copy in 64 steps costs nothing, and so little room hardly shows in the cache's size


def _fits(old: torch.Tensor, new: torch.Tensor, room: torch.Tensor) -> bool:
    """Whether `old` is the beginning of `room`, and `new` finds place behind it."""
    begins = old.data_ptr() == room.data_ptr() and old.shape[:-2] == room.shape[:-2] and old.stride() == room.stride()
    writable = torch.is_inference_mode_enabled() or not room.is_inference()
    return begins and writable and old.shape[-2] + new.shape[-2] <= room.shape[-2]


def _with_room(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A copy of `old` with place for `new` and some more."""
    length = old.shape[-2]
    room = old.new_empty(*old.shape[:-2], length + max(new.shape[-2], _ROOM), old.shape[-1])
    room[..., :length, :] = old
    return room


def _own(x: torch.Tensor) -> torch.Tensor:
    """`x` in memory of its own, without a gradient: a view would keep the whole prefill alive."""
    x = x.detach() if x.requires_grad else x
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()
