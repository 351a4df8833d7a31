"""Networks that timm does not have, one file per family. Importing a file registers its networks with timm."""

from typing import Any

from . import ceit, densenet, extra_layer, halonet, preresnet, rest, xception

NETWORKS: dict[str, dict[str, Any]] = {
    name: config
    for family in (ceit, preresnet, xception, densenet, extra_layer, halonet, rest)
    for name, config in family.default_cfgs.items()
}

__all__ = ["NETWORKS"]
