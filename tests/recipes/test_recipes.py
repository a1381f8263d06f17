"""Recipes: the shipped ones hold, mistakes are told at file and line, overrides reach what they name."""

import pytest

from regraft.errors import UserError
from regraft.recipes.load import check_recipe, dump, json_schema, load_recipe, parse_recipe, shipped
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
        ("    lr: 1e-4", "    lr: 1e-4\n    data: other", 1, "no data source 'other'"),
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
