"""Small models of transformers with random weights: loss, backward and all other outputs; static and dynamic batch."""

from collections.abc import Iterator
from functools import partial

import torch
import transformers

from tests.sweeps.sample import Items, Sample
from tests.sweeps.small_configs import MODELS, small

BATCH_DIM = torch.export.Dim("batch", min=1, max=16)

EXCLUDED: dict[str, str] = {
    "regnet": "a stage of one pixel: at a batch of 2, eager's own gradients are off by 2e-3 of those in float64"
}
"""Models that are not run, with the reason."""


def items() -> Items:
    """Return the models, by name and whether the batch is dynamic."""
    kinds = {"static": False, "dynamic": True}
    return {f"{name} {kind}": partial(_samples, name, kinds[kind]) for name in MODELS for kind in kinds}


def _samples(name: str, dynamic: bool) -> Iterator[Sample]:
    torch.manual_seed(0)
    model = MODELS[name]
    config = transformers.AutoConfig.for_model(name, **small(name) | model.config)
    # Key-value caches serve generation, not training.
    config.use_cache = False
    module = getattr(transformers, f"AutoModel{model.auto}").from_config(config).float()
    inputs = model.inputs()
    shapes = {key: {0: BATCH_DIM} if isinstance(value, torch.Tensor) else None for key, value in inputs.items()}
    options = {"dynamic_shapes": shapes} if dynamic else {}
    yield Sample(module, (), inputs, options)
