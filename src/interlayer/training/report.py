"""report.html: what a run or a comparison came to, as one file that needs nothing else.

Curves, table, heatmaps of which layer reads which, test images the networks disagree on, recipe, versions, command.
Everything is read from the folders of the runs, so a report can be made again at any time.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
from html import escape
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from PIL import Image

from ..analysis import layer_scores, plot_layer_scores
from ..hosts import attached_mechanisms
from ..models import load_weights
from ..tasks import make_task
from .compare import Comparison, points
from .data import BatchTransform, Images, ImageTransform, open_data
from .files import write_text
from .logs import read_metrics
from .network import build_network
from .recipe import Recipe, read_recipe
from .summary import read_summary

COLOURS = ("#3b6ea8", "#c8553d", "#4a8f5b", "#8a63a8", "#b58a2b", "#4b9c9c")
SHOWN_IMAGES = 24
SCORED_IMAGES = 64
STYLE = """
:root { color-scheme: light; --ink: #1d2430; --soft: #5c6675; --line: #dde2ea; --card: #f7f8fa; }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink); background: #fff;
  margin: 0 auto; max-width: 68rem; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 3rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 0.6rem; }
p { margin: 0.4rem 0; } .soft { color: var(--soft); font-size: 0.92rem; }
.verdict { background: var(--card); border-left: 4px solid #3b6ea8; padding: 0.7rem 1rem; margin: 0.8rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.45rem 0.6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; color: var(--soft); font-size: 0.88rem; white-space: normal; vertical-align: bottom; }
figure { margin: 0; } figure img { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 0.9rem; }
.pair { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.triple { display: grid; gap: 0.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 1fr)); }
.grid { display: grid; gap: 0.7rem; grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)); }
.grid figure { border: 1px solid var(--line); border-radius: 6px; overflow: hidden; background: var(--card); }
.grid img { aspect-ratio: 1; object-fit: contain; image-rendering: pixelated; background: #fff; }
.grid figcaption { padding: 0.35rem 0.5rem; font-size: 0.78rem; line-height: 1.35; overflow-wrap: anywhere; }
.key { display: inline-block; width: 0.7em; height: 0.7em; border-radius: 50%; margin-right: 0.35em; }
.right { color: #2c7a44; } .wrong { color: #b23b2a; }
pre { background: var(--card); padding: 0.8rem 1rem; overflow-x: auto; font-size: 0.82rem; line-height: 1.45;
  border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { body { max-width: none; padding: 0; font-size: 11pt; } figure, tr, .verdict { break-inside: avoid; }
  h2 { break-after: avoid; } .scroll { overflow: visible; }
  th, td { padding: 0.25rem 0.3rem; } table, th { font-size: 8.5pt; } }
"""


def write_comparison_report(comparison: Comparison) -> Path:
    """Write the report of a comparison into its folder."""
    names = [result.model for result in comparison.results]
    runs = {result.model: result.folders for result in comparison.results}
    first = comparison.results[0].folders[0]
    images = _test_images(read_recipe(first / "recipe.yaml"))
    body = [
        f"<h1>{escape(' or '.join(names))}?</h1>",
        f"<p class=soft>{escape(_setting(comparison.recipe))}, {len(comparison.seeds)} seeds each.</p>",
        *(f"<p class=verdict>{escape(text)}</p>" for text in comparison.verdicts()),
        *(f"<p class=soft>{escape(note)}</p>" for note in comparison.notes),
        _bad_images(read_summary(comparison.results[0].folders[0])["bad_images"]),
        "<h2>Accuracy and cost</h2>",
        _comparison_table(comparison),
        "<h2>Training</h2>",
        _curves(runs),
        *_attention(runs, images),
        *_disagreements(runs, images),
        *_record(comparison.command, comparison.recipe.replace(model=", ".join(names)), first),
    ]
    return _write(comparison.folder / "report.html", f"Comparison: {', '.join(names)}", body)


def write_run_report(folder: Path) -> Path:
    """Write the report of a single finished run into its folder."""
    recipe, summary = read_recipe(folder / "recipe.yaml"), read_summary(folder)
    runs = {recipe.model: [folder]}
    images = _test_images(recipe)
    test = summary["test"]
    table = _table(
        ["test accuracy", "top 5", "test loss", "images", "epoch tested", "training time"],
        [[
            _percent(test["accuracy"]), _percent(test["top5"]), f"{test['loss']:.4f}", f"{test['images']:,}",
            f"{summary['chosen_epoch']} ({summary['chosen_by']})", _duration(summary["seconds"]),
        ]],
        [recipe.model],
    )  # fmt: skip
    body = [
        f"<h1>{escape(recipe.model)}: {_percent(test['accuracy'])}</h1>",
        f"<p class=soft>{escape(_setting(recipe))}, seed {recipe.seed}, on {escape(summary['device'])}.</p>",
        *(f"<p class=soft>{escape(note)}</p>" for note in summary["notes"]),
        _bad_images(summary["bad_images"]),
        "<h2>Result</h2>",
        table,
        "<h2>Training</h2>",
        _curves(runs),
        *_attention(runs, images),
        *_mistakes(folder, images),
        *_record(summary["command"], recipe, folder),
    ]
    return _write(folder / "report.html", f"{recipe.model}: {_percent(test['accuracy'])}", body)


def _write(path: Path, title: str, body: list[str]) -> Path:
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    write_text(
        path, f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )
    return path


def _setting(recipe: Recipe) -> str:
    return (
        f"{recipe.data}, {recipe.epochs} epochs, batch {recipe.batch_size}, {recipe.optimizer} with learning rate "
        f"{recipe.scaled_lr:g}, {recipe.schedule} schedule, {recipe.precision}"
    )


def _percent(value: float) -> str:
    return f"{value * 100:.2f}%"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _table(head: list[str], rows: list[list[str]], names: list[str]) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in ["", *head])
    lines = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for name, row in zip(names, rows, strict=True)
    )
    return f"<div class=scroll><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>"


TABLE_HEAD = ["accuracy", "difference (95% interval)", "parameters", "MFLOPs", "epoch", "memory"]


def comparison_rows(comparison: Comparison) -> list[list[str]]:
    """The cells of a comparison's table, a row for each network."""
    return [
        [
            _percent(result.mean) + ("" if math.isnan(result.spread) else f" ± {result.spread * 100:.2f}"),
            _difference(result.difference),
            f"{result.cost.parameters:,}",
            f"{result.cost.flops / 1e6:,.1f}",
            f"{result.cost.epoch_seconds:.2f} s",
            f"{result.cost.memory / 2**20:,.0f} MiB",
        ]
        for result in comparison.results
    ]


def _difference(difference: Any) -> str:
    if difference is None:
        return ""
    if difference.low is None:
        return points(difference.mean)
    return f"{points(difference.mean)} ({points(difference.low)} to {points(difference.high)})"


def table_note(comparison: Comparison) -> str:
    """What the columns of the table mean."""
    shared = f", {comparison.together} runs sharing the GPU" if comparison.together > 1 else ""
    return (
        f"accuracy on the test images, mean ± standard deviation over {len(comparison.seeds)} seeds; difference to "
        f"{comparison.results[0].model} pair by pair, in points; MFLOPs: multiply-adds of one image; epoch: median "
        f"seconds of training{shared}; memory: peak of a training step of one run, with SGD; the interval is about "
        f"seeds, not about other test images"
    )


def _comparison_table(comparison: Comparison) -> str:
    table = _table(TABLE_HEAD, comparison_rows(comparison), [result.model for result in comparison.results])
    note = table_note(comparison)
    return f"{table}<p class=soft>{escape(note[0].upper() + note[1:])}.</p>"


def _curves(runs: dict[str, list[Path]]) -> str:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    parts = []
    for title, trained, evaluated in (
        ("Loss", "train_loss", "eval_loss"),
        ("Accuracy", "train_accuracy", "eval_accuracy"),
    ):
        figure = Figure(figsize=(5.4, 3.7), layout="constrained")
        axes = figure.subplots()
        for colour, (model, folders) in zip(_colours(len(runs)), runs.items(), strict=True):
            histories = [read_metrics(folder) for folder in folders]
            epochs = [row["epoch"] for row in histories[0]]
            for key, style in ((trained, ":"), (evaluated, "-")):
                for history in histories:
                    axes.plot(epochs, [row[key] for row in history], style, color=colour, alpha=0.35, linewidth=0.9)
                means = [sum(rows[i][key] for rows in histories) / len(histories) for i in range(len(epochs))]
                label = f"{model}, {'training' if key == trained else 'held out'}"
                marker = "o" if len(epochs) == 1 else None
                axes.plot(epochs, means, style, color=colour, linewidth=1.9, label=label, marker=marker)
        axes.set_xlabel("epoch")
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        if title == "Loss":
            axes.set_yscale("log")
        axes.legend(fontsize=7.5, frameon=False)
        parts.append(_figure(figure, f"{title} over epochs"))
    caption = (
        "Thick: mean over the seeds; thin: each run; dotted: training images, as augmented; solid: held-out images."
    )
    return f"<div class=pair>{''.join(parts)}</div><p class=soft>{caption}</p>"


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _figure(figure: Any, alternative: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<figure><img alt="{escape(alternative)}" src="data:image/svg+xml;base64,{data}"></figure>'


def _test_images(recipe: Recipe) -> Images | None:
    """The test images, where they can be opened one by one. What cannot be read was reported in training."""
    test = open_data(recipe.replace(on_bad_image="skip")).test
    return test if isinstance(test, Images) else None


def _attention(runs: dict[str, list[Path]], images: Images | None) -> list[str]:
    """Heatmaps of the networks that have layer attention, of the first seed."""
    parts = []
    for model, folders in runs.items():
        recipe, summary = read_recipe(folders[0] / "recipe.yaml"), read_summary(folders[0])
        network = build_network(recipe.replace(pretrained=False, weights=None), len(summary["classes"]))
        if not attached_mechanisms(network):
            continue
        if images is None:
            continue
        load_weights(network, folders[0] / "weights.safetensors")
        image_transform = ImageTransform.of(network, recipe)
        transform = image_transform.evaluation()
        places = _predictions(folders[0])[0][:, 0].tolist()  # of images that could be read
        chosen = [places[i] for i in _spread(len(places), SCORED_IMAGES)]
        pixels = torch.stack([torch.as_tensor(transform(images.open(place))) for place in chosen])
        task = make_task(dataclasses.asdict(recipe), summary["classes"])
        batch_transform = BatchTransform.of(
            recipe, task, image_transform.mean, image_transform.std, torch.device("cpu")
        )
        try:
            stages = layer_scores(network, batch_transform.normalize(pixels))
        except ValueError:  # a form of the mechanism that has no scores
            continue
        figures = [
            _figure(plot_layer_scores([stage], title=""), f"Which layer of {model} reads which, {stage.name}")
            for stage in stages
        ]
        parts += [f"<p><b>{escape(model)}</b>, seed {recipe.seed}</p>", f"<div class=triple>{''.join(figures)}</div>"]
    if not parts:
        return []
    caption = f"Weight with which a layer reads those before it, mean over {len(chosen)} test images and all heads."
    return ["<h2>Which layer reads which</h2>", *parts, f"<p class=soft>{caption}</p>"]


def _spread(total: int, wanted: int) -> list[int]:
    """Up to `wanted` places spread evenly over `total`."""
    count = min(total, wanted)
    return [i * total // count for i in range(count)]


def _predictions(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = safetensors.torch.load_file(folder / "predictions.safetensors")
    return tensors["predictions"], tensors["confidences"]


def _disagreements(runs: dict[str, list[Path]], images: Images | None) -> list[str]:
    """Test images that the first two networks, of the first seed, see differently."""
    (first, a), (second, b) = [(model, folders[0]) for model, folders in runs.items()][:2]
    classes = read_summary(a)["classes"]
    if images is None:
        return []
    (rows_a, sure_a), (rows_b, sure_b) = _predictions(a), _predictions(b)
    differ = (rows_a[:, 2] != rows_b[:, 2]).nonzero().flatten().tolist()
    title = "<h2>Where they disagree</h2>"
    if not differ:
        return [title, "<p>The two networks, with the first seed, predict the same class for every test image.</p>"]
    right_a = int((rows_a[differ, 2] == rows_a[differ, 1]).sum())
    right_b = int((rows_b[differ, 2] == rows_b[differ, 1]).sum())
    keys = [
        f'<span class=key style="background:{colour}" title="{escape(model)}"></span>'
        for colour, model in zip(_colours(2), (first, second), strict=True)
    ]
    cells = []
    for index in [differ[i] for i in _spread(len(differ), SHOWN_IMAGES)]:
        place, label = int(rows_a[index, 0]), int(rows_a[index, 1])
        lines = [f"<b>{escape(classes[label])}</b>"]
        for key, rows, sure in zip(keys, (rows_a, rows_b), (sure_a, sure_b), strict=True):
            lines.append(_said(key, classes[int(rows[index, 2])], float(sure[index]), int(rows[index, 2]) == label))
        cells.append(_cell(images, place, lines))
    text = (
        f"{len(differ)} of {len(rows_a)} test images get another class from the two networks (first seed): {first} is "
        f"right on {right_a} of them, {second} on {right_b}."
    )
    legend = f"<p class=soft>{keys[0]}{escape(first)} &nbsp; {keys[1]}{escape(second)}; in bold the true class</p>"
    return [title, f"<p>{escape(text)}</p>", legend, f"<div class=grid>{''.join(cells)}</div>"]


def _mistakes(folder: Path, images: Images | None) -> list[str]:
    classes = read_summary(folder)["classes"]
    if images is None:
        return []
    rows, sure = _predictions(folder)
    mistaken = (rows[:, 2] != rows[:, 1]).nonzero().flatten()
    wrong = mistaken[sure[mistaken].argsort(descending=True)].tolist()
    if not wrong:
        return ["<h2>Mistakes</h2>", "<p>None on the test images.</p>"]
    cells = [
        _cell(
            images,
            int(rows[i, 0]),
            [f"<b>{escape(classes[int(rows[i, 1])])}</b>", _said("", classes[int(rows[i, 2])], float(sure[i]), False)],
        )
        for i in wrong[:SHOWN_IMAGES]
    ]
    text = f"{len(wrong)} of {len(rows)} test images; the ones it was surest of:"
    return ["<h2>Mistakes</h2>", f"<p>{text}</p>", f"<div class=grid>{''.join(cells)}</div>"]


def _said(key: str, name: str, sure: float, right: bool) -> str:
    return f"{key}<span class={'right' if right else 'wrong'}>{escape(name)}</span> {sure * 100:.0f}%"


def _cell(images: Images, place: int, lines: list[str]) -> str:
    image = images.open(place)
    image.thumbnail((160, 160), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    source = f"data:image/png;base64,{data}"
    return (
        f'<figure><img alt="{escape(images.name(place))}" src="{source}">'
        f"<figcaption>{'<br>'.join(lines)}</figcaption></figure>"
    )


def _bad_images(found: dict[str, str]) -> str:
    if not found:
        return ""
    listed = "; ".join(f"{name}: {why}" for name, why in list(found.items())[:10])
    return f"<p class=verdict>{len(found)} images could not be used and were left out. {escape(listed)}</p>"


def _record(command: str, recipe: Recipe, folder: Path) -> list[str]:
    found = ", ".join(f"{name} {version}" for name, version in read_summary(folder)["versions"].items())
    return [
        "<h2>Again</h2>",
        f"<pre>{escape(command or 'started from Python')}</pre>",
        f"<p class=soft>{escape(found)}</p>",
        "<h2>Recipe</h2>",
        f"<pre>{escape(recipe.to_yaml())}</pre>",
    ]
