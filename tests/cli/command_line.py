"""Runs the command line in a separate process, as a user does."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Most of the time of a small command is spent on imports. One that fails, or that other tests run in a new interpreter,
# is forked from a process that has done them already.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["interlayer_cli.app", "interlayer.pages", "interlayer.papers.tables", "sklearn.datasets"]
)
SECONDS = 300


def run(*arguments, **options):
    """Runs a command in a new interpreter, with options of `subprocess.run`."""
    command = [sys.executable, "-c", "from interlayer_cli.app import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, **options)


def run_forked(*arguments, cwd=None):
    """Runs a command in a process with the library already imported, in the environment of the first such process."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = FORKED.Process(target=_main, args=([str(a) for a in arguments], str(cwd or os.getcwd()), outputs))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(arguments, SECONDS)
        return subprocess.CompletedProcess(arguments, process.exitcode, *(path.read_text() for path in outputs))


def _main(arguments, folder, outputs):
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    sys.argv = ["interlayer", *arguments]
    from interlayer_cli.app import main

    main()


def fails(*arguments, **options):
    """Returns the single sentence that a failing command prints."""
    result = run_forked(*arguments, **options) if options.keys() <= {"cwd"} else run(*arguments, **options)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("interlayer: ")
    return lines[0]
