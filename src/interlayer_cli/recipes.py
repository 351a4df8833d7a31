"""`interlayer recipes`: list the recipes of the library and the keys of recipes."""

from typing import Annotated, Any

import typer

from .completion import complete_recipe


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="The recipe to print, or the key to explain.", autocompletion=complete_recipe),
    ] = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print all values, including defaults and inherited values.")
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List all keys of recipes and their meaning.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all keys and their meaning as Markdown.")] = False,
) -> None:
    """List the recipes, print one, or explain a key.

    Every key of a recipe can be set on the command line of `interlayer train`, as in `epochs=10`.

    Examples: `interlayer recipes rla_cifar`, `interlayer recipes new_lr_scale`, `interlayer recipes --keys`
    """
    from interlayer.training.recipe import list_keys, list_recipes, load_recipe, recipe_text

    if markdown:
        typer.echo(_markdown(), nl=False)
    elif keys:
        _print_table(("key", "default", "meaning"), [(k.name, k.default, k.meaning) for k in list_keys().values()])
    elif name is None:
        _print_table(("recipe", "description"), [(entry, _description(recipe_text(entry))) for entry in list_recipes()])
    elif name in list_keys():
        _explain(name)
    else:
        typer.echo(load_recipe(name).to_yaml() if resolved else recipe_text(name), nl=False)


def _description(text: str) -> str:
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    return next((line for line in lines if line and not line.startswith("interlayer ")), "")


def _explain(name: str) -> None:
    """Prints the meaning of a key, its type and default, and the recipes that set it."""
    from interlayer.training.keys import shown_value
    from interlayer.training.recipe import list_keys, recipes_with

    key = list_keys()[name]
    typer.echo(f"{name}: {key.meaning}")
    typer.echo(f"  {key.type}; default {key.default}")
    by_value: dict[str, list[str]] = {}
    for recipe, value in recipes_with(name).items():
        by_value.setdefault(shown_value(value), []).append(recipe)
    for shown, names in by_value.items():
        typer.echo(f"  {shown} in {', '.join(names)}")


def _markdown() -> str:
    """Returns all keys as Markdown, one table for each section of the recipe."""
    from interlayer.training.recipe import SECTIONS, list_keys

    lines = [
        "# Keys of recipes", "", "Printed by `interlayer recipes --markdown`. Every key can be set in a recipe file as",
        "`key: value` and on the command line as `key=value`.",
    ]  # fmt: skip
    for key in list_keys().values():
        if key.name in SECTIONS:
            lines += [
                "",
                f"## {SECTIONS[key.name]}",
                "",
                "| key | values | default | meaning |",
                "| --- | --- | --- | --- |",
            ]
        lines.append(f"| `{key.name}` | {key.type} | {key.default} | {key.meaning} |")
    return "\n".join(lines) + "\n"


def _print_table(columns: tuple[str, ...], rows: Any) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))  # values can contain brackets, which are markup
    Console(width=None if Console().is_terminal else 140).print(table)
