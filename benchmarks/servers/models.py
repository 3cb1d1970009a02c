"""Models as clients call them: one row a request, by the names of the inputs, with a dynamic batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.models import MODELS

if TYPE_CHECKING:
    from torch import nn

MAX_BATCH = 64


@dataclass(frozen=True)
class ServedModel:
    """A model behind a server.

    Attributes:
        name: of `benchmarks.models`.
        request: returns the inputs of a request by name, from a random generator and a length.
        lengths: of sequences, of which mixed requests take one each; one: requests are alike.
        output: name of the output that is compared.
        answer: returns the shape of that output from the length of a request.
    """

    name: str
    request: Callable[[np.random.Generator, int], dict[str, np.ndarray]]
    lengths: tuple[int, ...]
    output: str
    answer: Callable[[int], tuple[int, ...]]

    def module(self) -> nn.Module:
        """Return the model in eval mode, which takes the inputs of a request by name."""
        return MODELS[self.name].module().eval()

    def requests(self, count: int) -> list[dict[str, np.ndarray]]:
        """Return requests, always the same ones."""
        generator = np.random.default_rng(0)
        return [self.request(generator, self.lengths[index % len(self.lengths)]) for index in range(count)]

    def export(self, directory: Path) -> None:
        """Write the bundle, whose batch and lengths are dynamic."""
        import torch

        import aotexport

        batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
        length = torch.export.Dim("length", min=2, max=max(self.lengths))
        example = {
            name: torch.from_numpy(np.concatenate([value] * 2))
            for name, value in self.request(np.random.default_rng(0), max(self.lengths)).items()
        }
        mixed = len(self.lengths) > 1
        sizes = {name: {0: batch} | ({1: length} if mixed else {}) for name in example}
        aotexport.export(
            self.module(), (), example, output=directory, dynamic_shapes=sizes, programs=("infer",), verify="fast"
        )

    def export_onnx(self, file: Path) -> None:
        """Write the ONNX model of `torch.onnx.export`, with the same dynamic sizes."""
        import torch

        example = {
            name: torch.from_numpy(np.concatenate([value] * 2))
            for name, value in self.request(np.random.default_rng(0), max(self.lengths)).items()
        }
        axes: dict[int, Any] = {0: torch.export.Dim("batch", min=1, max=MAX_BATCH)}
        if len(self.lengths) > 1:
            axes[1] = torch.export.Dim("length", min=2, max=max(self.lengths))
        torch.onnx.export(
            self.module(),
            (),
            str(file),
            kwargs=example,
            input_names=list(example),
            dynamic_shapes=dict.fromkeys(example, axes),
            dynamo=True,
            verbose=False,
        )


def _sentence(generator: np.random.Generator, length: int) -> dict[str, np.ndarray]:
    ids = generator.integers(1000, 4000, (1, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def _image(generator: np.random.Generator, length: int) -> dict[str, np.ndarray]:
    return {"pixel_values": generator.standard_normal((1, 3, length, length), np.float32)}


def _tokens(generator: np.random.Generator, length: int) -> dict[str, np.ndarray]:
    return {"input_ids": generator.integers(0, 4096, (1, length))}


SERVED = {
    model.name: model
    for model in (
        ServedModel("minilm", _sentence, (16, 32, 64), "last_hidden_state", lambda length: (1, length, 384)),
        ServedModel("gpt2", _tokens, (32,), "logits", lambda length: (1, length, 4096)),
        ServedModel("resnet", _image, (64,), "logits", lambda length: (1, 10)),
    )
}
