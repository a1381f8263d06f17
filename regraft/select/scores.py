"""The scores behind the selectors: layer -> number, lower converts first."""

from __future__ import annotations

from typing import Any

import torch

from regraft.convert.graft import converted_layers, decoder_layers
from regraft.convert.layers import evenly
from regraft.data.packing import Batch
from regraft.data.synthetic import TASKS
from regraft.distill.loop import teacher_taps
from regraft.distill.losses import Head, align_loss

_BATCH_TOKENS = 2048  # of a pass
_CHUNK = 128  # tokens whose logits over the whole vocabulary exist at one time


def uniform_scores(calibration: Any, num_layers: int, keep: int) -> dict[int, float]:
    """1 for `keep` evenly spaced layers, 0 for the others."""
    kept = evenly(num_layers, keep)
    return {i: float(i in kept) for i in range(num_layers)}


@torch.no_grad()
def align_scores(calibration: Any, num_layers: int, keep: int) -> dict[int, float]:
    """Error of the aligned mixers' head outputs on the teacher's inputs, over the variance of the teacher's."""
    if calibration.layer_error is not None:
        return dict(calibration.layer_error)
    from regraft.convert.model.context import Context

    layers = converted_layers(calibration.student)
    totals = dict.fromkeys(layers, 0.0)
    for row in calibration.rows:
        batch = _batch(row, calibration.teacher.device)
        taps = teacher_taps(calibration.teacher, batch, list(layers))
        for index, mixer in layers.items():
            hidden, position, target = taps[index]
            out = mixer.heads(hidden, position, Context.plain())
            totals[index] += align_loss("mse_over_variance", out, target).item()
    return {index: total / len(calibration.rows) for index, total in totals.items()}


def _batch(row: torch.Tensor, device: Any) -> Batch:
    ids = row[None].to(device)
    return Batch(ids, torch.arange(ids.shape[1], device=device)[None], ids)


def kl_scores(calibration: Any, num_layers: int, keep: int) -> dict[int, float]:
    """KL(teacher || teacher with one layer converted), layer by layer, at every fourth position of the rows.

    Neighbouring positions say nearly the same, and the logits of all of them would cost as much as the layers.
    """
    return _single_layer_kl(calibration, calibration.rows, _every_fourth(calibration.rows))


def recall_scores(calibration: Any, num_layers: int, keep: int) -> dict[int, float]:
    """The same KL on the first half of the rows, plus that at the answers of as many recall items.

    The items are associative ones (see regraft.data.synthetic), as long as the rows, with the rows for text in between.
    On plain text a layer that everything depends on to find something again looks like any other.
    """
    number, length = calibration.rows.shape
    text = calibration.rows[: number - number // 2]
    haystack = calibration.rows.flatten().tolist()
    make = TASKS["associative"].make
    items = [make(calibration.tokenizer, haystack, length, f"select {i}") for i in range(max(1, number // 2))]
    before = torch.zeros(len(items), length, dtype=torch.bool)
    for row, item in zip(before, items, strict=True):
        row[[p - 1 for answer in item.answers for p in answer]] = True
    on_text = _single_layer_kl(calibration, text, _every_fourth(text))
    on_answers = _single_layer_kl(calibration, torch.stack([item.ids for item in items]), before)
    return {index: kl + on_answers[index] for index, kl in on_text.items()}


def _every_fourth(rows: torch.Tensor) -> torch.Tensor:
    """[N, T]: every fourth of the positions that predict a token of their row."""
    position = torch.arange(rows.shape[1])
    return ((position % 4 == 3) & (position < rows.shape[1] - 1)).expand(rows.shape)


@torch.no_grad()
def _single_layer_kl(calibration: Any, rows: torch.Tensor, where: torch.Tensor) -> dict[int, float]:
    """Mean KL at the positions `where` [N, T] of `rows` [N, T], for each layer converted alone.

    The swap happens inside the teacher for the time of one pass. The layers below the swapped one give what the
    teacher's give, so they are not computed again: their outputs are replayed.
    """
    teacher, mixers = calibration.teacher, converted_layers(calibration.student)
    head = Head.of(teacher)
    totals = dict.fromkeys(mixers, 0.0)
    size = max(1, _BATCH_TOKENS // rows.shape[1])
    for part, places in zip(rows.split(size), where.split(size), strict=True):
        ids, places = part.to(teacher.device), places.to(teacher.device)
        inputs, final = _layer_inputs(teacher, ids)
        reference = [head(piece).log_softmax(-1) for piece in final[places].split(_CHUNK)]
        for index, mixer in mixers.items():
            hidden = _from_layer(teacher, ids, index, inputs[index], mixer)
            for piece, target in zip(hidden[places].split(_CHUNK), reference, strict=True):
                found = head(piece).log_softmax(-1)
                totals[index] += (target.exp() * (target - found)).sum(dtype=torch.float64).item()
    return {index: total / int(where.sum()) for index, total in totals.items()}


def _layer_inputs(teacher: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The hidden states that enter every layer, and the final ones."""
    taken: list[torch.Tensor] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        taken.append(args[0] if args else kwargs["hidden_states"])

    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in decoder_layers(teacher)]
    try:
        final = teacher.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    return taken, final


def _from_layer(teacher: Any, ids: torch.Tensor, index: int, entering: torch.Tensor, mixer: Any) -> torch.Tensor:
    """Final hidden states when `mixer` replaces the attention of layer `index`, which `entering` enters."""
    from regraft.convert.model.context import Context

    layers = decoder_layers(teacher)
    layer = layers[index]
    original, forward = layer.self_attn, mixer.forward

    def replay(module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (entering, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": entering}

    skipped = [(below, below.forward) for below in layers[:index]]
    handle = layer.register_forward_pre_hook(replay, with_kwargs=True)
    context = Context.plain()
    try:
        for below, _ in skipped:
            below.forward = lambda hidden_states, *args, **kwargs: hidden_states
        mixer.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "regraft": context})
        layer.self_attn = mixer
        return teacher.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        layer.self_attn = original
        del mixer.forward
        for below, _ in skipped:
            del below.forward
        handle.remove()
