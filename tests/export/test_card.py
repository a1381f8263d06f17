"""The card says what the checkpoint is, from its config and its figures alone."""

import json

import pytest
from huggingface_hub import ModelCard

from regraft.convert.export.card import render_card, write_card
from regraft.convert.sources import SourceInfo
from regraft.eval.results import Quality, Recall, Results, Speed


def config_of(model, **source):
    model.config.regraft["source"].update(source)
    return json.loads(json.dumps(model.config.to_dict(), default=str))


@pytest.fixture
def mixed(tiny_llama, grafted):
    return grafted(grafted(tiny_llama(), "sliding_window", layers=[0, 1], window=6), "window_linear", layers=[3])


def test_a_card_names_the_source_in_public(mixed):
    info = SourceInfo("demo:smollm2", "demo", None, "abc", "Q4_1", "apache-2.0", "llama")
    card = render_card(config_of(mixed, **info.__dict__), recipe_text="name: x\nbase: demo:smollm2\n")
    data = ModelCard(card).data
    assert data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct" and data.license == "apache-2.0"
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation"
    assert data.base_model_relation == "finetune"
    assert data.tags == ["regraft", "linear-attention", "hybrid-attention", "sliding-window", "window-linear"]
    assert "Q4_1" in card and "abc" in card and "prefix caching" in card and "transformers >= 5.24" in card
    assert "```yaml\nname: x\nbase: demo:smollm2\n```" in card


def test_strip_and_mixer_table(mixed):
    card = render_card(config_of(mixed, ref="a/b", kind="hub", revision="1234"))
    assert "LLSL" in card and "3 of 4 attention layers" in card and "a/b, revision 1234" in card
    rows = [line for line in card.splitlines() if line.startswith("| `")]
    assert len(rows) == 2
    assert (
        rows[0].startswith("| `sliding_window` | softmax over the last keys")
        and "| 0-1 | window 6, sinks 4 |" in rows[0]
    )
    assert "| 3 | window 64, sinks 4, feature_dim 64" in rows[1]


def test_a_local_source_without_licence_claims_neither_id_nor_licence(mixed):
    data = ModelCard(render_card(config_of(mixed, ref="/x/y/base", kind="folder", license=None))).data
    assert data.base_model is None and data.license is None


def test_all_layers_converted_is_no_hybrid(tiny_llama, grafted):
    card = render_card(config_of(grafted(tiny_llama(), "sliding_window", window=6), ref="a/b", kind="hub"))
    assert ModelCard(card).data.tags == ["regraft", "sliding-window"] and "4 of 4" in card


def test_figures_with_their_spread(mixed, tmp_path):
    results = Results(
        model="x",
        teacher="t",
        quality=[Quality("student", "core", 0.0312, 0.0011, 0.91, 13.5, 1.02, 40, 512, 20480)],
        recall=[Recall("student", "passkey", 2048, 0.95, 0.02, 100)],
        speed=[Speed("student", 8192, 1000.0, 20.5, 0.1, 0.1, 3 * 2**20, "float32", 3, 1)],
        tasks={"student": {"piqa": {"alias": "piqa", "acc,none": 0.65, "acc_stderr,none": 0.01}}},
        env={"machine": {"device": "cpu", "processor": "Some CPU", "torch_threads": 2}},
    )
    (tmp_path / "config.json").write_text(json.dumps(config_of(mixed, ref="a/b", kind="hub")))
    card = write_card(tmp_path, results=results).read_text()
    for row in (
        "| student | core | 0.0312 ± 0.0011 | 0.910 | 13.50 | 1.020 | 40 windows of 512 |",
        "| student | passkey | 2048 | 0.950 ± 0.020 | 100 |",
        "| student | 8192 | 3.00 MiB (float32) | 1000 | 20.5 | 1 + 3 |",
        "| student | piqa | acc | 0.6500 ± 0.0100 |",
        "Speed on Some CPU, 2 threads",
    ):
        assert row in card
