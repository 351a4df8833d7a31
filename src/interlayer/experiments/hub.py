"""Trained networks in the format of the Hugging Face Hub: config.json, model.safetensors and a model card.

The configuration is written by timm, so that `timm.create_model("hf-hub:USER/NAME", pretrained=True)` loads a network
whose name timm knows, including the models that this library registers. For NAME+MECHANISM, which timm does not know,
the architecture is that name: `build_network` and every command that takes a model load it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import HfApi
from timm.models._hub import save_config_for_hf

from ..hosts import options_of
from ..models.build import build_network, split_name
from ..models.checkpoints import save_weights
from ..models.hub import CONFIG_FILE, WEIGHTS_FILE, hub_errors, is_stored, read_stored
from ..models.names import own_options
from ..models.pretrained import unreachable_reason
from ..training.files import TrainingError, write_text, writing
from .model_card import model_card
from .pretrained import load_network
from .trained import LoadedNetwork

CARD_FILE = "README.md"
KEPT_KEYS = ("fixed_input_size", "pool_size", "first_conv", "classifier")  # of timm's configuration


def save_for_hub(
    source: str,
    folder: str | Path,
    *,
    overrides: Sequence[str] = (),
    license: str = "unknown",
    name: str | None = None,
) -> Path:
    """Writes a trained network to a new folder as config.json, model.safetensors and README.md, a model card.

    The folder is loaded again, and its network is compared with the original one, before it gets its name. It is named
    local-dir:FOLDER in all commands and in `timm.create_model`.

    Args:
        source: the folder of a run, or the name of a model.
        folder: the folder to write. It must not exist, or be empty.
        overrides: "weights=FILE" for other weights, and for a model also "pretrained=true" and options of the model.
        license: the license of the weights, in the Hub's notation, such as "apache-2.0".
        name: the name of the model in the model card; that of the folder if None.

    >>> interlayer.save_for_hub("runs/mine", "my-model")
    >>> timm.create_model("local-dir:my-model", pretrained=True)  # a network that timm knows
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrainingError(f"{folder} exists: choose another folder")
    loaded = load_network(source, overrides, device=torch.device("cpu"))
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            _write(loaded, temporary, license, name or folder.name)
            temporary.chmod(0o755)
            temporary.replace(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def push_to_hub(
    source: str,
    repository: str,
    *,
    overrides: Sequence[str] = (),
    license: str = "unknown",
    private: bool = False,
    message: str = "Add model",
    api: HfApi | None = None,
) -> str:
    """Uploads a trained network to the Hugging Face Hub, with a model card, and returns the address of the commit.

    The repository is created if it does not exist. An existing model card is kept.

    Args:
        source: the folder of a run, or the name of a model.
        repository: the name on the Hub, USER/NAME.
        overrides: "weights=FILE" for other weights, and for a model also "pretrained=true" and options of the model.
        license: the license of the weights, in the Hub's notation, such as "apache-2.0".
        private: whether a new repository is private.
        message: the message of the commit.
        api: the client of the Hub; by default one that uses the login of `hf auth login`.

    >>> interlayer.push_to_hub("runs/mine", "user/my-model", license="apache-2.0")
    """
    repository = repository.removeprefix("hf-hub:")
    if api is None and unreachable_reason():
        raise TrainingError(
            f"the Hub cannot be reached, so {repository} was not uploaded: save_for_hub (interlayer push ... "
            "local-dir:FOLDER) writes the same files to a folder"
        )
    client = api or HfApi(library_name="interlayer")
    with tempfile.TemporaryDirectory() as parent:
        folder = save_for_hub(
            source, Path(parent) / "model", overrides=overrides, license=license, name=repository.split("/")[-1]
        )
        with hub_errors(repository, "try again later"):
            created = client.create_repo(repository, private=private, exist_ok=True).repo_id
            has_card = client.file_exists(created, CARD_FILE)
            commit = client.upload_folder(
                repo_id=created, folder_path=folder, commit_message=message,
                ignore_patterns=[CARD_FILE] if has_card else None,
            )  # fmt: skip
    return str(commit)


def _write(loaded: LoadedNetwork, folder: Path, license: str, name: str) -> None:
    if loaded.task.annotations != "labels":
        raise TrainingError(f"networks of task={loaded.task.name} cannot be stored for timm: only classifiers can")
    network: Any = loaded.network
    architecture, options = _architecture(loaded)
    config = {
        "architecture": architecture,
        "num_classes": network.num_classes,
        "pretrained_cfg": _image_config(loaded),
        **({"label_names": loaded.class_names.names} if loaded.class_names and loaded.classes else {}),
    }
    save_config_for_hf(network, folder / CONFIG_FILE, model_config=config, model_args=options)
    save_weights(network, folder / WEIGHTS_FILE)
    write_text(folder / CARD_FILE, model_card(loaded, architecture, name=name, license=license))
    _check(loaded, folder)


def _image_config(loaded: LoadedNetwork) -> dict[str, Any]:
    """Returns the configuration in timm's format: the transform of images, and the names of layers."""
    network: Any = loaded.network
    transform = loaded.transform
    return {
        **{key: network.pretrained_cfg[key] for key in KEPT_KEYS if key in network.pretrained_cfg},
        "num_classes": network.num_classes,
        "input_size": [3, transform.size, transform.size],
        "mean": list(transform.mean),
        "std": list(transform.std),
        "interpolation": transform.interpolation,
        "crop_pct": transform.crop_pct,
        "crop_mode": transform.crop_mode,
    }


def _architecture(loaded: LoadedNetwork) -> tuple[str, dict[str, Any]]:
    """Returns the name and the options with which `build_network` builds the network again, without stored models."""
    recipe = loaded.recipe
    backbone, mechanisms = split_name(recipe.model)
    options: dict[str, Any] = dict(recipe.model_options)
    attach_options = dict(recipe.attach_options)
    name = recipe.model
    if is_stored(backbone):
        stored = read_stored(backbone)
        if mechanisms and "attach_options" in stored.options:
            raise TrainingError(f"{backbone} has options of its mechanism: a further mechanism cannot be stored")
        name = stored.name + recipe.model.removeprefix(backbone)
        options = {**stored.options, **options}
    elif recipe.pretrained or recipe.weights:
        name = _started_as_identity(backbone, mechanisms, recipe.model, attach_options)
    own = own_options(name)
    if own and not split_name(name)[1]:  # timm builds a named model, and takes the options of its mechanism so
        name, attach_options = split_name(name)[0], {**(options.get("attach_options") or {}), **own}
    if attach_options:
        options["attach_options"] = attach_options
    size = loaded.transform.size
    plain = split_name(name)[0]
    if recipe.image_size and "img_size" not in options and _takes_image_size(plain, options, size):
        options["img_size"] = size
    return name, options


def _started_as_identity(
    backbone: str, mechanisms: list[tuple[str, dict[str, Any]]], name: str, attach_options: dict[str, Any]
) -> str:
    """Returns the name with the default of `build_network` for networks that start from trained weights."""
    parts = name.split("+")
    for index, (mechanism, inline) in enumerate(mechanisms, start=1):
        if "init" in options_of(mechanism) and "init" not in inline and "init" not in attach_options:
            parts[index] += ",init=identity" if inline else ":init=identity"
    return "+".join(parts)


def _takes_image_size(backbone: str, options: dict[str, Any], size: int) -> bool:
    given = {key: value for key, value in options.items() if key != "attach_options"}
    try:
        with torch.device("meta"):
            timm.create_model(backbone, img_size=size, **given)
    except TypeError:
        return False
    return True


def _check(loaded: LoadedNetwork, folder: Path) -> None:
    """Raises unless the network that the folder describes computes what the original network computes."""
    again = build_network(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(2, 3, loaded.transform.size, loaded.transform.size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = loaded.network(images), again(images)
    if not torch.equal(expected, found):
        difference = float((expected - found).abs().max())
        raise TrainingError(
            f"{loaded.recipe.model} was not stored: loaded again, its outputs differ by {difference:.1e}"
        )
