"""Small models of vision, diffusion and graph libraries with random weights: static, and with a dynamic batch."""

from collections.abc import Iterator
from functools import partial

import torch

from tests.sweeps.diffusion_models import DIFFUSERS
from tests.sweeps.graph_models import GEOMETRIC
from tests.sweeps.made import Model
from tests.sweeps.sample import Items, Sample
from tests.sweeps.vision_models import SEGMENTATION, TIMM, TORCHVISION

LIBRARIES: dict[str, dict[str, Model]] = {
    "timm": TIMM,
    "torchvision": TORCHVISION,
    "diffusers": DIFFUSERS,
    "torch_geometric": GEOMETRIC,
    "segmentation_models_pytorch": SEGMENTATION,
}

EXCLUDED: dict[str, str] = {}
"""Models that are not run, with the reason."""


def items() -> Items:
    """Return the models, by library, name and whether the batch is dynamic."""
    kinds = {"static": False, "dynamic": True}
    return {
        f"{library}/{name} {kind}": partial(_samples, model, kinds[kind])
        for library, models in LIBRARIES.items()
        for name, model in models.items()
        for kind in kinds
    }


def _samples(model: Model, dynamic: bool) -> Iterator[Sample]:
    torch.manual_seed(0)
    make, inputs = model
    module, call = make.make(), inputs()
    yield Sample(module, (), call.kwargs, call.options | ({"dynamic_shapes": call.shapes} if dynamic else {}))
