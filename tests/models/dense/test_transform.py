"""The transform of detectors computes what torchvision's computes."""

import pytest
import torch
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from interlayer.models.dense.transform import DetectorTransform

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


@pytest.mark.parametrize("size", [(64, 80), (40, 50), (32, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_and_boxes_are_those_of_torchvision(size, dtype):
    ours = DetectorTransform(64, 100, MEAN, STD, size_divisible=32, resizes=True)
    theirs = GeneralizedRCNNTransform(64, 100, list(MEAN), list(STD))
    images = [torch.rand(3, *size).to(dtype)]
    targets = [{"boxes": torch.tensor([[1.0, 2.0, 30.0, 20.0]]), "labels": torch.tensor([1])}]
    for training in (True, False):
        batch, boxes = ours.train(training)(images, targets)
        expected, expected_boxes = theirs.train(training)(images, targets)
        assert batch.image_sizes == expected.image_sizes
        assert torch.equal(batch.tensors, expected.tensors)
        assert torch.equal(boxes[0]["boxes"], expected_boxes[0]["boxes"])


def test_the_statistics_are_not_part_of_the_weights():
    assert not DetectorTransform(64, 100, MEAN, STD, size_divisible=32, resizes=True).state_dict()


def test_integer_images_are_refused_as_by_torchvision():
    transform = DetectorTransform(64, 100, MEAN, STD, size_divisible=32, resizes=False)
    with pytest.raises(TypeError, match="floating"):
        transform([torch.zeros(3, 64, 64, dtype=torch.uint8)])
