"""The commands of README.md and docs/ are run, or at least understood, by the command line.

Commands that need what a test does not have are in NEEDS, with the reason; of these, the options are parsed, and the
recipes, keys and networks must exist. The others are run in a new folder, one document after another.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from documents import BLOCKS, ROOT
from typer.main import get_command

from interlayer.models.build import check_network
from interlayer.training import load_recipe
from interlayer_cli.app import app

NEEDS = {  # a pattern of commands that are not run, and why
    r"/data/": "images of the reader",
    r"runs/(?!digits)": "a run of the reader",
    r"\w\.(safetensors|png|jpg)\b": "a file of the reader",
    r"pretrained=true": "a download",
    r"(local-dir|hf-hub):": "a model that is stored elsewhere",
    r"^interlayer compare$": "three minutes of training; `make run` runs it",
}
SHORTER = {  # values that make a command quick, in the order of KEY=VALUE
    "interlayer train --recipe digits --output runs/digits": ["epochs=1", "model_options.blocks=1"],
}


def commands(text: str) -> list[str]:
    """Returns the commands of a block without comments; of a pipeline, the last one."""
    lines = re.sub(r"(^| )#.*$", "", text, flags=re.MULTILINE).splitlines()
    return [line.split(" | ")[-1].strip() for line in lines if line.strip()]


DOCUMENTED = [
    (name, command)
    for name, block in BLOCKS.items()
    if block.language == "" and not block.text.startswith(">>>")
    for command in commands(block.text)
]
INTERLAYER = [command for _, command in DOCUMENTED if command.startswith("interlayer ")]
GALLERY = {command for name, command in DOCUMENTED if name.startswith("docs/gallery.md")}  # `make gallery` runs them


def reason(command: str) -> str | None:
    """Returns why a command is not run, or None if it is."""
    return next((why for pattern, why in NEEDS.items() if re.search(pattern, command)), None)


def parsed(command: str) -> dict:
    """Returns the arguments and options of a command, as the command line understands them."""
    words, found = shlex.split(command)[1:], get_command(app)
    while hasattr(found, "commands"):
        assert words, f"{command}: lacks a subcommand"
        assert words[0] in found.commands, f"{command}: no such subcommand"
        found, words = found.commands[words[0]], words[1:]
    return found.make_context(command, words).params


@pytest.mark.parametrize("command", sorted(set(INTERLAYER)))
def test_commands_are_understood(command):
    given = parsed(command)
    named = [given.get(key) for key in ("model", "network", "source")]
    networks = [name for value in named for name in (value if isinstance(value, list) else [value]) if name]
    for name in networks:
        if not name.startswith(("runs/", "local-dir:", "hf-hub:")):
            check_network(name)
    if given.get("recipe"):
        load_recipe(given["recipe"], given["overrides"] or [], model=networks[0] if networks else None)


@pytest.mark.parametrize(
    ("command", "message"), [("interlayer tran", "no such subcommand"), ("interlayer plot", "lacks")]
)
def test_a_wrong_command_is_found(command, message):
    with pytest.raises(AssertionError, match=message):
        parsed(command)


def test_commands_run(tmp_path, monkeypatch, capsys):
    """Those that need nothing, in the order of the pages."""
    monkeypatch.chdir(tmp_path)
    ran = [command for command in dict.fromkeys(INTERLAYER) if command not in GALLERY and reason(command) is None]
    for command in ran:
        app([*shlex.split(command)[1:], *SHORTER.get(command, [])], standalone_mode=False)
    assert set(SHORTER) <= set(ran)
    assert Path("runs/digits/report.html").is_file()
    assert Path("scores.png").is_file()


@pytest.mark.parametrize("pattern", NEEDS)
def test_the_reasons_are_up_to_date(pattern):
    assert any(re.search(pattern, command) for command in INTERLAYER)


def test_other_commands_name_what_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, command in DOCUMENTED:
        program, *words = shlex.split(command)
        if program == "make":
            assert set(words) <= targets, f"{name}: {command}"
        elif program == "pip":
            assert set(re.findall(r"\.\[(\w+)\]", command)) <= set(extras), f"{name}: {command}"
        elif program == "python":
            assert (ROOT / words[0]).is_file(), f"{name}: {command}"
        else:
            assert program == "interlayer", f"{name}: no test knows {program!r}"
