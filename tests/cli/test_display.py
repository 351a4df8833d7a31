"""Progress of runs where stderr is a file."""

from pathlib import Path

from interlayer.training import Progress
from interlayer_cli.display import showing


def test_a_run_that_resumes_in_an_evaluation_has_its_line(capsys):
    """It has trained nothing yet whose speed could be shown."""
    run = Path("runs/one")
    with showing() as show:
        show(Progress(run, "evaluated", 2, 5, 10, 10, loss=0.5))
        show(Progress(run, "training", 3, 5, 10, 10, loss=0.25, images_per_second=40.0, seconds_left=90.0))
        show(Progress(run, "evaluated", 3, 5, 10, 10, loss=0.25))
    first, second = capsys.readouterr().err.splitlines()
    assert first == "one: epoch 3/5, loss 0.5000"
    assert second == "one: epoch 4/5, loss 0.2500, 40 images/s, 1:30 left"
