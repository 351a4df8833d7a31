"""The folder of a run. A folder holds one run, and only the same recipe can be resumed in it."""

from __future__ import annotations

from pathlib import Path

from .checkpoint import Checkpoints
from .files import TrainingError, write_text
from .lock import FolderLock
from .processes import Processes
from .recipe import Recipe, differences, read_recipe

MACHINE_KEYS = {  # may change when a run is resumed: they do not affect the results beyond rounding
    "workers", "resident", "tensorboard", "wandb", "checkpoint_steps", "eval_batch_size", "compile", "cuda_graph",
    "device",
}  # fmt: skip


class RunFolder:
    """A folder that is locked for one run.

    Args:
        path: the folder. All ranks use the path of rank 0, because default names contain the time.
        recipe: the recipe of the run.
        resume: whether to resume the run that is in the folder, if there is one.
    """

    def __init__(self, path: Path, recipe: Recipe, processes: Processes, *, resume: bool) -> None:
        self.path: Path = processes.broadcast(path)
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self.lock = FolderLock(self.path) if processes.is_main else None
        try:
            self._claim(recipe, resume)
        except BaseException:
            self.release()
            raise

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.yaml"

    def _claim(self, recipe: Recipe, resume: bool) -> None:
        """Raises if the folder holds another run."""
        if (self.recipe_file.exists() or self.checkpoints.all()) and not resume:
            raise TrainingError(f"{self.path} already holds a run: --resume to continue it, or choose another folder")
        if self.recipe_file.exists():
            check_same_recipe(self.path, recipe)
        for unfinished in self.path.glob(".*.safetensors.*"):  # left by a process that was killed while writing
            unfinished.unlink(missing_ok=True)

    def write_recipe(self, recipe: Recipe, command: str) -> None:
        """Writes the recipe, unless a resumed run has already written it."""
        if not self.recipe_file.exists():
            write_text(self.recipe_file, recipe.to_yaml(command))

    @property
    def command(self) -> str:
        """The command that started the run, as recipe.yaml records it."""
        lines = self.recipe_file.read_text().splitlines() if self.recipe_file.exists() else []
        return "\n".join(line.removeprefix("# ") for line in lines if line.startswith("# "))

    def release(self) -> None:
        """Releases the lock. Removes the folder if nothing was written in it."""
        if self.lock is not None:
            self.lock.release(remove=not self.recipe_file.exists())


def check_same_recipe(folder: Path, recipe: Recipe) -> None:
    """Raises if the run in the folder has another recipe."""
    changed = {
        key: values
        for key, values in differences(read_recipe(folder / "recipe.yaml"), recipe).items()
        if key not in MACHINE_KEYS
    }
    if changed:
        listed = ", ".join(f"{key} {before!r} -> {now!r}" for key, (before, now) in changed.items())
        raise TrainingError(f"{folder} holds a run of another recipe ({listed}): choose another folder")
