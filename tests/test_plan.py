"""What plan and inspect print is what the real model has."""

import pytest
import torch

from regraft.convert.graft import converted_layers
from regraft.convert.plan import inspect_source, plan, render_inspection
from regraft.eval.bench import cache_bytes
from regraft.recipes.load import parse_recipe

OPTIONS = {"sliding_window": "{window: 8, sinks: 2}", "window_linear": "{window: 8, sinks: 2, feature_dim: 8}"}


def recipe(base, name, stages="[]"):
    return parse_recipe(
        f"name: x\nbase: {base}\nconvert: {{mixer: {name}, options: {OPTIONS[name]}}}\n"
        f"layers: {{by: list, layers: '0,2'}}\ndistill: {stages}\n",
        "x",
    )


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_parameters_and_cache_are_exact(tiny_llama, grafted, tmp_path, name):
    teacher = tiny_llama(max_position_embeddings=2048)
    teacher.save_pretrained(tmp_path / "m")
    options = {"window": 8, "sinks": 2, **({"feature_dim": 8} if name == "window_linear" else {})}
    model = grafted(teacher, name, layers=[0, 2], **options)
    made = plan(recipe(tmp_path / "m", name))
    assert made.parameters["total"] == sum(p.numel() for p in model.parameters())
    assert made.parameters["kept"] == sum(p.numel() for p in teacher.parameters())
    for length in (512, 1024):
        ids = torch.randint(3, 128, (1, length))
        live = [cache_bytes(m(ids, use_cache=True).cache) for m in (teacher, model)]
        assert list(made.cache[length]) == live
    assert "LSLS" in made.render() and made.to_dict()["converted"] == [0, 2]


def test_trained_parameters_are_what_the_stages_train(tiny_llama, grafted, tmp_path):
    from regraft.distill.stages import trainable_summary

    teacher = tiny_llama()
    teacher.save_pretrained(tmp_path / "m")
    stages = (
        "[{stage: align, tokens: 1k}, {stage: logits, tokens: 1k, train: mixers}, {stage: logits, tokens: 1k, train: all},"
        " {stage: logits, tokens: 1k, train: lora, lora: {r: 2}}]"
    )
    wanted = recipe(tmp_path / "m", "window_linear", stages)
    model = grafted(teacher, "window_linear", layers=[0, 2], window=8, sinks=2, feature_dim=8)
    for stage, told in zip(wanted.distill, plan(wanted).stages, strict=True):
        summary = trainable_summary(model, stage)
        assert told.trained == summary["new"]["parameters"] + summary["rest"]["parameters"], stage


def test_inspect_tells_what_fits_and_why_not(tiny_model, grafted, tmp_path):
    gemma = tiny_model("gemma3_text", layer_types=["sliding_attention"] * 3 + ["full_attention"])
    gemma.save_pretrained(tmp_path / "g")
    told = inspect_source(str(tmp_path / "g"))
    assert told["mixers"]["window_linear"]["layers"] == [3]
    assert "slides" in render_inspection(told)
    grafted(gemma, "sliding_window", layers=[1], window=4).save_pretrained(tmp_path / "c")
    told = inspect_source(str(tmp_path / "c"))
    assert told["strip"] == "SLSS" and told["converted"]["1"]["name"] == "sliding_window"
    (tmp_path / "g" / "config.json").write_text('{"model_type": "gpt2"}')
    assert not inspect_source(str(tmp_path / "g"))["supported"]
    assert len(converted_layers(gemma)) == 0
