"""The Python interface: the functions that the command line has, callable at any time, light to import."""

import inspect
import json
import subprocess
import sys

import pytest

import regraft
from regraft.errors import UserError
from regraft.recipes.schema import AlignStage, DataConfig, EvalConfig

NAMES = {
    "inspect", "plan", "select", "convert", "distill", "evaluate", "verify", "bench", "run", "report", "export", "load",
}  # fmt: skip
SMALL = {"window": 8, "sinks": 2, "feature_dim": 8}


@pytest.fixture
def source(tiny_llama, tiny_tokenizer, tmp_path):
    tiny_llama(vocab=260, max_position_embeddings=2048).save_pretrained(tmp_path / "src")
    tiny_tokenizer.save_pretrained(tmp_path / "src")
    return str(tmp_path / "src")


@pytest.fixture
def text(tmp_path):
    rows = [{"text": " ".join(str(i * j % 97) for j in range(120))} for i in range(60)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return DataConfig(source=str(tmp_path / "t.jsonl"))


def test_what_there_is():
    assert set(regraft.__all__) == NAMES | {"__version__"} and set(regraft.__all__) <= set(dir(regraft))
    with pytest.raises(AttributeError, match="no attribute 'graft'"):
        _ = regraft.graft


# command line's word -> Python's, where they differ; None: how a result is shown, or where a file of it goes
WORDS = {
    "model": "ref", "student": "ref", "option": "options", "set_": "overrides",
    "protocol": "protocols", "samples": "recall_samples", "as_json": None, "dry_run": None, "help": None,
}  # fmt: skip
ONLY_SHOWN = {("select", "out"), ("eval", "out")}


def test_every_function_mirrors_a_command():
    """What a command can be told, its function can be told too, under the same name."""
    import typer.main

    from regraft import api
    from regraft.cli.main import app
    from regraft.convert.export.hub import export
    from regraft.convert.plan import inspect_source
    from regraft.convert.sources import load_source
    from regraft.eval.bench import bench
    from regraft.pipeline import run

    # where the functions' **options go
    beyond = {"convert": load_source, "run": run, "bench": bench, "export": export, "inspect": inspect_source}
    commands = typer.main.get_command(app).commands
    assert {"eval", *NAMES} - {"evaluate", "load"} <= set(commands)
    for name in ["eval", *sorted(NAMES - {"evaluate", "load"})]:
        function = getattr(api, {"eval": "evaluate"}.get(name, name))
        assert len(inspect.getdoc(function)) > 40, name
        parameters = inspect.signature(function).parameters
        known = set(parameters)
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            known |= set(inspect.signature(beyond[name]).parameters)
        if name == "eval":
            known |= set(EvalConfig.model_fields)
        for parameter in commands[name].params:
            word = WORDS.get(parameter.name, parameter.name)
            # `distill` takes its stage from a recipe; the function takes the stage itself
            if (
                word is None
                or (name, word) in ONLY_SHOWN
                or (name, word) in {("distill", "recipe"), ("distill", "overrides")}
            ):
                continue
            assert word in known, (name, word)


def test_importing_is_light_and_rooms_do_not_hide_functions():
    """`regraft.convert` is a function and a package: it can be called before and after the package is imported."""
    code = (
        "import sys, regraft\n"
        "from regraft.errors import UserError\n"
        "assert not {'torch', 'transformers', 'pydantic', 'yaml'} & set(sys.modules)\n"
        "for name in ('convert', 'select', 'distill'):\n"
        "    assert callable(getattr(regraft, name))\n"
        "import regraft.convert.layers, regraft.select, regraft.distill\n"
        "assert 'torch' not in sys.modules\n"
        "assert regraft.convert.layers.parse_layers('all', 2) == [0, 1]\n"
        "from regraft.convert import layers as again\n"
        "assert again is regraft.convert.layers\n"
        "import inspect\n"
        "for name in ('convert', 'select', 'distill'):\n"
        "    function = getattr(regraft, name)\n"
        "    assert inspect.signature(function) == inspect.signature(getattr(regraft.api, name))\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        regraft.convert('src', to='slidingwindow')\n"
        "    except UserError as error:\n"
        "        assert 'sliding_window' in error.fix\n"
        "    else:\n"
        "        raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_from_a_source_to_a_published_folder(source, text, tmp_path):
    """Every function once, in the order of use."""
    assert regraft.inspect(source)["num_layers"] == 4
    assert type(regraft.load(source).model).__name__ == "LlamaForCausalLM"

    chosen = regraft.select(
        source,
        to="window_linear",
        keep=2,
        options=SMALL,
        data=text,
        tokens=512,
        align_tokens=600,
        log=lambda line: None,
    )
    assert len(chosen.converted) == 2 and chosen.by == "align"

    result = regraft.convert(source, tmp_path / "half", to="window_linear", layers=chosen.converted, options=SMALL)
    assert sorted(result.reports) == chosen.converted
    with pytest.raises(UserError, match="exists already"):
        regraft.convert(source, tmp_path / "half", to="window_linear", layers=chosen.converted)

    stage = AlignStage(stage="align", tokens=640, seq_len=64, checkpoint_every=4)
    said = []
    arguments = {"teacher": source, "out": tmp_path / "aligned", "data": text, "log": said.append}
    done = regraft.distill(tmp_path / "half", stage, **arguments)
    assert done.steps == 10 and sorted(done.layer_error) == chosen.converted
    assert {p.name for p in (tmp_path / "aligned").iterdir()} == {"model", "metrics.jsonl"}  # no checkpoints left
    with pytest.raises(UserError, match="finished already"):
        regraft.distill(tmp_path / "half", stage, **arguments)

    model = str(tmp_path / "aligned" / "model")
    config = EvalConfig(windows=2, recall=[], baselines=False)
    results = regraft.evaluate(model, config=config, data=text.model_copy(update={"split": "all"}), log=said.append)
    assert results.quality[-1].name == "student" and results.teacher == source
    assert regraft.verify(model, reload=False).checks
    rows = regraft.bench(model, contexts=[32], repeats=1, new_tokens=2)
    assert {row.name for row in rows} == {"teacher", "student"}
    manifest = regraft.export(model, tmp_path / "public")
    assert "model.safetensors" in manifest.files and (tmp_path / "public" / "README.md").is_file()


def test_distill_goes_on_and_keeps_to_its_folder(source, text, tmp_path):
    regraft.convert(source, tmp_path / "half", to="window_linear", layers="0,2", options=SMALL)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    stage = AlignStage(stage="align", tokens=640, seq_len=64, checkpoint_every=4)
    arguments = {"teacher": source, "data": text, "log": lambda line: None}
    with pytest.raises(UserError, match="holds something else"):
        regraft.distill(tmp_path / "half", stage, out=tmp_path / "mine", **arguments)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]

    whole = regraft.distill(tmp_path / "half", stage, out=tmp_path / "whole", **arguments)
    said = []

    def stop(line):
        said.append(line)
        if "step 6/" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regraft.distill(tmp_path / "half", stage, out=tmp_path / "parts", **{**arguments, "log": stop})
    again = regraft.distill(tmp_path / "half", stage, out=tmp_path / "parts", **{**arguments, "log": said.append})
    assert any("resuming align at step 4" in line for line in said)
    assert again.final_loss == whole.final_loss and again.layer_error == whole.layer_error


def test_align_wants_the_layers_that_were_replaced(source, text, tmp_path, tiny_llama, tiny_tokenizer):
    regraft.convert(source, tmp_path / "half", to="window_linear", layers="0,2", options=SMALL)
    tiny_llama(vocab=260, layers=2).save_pretrained(tmp_path / "other")
    tiny_tokenizer.save_pretrained(tmp_path / "other")
    stage = AlignStage(stage="align", tokens=64, seq_len=64)
    with pytest.raises(UserError, match="other shapes"):
        regraft.distill(tmp_path / "half", stage, teacher=str(tmp_path / "other"), out=tmp_path / "x", data=text)
    assert not (tmp_path / "x").exists()


def test_plan_and_run_take_names_files_and_recipes(source, text, tmp_path):
    from regraft.recipes.load import load_recipe

    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"name: tiny  # mine\nbase: {source}\nconvert: {{mixer: sliding_window, options: {{window: 8}}}}\n"
        f"layers: {{by: list, layers: 0-1}}\n"
        f"data: {{eval: {{source: {text.source}, split: all}}}}\n"
        "eval: {windows: 2, recall: [], baselines: false}\n"
    )
    assert regraft.plan(recipe).converted == [0, 1]
    assert regraft.plan(load_recipe(str(recipe)), device="cpu").converted == [0, 1]
    overrides = ["layers.layers=2"]
    assert regraft.plan(recipe, overrides=overrides).converted == [2]
    done = regraft.run(
        recipe, tmp_path / "out", overrides=overrides, upto="select", device="cpu", log=lambda line: None
    )
    assert done.selection.converted == [2]
    # the change is written into the recipe, and the comment stays
    kept = (tmp_path / "out" / "recipe.yaml").read_text()
    assert "# mine" in kept and load_recipe(str(tmp_path / "out" / "recipe.yaml")).layers.layers == "2"
