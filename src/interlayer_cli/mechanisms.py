"""`interlayer mechanisms`: what can be attached, and with which options."""

from typing import Annotated

import typer


def mechanisms(
    name: Annotated[str | None, typer.Argument(help="A mechanism whose options are listed.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all of them as Markdown.")] = False,
) -> None:
    """List the mechanisms, or the options of one.

    Options are written behind a model's name, `resnet50+mrla_light:channels_per_head=16`, wherever a command takes one.

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
        table = Table("mechanism", "what it is")
        for key, row in MECHANISMS.items():
            table.add_row(key, row.about)
    else:
        options = options_of(name)
        console.print(f"{name}: {MECHANISMS[name].about}", highlight=False)
        if not options:
            return
        table = Table("option", "default", "meaning")
        for option in options.values():
            table.add_row(option.name, option.default, option.meaning)
    console.print(table)


def _markdown() -> str:
    """The same as a page of Markdown; mechanisms with the same options share a table."""
    from interlayer.hosts import MECHANISMS, options_of

    groups: dict[type, list[str]] = {}
    for key, row in MECHANISMS.items():
        groups.setdefault(row.options, []).append(key)
    lines = ["# Options", "", "Printed by `interlayer mechanisms --markdown`.", ""]
    for keys in groups.values():
        lines += ["## " + ", ".join(f"`{key}`" for key in keys), ""]
        lines += [f"- `{key}`: {MECHANISMS[key].about}." for key in keys]
        options = options_of(keys[0])
        if options:
            lines += ["", "| option | default | meaning |", "| --- | --- | --- |"]
            lines += [f"| `{option.name}` | {option.default} | {option.meaning} |" for option in options.values()]
        else:
            lines += ["", "No options."]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"
