"""Runs the command line in a separate process, as a user does."""

import subprocess
import sys


def run(*arguments, **options):
    command = [sys.executable, "-c", "from interlayer_cli.app import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def fails(*arguments, **options):
    """Returns the single sentence that a failing command prints."""
    result = run(*arguments, **options)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("interlayer: ")
    return lines[0]
