"""The opening lines of a run: what it understood."""

import os

import pytest
import timm
from PIL import Image

from interlayer.models import save_weights
from interlayer.training import Trainer, load_recipe
from interlayer.training.overview import overview_of
from interlayer.training.processes import init_processes
from interlayer.training.setup import set_up


def said_by(recipe, folder):
    said = []
    trainer = Trainer(recipe, folder, on_start=said.append)
    next(steps := trainer.run())
    next(steps)
    trainer.close()
    return said[0].lines()


def test_a_run_says_what_is_new_and_its_rates(tuned, tmp_path, trained):
    recipe = tuned("resnet10t+mrla_light", new_lr_scale=10, layer_decay=0.5, freeze_epochs=1, lr=0.02, epochs=2)
    lines = said_by(recipe.replace(warmup_epochs=5, schedule_on="step", workers=64, resident="no"), tmp_path / "run")
    cores = len(os.sched_getaffinity(0))
    assert lines[0].endswith("120 training (train/) and 40 test (val/) images, 10 classes: 0, 1, 2, 3, 4, ...")
    assert "warm-up of 0.4 epochs, because warmup_epochs=5 would not end within the run" in lines[1]
    assert f"{cores} worker" in lines[2]
    assert "instead of 64, one per core" in lines[2]
    assert "16,686 new (11,556 of the mechanism and 5,130 of the classifier)" in lines[3]
    head = "the classifier for 5 classes is replaced by a new one for 10; the mechanism starts as the identity"
    assert lines[4] == f"weights: {trained['resnet10t']}, 84 tensors loaded; {head}"
    # stem, four blocks, classifier: the stem is five layers before the classifier
    rates = "0.000625 to 0.01 for loaded parameters and 0.2 for new ones (sgd)"
    assert lines[5] == f"learning rate: {rates}; only new parameters are trained for the first 3 steps"


def test_a_run_says_the_rate_of_a_mechanism(tuned, tmp_path):
    recipe = tuned("resnet10t+mrla_light", new_lr_scale=2, mechanism_lr_scale=10, lr=0.02)
    rates = "0.02 for loaded parameters, 0.04 for new ones and 0.2 for those of the mechanism (sgd)"
    assert said_by(recipe, tmp_path / "run")[5] == f"learning rate: {rates}"


def test_a_plain_network_says_that_its_classifier_is_new(tuned, tmp_path):
    lines = said_by(tuned("resnet10t", zero_head=True), tmp_path / "run")
    assert lines[3].endswith(", 5,130 new (the classifier)")
    assert lines[5] == "learning rate: 0.01 for loaded parameters and 0.01 for new ones (sgd)"


def test_a_freeze_that_does_not_end_says_that_it_covers_the_run(tuned, tmp_path):
    """Without this, a run of three steps would speak of its first nine."""
    lines = said_by(tuned("resnet10t", zero_head=True, freeze_epochs=3, epochs=1, precision="tf32"), tmp_path / "run")
    assert lines[5].endswith(
        "only new parameters are trained for the whole run, because freeze_epochs=3 does not end within it"
    )
    assert lines[2].startswith("device: CPU, float32, "), "tf32 is a precision of GPUs"


def test_a_run_says_which_folder_is_which_split(tuned, tmp_path):
    for number, folder in enumerate(f"{split}/{name}" for split in ("training", "valid") for name in ("ant", "bee")):
        (tmp_path / "data" / folder).mkdir(parents=True)
        for image in range(10):
            pixels = Image.effect_noise((8, 8), 9 + number + image).convert("RGB")
            pixels.save(tmp_path / "data" / folder / f"{image}.png")
    recipe = tuned("resnet10t", data=str(tmp_path / "data"), image_size=32, batch_size=4, workers=0)
    lines = said_by(recipe, tmp_path / "run")
    assert lines[0].endswith("data, 20 training (training/) and 20 test (valid/) images, 2 classes: ant, bee")
    lines = said_by(recipe.replace(data=str(tmp_path / "data" / "valid")), tmp_path / "other")
    assert lines[0].endswith("valid, 18 training and 2 test images, 2 classes: ant, bee")
    assert lines[1].startswith("note: ")
    assert lines[1].endswith("a tenth of its 20 images, the same for every seed, is the test split")


@pytest.mark.parametrize(
    ("mechanism", "line"),
    [
        ("mrla_light:channels_per_head=8", "the mechanism starts as the identity"),
        ("cb:scaled=true", "the mechanism starts as the identity"),
        ("cb", "the untrained mechanism changes its outputs from the start"),
        ("mrla_light:channels_per_head=8,init=paper", "the untrained mechanism changes its outputs from the start"),
    ],
)
def test_the_opening_lines_say_whether_the_mechanism_starts_as_the_identity(mechanism, line, tmp_path):
    """A user would believe that the function of the pretrained network is preserved, also behind a head of zeros."""
    options = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    start = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=16, **options)
    save_weights(start, tmp_path / "start.safetensors")
    recipe = load_recipe(
        "finetune", model=f"vit_tiny_patch16_224+{mechanism}", model_options=options, image_size=16, data="digits",
        weights=str(tmp_path / "start.safetensors"), device="cpu", workers=0,
    )  # fmt: skip
    setup = set_up(recipe, init_processes(recipe), None)
    assert overview_of(setup).network[1].endswith(line)
