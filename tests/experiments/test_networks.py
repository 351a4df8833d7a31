"""Networks that are ready to use: those of runs, and any model with its weights, evaluated as timm evaluates it."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from digit_images import SMALL, save_digits
from PIL import Image

import interlayer
from interlayer.experiments import PretrainedNetwork, evaluate, load_network, predict
from interlayer.training import RecipeError, TrainingError, train
from interlayer.training.recipe import from_values

MODEL = "test_resnet"
SYNSETS = {"n01440764": 0, "n02123045": 281, "n03977966": 734}
CPU = ["device=cpu", "workers=0"]


def save_noise(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (190 + 30 * number, 240, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder with images of three of ImageNet's classes."""
    root = tmp_path_factory.mktemp("photographs")
    for name in SYNSETS:
        save_noise(root / "val" / name, 2)
    return root


def weights_of(root, classes=1000):
    torch.manual_seed(1)
    network = timm.create_model(MODEL, num_classes=classes).eval()
    path = root / f"weights{classes}.safetensors"
    safetensors.torch.save_file(network.state_dict(), path)
    return network, path


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return weights_of(tmp_path_factory.mktemp("weights"))


def test_a_model_is_evaluated_with_timms_own_transform_and_imagenets_classes(photographs, weights):
    network, path = weights
    config = timm.data.resolve_model_data_config(network)
    transform = timm.data.create_transform(**config)
    losses, right = [], []
    for name, label in SYNSETS.items():
        for file in sorted((photographs / "val" / name).iterdir()):
            with torch.no_grad(), Image.open(file) as image:
                logits = network(transform(image.convert("RGB"))[None])
            losses.append(float(F.cross_entropy(logits, torch.tensor([label]))))
            right.append(label in logits.topk(5).indices)
    loaded = load_network(MODEL, [f"weights={path}", *CPU])
    scores = evaluate(loaded, str(photographs))
    assert scores["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert (scores["images"], scores["top5"]) == (6, np.mean(right))
    present = {entry["class"]: entry["images"] for entry in scores["classes"] if entry["images"]}
    assert present == {"tench": 2, "tabby": 2, "police van": 2}


def test_an_attached_mechanism_starts_as_the_identity(photographs, weights):
    """The network with a mechanism that the weights do not contain gives exactly the same figures."""
    _, path = weights
    plain, attached = (
        evaluate(load_network(name, [f"weights={path}", *CPU]), str(photographs / "val"))
        for name in (MODEL, f"{MODEL}+mrla_light:channels_per_head=8")
    )
    assert attached.pop("contribution")["changed"] == 0
    assert plain.pop("contribution") is None
    assert {**plain, "model": ""} == {**attached, "model": ""}


def test_an_untrained_mechanism_that_changes_the_output_is_warned_about(weights, caplog):
    load_network(f"{MODEL}+mrla_light:channels_per_head=8,init=paper", [f"weights={weights[1]}", *CPU])
    assert "is untrained and changes its output" in caplog.text


def test_options_change_the_transform(photographs, weights):
    loaded = PretrainedNetwork(MODEL, [f"weights={weights[1]}", "image_size=96", "crop_pct=1.0", *CPU])
    image = Image.open(photographs / "val" / "n01440764" / "0.png")
    assert loaded.transform(image).shape == (3, 96, 96)
    assert loaded.transform.crop_pct == 1.0
    (found,) = predict(loaded, [photographs / "val" / "n01440764" / "0.png"], top=2)
    logits = loaded.network(loaded.transform(image)[None])
    assert found["classes"][0]["class"] == loaded.classes[int(logits.argmax())]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (MODEL, [], "test_resnet has no trained weights: give weights=FILE, or pretrained=true"),
        ("resnet5O", [], "no such folder of a run, and unknown model 'resnet5O'; did you mean resnet50"),
        ("runs/nothing", [], "runs/nothing: no such folder of a run, and unknown model"),
        (MODEL, ["pretrained=true", "epochs=3"], "epochs has no effect here; the options are: weights, pretrained"),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(name, overrides, message):
    with pytest.raises(TrainingError, match=message):
        load_network(name, overrides)


def test_weights_without_a_classifier_are_refused(tmp_path, weights):
    """A random classifier would give figures that mean nothing."""
    network, _ = weights
    tensors = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith("fc.")}
    safetensors.torch.save_file(tensors, tmp_path / "features.safetensors")
    with pytest.raises(TrainingError, match=r"features.safetensors holds no classifier for this network: fc\.weight"):
        PretrainedNetwork(MODEL, [f"weights={tmp_path / 'features.safetensors'}"])


def test_weights_of_another_network_are_refused_with_their_names(tmp_path):
    """Not as weights without a classifier, which would be half of the truth."""
    other = timm.create_model("tf_efficientnet_lite0")
    safetensors.torch.save_file(other.state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other.safetensors does not fit the network: .* and \d+ more; "):
        PretrainedNetwork(MODEL, [f"weights={tmp_path / 'other.safetensors'}"])


def test_a_head_of_other_classes_takes_the_names_of_the_data(tmp_path, photographs, caplog):
    _, path = weights_of(tmp_path, classes=3)
    loaded = PretrainedNetwork(MODEL, [f"weights={path}", *CPU])
    scores = evaluate(loaded, str(photographs))
    assert [entry["class"] for entry in scores["classes"]] == sorted(SYNSETS)
    assert "the names of the 3 classes are not known" in caplog.text
    assert "top5" not in scores, "of three classes, top 5 is always right"
    assert loaded.task.show_details(scores)[0].columns == ["images", "top 1", "loss", "calibration error"]
    save_noise(tmp_path / "two" / "a", 1)
    save_noise(tmp_path / "two" / "b", 1)
    with pytest.raises(TrainingError, match="has 3 classes of unknown names, and the data has 2 classes"):
        evaluate(loaded, str(tmp_path / "two"))


def test_names_in_the_configuration_of_a_model_are_its_classes(tmp_path):
    """Models that were saved for the Hugging Face Hub list the names of their classes."""
    _, path = weights_of(tmp_path, classes=3)
    names = "model_options.pretrained_cfg_overlay.label_names=[bird,cat,dog]"
    assert PretrainedNetwork(MODEL, [f"weights={path}", names, *CPU]).classes == ["bird", "cat", "dog"]


# Runs


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("networks") / "run"
    train(from_values({**SMALL, "epochs": 1}), folder)
    return folder


def test_a_run_is_loaded_with_its_network_transform_and_classes(run_folder, tmp_path):
    save_digits(tmp_path, 1)
    file = next((tmp_path / "3").iterdir())
    run = interlayer.load_run(str(run_folder))
    with torch.no_grad():
        probabilities = run.network(run.transform(Image.open(file))[None]).softmax(1)[0]
    (found,) = predict(run, [file], top=10)
    ours = {name: pytest.approx(float(p), rel=1e-5) for name, p in zip(run.classes, probabilities, strict=True)}
    assert {entry["class"]: entry["probability"] for entry in found["classes"]} == ours
    assert not run.network.training
    assert run.classes == [str(label) for label in range(10)]
    assert run.recipe.model == run.summary["model"] == SMALL["model"]


def test_every_split_of_a_runs_own_data_can_be_evaluated(run_folder):
    run = interlayer.load_run(run_folder)
    assert evaluate(run)["accuracy"] == pytest.approx(run.summary["test"]["accuracy"])
    assert evaluate(run, split="train")["images"] == 1437
    with pytest.raises(TrainingError, match="digits has no validation split"):
        evaluate(run, split="val")
    with pytest.raises(TrainingError, match="unknown split 'tets': expected train, validation or test"):
        evaluate(run, split="tets")


def test_the_transform_of_a_run_can_be_changed_and_its_network_cannot(run_folder):
    assert load_network(str(run_folder), ["image_size=16", "device=cpu"]).transform.size == 16
    with pytest.raises(TrainingError, match="model_options has no effect here"):
        load_network(str(run_folder), ["model_options.blocks=2"])
    with pytest.raises(TrainingError, match="device must be cpu or cuda, got 'gpu'"):
        load_network(str(run_folder), ["device=gpu"])
    with pytest.raises(RecipeError, match="did you mean 'crop_pct'"):
        load_network(str(run_folder), ["crop_pc=1"])


def test_a_run_of_three_classes_logs_no_top_5(tmp_path):
    save_digits(tmp_path / "data" / "train", 8, size=8)
    for label in range(3, 10):
        for file in (tmp_path / "data" / "train" / str(label)).iterdir():
            file.unlink()
        (tmp_path / "data" / "train" / str(label)).rmdir()
    recipe = from_values({**SMALL, "data": str(tmp_path / "data"), "epochs": 1, "batch_size": 8})
    summary = train(recipe, tmp_path / "run")
    assert set(summary["test"]) == {"accuracy", "loss", "images"}
    assert "top5" not in (tmp_path / "run" / "metrics.csv").read_text()
