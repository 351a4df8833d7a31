"""`interlayer mechanisms`: list the mechanisms and their options."""

from typing import Annotated, Any

import typer

PLAIN_CONTROL = "Control: the plain network."


def mechanisms(
    name: Annotated[str | None, typer.Argument(help="The mechanism to list the options of.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all mechanisms and options as Markdown.")] = False,
) -> None:
    """List the mechanisms, or the options and controls of one.

    Options follow the name of the mechanism, as in `resnet50+mrla_light:channels_per_head=16`, in all commands.

    Examples: `interlayer mechanisms`, `interlayer mechanisms mrla_light`
    """
    from rich.console import Console
    from rich.table import Table

    from interlayer.hosts import MECHANISMS, options_of

    if markdown:
        typer.echo(_markdown(), nl=False)
        return
    console = Console(width=None if Console().is_terminal else 140)
    if name is None:
        table = Table("mechanism", "description")
        for key, row in MECHANISMS.items():
            table.add_row(key, row.about)
    else:
        options, controls = options_of(name), MECHANISMS[name].controls
        console.print(f"{name}: {MECHANISMS[name].about}", highlight=False)
        if options:
            table = Table("option", "default", "meaning")
            for option in options.values():
                table.add_row(option.name, option.default, option.meaning)
            console.print(table)
        if not controls:
            console.print(PLAIN_CONTROL)
            return
        table = Table("control", "what is left", "what is tested")
        for control in controls:
            table.add_row(_written(control), control.left, control.tested)
    console.print(table)


def _written(control: Any) -> str:
    """Returns the options of a control as they are written behind the name of the mechanism."""
    return ",".join(f"{key}={str(value).lower()}" for key, value in control.options.items())


def _markdown() -> str:
    """Returns all mechanisms as Markdown. Mechanisms with the same options share a table."""
    from interlayer.hosts import MECHANISMS, options_of

    groups: dict[tuple[Any, ...], list[str]] = {}
    for key, row in MECHANISMS.items():
        groups.setdefault((row.options, *map(id, row.controls)), []).append(key)
    lines = [
        "# Options",
        "",
        "Printed by `interlayer mechanisms --markdown`. [Controls](controls.md) are the mechanism",
    ]
    lines += ["without what it is credited with.", ""]
    for keys in groups.values():
        lines += ["## " + ", ".join(f"`{key}`" for key in keys), ""]
        lines += [f"- `{key}`: {MECHANISMS[key].about}." for key in keys]
        options = options_of(keys[0])
        if options:
            lines += ["", "| option | default | meaning |", "| --- | --- | --- |"]
            lines += [f"| `{option.name}` | {option.default} | {option.meaning} |" for option in options.values()]
        else:
            lines += ["", "No options."]
        controls = MECHANISMS[keys[0]].controls
        if controls:
            lines += ["", "| control | what is left | what is tested |", "| --- | --- | --- |"]
            lines += [f"| `{_written(control)}` | {control.left} | {control.tested} |" for control in controls]
        else:
            lines += ["", PLAIN_CONTROL]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"
