"""Robustness of a segmenter: images of different sizes, and attacks through the loss of its evaluation."""

import pytest
from dense_data import small_recipe, write_label_maps, write_objects

from interlayer.analysis import parse_perturbations
from interlayer.experiments import evaluate, load_network, robustness
from interlayer.training import TrainingError, train


def test_a_segmenter_is_perturbed_and_attacked(tmp_path):
    write_label_maps(tmp_path / "data")
    train(small_recipe("segment", tmp_path / "data", epochs=3), tmp_path / "run")
    network = load_network(str(tmp_path / "run"))
    rows = parse_perturbations(["occlusion", "gaussian_noise=60", "fgsm=16", "pgd=8"])
    found = robustness({"a": network}, perturbations=rows, repeats=2)
    assert found.metric.name == "miou"
    assert found.scores["a"][found.conditions[0]].mean == evaluate(network)["miou"]
    assert [len(score.values) for score in found.scores["a"].values()] == [1, 1, 2, 1, 2]
    attacked = found.examples[3]
    assert (attacked.image - attacked.original).abs().max() == pytest.approx(16 / 255, abs=1e-5)
    height, width = found.examples[1].image.shape[1:]
    assert {height, width} == {48, 64}, "the example has no padding"
    center = found.examples[1].image[:, height // 4 : 3 * height // 4, width // 4 : 3 * width // 4]
    assert center.sum() == 0


def test_a_detector_is_perturbed_and_not_attacked(tmp_path):
    write_objects(tmp_path / "data")
    train(small_recipe("detect", tmp_path / "data"), tmp_path / "run")
    network = load_network(str(tmp_path / "run"))
    assert robustness({"a": network}, perturbations=parse_perturbations(["gaussian_blur=1"])).images == 4
    with pytest.raises(TrainingError, match="task=detect cannot be attacked, its predictions are boxes"):
        robustness({"a": network}, perturbations=parse_perturbations(["fgsm"]))
