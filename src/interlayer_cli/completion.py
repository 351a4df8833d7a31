"""Names that the shell completes. They are found without importing torch, so that completion is immediate."""

from importlib.util import find_spec
from pathlib import Path


def recipe_names() -> list[str]:
    """Returns the names of the recipes that come with the package."""
    spec = find_spec("interlayer")  # finds the package without importing it
    folders = list(spec.submodule_search_locations or []) if spec else []
    return sorted(file.stem for folder in folders for file in Path(folder, "recipes").glob("*.yaml"))


def complete_recipe(incomplete: str) -> list[str]:
    """Returns the names of recipes that begin with ``incomplete``."""
    return [name for name in recipe_names() if name.startswith(incomplete)]
