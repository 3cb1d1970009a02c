"""Language models of ten families, tuned for 20 steps from bundles as in eager mode with peft: whole, LoRA, QLoRA."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import aotexport
from aotexport_runtime import adapters, load

peft = pytest.importorskip("peft", reason="needs the extra `trainers`")
transformers = pytest.importorskip("transformers", reason="needs the extra `examples`")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDTHS = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
COMMON = {**WIDTHS, "num_hidden_layers": 1, "max_position_embeddings": 64, **ENDS}
SHARED, GATED = {**COMMON, "num_key_value_heads": 2}, ["q_proj", "v_proj", "gate_proj"]
HALF = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
HALVES = {f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in HALF.items()}
BART = {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 64, "dropout": 0.0, **HALVES, **ENDS}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
FALCON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}

FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Llama": (SHARED, GATED),
    "Mistral": ({**SHARED, "sliding_window": None}, GATED),
    "Qwen2": ({**SHARED, "tie_word_embeddings": True}, GATED),
    "Qwen3": ({**SHARED, "head_dim": 8}, GATED),
    "Gemma2": ({**SHARED, "head_dim": 8}, GATED),
    "Phi": (COMMON, ["q_proj", "v_proj", "fc1"]),
    "GPT2": ({**GPT2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, ["c_attn", "c_fc"]),
    "Falcon": (FALCON, ["query_key_value", "dense_h_to_4h"]),
    "T5": ({**T5, "decoder_start_token_id": 0}, ["q", "v", "wi"]),
    "Bart": ({**BART, "decoder_start_token_id": 2}, ["q_proj", "v_proj", "fc1"]),
}
"""Configurations, and layers that adapters stand beside."""

IDS = torch.randint(3, 64, (3, 7), generator=torch.Generator().manual_seed(0))
CALL = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}


def model(family):
    torch.manual_seed(4)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family][0], use_cache=False)
    of_pairs = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    return of_pairs.from_config(config).train()


def tuned(module):
    """Train what requires gradients for 20 steps; return the losses."""
    losses, trained = list[float](), [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-2, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        loss = module(**CALL).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def dequantised(layer):
    integers, scale = layer._weight_qdata, layer._weight_scale
    columns = torch.stack([(integers << 4) >> 4, integers >> 4], -1).type_as(scale).view(len(integers), len(scale), -1)
    return (columns * scale.t()[..., None] + layer._weight_zero_point.t()[..., None]).flatten(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_tuned_as_in_eager_mode_with_peft(family, tmp_path):
    aotexport.export(model(family), (), CALL, output=tmp_path / "base", programs=("train",), verify=False)
    module, twin = load(tmp_path / "base").train(), model(family)
    assert tuned(module) == pytest.approx(tuned(twin), abs=1e-5)
    weights = dict(twin.named_parameters())
    for name, weight in module.named_parameters():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-5)
    aotexport.derive(tmp_path / "base", output=tmp_path / "small", quantize="int4", verify=False)
    for base in ("base", "small"):
        module, twin = load(tmp_path / base).train(), model(family)
        layers = {path: layer for path, layer in module.named_modules() if hasattr(layer, "_weight_qdata")}
        assert bool(layers) == (base == "small")
        for path, layer in layers.items():
            weight = dequantised(layer)
            twin.get_submodule(path).weight.data.copy_(weight.t() if family == "GPT2" else weight)
        options = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=FAMILIES[family][1], fan_in_fan_out=family == "GPT2"
        )
        twin = peft.get_peft_model(twin, options)
        twin.save_pretrained(tmp_path / f"{base} start")
        adapters.load_adapter(module, tmp_path / f"{base} start", trainable=True)
        assert tuned(module) == pytest.approx(tuned(twin), abs=1e-5)
        adapters.save_adapter(module, tmp_path / f"{base} ours")
        twin.save_pretrained(tmp_path / f"{base} theirs")
        ours, theirs = (load_file(tmp_path / f"{base} {who}/adapter_model.safetensors") for who in ("ours", "theirs"))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
