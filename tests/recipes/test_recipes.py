"""Recipes: the shipped ones hold, mistakes are told at file and line, overrides reach what they name."""

import pytest

from regraft.errors import UserError
from regraft.recipes.load import changed_text, check_recipe, dump, json_schema, load_recipe, parse_recipe, shipped
from regraft.recipes.schema import Recipe, parse_size

GOOD = """\
version: 1
name: try
base: demo:smollm2
convert: {mixer: window_linear, options: {window: 32}}
layers: {by: align, keep: 4}
distill:
  - {stage: align, tokens: 2k, lr: 1e-2}
  - stage: logits
    tokens: 1.5k
    lr: 1e-4
"""


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_recipe_holds(name):
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.title and recipe.source_of_method
    check_recipe(recipe)
    assert parse_recipe(dump(recipe), "x") == recipe


def test_every_yaml_file_in_the_package_is_a_shipped_recipe():
    from pathlib import Path

    import regraft

    files = {p.stem for p in Path(regraft.__file__).parent.rglob("*.yaml")}
    assert files == set(shipped()) == {"quickstart", "window-hybrid", "lolcats"}


def test_numbers_as_people_write_them():
    recipe = parse_recipe(GOOD, "x")
    assert recipe.distill[0].lr == 0.01 and recipe.distill[0].tokens == 2000 and recipe.distill[1].tokens == 1500
    assert parse_size("2M") == 2_000_000 and parse_size(5) == 5
    with pytest.raises(ValueError, match="not a size"):
        parse_size("many")


@pytest.mark.parametrize(
    "old,new,line,told",
    [
        ("keep: 4", "kep: 4", 5, "did you mean 'keep'"),
        ("keep: 4", "keep: -4", 5, "greater than or equal to 0"),
        ("lr: 1e-4", "lr: fast", 10, "valid number"),
        ("tokens: 1.5k", "tokens: 0", 9, "greater than 0"),
        ("stage: logits", "stage: logit", 8, "align, logits or finetune"),
        ("base: demo:smollm2", "bse: demo:smollm2", 3, "did you mean 'base'"),
        ("version: 1", "version: 9", 1, "newer than this regraft"),
        ("window_linear, options", "window_linear, option", 4, "did you mean 'options'"),
        ("keep: 4}", "keep: 4, layers: 0-3}", 5, "only read with by: list"),
        ("by: align, keep: 4", "by: list", 5, "needs `layers`"),
        ("by: align, keep: 4", "by: align", 5, "needs `keep`"),
        ("    lr: 1e-4", "    lr: 1e-4\n    train: lora", 8, "belong together"),
        ("    lr: 1e-4", "    lr: 1e-4\n    kl: 0", 8, "nothing to train on"),
        ("    lr: 1e-4", "    lr: 1e-4\n    data: other", 11, "distill.1.data: no data source 'other'"),
        ("by: align, keep: 4", "by: list, layers: 0-3, keep: 4", 5, "not read with by: list"),
        ("keep: 4", "keep: 4, keep: 5", 5, "given twice, first in line 5"),
        ("lr: 1e-2", "lr: .inf", 7, "finite number"),
        ("by: align, keep: 4", "by: list, layers: 0,2", 5, "needs quotes"),
    ],
)
def test_a_mistake_is_told_at_its_line(old, new, line, told):
    text = GOOD.replace(old, new)
    assert text != GOOD
    with pytest.raises(UserError) as caught:
        parse_recipe(text, "my.yaml")
    assert told in caught.value.what, caught.value
    assert caught.value.where == f"my.yaml:{line}"
    assert len(caught.value.lines()) == 3


def test_several_mistakes_are_all_told_in_three_lines():
    with pytest.raises(UserError) as caught:
        parse_recipe(GOOD.replace("keep: 4", "keep: -4").replace("lr: 1e-4", "lr: fast"), "my.yaml")
    assert "and 1 more" in caught.value.what and "my.yaml:10" in caught.value.what
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("text,told", [("a: [", "not YAML"), ("- a", "mapping"), ("a:\n\tb: 1", "not YAML")])
def test_what_is_no_recipe(text, told):
    with pytest.raises(UserError, match=told):
        parse_recipe(text, "x.yaml")


def test_overrides():
    recipe = parse_recipe(GOOD, "x", ["layers.keep=8", "distill.1.lr=2e-3", "convert.options.window=7", "seed=3"])
    assert (recipe.layers.keep, recipe.distill[1].lr, recipe.convert.options["window"], recipe.seed) == (8, 2e-3, 7, 3)
    for override, told in (
        ("layers.kep=3", "did you mean 'keep'"),
        ("distill.7.lr=1", "no '7'"),
        ("layers", "not key=value"),
        ("distill.0.lr=x", "valid number"),
        ("name.first=x", "no 'first'"),
    ):
        with pytest.raises(UserError, match=told) as caught:
            parse_recipe(GOOD, "x", [override])
        assert caught.value.where.startswith("--set")


def test_names_are_checked_against_the_registries():
    with pytest.raises(UserError, match="unknown mixer 'window_liner'"):
        check_recipe(parse_recipe(GOOD.replace("window_linear", "window_liner"), "x"))
    with pytest.raises(UserError, match="no option 'windw'"):
        check_recipe(parse_recipe(GOOD.replace("{window: 32}", "{windw: 32}"), "x"))
    with pytest.raises(UserError, match="unknown selector 'algn'"):
        check_recipe(parse_recipe(GOOD.replace("by: align", "by: algn"), "x"))
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        load_recipe("quikstart")


def test_the_json_schema_names_every_field():
    import json

    schema = json.loads(json_schema())
    assert set(schema["properties"]) == set(Recipe.model_fields)


@pytest.mark.parametrize(
    "old,new,place,told",
    [
        ("window_linear", "window_liner", "my.yaml:4", "convert.mixer: unknown mixer 'window_liner'"),
        (
            "{window: 32}",
            "{window: 32,\n    windw: 3}",
            "my.yaml:5",
            "convert.options.windw: mixer window_linear has no",
        ),
        (
            "{window: 32}",
            "{sinks: 4,\n    window: 0}",
            "my.yaml:5",
            "convert.options.window: mixer window_linear: window",
        ),
        ("by: align", "by: algn", "my.yaml:5", "layers.by: unknown selector 'algn'"),
    ],
)
def test_what_the_registries_refuse_is_told_at_its_line(old, new, place, told):
    with pytest.raises(UserError) as caught:
        check_recipe(parse_recipe(GOOD.replace(old, new), "my.yaml"))
    assert caught.value.where == place and caught.value.what.startswith(told), caught.value
    assert len(caught.value.lines()) == 3
    assert "Traceback" not in str(caught.value)


def test_an_override_is_told_as_such_later_too():
    recipe = parse_recipe(GOOD, "my.yaml", ["convert.options.windw=3"])
    with pytest.raises(UserError) as caught:
        check_recipe(recipe)
    assert caught.value.where == "--set convert.options.windw"
    # a contradiction that an override brings in names the override; another mistake does not
    with pytest.raises(UserError) as caught:
        parse_recipe(GOOD, "my.yaml", ["layers.by=list"])
    assert caught.value.where == "--set layers.by"
    with pytest.raises(UserError) as caught:
        parse_recipe(GOOD + "    data: other\n", "my.yaml", ["seed=1"])
    assert caught.value.where == "my.yaml:11"


def test_layers_as_people_write_them():
    for written, meant in (("9", "9"), ("[0, 2]", "0,2"), ("0-3", "0-3"), ("'SL'", "SL"), ("'0,2'", "0,2")):
        recipe = parse_recipe(GOOD.replace("{by: align, keep: 4}", f"{{by: list, layers: {written}}}"), "x")
        assert recipe.layers.layers == meant
    assert parse_recipe(GOOD, "x", ["layers={by: list, layers: 3}"]).layers.layers == "3"


def test_overrides_are_written_into_the_text_and_the_comments_stay():
    load_text = (shipped()["quickstart"]).read_text()
    sets = [
        "layers.keep=8",
        "distill.0.lr=1e-3",
        "seed=7",
        "eval.limit=5",
        "data.eval.field=body",
        "convert.options={}",
    ]
    text = changed_text(load_text, "q", sets)
    assert parse_recipe(text, "x") == parse_recipe(load_text, "q", sets)
    assert [line for line in text.splitlines() if "#" in line] == [x for x in load_text.splitlines() if "#" in x]
    # keys that are not there yet, in block and flow mappings and below missing ones; values in every style
    block = GOOD + "eval:\n  # which\n  protocols: [core]\n  tasks:\n    - a\n    - b\n"
    for sets in (
        ["distill.1.lora.r=4", "distill.1.train=lora"],
        ["eval.windows=3"],
        ["eval.tasks=[c]"],
        ["title='a: b # c'"],
        ["data={train: {split: all}, eval: {}}"],
        ["data.eval.bos=true", "data.train.source=corpus"],
    ):
        text = changed_text(block, "x", sets)
        assert parse_recipe(text, "x") == parse_recipe(block, "x", sets), text
        assert "# which" in text
    anchored = GOOD.replace("lr: 1e-2", "lr: &rate 1e-2").replace("lr: 1e-4", "lr: *rate")
    assert parse_recipe(anchored, "x").distill[1].lr == 1e-2
    with pytest.raises(UserError, match="layout"):
        changed_text(anchored, "x", ["distill.1.lr=3e-3"])


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(UserError, match="not UTF-8"):
        load_recipe(str(tmp_path / "r.yaml"))
