"""The `interlayer` command: its subcommands and its error handling."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from . import (
    compare,
    convert,
    demo,
    evaluate,
    explore,
    export,
    inspect,
    mechanisms,
    models,
    plot,
    predict,
    profile,
    push,
    recipes,
    resume,
    robustness,
    tables,
    train,
)

app = typer.Typer(
    name="interlayer",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Cross-layer attention for vision backbones: train, compare, inspect and measure networks.",
)
COMMANDS = (
    train.train,
    compare.compare,
    resume.resume,
    evaluate.evaluate,
    robustness.robustness,
    inspect.inspect,
    explore.explore,
    predict.predict,
    export.export,
    push.push,
    recipes.recipes,
    models.models,
    mechanisms.mechanisms,
    tables.tables,
    convert.convert,
    profile.profile,
    demo.demo,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(plot.plot, name="plot")


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"interlayer {version('interlayer')}")
        except PackageNotFoundError:
            typer.echo("interlayer, run from source")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. An error of the user gives one sentence on stderr and exit code 2, without a traceback.

    INTERLAYER_DEBUG=1 shows the traceback.
    """
    try:
        code = app(prog_name="interlayer", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        _fail("stopped", 130)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("INTERLAYER_DEBUG"):
            raise
        _fail(_one_line(_message(error)), 2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's errors have this method; any other exception is a bug
            if _another_rank_failed():  # often only because the connection to that rank was lost
                sys.exit(1)
            raise
        if not error.format_message():  # typer has printed the help of a command without arguments
            sys.exit(0)
        _fail(_one_line(train.key_advice(error) or error.format_message()), 2)
    sys.exit(code if isinstance(code, int) else 0)


def _message(error: Exception) -> str:
    """Returns the message of an error; one of the operating system names the file first."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror.lower()}"
    return str(error)


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _fail(message: str, code: int) -> None:
    """Prints the message and exits. Of several processes, the first one that fails prints its message."""
    if not _another_rank_failed():
        typer.echo(f"interlayer: {message}", err=True)
    sys.exit(code)


def _another_rank_failed() -> bool:
    """Whether another process of this torchrun has called this function before, because it failed.

    torchrun gives each process the path of an error file. Their common folder belongs to this run alone.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return False
    try:
        os.close(os.open(Path(error_file).parents[1] / "interlayer_failed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    except OSError:
        return False
    return False
