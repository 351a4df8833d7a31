"""Networks and images whose class activation maps are known."""

import timm
import torch
from torch import nn

HEIGHT, WIDTH, PATCH = 64, 96, 8
CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))  # row and column: top left, top right, bottom left, bottom right


class ColorNet(nn.Module):
    """A convolutional network whose class is a bright color: red, green or blue. It sees every place alike."""

    def __init__(self, stride=PATCH):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, stride, stride), nn.ReLU(inplace=True))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
            self.features[0].bias[:3] = -0.9  # what is less bright, as a blurred square is, does not count
            for color in range(3):
                self.features[0].weight[color, color] = 1 / stride**2
                self.features[0].weight[color + 3, color] = 0.1 / stride**2
                self.head.weight[color, color] = 80.0

    def forward(self, images):
        return self.head(self.pool(self.features(images)).flatten(1))


def color_vit(**options):
    """A ViT whose class is a bright color.

    Channels 0 to 2 of a token are the color of its patch. The MLP of the first block writes what is bright enough to
    the channels 3 to 5. In the second block, the class token gets them from the patches, by uniform attention. Channels
    6 and 7 are constants beside which a color that is not bright is small, because norms would enlarge it otherwise.
    """
    size = {"img_size": (HEIGHT, WIDTH), "patch_size": PATCH, "embed_dim": 12, "depth": 2, "num_heads": 3}
    name = options.pop("name", "vit_tiny_patch16_224")
    model = timm.create_model(name, num_classes=3, **size, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(1)
        first, second = model.blocks
        model.patch_embed.proj.bias[6:8] = torch.tensor([10.0, -10.0])
        second.attn.qkv.weight[-12:] = torch.eye(12)  # values are the tokens; queries and keys are zero
        second.attn.proj.weight.copy_(torch.eye(12))
        heads = [model.head] + ([model.head_dist] if hasattr(model, "head_dist") else [])
        for color in range(3):
            model.patch_embed.proj.weight[color, color] = 1 / PATCH**2
            first.mlp.fc1.weight[color, color] = 400.0
            first.mlp.fc1.bias[color] = -400.0 * 0.22  # a color of 0.9, after the norm
            first.mlp.fc2.weight[color + 3, color] = 1.0
            for head in heads:
                head.weight[color, color + 3] = 50.0
    return model


def square_image(color, row, column, *, size=(HEIGHT, WIDTH)):
    """A dark image with one square of a color in a cell of the grid of patches."""
    image = torch.zeros(1, 3, *size)
    image[:, color, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = 2.0
    return image


def cell_of(heatmap):
    """Row and column of the cell of the grid that has the largest mean, and its part of the whole."""
    cells = heatmap.unflatten(0, (-1, PATCH)).unflatten(2, (-1, PATCH)).mean((1, 3))
    place = int(cells.argmax())
    return (place // cells.shape[1], place % cells.shape[1]), float(cells.max() / cells.sum())


def hooks_of(model):
    """The number of hooks on all modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
