"""`interlayer explore`: the server of a command, and what it says if it cannot start."""

import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from command_line import fails

from interlayer_cli.explore import open_explorer

pytest.importorskip("gradio", reason="gradio is not installed: the explorer cannot be shown")


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_the_command_serves_a_page_on_this_computer_until_it_is_stopped(port):
    command = [sys.executable, "-c", "from interlayer_cli.app import main; main()", "explore", "resnet10t+mrla_light"]
    command += ["image_size=64", "--no-browser", "--port", str(port)]

    def heed_interrupts():  # which a shell makes the commands in its background ignore, and these their children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, preexec_fn=heed_interrupts)
    try:
        line = process.stdout.readline()
        assert line == f"explorer: http://127.0.0.1:{port}/ (Ctrl-C stops it)\n", process.stderr.read()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as page:
            assert b"interlayer explorer" in page.read()
        assert f"127.0.0.1:{port}, which may be in use" in fails("explore", "resnet10t", "--port", port)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
        assert (process.returncode, output, errors) == (0, "stopped\n", "")
    finally:
        process.kill()


def test_networks_that_cannot_be_loaded_are_named(tmp_path):
    assert "no such folder of a run" in fails("explore", tmp_path / "nowhere")
    assert "did you mean resnet18" in fails("explore", "resnet118")


def test_networks_are_offered_under_names_that_tell_them_apart():
    given = ["image_size=64", "resnet10t", "resnet10t", "weights=a.safetensors"]
    assert open_explorer(given).names == ["resnet10t", "resnet10t weights=a.safetensors"]
    assert len(open_explorer([]).names) >= 2, "something is offered without a download"
