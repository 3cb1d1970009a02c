"""Models of diffusers, made small."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.sweeps.made import Call, Model, images, made, rows, sizes

TEXT = (3, 4, 16)


def _steps(fixed: dict[str, Any] | None = None, /, **sizes: tuple[int, ...]) -> Callable[[], Call]:
    """Return a call with random values of these sizes at three steps of time, and with fixed arguments."""

    def call() -> Call:
        values = {name: torch.randn(size) for name, size in sizes.items()}
        return rows(**values, **{"timestep": torch.tensor([1, 5, 9]), "return_dict": False, **(fixed or {})})

    return call


def _flux() -> Call:
    sizes = {"hidden_states": (3, 16, 8), "encoder_hidden_states": TEXT, "pooled_projections": (3, 16)}
    call = _steps({"timestep": torch.tensor([0.1, 0.5, 0.9])}, **sizes)()
    places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(4, 3)}
    return Call({**call.kwargs, **places}, {**call.shapes, "img_ids": {}, "txt_ids": {}})


ALONE = partial(images, "sample", 32)
CALLS: dict[str, Callable[[], Call]] = {
    "unet_2d_condition": _steps(sample=(3, 4, 16, 16), encoder_hidden_states=TEXT),
    "vq": ALONE,
    "autoencoder_tiny": ALONE,
    "dit": _steps({"class_labels": torch.tensor([1, 2, 3])}, hidden_states=(3, 4, 16, 16)),
    "sd3": _steps(hidden_states=(3, 4, 16, 16), encoder_hidden_states=TEXT, pooled_projections=(3, 16)),
    "flux": _flux,
    "prior": _steps(hidden_states=(3, 16), proj_embedding=(3, 16), encoder_hidden_states=(3, 7, 16)),
}
_LISTED = json.loads(Path(__file__).with_name("diffusers.json").read_text())
DIFFUSERS: dict[str, Model] = {
    name: (made(path, **{key: sizes(one) for key, one in options.items()}), CALLS[name])
    for name, (path, options) in _LISTED.items()
}
