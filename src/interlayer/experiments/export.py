"""Export of a network to a file that runs without this library: ONNX, or the format of torch.export.

The exported program takes normalized images [batch, 3, height, width] in float32. What is needed to make them, and the
names of the classes, is stored in the file. A file is checked before it gets its name: it is loaded again and its
outputs are compared with those of the network.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from ..models.checkpoints import replacing
from ..ops import backend
from ..training.files import writing
from .trained import LoadedNetwork

FORMATS = ("onnx", "pt2")
METADATA_FILE = "metadata.json"  # the extra file of a .pt2 file
TOLERANCE = 1e-4
ROUNDINGS = 4.0  # times the rounding of the network itself, if that exceeds the tolerance
TRACED_BATCH, CHECKED_BATCHES = 2, (1, 3)
MOST_ONNX_BYTES = 2**31 - 2**20  # protocol buffers are limited to 2 GiB

Run = Callable[[Tensor], list[Tensor]]


class ExportError(ValueError):
    """A network cannot be exported, or the exported program computes something else. The message says why."""


@dataclass(frozen=True)
class ExportReport:
    """A file that was exported and checked.

    Args:
        path: the file.
        batch_sizes: the batch sizes at which its outputs were compared with those of the network.
        difference: the largest absolute difference.
        scale: the largest absolute output of the network.
    """

    path: Path
    batch_sizes: tuple[int, ...]
    difference: float
    scale: float


def export_model(
    network: nn.Module,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    batch_size: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    images: Tensor | None = None,
    tolerance: float = TOLERANCE,
    overwrite: bool = False,
) -> ExportReport:
    """Exports a network as an ONNX or torch.export file and checks the file.

    The network is exported on the CPU in eval mode and is not changed. Its operations are exported as plain PyTorch.

    Args:
        network: the network.
        path: the file to write.
        format: "onnx" or "pt2"; by default that of the suffix of ``path``.
        image_size: height and width of the images; those of the network's configuration if None.
        batch_size: the number of images of a batch; any number if None.
        metadata: JSON-serializable values that are stored in the file in addition to `metadata_of`.
        images: normalized images [B, 3, H, W] for the comparison; random numbers if None.
        tolerance: the largest difference between the outputs of the file and of the network, relative to the largest
            output, or to 1 if that is larger. A network that amplifies rounding may differ by four times the difference
            between its own outputs in float32 and in float64.
        overwrite: whether to replace an existing file.

    Raises:
        ExportError: the network cannot be exported, a package is missing, or the outputs differ. No file is written.

    >>> interlayer.export_model(model, "model.onnx")
    """
    path = Path(path)
    chosen = _format(path, format)
    _check_output(path, overwrite)
    _check_packages(chosen)
    exported = copy.deepcopy(network).cpu().float().eval()
    height, width = _size(exported, image_size)
    described = {**metadata_of(exported, (height, width)), **(metadata or {})}
    example = torch.randn(batch_size or TRACED_BATCH, 3, height, width, generator=torch.Generator().manual_seed(0))
    with writing(path), replacing(path) as temporary, backend("auto"), torch.no_grad():
        write, load = (_write_onnx, _load_onnx) if chosen == "onnx" else (_write_pt2, _load_pt2)
        with _quiet():
            try:
                write(exported, example, temporary, batch_size is None, described)
                run = load(temporary)
            except OSError:
                raise
            except Exception as error:  # the exporters raise errors of many types
                raise ExportError(_cannot_export(network, chosen, batch_size, error)) from error
        batches = _batches(example, images, batch_size)
        report = _compare(exported, run, path, batches)
        allowed = tolerance * max(1.0, report.scale)
        if report.difference > allowed and report.difference > ROUNDINGS * _rounding(network, batches):
            raise ExportError(
                f"{path} was not written: its outputs differ from those of the network by up to "
                f"{report.difference:.1e}, where outputs are up to {report.scale:.1e}"
            )
    return report


def export_source(source: LoadedNetwork, path: Path, **options: Any) -> ExportReport:
    """Exports the network of a run or of a named model, with its classes and the transform of its images."""
    if source.task.annotations != "labels":
        raise ExportError(f"networks of task={source.task.name} cannot be exported: only classifiers can")
    transform = source.transform
    metadata = {
        "model": source.recipe.model,
        "classes": source.classes if source.class_names else [],
        "mean": list(transform.mean),
        "std": list(transform.std),
        "interpolation": transform.interpolation,
        "crop_pct": transform.crop_pct,
        "crop_mode": transform.crop_mode,
    }
    return export_model(source.network, path, image_size=transform.size, metadata=metadata, **options)


def metadata_of(network: nn.Module, image_size: tuple[int, int]) -> dict[str, Any]:
    """Returns what timm knows about the images of a network: mean, std, interpolation and crop."""
    config = timm.data.resolve_model_data_config(network)
    return {
        "input": "normalized images [batch, 3, height, width], float32",
        "image_size": list(image_size),
        "mean": list(config["mean"]),
        "std": list(config["std"]),
        "interpolation": config["interpolation"],
        "crop_pct": config["crop_pct"],
        "crop_mode": config["crop_mode"],
    }


def _format(path: Path, wanted: str | None) -> str:
    suffix = path.suffix.removeprefix(".")
    chosen = wanted or suffix
    if chosen not in FORMATS:
        raise ExportError(f"expected a format among {', '.join(FORMATS)}, got {chosen!r}")
    if suffix != chosen:
        raise ExportError(f"expected a file name that ends in .{chosen}, got {path.name!r}")
    return chosen


def _check_output(path: Path, overwrite: bool) -> None:
    if not path.parent.is_dir():
        raise ExportError(f"{path.parent}: no such folder")
    if path.is_dir():
        raise ExportError(f"{path} is a folder, expected the name of a file")
    if path.exists() and not overwrite:
        raise ExportError(f"{path} exists; give --overwrite (overwrite=True in Python) to replace it")


def _check_packages(chosen: str) -> None:
    needed = ("onnx", "onnxscript", "onnxruntime") if chosen == "onnx" else ()
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ExportError(f"exporting to ONNX needs {', '.join(missing)}: pip install {' '.join(missing)}")


def _size(network: nn.Module, image_size: int | tuple[int, int] | None) -> tuple[int, int]:
    if image_size is None:
        height, width = timm.data.resolve_model_data_config(network)["input_size"][-2:]
        return int(height), int(width)
    return (image_size, image_size) if isinstance(image_size, int) else image_size


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses what the exporters print, warn and log about their own internals. Their errors remain."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _dynamic(any_batch: bool) -> Any:
    return ({0: torch.export.Dim("batch")},) if any_batch else None


def _write_pt2(network: nn.Module, example: Tensor, path: Path, any_batch: bool, metadata: Mapping[str, Any]) -> None:
    program = torch.export.export(network, (example,), dynamic_shapes=_dynamic(any_batch))
    contents = io.BytesIO()  # torch's own writer ends the process if the disk is full
    torch.export.save(program, contents, extra_files={METADATA_FILE: json.dumps(metadata, indent=2)})
    path.write_bytes(contents.getbuffer())


def _load_pt2(path: Path) -> Run:
    module = torch.export.load(path).module()
    return lambda images: _leaves(module(images))


def _write_onnx(network: nn.Module, example: Tensor, path: Path, any_batch: bool, metadata: Mapping[str, Any]) -> None:
    size = sum(tensor.nbytes for tensor in network.state_dict().values())
    if size > MOST_ONNX_BYTES:
        raise ExportError(f"its weights of {size / 2**30:.1f} GiB do not fit in an ONNX file; export it as pt2")
    program: Any = torch.onnx.export(
        network, (example,), dynamo=True, dynamic_shapes=_dynamic(any_batch), verbose=False, input_names=["images"]
    )
    for key, value in metadata.items():
        program.model.metadata_props[key] = json.dumps(value)
    program.save(path, external_data=False)


def _load_onnx(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (images_input,) = session.get_inputs()
    return lambda images: [
        torch.from_numpy(output) for output in session.run(None, {images_input.name: images.numpy()})
    ]


def _batches(example: Tensor, images: Tensor | None, batch_size: int | None) -> list[Tensor]:
    """Returns the batches of the comparison: two sizes, neither of which was traced, or one if the size is fixed."""
    pool = example if images is None else images.detach().cpu().float()
    sizes = CHECKED_BATCHES if batch_size is None else (batch_size,)
    if images is None:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(size, *example.shape[1:], generator=generator) for size in sizes]
    if pool.shape[1:] != example.shape[1:]:
        raise ExportError(
            f"expected images of shape [B, {', '.join(map(str, example.shape[1:]))}], got {list(pool.shape)}"
        )
    return [pool[[index % len(pool) for index in range(size)]] for size in sizes]


def _leaves(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _compare(network: nn.Module, run: Run, path: Path, batches: Sequence[Tensor]) -> ExportReport:
    """Compares the outputs of a loaded file with those of the network."""
    difference, scale = 0.0, 0.0
    for images in batches:
        expected, found = _leaves(network(images)), run(images)
        if [tuple(tensor.shape) for tensor in expected] != [tuple(tensor.shape) for tensor in found]:
            shapes = [[list(tensor.shape) for tensor in tensors] for tensors in (expected, found)]
            raise ExportError(f"{path} was not written: expected outputs of shapes {shapes[0]}, got {shapes[1]}")
        for ours, theirs in zip(expected, found, strict=True):
            distance = float((ours - theirs).abs().max())
            difference = max(difference, distance if distance == distance else float("inf"))
            scale = max(scale, float(ours.abs().max()))
    return ExportReport(path, tuple(len(images) for images in batches), difference, scale)


def _rounding(network: nn.Module, batches: Sequence[Tensor]) -> float:
    """Returns the largest difference between the outputs of the network in float32 and in float64."""
    single, double = (copy.deepcopy(network).cpu().eval().to(dtype) for dtype in (torch.float32, torch.float64))
    largest = 0.0
    for images in batches:
        try:
            exact = _leaves(double(images.double()))
        except RuntimeError:  # a network with operations of a fixed dtype
            return 0.0
        rounded = _leaves(single(images))
        largest = max([largest, *(float((a - b).abs().max()) for a, b in zip(rounded, exact, strict=True))])
    return largest


def _cannot_export(network: nn.Module, chosen: str, batch_size: int | None, error: Exception) -> str:
    while error.__cause__ is not None:  # torch.onnx wraps the reason
        error = error.__cause__  # type: ignore[assignment]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0][:300] if lines else type(error).__name__
    remedy = "; a fixed batch size (--batch-size) may be possible" if batch_size is None else ""
    return f"{type(network).__name__} cannot be exported to {chosen}: {reason}{remedy}"
