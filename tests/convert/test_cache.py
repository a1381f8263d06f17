"""The cache of kept softmax layers: what transformers' own gives, without copying it for every token."""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from regraft.convert.model.cache import AppendingLayer


def filled(layer, tokens=5, batch=2):
    torch.manual_seed(0)
    layer.update(torch.randn(batch, 3, tokens, 8), torch.randn(batch, 3, tokens, 8))
    return layer


def one(seed, batch=2, tokens=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, tokens, 8, generator=g), torch.randn(batch, 3, tokens, 8, generator=g)


def same(found, wanted):
    assert torch.equal(found.keys, wanted.keys) and torch.equal(found.values, wanted.values)
    assert found.get_seq_length() == wanted.get_seq_length()


OPERATIONS = {
    "steps": lambda layer: [layer.update(*one(i)) for i in range(7)],
    "a long piece": lambda layer: layer.update(*one(1, tokens=700)),
    "past the room": lambda layer: [layer.update(*one(i, tokens=100)) for i in range(6)],
    "crop": lambda layer: (layer.update(*one(1)), layer.crop(-3), layer.update(*one(2)), layer.update(*one(3))),
    "beams": lambda layer: (
        layer.update(*one(1)),
        layer.reorder_cache(torch.tensor([1, 1])),
        layer.update(*one(2)),
        layer.reorder_cache(torch.tensor([1, 0])),
        layer.update(*one(3)),
    ),
    "more rows": lambda layer: (
        layer.update(*one(1)),
        layer.batch_repeat_interleave(2),
        layer.update(*one(2, batch=4)),
        layer.batch_select_indices(torch.tensor([2])),
        layer.update(*one(3, batch=1)),
    ),
    "to the CPU and back": lambda layer: (
        layer.update(*one(1)),
        layer.offload(),
        layer.prefetch(),
        layer.update(*one(2)),
    ),
    "reset": lambda layer: (layer.update(*one(1)), layer.reset(), layer.update(*one(2)), layer.update(*one(3))),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_it_holds_what_the_copying_layer_holds(name):
    layers = [filled(kind()) for kind in (AppendingLayer, DynamicLayer)]
    with torch.no_grad():
        for layer in layers:
            OPERATIONS[name](layer)
    same(*layers)


def test_a_token_is_written_behind_the_others_without_moving_them():
    layer = filled(AppendingLayer())
    assert layer.room is None  # a prefill takes no more memory than it needs
    with torch.no_grad():
        layer.update(*one(1))
        place = layer.keys.data_ptr()
        for i in range(60):
            layer.update(*one(i))
    assert layer.keys.data_ptr() == place and layer.keys.shape[-2] == 66


def test_copies_do_not_write_into_each_other():
    layer = filled(AppendingLayer())
    with torch.no_grad():
        layer.update(*one(1))
        other = copy.deepcopy(layer)
        before = layer.keys.clone()
        layer.update(*one(2)), other.update(*one(3))
    assert torch.equal(layer.keys[..., :-1, :], before) and torch.equal(other.keys[..., :-1, :], before)
    assert not torch.equal(layer.keys, other.keys)


def test_gradients_flow_and_what_they_need_is_not_overwritten():
    layer = filled(AppendingLayer())
    with torch.no_grad():
        layer.update(*one(1))
    query = torch.randn(2, 3, 1, 8, requires_grad=True)
    losses = []
    for i in range(2):
        keys, values = layer.update(*one(i))
        losses.append(torch.nn.functional.scaled_dot_product_attention(query, keys, values).sum())
    sum(losses).backward()
    assert query.grad.abs().sum() > 0


def test_a_cache_from_inference_mode_goes_on_outside_of_it():
    layer, wanted = filled(AppendingLayer()), filled(DynamicLayer())
    for held in (layer, wanted):
        with torch.inference_mode():
            held.update(*one(1))
            held.update(*one(2))
        with torch.no_grad():
            held.update(*one(3))
    same(layer, wanted)


def test_a_grafted_model_uses_it_for_its_kept_layers(tiny_llama, grafted):
    model = grafted(tiny_llama(), "sliding_window", layers=[1], window=4, sinks=1)
    ids = torch.randint(3, 128, (1, 9))
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).cache
        steps = [model(ids[:, t : t + 1], cache=cache, use_cache=True).logits for t in range(6, 9)]
        whole = model(ids).logits
    assert isinstance(cache.layers[0], AppendingLayer) and cache.layers[0].room is not None
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 6:], atol=1e-5, rtol=1e-4)
