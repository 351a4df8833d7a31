"""`interlayer export`, run in a separate process as a user runs it."""

import resource
import signal
import subprocess
import sys

from command_line import fails, run


def test_a_missing_package_is_named_with_the_command_that_installs_it(finished_run, tmp_path):
    """Simulated by a module path on which onnxruntime cannot be found."""
    program = (
        "import sys, importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'onnxruntime' else found(name, *a)\n"
        f"sys.argv = ['interlayer', 'export', {str(finished_run)!r}, '--output', {str(tmp_path / 'model.onnx')!r}]\n"
        "from interlayer_cli.app import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert "needs onnxruntime: pip install onnxruntime" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_command_exports_a_run(finished_run, tmp_path):
    result = run("export", finished_run, "--format", "pt2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "run.pt2: outputs differ from the network's by at most" in result.stdout
    assert "batches of 1 and 3 images" in result.stdout
    assert (tmp_path / "run.pt2").is_file()
    assert "run.pt2 exists; give --overwrite" in fails("export", finished_run, "--format", "pt2", cwd=tmp_path)


def test_a_full_disk_leaves_nothing(finished_run, tmp_path):
    """A limit on the size of files stands for a full disk."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    sentence = fails("export", finished_run, "--output", tmp_path / "model.pt2", preexec_fn=limit)
    assert "model.pt2 could not be written" in sentence
    assert list(tmp_path.iterdir()) == []
