"""Several networks on one command line, each with its own KEY=VALUE."""

import re
from collections.abc import Sequence
from pathlib import Path

OVERRIDE = re.compile(r"[a-z_]+(\.\w+)*=")  # not NAME+MECHANISM:OPTION=VALUE


def split_networks(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns each run or model with its overrides. Those before the first network are for all networks."""
    shared: list[str] = []
    found: list[tuple[str, list[str]]] = []
    for text in arguments:
        if not OVERRIDE.match(text) or Path(text).exists():
            found.append((text, []))
        elif found:
            found[-1][1].append(text)
        else:
            shared.append(text)
    if not found:
        raise ValueError("no network is given: name folders of runs, or models")
    return [(network, [*shared, *keys]) for network, keys in found]


def distinct_names(networks: Sequence[tuple[str, list[str]]], models: list[str]) -> list[str]:
    """Returns a name for each network: its model, or more of what was given where models are alike."""
    folders = [Path(network).name for network, _ in networks]
    shared = set.intersection(*(set(keys) for _, keys in networks))
    texts = [" ".join([network, *(key for key in keys if key not in shared)]) for network, keys in networks]
    for names in (models, folders):
        if len(set(names)) == len(names):
            return names
    for text in texts:
        if texts.count(text) > 1:
            raise ValueError(f"{text} is given twice: name different networks")
    return texts
