"""Models as timm stores them on the Hugging Face Hub: a folder with config.json and model.safetensors.

A model is named hf-hub:USER/NAME or local-dir:FOLDER, as in timm. The entry "architecture" of its config.json is the
name of a timm model, or NAME+MECHANISM, which timm alone cannot build. Weights are read from .safetensors files, or
from PyTorch files with weights_only=True.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from timm.models._factory import parse_model_name
from timm.models._hub import _PREFERRED_FILES, hf_split, load_model_config_from_path

from .pretrained import unreachable_reason

PREFIXES = ("hf-hub:", "local-dir:")
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


@dataclass(frozen=True)
class StoredModel:
    """A model in a folder.

    Args:
        folder: the folder that contains config.json and the weights.
        name: a name that `build_network` accepts, such as "resnet50" or "resnet50+mrla_light".
        config: the configuration of the model in timm's format: number of classes, image size, mean, std, classes.
        options: options with which the network is built.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_classes(self) -> int:
        return int(self.config["num_classes"])

    def weights(self) -> Path:
        """Returns the file of the weights."""
        for name in _PREFERRED_FILES:
            if (self.folder / name).is_file():
                return self.folder / name
        raise ValueError(f"{self.folder} holds no weights: expected {WEIGHTS_FILE}")


def is_stored(name: str) -> bool:
    """Whether a name is that of a model in a folder or on the Hub, with or without further mechanisms."""
    return name.lower().replace("hf_hub:", "hf-hub:").startswith(PREFIXES)


def read_stored(name: str, *, weights: bool = False) -> StoredModel:
    """Reads the configuration of hf-hub:USER/NAME or local-dir:FOLDER.

    Args:
        weights: whether to download the weights as well, if the model is on the Hub.

    Raises:
        ValueError: there is no such model, or the Hub cannot be reached.
    """
    source, identifier = parse_model_name(name)
    folder = _download(identifier, weights=weights) if source == "hf-hub" else Path(identifier)
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{folder} holds no model: expected {CONFIG_FILE} and {WEIGHTS_FILE}")
    try:
        config, architecture, options = load_model_config_from_path(folder)
        config.setdefault("num_classes", 1000)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG_FILE} is not a configuration of a timm model: {error!r}") from error
    return StoredModel(folder, architecture, config, dict(options or {}))


def _download(identifier: str, *, weights: bool) -> Path:
    """Downloads a model from the Hub and returns its folder in the cache. Offline, the cache alone is used."""
    repository, revision = hf_split(identifier)
    offline = bool(unreachable_reason())

    def fetch(filename: str) -> Path:
        return Path(huggingface_hub.hf_hub_download(repository, filename, revision=revision, local_files_only=offline))

    with hub_errors(repository, "name a folder with local-dir:FOLDER"):
        folder = fetch(CONFIG_FILE).parent
        for filename in _PREFERRED_FILES if weights else ():
            try:
                fetch(filename)
                break
            except EntryNotFoundError:
                continue
    return folder


def unreachable(what: str, remedy: str) -> str:
    """Returns the sentence for something that is neither on this machine nor can be downloaded."""
    host = urlparse(huggingface_hub.constants.ENDPOINT).hostname
    return f"{what} is not on this machine, and {host} cannot be reached: {remedy}"


@contextmanager
def hub_errors(repository: str, remedy: str) -> Iterator[None]:
    """Turns the errors of the Hub's client inside the ``with`` block into a ValueError of one sentence."""
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"expected the name of a model on the Hub as USER/NAME, got {repository!r}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{repository} is not on the Hub, or is private: check the name, or log in with `hf auth login`"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(f"the Hub refused {repository}: {str(error).splitlines()[0]}") from error
    except FileNotFoundError as error:  # not in the cache, and the Hub cannot be reached
        raise ValueError(unreachable(repository, remedy)) from error
    except EntryNotFoundError as error:
        raise ValueError(f"{repository} holds no {CONFIG_FILE}: it is not a model in timm's format") from error
    except OSError as error:
        raise ValueError(unreachable(repository, remedy)) from error
