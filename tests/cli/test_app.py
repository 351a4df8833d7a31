"""The entry point of the command line: help, completion of names, and suggestions for names that do not exist."""

import os
import re

import pytest
from command_line import fails, run, run_forked

from interlayer.training.recipe import list_recipes
from interlayer_cli.completion import recipe_names


@pytest.mark.parametrize("arguments", [(), ("plot",)])
def test_without_arguments_the_help_is_printed_and_that_is_no_error(arguments):
    result = run(*arguments)
    assert result.returncode == 0
    assert "Usage: interlayer" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("command", [(), ("train",), ("tables",), ("plot",), ("plot", "layer-scores")])
def test_h_is_short_for_help(command):
    result = run(*command, "-h")
    assert result.returncode == 0
    assert f"Usage: {' '.join(('interlayer', *command))}" in result.stdout


def test_an_unknown_command_suggests_the_nearest():
    assert "No such command 'trian'. Did you mean 'train'?" in fails("trian")


def complete(line, **environment):
    """Returns what bash would offer after ``line``."""
    words = line.split(" ")
    variables = {"_INTERLAYER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return run(env={**os.environ, **variables, **environment}).stdout.split()


def test_the_shell_completes_commands_options_and_recipes():
    assert complete("interlayer tr") == ["train"]
    assert complete("interlayer train --re") == ["--recipe", "--resume"]
    assert complete("interlayer train --recipe rla_c") == ["rla_cifar"]
    assert complete("interlayer recipes rla_c") == ["rla_cifar"]


def test_the_script_for_the_shell_names_the_command():
    """The script is for `interlayer`, however Python was started."""
    # Without this, Typer takes the shell that started the tests, if one is running.
    result = run("--show-completion", "bash", env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert result.returncode == 0
    assert "_INTERLAYER_COMPLETE" in result.stdout


def test_completion_knows_all_recipes():
    assert recipe_names() == list_recipes()


def test_tables_counts_the_starred_figures():
    result = run_forked("tables", "rest")
    assert "6 rows: every figure that should agree does. 6 figures are starred:" in result.stdout
    assert result.stdout.count(" *") - result.stdout.count(" * not reproduced") == 6
    reasons = re.findall(r"^\* (\d+) figures?: \w+", result.stdout, re.MULTILINE)
    assert sum(map(int, reasons)) == 6, "every starred figure has a reason"


def test_a_pattern_that_matches_no_model_suggests_one_that_does():
    assert re.search(r"'\*resnet50\*' matches \d\d", fails("models", "resnet50"))
    assert "did you mean rest_lite" in fails("models", "restlite")


def test_an_error_of_the_operating_system_names_the_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "file is a file: choose another name" in fails("compare", "--output", "file", cwd=tmp_path)
    message = fails("compare", "--output", "file/inside", cwd=tmp_path)
    assert "file/inside could not be written: Not a directory" in message


def test_compare_refuses_unknown_names_before_it_trains(tmp_path):
    """The plain network would be measured first, which takes minutes."""
    message = fails("compare", "--model", "resnet18+mrla_lite", "--output", tmp_path / "out")
    assert "unknown mechanism 'mrla_lite'" in message
    assert not (tmp_path / "out").exists()
