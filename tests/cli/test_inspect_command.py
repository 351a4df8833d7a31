"""`interlayer inspect`: a page of a run, and sentences for what cannot be inspected."""

from command_line import fails, run_forked

SMALL = ("image_size=64", "model_options={depth: 2}")


def test_the_command_writes_a_page_with_its_figures(tmp_path):
    line = ("inspect", *SMALL, "vit_tiny_patch16_224", "vit_tiny_patch16_224+cb", "--output", tmp_path / "inside.html")
    result = run_forked(*line)
    assert result.returncode == 0, result.stderr
    page, figures = (tmp_path / "inside.html").read_text(), sorted((tmp_path / "inside_figures").iterdir())
    assert f"{len(figures)} figures" in result.stdout
    assert len(figures) >= 5
    assert "vit_tiny_patch16_224+cb, untrained" in page
    assert "interlayer inspect" in page, "the command that makes it again"
    assert "exists; give --overwrite" in fails(*line)
    (tmp_path / "inside.html").unlink()
    assert "inside_figures exists; give --overwrite" in fails(*line), "its figures are not replaced unasked"


def test_what_cannot_be_inspected_is_named(tmp_path):
    assert "such as inspection.html" in fails("inspect", "resnet10t", "--output", tmp_path / "page.txt")
    assert "no such folder" in fails("inspect", "resnet10t", "--output", tmp_path / "nowhere" / "page.html")
    (tmp_path / "notes.png").write_text("no image")
    line = ("inspect", "resnet10t", "--images", tmp_path / "notes.png", "--output", tmp_path / "page.html")
    assert "notes.png cannot be used" in fails(*line)
    assert "did you mean resnet18" in fails("inspect", "resnet118", "--output", tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.png"], "nothing is half-written"
