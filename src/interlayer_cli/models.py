"""`interlayer models`: list the models that the library registers with timm."""

from typing import Annotated

import typer


def models(
    pattern: Annotated[str, typer.Argument(help="Shell-style pattern, such as 'resnet50_*'.")] = "*",
    parameters: Annotated[
        bool, typer.Option("--parameters", help="Count the parameters, and those added to the backbone.")
    ] = False,
) -> None:
    """List the models that `import interlayer` registers with timm.

    Examples: `interlayer models`, `interlayer models 'deit_*' --parameters`
    """
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from interlayer.models import backbone_of, list_models

    names = list_models(pattern)
    if not names:
        raise ValueError(f"no model matches {pattern!r}; {_suggestion(pattern)}")
    table = Table("model", "backbone")
    if parameters:
        table.add_column("parameters", justify="right")
        table.add_column("added", justify="right")
    progress = Console(stderr=True)
    for name in track(names, "counting", console=progress, transient=True, disable=not parameters):
        row = [name, backbone_of(name) if backbone_of(name) != name else ""]
        if parameters:
            ours, plain = (_count(model) for model in (name, backbone_of(name)))
            row += [f"{ours:,}", f"+{ours - plain:,}" if ours != plain else ""]
        table.add_row(*row)
    Console().print(table)


def _suggestion(pattern: str) -> str:
    """Returns a pattern that matches, the most similar names, or the command that lists all models."""
    from difflib import get_close_matches

    from interlayer.models import list_models

    word = pattern.strip("*")
    containing = len(list_models(f"*{word}*"))
    if containing:
        return f"'*{word}*' matches {containing}"
    near = get_close_matches(word, list_models(), n=3)
    return f"did you mean {', '.join(near)}?" if near else "`interlayer models` lists them all"


def _count(name: str) -> int:
    import torch

    from interlayer.analysis import count_parameters
    from interlayer.analysis.shapes import RememberedShapes
    from interlayer.models.build import build_network

    with torch.device("meta"), RememberedShapes():
        return count_parameters(build_network(name))
