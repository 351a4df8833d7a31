"""A task from outside the package whose predictions are places in an image: the box and the mask of bright pixels."""

import torch
from torch import nn
from torchvision.ops import masks_to_boxes

from interlayer.tasks import MeanEvaluator, Metric, Task, register_task
from interlayer.tasks.coco_results import coco_detections, describe_detections, detection_table, detections_of
from interlayer.tasks.drawing import draw_detections


class SpotEvaluator(MeanEvaluator):
    def values_of(self, outputs, targets):
        return {"loss": torch.zeros(len(outputs)), "found": torch.ones(len(outputs))}


@register_task
class BrightSpots(Task):
    """Nothing is trained: the box is that of the pixels that are brighter than the mean."""

    name = "bright_spots"
    headline = Metric("found")
    eval_metrics = (headline,)
    draws = True

    def build(self):
        return nn.Identity()

    def loss(self, outputs, targets):
        return outputs.mean(), {}

    def evaluator(self, *, records=False):
        return SpotEvaluator(records=records)

    def predictions(self, outputs, top, targets=None):
        return [describe_detections(self.spot(pixels), self.classes) for pixels in outputs]

    def spot(self, pixels):
        masks = (pixels.mean(dim=0) > 0)[None]
        masks = masks[masks.flatten(1).any(dim=1)]  # the image that pads a batch is dark
        boxes = masks_to_boxes(masks) + torch.tensor([0, 0, 1, 1])
        count = len(masks)
        return {"boxes": boxes, "labels": torch.ones(count).long(), "scores": torch.full([count], 0.75), "masks": masks}

    def show_predictions(self, found):
        return detection_table(found, self.classes)

    def draw(self, image, prediction, *, min_score=0.5):
        return draw_detections(image, detections_of(prediction, self.classes), self.classes, min_score=min_score)

    def coco_results(self, prediction, image_id, categories):
        return coco_detections(prediction, image_id, categories)
