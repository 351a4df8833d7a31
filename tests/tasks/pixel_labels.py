"""A task of dense prediction from outside the package: a class for each pixel, of images of different sizes."""

import torch
import torch.nn.functional as F
from torch import nn

from interlayer.tasks import Evaluator, Metric, Scores, Task


class PixelEvaluator(Evaluator):
    """Counts pixels of all images together, so that its metric is no mean over images."""

    def __init__(self):
        self.right = self.pixels = self.count = 0

    def update(self, outputs, targets, places):
        for logits, (_, labels), place in zip(outputs, targets, places.tolist(), strict=True):
            if place >= 0:
                self.right += int((logits.argmax(dim=0) == labels).sum())
                self.pixels += labels.numel()
                self.count += 1

    def result(self, collective):
        return Scores({"pixel_accuracy": self.right / self.pixels}, self.count)


class PixelLabels(Task):
    """Targets are pairs of a size and a label map of that size. Images are padded to the size of the largest one."""

    name = "pixel_labels"
    headline = Metric("pixel_accuracy", percent=True)
    eval_metrics = (headline,)

    def build(self):
        return nn.Conv2d(3, 2, 1)

    def forward(self, model, images, targets=None):
        return [logits[:, :height, :width] for logits, ((height, width), _) in zip(model(images), targets, strict=True)]

    def loss(self, outputs, targets):
        losses = [
            F.cross_entropy(logits[None], labels[None]) for logits, (_, labels) in zip(outputs, targets, strict=True)
        ]
        return torch.stack(losses).mean(), {}

    def evaluator(self, *, records=False):
        return PixelEvaluator()

    def image_sizes(self, images, targets):
        return [size for size, _ in targets]
