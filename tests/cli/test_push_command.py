"""`interlayer push`, run in a separate process as a user runs it."""

import pytest
from command_line import fails, run


@pytest.mark.slow
def test_a_pushed_run_is_loaded_again_by_its_name(finished_run, tmp_path):
    result = run("push", finished_run, "local-dir:pushed", "--license", "mit", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "stored in pushed; its name is local-dir:pushed" in result.stdout
    assert {file.name for file in (tmp_path / "pushed").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    assert "license: mit" in (tmp_path / "pushed" / "README.md").read_text()
    ours = run("evaluate", finished_run, "--json").stdout
    again = run("evaluate", "local-dir:pushed", "--data", "digits", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert _accuracy(again.stdout) == _accuracy(ours)


def test_a_target_that_is_no_name_of_a_model_is_refused(finished_run, tmp_path):
    sentence = fails("push", finished_run, "pushed", cwd=tmp_path)
    assert "expected hf-hub:USER/NAME or local-dir:FOLDER, got 'pushed'" in sentence
    assert list(tmp_path.iterdir()) == []


def _accuracy(printed: str) -> str:
    return next(line for line in printed.splitlines() if '"top_1"' in line or '"accuracy"' in line)
