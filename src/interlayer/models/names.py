"""Names of networks, as recipes and the command line take them.

NAME                                    a timm model, or hf-hub:USER/NAME or local-dir:FOLDER
NAME+MECHANISM:OPTION=VALUE,...         mechanisms that are attached to it, each with its options
NAME:OPTION=VALUE,...                   a named model of this library, such as resnet50_mrla_light, with options of
                                        the mechanism that it has by itself
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .. import hosts
from ..hosts import Control
from .errors import ModelError
from .hub import is_stored
from .rows import ROWS


def parse_value(text: str) -> Any:
    """Parses the text of an option as YAML; text that is not valid YAML is returned unchanged.

    >>> parse_value("true"), parse_value("[6, 6]"), parse_value("end")
    (True, [6, 6], 'end')
    """
    try:
        return yaml.safe_load(text) if text.strip() else None
    except yaml.YAMLError:
        return text


def split_name(name: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Splits a name into the name of the backbone and the mechanisms to attach, each with its options.

    >>> split_name("deit_small_patch16_224+cb:scaled=true,blocks=all+mrla_light")
    ('deit_small_patch16_224', [('cb', {'scaled': True, 'blocks': 'all'}), ('mrla_light', {})])
    >>> split_name("deit_small_patch16_224+cb:spare_pyramid=[3,5,7,11],blocks=all")
    ('deit_small_patch16_224', [('cb', {'spare_pyramid': [3, 5, 7, 11], 'blocks': 'all'})])
    """
    backbone, *attachments = _components(name)
    return _split(backbone, name)[0], [_split(attachment, name) for attachment in attachments]


def own_options(name: str) -> dict[str, Any]:
    """Returns the options that a name gives to the mechanism that its named model has by itself.

    >>> own_options("resnet50_mrla_light:drop_path=0.1")
    {'drop_path': 0.1}
    """
    return _split(_components(name)[0], name)[1]


def own_mechanism(name: str) -> str:
    """Returns the mechanism that a named model of this library has by itself; an empty string if it has none."""
    row = ROWS.get(split_name(name)[0])
    return "" if row is None else row.mechanism


def _components(name: str) -> list[str]:
    """Returns the backbone and the attachments of a name, as they are written."""
    if is_stored(name) and Path(name.partition(":")[2]).is_dir():  # the name of a folder may contain a +
        return [name]
    return name.split("+")


def _split(component: str, name: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of a backbone or mechanism and its options."""
    if is_stored(component):
        return component, {}
    key, colon, text = component.partition(":")
    entries = [entry.partition("=") for entry in _entries(text)]
    if not key or (colon and not entries) or not all(option and equals for option, equals, _ in entries):
        raise ModelError(f"expected NAME+MECHANISM, or NAME+MECHANISM:KEY=VALUE,KEY=VALUE, got {name!r}")
    return key, {option: parse_value(value) for option, _, value in entries}


def _entries(text: str) -> list[str]:
    return [entry for entry in re.split(r",+(?=\w+=|$)", text) if entry]  # a list has commas too


@dataclass(frozen=True)
class ControlNetwork:
    """A network that is the control of another one.

    Args:
        name: the name of the control network.
        mechanism: the mechanism of the other network that it is the control of.
        control: what is left of the mechanism, and what is tested.
    """

    name: str
    mechanism: str
    control: Control


def control_networks(name: str, attach_options: Mapping[str, Any] | None = None) -> list[ControlNetwork]:
    """Returns the controls of a network with mechanisms, the mildest control of each mechanism first.

    The list is empty if the plain network is its only control.

    Args:
        name: the name of the network.
        attach_options: options of its mechanism that are not in its name, as in a recipe.

    >>> [network.name for network in control_networks("resnet50+mrla_light:channels_per_head=16")][0]
    'resnet50+mrla_light:channels_per_head=16,cross_layer=false'
    """
    components, found = _components(name), []
    for index, component in enumerate(components):
        key, inline = _split(component, name)
        row = None if index else ROWS.get(key)
        mechanism = key if index else row.mechanism if row else ""
        if not mechanism:
            continue
        outside = dict(row.options if row else attach_options or {} if len(components) == 2 else {})
        for control in hosts.controls_of(mechanism, {**outside, **inline}):
            written = _written(component, control, mechanism, outside)
            changed = "+".join((*components[:index], written, *components[index + 1 :]))
            found.append(ControlNetwork(changed, mechanism, control))
    return found


def _written(component: str, control: Control, mechanism: str, outside: Mapping[str, Any]) -> str:
    """Returns a component of a name with the options of a control.

    Args:
        outside: options of the mechanism that are not in the name. Those that mean nothing in the control are written
            with their defaults.
    """
    key, _, text = component.partition(":")
    replaced = (*control.options, *control.without)
    kept = [entry for entry in _entries(text) if entry.partition("=")[0] not in replaced]
    defaults = {field.name: field.default for field in dataclasses.fields(hosts.MECHANISMS[mechanism].options)}
    changed = {option: defaults[option] for option in control.without if option in outside} | dict(control.options)
    return f"{key}:{','.join([*kept, *(f'{option}={_text(value)}' for option, value in changed.items())])}"


def _text(value: Any) -> str:
    """Returns a value as `parse_value` reads it."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("...\n").strip()


def same_network(first: str, second: str) -> bool:
    """Whether two names mean the same network, with options in any order."""

    def parsed(name: str) -> Any:
        return *split_name(name), own_options(name)

    return parsed(first) == parsed(second)
