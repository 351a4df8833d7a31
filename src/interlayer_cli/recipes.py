"""`interlayer recipes`: list the recipes of the library."""

from typing import Annotated

import typer

from .completion import complete_recipe


def recipes(
    name: Annotated[str | None, typer.Argument(help="The recipe to print.", autocompletion=complete_recipe)] = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print all values, including defaults and inherited values.")
    ] = False,
) -> None:
    """List the recipes, or print one.

    Example: `interlayer recipes rla_cifar`
    """
    from interlayer.training.recipe import list_recipes, load_recipe, recipe_text

    if name is not None:
        typer.echo(load_recipe(name).to_yaml() if resolved else recipe_text(name), nl=False)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("recipe", "description")
    for entry in list_recipes():
        lines = [line.removeprefix("#").strip() for line in recipe_text(entry).splitlines() if line.startswith("#")]
        about = [line for line in lines if line and not line.startswith("interlayer ")]
        table.add_row(entry, about[0] if about else "")
    Console(width=None if Console().is_terminal else 140).print(table)
