"""The explorer: a local web page on which a person looks inside networks, shown by Gradio (the extra `explore`).

What it shows is computed by `interlayer.experiments.explorer`. The photograph and the choices belong to the session of
a visitor, and nothing is loaded from other servers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from PIL import Image

from ..analysis.class_activation import METHODS
from ..experiments.explorer import MOST_BYTES, ExploredNetwork, Explorer, Shown, read_photograph
from ..experiments.shown_images import sample_photographs

ALL_HEADS, LAST_STAGE, PREDICTED, NOTHING = "mean over heads", "last stage", "the predicted class", "nothing"
CENTER = (0.5, 0.5)
KEPT_SECONDS = 3600  # for which the files of visitors are kept
AT_ONCE = 2  # events of other kinds than drawing that are handled at the same time
FONTS = ("system-ui", "sans-serif")  # of the visitor's system: Gradio's own are loaded from another server
MONOSPACED = ("ui-monospace", "monospace")
INTRODUCTION = (
    "# Look inside a network\n"
    "Drop a photograph or take a sample, choose a network, and walk through the tabs. A network is one of the list, or "
    "any model of timm with or without a mechanism, such as `resnet50+mrla_base`. Without weights it is untrained, and "
    "what it shows means little."
)
CLASS_ACTIVATION = (
    "Warm colors mark what speaks for the class. Score-CAM and Group-CAM mask the photograph and see how the class "
    "changes; the others use gradients. A stage near the input sees details, a late one objects."
)
LAYER_ATTENTION = (
    "A row is a layer, a column a layer that it reads, and the color the weight. In MRLA-base the weights of a row add "
    "up to one; in MRLA-light they are products of lambda and have both signs."
)
SPATIAL_ATTENTION = (
    "Click into the picture: warm colors mark the patches to which the patch in the red box attends, from the smallest "
    "to the largest weight."
)


class ActivationPanel(NamedTuple):
    """Components of class activation for one network."""

    predictions: Any
    target: Any
    stage: Any
    image: Any
    caption: Any


class LayerPanel(NamedTuple):
    """Components of layer attention for one network."""

    stage: Any
    head: Any
    image: Any
    caption: Any


class AttentionPanel(NamedTuple):
    """Components of spatial attention for one network."""

    layer: Any
    head: Any
    image: Any
    caption: Any


def import_gradio() -> Any:
    """Imports Gradio. Raises an ImportError that says how to install it."""
    try:
        import gradio
    except ImportError as error:
        raise ImportError(
            'the explorer is shown by Gradio: install it with pip install "interlayer[explore]"'
        ) from error
    return gradio


def build_explorer(explorer: Explorer) -> Any:
    """Returns the page of an explorer, a `gradio.Blocks`.

    Args:
        explorer: the networks. The first one is shown first.
    """
    return _Page(explorer).build()


def serve_explorer(
    explorer: Explorer,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    open_browser: bool = False,
    wait: bool = True,
) -> tuple[Any, str]:
    """Serves the page of an explorer.

    Args:
        explorer: the networks.
        host: the address to listen at; the default is reached from this computer only.
        port: the port; a free one from 7860 on if None.
        open_browser: whether to open the page in a browser.
        wait: whether to return only when the server is stopped.

    Returns:
        The page, whose ``close()`` stops the server, and its address.
    """
    gr = import_gradio()
    page = build_explorer(explorer)
    theme = gr.themes.Default(font=FONTS, font_mono=MONOSPACED)
    _, address, _ = page.queue(default_concurrency_limit=AT_ONCE).launch(
        server_name=host, server_port=port, inbrowser=open_browser, share=False, quiet=True, prevent_thread_lock=True,
        max_file_size=MOST_BYTES, theme=theme, footer_links=[], ssr_mode=False, enable_monitoring=False,
    )  # fmt: skip
    if wait:
        page.block_thread()
    return page, address


class _Page:
    """Builds the page and handles its events."""

    def __init__(self, explorer: Explorer) -> None:
        self.gr, self.explorer, self.samples = import_gradio(), explorer, sample_photographs()
        self.groups: list[list[Any]] = [[], []]  # what is hidden if there is no such network

    def build(self) -> Any:
        gr = self.gr
        delete_cache = (KEPT_SECONDS, KEPT_SECONDS)
        with gr.Blocks(title="interlayer explorer", analytics_enabled=False, delete_cache=delete_cache) as page:
            self.photograph, self.place = gr.State(None), gr.State(CENTER)
            gr.Markdown(INTRODUCTION)
            with gr.Row():
                with gr.Column(scale=1, min_width=260):
                    upload = gr.File(label="A photograph", type="filepath", height=130, elem_id="upload")
                    first = next(iter(self.samples))
                    sample = gr.Radio(list(self.samples), value=first, label="Samples", elem_id="sample")
                    self.message = gr.Markdown(elem_id="message")
                    self.networks, self.problems = [], []
                    for number in (0, 1):
                        self.networks.append(self._network_list(number))
                        self.problems.append(gr.Markdown(elem_id=f"problem-{number}"))
                with gr.Column(scale=3), gr.Tabs():
                    with gr.Tab("Class activation"):
                        gr.Markdown(CLASS_ACTIVATION)
                        titles = [(method.title, name) for name, method in METHODS.items()]
                        self.method = gr.Dropdown(titles, value="grad_cam", label="Method", elem_id="method")
                        self.activations = self._beside(self._activation_panel)
                    with gr.Tab("Layer attention"):
                        gr.Markdown(LAYER_ATTENTION)
                        self.layers = self._beside(self._layer_panel)
                    with gr.Tab("Spatial attention"):
                        gr.Markdown(SPATIAL_ATTENTION)
                        self.attentions = self._beside(self._attention_panel)
            outputs = [upload, self.photograph, sample, self.message]
            upload.upload(self.read, upload, outputs, api_name=False)
            for event in (sample.input, page.load):
                event(self.take, sample, [self.photograph, self.message], api_name=False)
            for number in (0, 1):
                self._connect(number)
        return page

    def _network_list(self, number: int) -> Any:
        names = self.explorer.names
        choices, label = (names, "Network") if number == 0 else ([NOTHING, *names], "Compare with")
        return self.gr.Dropdown(
            choices, value=choices[0], label=label, allow_custom_value=True, elem_id=f"network-{number}"
        )

    def _beside(self, make: Callable[[int], Any]) -> list[Any]:
        """Returns the panels of both networks, side by side."""
        made = []
        with self.gr.Row():
            for number in (0, 1):
                with self.gr.Column(visible=number == 0) as group:
                    made.append(make(number))
                self.groups[number].append(group)
        return made

    def _activation_panel(self, number: int) -> ActivationPanel:
        with self.gr.Row():
            target = self.gr.Dropdown([PREDICTED], value=PREDICTED, label="Class", elem_id=f"target-{number}")
            stage = self.gr.Dropdown([LAST_STAGE], value=LAST_STAGE, label="Layer", elem_id=f"stage-{number}")
        image, caption = self._picture("activation", number)
        predictions = self.gr.Label(label="Prediction", elem_id=f"prediction-{number}")
        return ActivationPanel(predictions, target, stage, image, caption)

    def _layer_panel(self, number: int) -> LayerPanel:
        with self.gr.Row():
            stage = self.gr.Dropdown([], label="Stage", elem_id=f"layer-stage-{number}")
            head = self.gr.Dropdown([ALL_HEADS], value=ALL_HEADS, label="Head", elem_id=f"layer-head-{number}")
        return LayerPanel(stage, head, *self._picture("layers", number))

    def _attention_panel(self, number: int) -> AttentionPanel:
        with self.gr.Row():
            layer = self.gr.Dropdown([], label="Layer", elem_id=f"attention-layer-{number}")
            head = self.gr.Dropdown([ALL_HEADS], value=ALL_HEADS, label="Head", elem_id=f"attention-head-{number}")
        return AttentionPanel(layer, head, *self._picture("attention", number))

    def _picture(self, what: str, number: int) -> tuple[Any, Any]:
        image = self.gr.Image(
            type="pil", format="png", interactive=False, show_label=False, buttons=["download", "fullscreen"],
            elem_id=f"{what}-{number}",
        )  # fmt: skip
        return image, self.gr.Markdown(elem_id=f"{what}-caption-{number}")

    def _connect(self, number: int) -> None:
        """Connects the controls of one network with its pictures."""
        network = self.networks[number]
        activation, layers, attention = self.activations[number], self.layers[number], self.attentions[number]
        draw = partial(self._draw_at, number)
        inputs = [self.photograph, network, self.method, self.place]
        panels = [component for panel in (activation, layers, attention) for component in panel]
        for event in (self.photograph.change, network.change):
            draw(event, self.refresh, inputs, [self.problems[number], *self.groups[number], *panels])
        inputs = [self.photograph, network, self.method, activation.target, activation.stage]
        for control in (self.method, activation.target, activation.stage):
            draw(control.input, self.draw_activation, inputs, [activation.image, activation.caption])
        # Stages and layers differ in their number of heads, so the choice of a head begins again before drawing.
        inputs = [self.photograph, network, layers.stage]
        chosen = draw(layers.stage.input, self.choose_stage, inputs, layers.head)
        for event in (chosen.then, layers.head.input):
            inputs = [self.photograph, network, layers.stage, layers.head]
            draw(event, self.draw_layers, inputs, [layers.image, layers.caption])
        inputs = [self.photograph, network, attention.layer]
        chosen = draw(attention.layer.input, self.choose_layer, inputs, attention.head)
        for event in (chosen.then, attention.head.input):
            inputs = [self.photograph, network, attention.layer, attention.head, self.place]
            draw(event, self.draw_attention, inputs, [attention.image, attention.caption])

        def choose(image: Image.Image, event: Any) -> tuple[float, float]:
            return place_of(event.index, image.size)

        choose.__annotations__["event"] = self.gr.SelectData  # by which Gradio knows that it wants the click
        clicked = attention.image.select(choose, attention.image, self.place, api_name=False)
        for other, panel in enumerate(self.attentions):
            inputs = [self.photograph, self.networks[other], panel.layer, panel.head, self.place]
            self._draw_at(other, clicked.then, self.draw_attention, inputs, [panel.image, panel.caption])

    def _draw_at(self, number: int, event: Callable[..., Any], function: Any, inputs: list[Any], outputs: Any) -> Any:
        """Calls a function that draws in the panels of one network, after those that were called before it.

        Otherwise a slow function, such as that of the network chosen before, would replace what a later one has drawn.
        """
        return event(function, inputs, outputs, api_name=False, concurrency_id=f"network-{number}", concurrency_limit=1)

    def read(self, path: str) -> tuple[None, Any, Any, str]:
        """Reads the file of a visitor, and empties the field for the next one.

        The file replaces the photograph only if it is an image.
        """
        try:
            return None, read_photograph(path), None, ""
        except ValueError as error:
            return None, self.gr.skip(), self.gr.skip(), _problem(error)

    def take(self, sample: str | None) -> tuple[Any, str]:
        """Returns a sample photograph."""
        return (self.samples[sample](), "") if sample else (self.gr.skip(), "")

    def refresh(self, photograph: Image.Image | None, name: str, method: str, place: tuple[float, float]) -> list[Any]:
        """Shows a photograph in all panels of a network."""
        gr = self.gr
        shown, problem, network = name != NOTHING, "", None
        if photograph is not None and shown:
            try:
                network = self.explorer.open(name)
            except (ValueError, OSError, ImportError) as error:
                problem = _problem(error)
        groups = [gr.update(visible=shown)] * 3
        if network is None:
            empty = [len(ActivationPanel._fields), len(LayerPanel._fields), len(AttentionPanel._fields)]
            return [problem, *groups, *[None] * (sum(empty))]
        return [
            problem, *groups, *self._activation(network, photograph, method), *self._layers(network, photograph),
            *self._attention(network, photograph, place),
        ]  # fmt: skip

    def _activation(self, network: ExploredNetwork, photograph: Any, method: str) -> ActivationPanel:
        found = network.predictions(photograph)
        targets = [PREDICTED, *(name for name, _ in found)]
        stages = [LAST_STAGE, *(f"stage {number}" for number in range(1, len(network.stages(photograph)) + 1))]
        return ActivationPanel(
            dict(found) or None,
            self.gr.update(choices=targets, value=PREDICTED),
            self.gr.update(choices=stages, value=LAST_STAGE),
            *_drawn(partial(network.class_activation, photograph, method)),
        )

    def _layers(self, network: ExploredNetwork, photograph: Any) -> LayerPanel:
        try:
            stages = network.layer_scores(photograph)
        except ValueError:  # such as mechanisms without attention; `_drawn` says why
            stages = []
        choices = [(stage.name, number) for number, stage in enumerate(stages)]
        first = next((number for number, stage in enumerate(stages) if len(stage.blocks) > 1), 0)
        heads = self._heads(stages[first].scores.shape[1] if stages else 0)
        drawn = _drawn(partial(network.layer_attention, photograph, stage=first))
        return LayerPanel(self.gr.update(choices=choices, value=first if choices else None), heads, *drawn)

    def _attention(self, network: ExploredNetwork, photograph: Any, place: tuple[float, float]) -> AttentionPanel:
        found = network.attentions(photograph)
        names = [attention.name for attention in found]
        heads = self._heads(found[-1].heads if found else 0)
        drawn = _drawn(partial(network.spatial_attention, photograph, place=place))
        return AttentionPanel(self.gr.update(choices=names, value=names[-1] if names else None), heads, *drawn)

    def _heads(self, count: int) -> Any:
        choices = [(ALL_HEADS, ALL_HEADS), *((f"head {number}", number) for number in range(count))]
        return self.gr.update(choices=choices, value=ALL_HEADS)

    def draw_activation(self, photograph: Any, name: str, method: str, target: str, stage: str) -> Any:
        number = None if stage in (None, LAST_STAGE) else int(stage.split()[-1])  # None: there is no second network
        chosen = None if target == PREDICTED else target
        return self._draw(photograph, name, "class_activation", method, target=chosen, stage=number)

    def choose_stage(self, photograph: Any, name: str, stage: int) -> Any:
        """Offers the heads of another stage."""
        if photograph is None or name == NOTHING:
            return self.gr.skip()
        return self._heads(self.explorer.open(name).layer_scores(photograph)[stage].scores.shape[1])

    def choose_layer(self, photograph: Any, name: str, layer: str) -> Any:
        """Offers the heads of another spatial attention."""
        if photograph is None or name == NOTHING:
            return self.gr.skip()
        heads = {attention.name: attention.heads for attention in self.explorer.open(name).attentions(photograph)}
        return self._heads(heads[layer])

    def draw_layers(self, photograph: Any, name: str, stage: int | None, head: int | str) -> Any:
        return self._draw(photograph, name, "layer_attention", stage=stage or 0, head=_head(head))

    def draw_attention(self, photograph: Any, name: str, layer: str | None, head: int | str, place: Any) -> Any:
        return self._draw(photograph, name, "spatial_attention", layer=layer, head=_head(head), place=tuple(place))

    def _draw(self, photograph: Any, name: str, what: str, *args: Any, **options: Any) -> tuple[Any, str]:
        if photograph is None or name == NOTHING:
            return None, ""
        return _drawn(lambda: getattr(self.explorer.open(name), what)(photograph, *args, **options))


def place_of(pixel: tuple[int, int], size: tuple[int, int]) -> tuple[float, float]:
    """Returns the place of a pixel (x, y) in an image, as fractions of width and height."""
    return (pixel[0] + 0.5) / size[0], (pixel[1] + 0.5) / size[1]


def _head(value: int | str | None) -> int | None:
    return None if value in (None, ALL_HEADS) else int(value)


def _drawn(draw: Callable[[], Shown]) -> tuple[Image.Image | None, str]:
    """Returns a picture and its caption, or no picture and the reason."""
    try:
        shown = draw()
    except (ValueError, ImportError) as error:
        return None, _problem(error)
    return shown.image, shown.caption


def _problem(error: Exception) -> str:
    """Returns the message of an error as a sentence."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith("?") else ".")
