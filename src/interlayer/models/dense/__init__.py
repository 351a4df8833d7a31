"""Detectors and segmenters on the backbones of this library."""

from .detectors import DETECTORS, detector
from .segmenters import SEGMENTERS, segmenter

__all__ = ["DETECTORS", "SEGMENTERS", "detector", "segmenter"]
