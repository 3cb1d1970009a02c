"""A convolutional network for handwritten digits of 8 by 8 pixels, as `aotexport` takes it."""

import torch
from torch import nn
from torch.export import Dim


class DigitsNetwork(nn.Module):
    """Two convolutions with batch norm, then two linear layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits `[batch, 10]` of float images `[batch, 1, 8, 8]` in [0, 1]."""
        return self.classify(self.features(images))


def model() -> DigitsNetwork:
    """Return the untrained network; every call gives the same weights."""
    torch.manual_seed(0)
    return DigitsNetwork()


def example_inputs() -> tuple[torch.Tensor]:
    """Return the inputs of the example call."""
    return (torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)),)


dynamic_shapes = {"images": {0: Dim("batch", min=1, max=1024)}}
