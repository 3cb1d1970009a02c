"""Small models of transformers with random weights: loss, backward and all other outputs; static and dynamic batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers

from tests.sweeps.sample import Items, Sample

BATCH = 3
BATCH_DIM = torch.export.Dim("batch", min=1, max=16)
VOCABULARY = 100
LENGTH = 10
SIDE = 32
SOUND = 800

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {**HEADS, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
SEQUENCES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
IMAGE = {
    "image_size": SIDE,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_labels": 5,
}
WAVE = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 5),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "num_labels": 5,
    "classifier_proj_size": 16,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Model:
    """A model of the zoo.

    Attributes:
        auto: name after `AutoModel` of the class that picks the architecture.
        inputs: function from a batch size to the keyword arguments of a call.
        config: sizes of the model.
    """

    auto: str
    inputs: Any
    config: dict[str, Any] = field(default_factory=dict)


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape)


def _causal() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def _unmasked() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": _tokens(BATCH, LENGTH)}


def _translation() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": _tokens(BATCH, 6)}


def _pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE), "labels": torch.randint(5, (BATCH,))}


def _pictures_alone() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE)}


def _segments() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE), "labels": torch.randint(5, (BATCH, SIDE, SIDE))}


def _captions() -> dict[str, Any]:
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "return_loss": True, **_pictures_alone()}


def _sounds() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, SOUND), "labels": torch.randint(5, (BATCH,))}


def _transcripts() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, SOUND), "labels": torch.randint(1, 20, (BATCH, 6))}


def _spectra() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, 32, 16), "labels": torch.randint(5, (BATCH,))}


def _speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 16, 40), "labels": _tokens(BATCH, 6)}


def _long_speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 40, 16), "labels": _tokens(BATCH, 6)}


CAUSAL, MASKED, TRANSLATION = "ForCausalLM", "ForMaskedLM", "ForSeq2SeqLM"
PICTURES = "ForImageClassification"
STATES = {"state_size": 8, "expand": 2, "conv_kernel": 4, "use_mambapy": False}

MODELS: dict[str, Model] = {
    # Decoders.
    "gpt2": Model(CAUSAL, _causal, TEXT),
    "gpt_neo": Model(CAUSAL, _causal, {**TEXT, "attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "gpt_neox": Model(CAUSAL, _causal, TEXT),
    "gptj": Model(CAUSAL, _causal, {**TEXT, "rotary_dim": 4}),
    "codegen": Model(CAUSAL, _causal, {**TEXT, "rotary_dim": 4}),
    "gpt_bigcode": Model(CAUSAL, _causal, TEXT),
    "opt": Model(CAUSAL, _causal, {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": Model(CAUSAL, _causal, TEXT),
    "mpt": Model(CAUSAL, _causal, {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2}),
    "falcon": Model(CAUSAL, _causal, TEXT),
    "llama": Model(CAUSAL, _causal, HEADS),
    "mistral": Model(CAUSAL, _causal, {**HEADS, "sliding_window": 4}),
    "qwen2": Model(CAUSAL, _causal, HEADS),
    "qwen3": Model(CAUSAL, _causal, HEADS),
    "gemma": Model(CAUSAL, _causal, HEADS),
    "gemma2": Model(CAUSAL, _causal, {**HEADS, "sliding_window": 4}),
    "gemma3_text": Model(CAUSAL, _causal, {**HEADS, "sliding_window": 4}),
    "phi": Model(CAUSAL, _causal, TEXT),
    "phi3": Model(CAUSAL, _causal, TEXT),
    "stablelm": Model(CAUSAL, _causal, HEADS),
    "olmo2": Model(CAUSAL, _causal, HEADS),
    "cohere": Model(CAUSAL, _causal, HEADS),
    "granite": Model(CAUSAL, _causal, HEADS),
    "smollm3": Model(CAUSAL, _causal, HEADS),
    # Mixtures of experts.
    "mixtral": Model(CAUSAL, _causal, {**EXPERTS, "num_local_experts": 4}),
    "qwen2_moe": Model(CAUSAL, _causal, {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": Model(CAUSAL, _causal, {**EXPERTS, "num_experts": 4}),
    "olmoe": Model(CAUSAL, _causal, {**EXPERTS, "num_experts": 4}),
    "gpt_oss": Model(CAUSAL, _causal, {**EXPERTS, "num_local_experts": 4}),
    "granitemoe": Model(CAUSAL, _causal, {**EXPERTS, "num_local_experts": 4}),
    "switch_transformers": Model(
        TRANSLATION,
        _translation,
        # Noise would choose other experts in every call.
        {**T5, "num_experts": 4, "expert_capacity": 8, "router_jitter_noise": 0.0, "dropout_rate": 0.0},
    ),
    # State spaces and other recurrences.
    "mamba": Model(CAUSAL, _unmasked, {**TEXT, **STATES}),
    "mamba2": Model(
        CAUSAL, _unmasked, {**TEXT, **STATES, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    ),
    "falcon_mamba": Model(CAUSAL, _unmasked, {**TEXT, **STATES}),
    "jamba": Model(
        CAUSAL,
        _causal,
        {
            **HEADS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
        },
    ),
    "recurrent_gemma": Model(
        CAUSAL, _causal, {**HEADS, "lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3}
    ),
    "rwkv": Model(CAUSAL, _unmasked, {**TEXT, "attention_hidden_size": 32, "context_length": 64}),
    "lfm2": Model(CAUSAL, _causal, {**HEADS, "layer_types": ["conv", "full_attention"]}),
    # Encoders.
    "bert": Model(MASKED, _masked, TEXT),
    "roberta": Model(MASKED, _masked, TEXT),
    "albert": Model(MASKED, _masked, {**TEXT, "embedding_size": 16}),
    "distilbert": Model(MASKED, _masked, {**TEXT, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
    "electra": Model(MASKED, _masked, {**TEXT, "embedding_size": 16}),
    "deberta-v2": Model(MASKED, _masked, {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "mpnet": Model(MASKED, _masked, TEXT),
    "fnet": Model(MASKED, _unmasked, TEXT),
    "modernbert": Model(
        MASKED,
        _masked,
        {**TEXT, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2, "reference_compile": False},
    ),
    "convbert": Model(MASKED, _masked, {**TEXT, "embedding_size": 16, "head_ratio": 2}),
    "squeezebert": Model(MASKED, _masked, {**TEXT, "embedding_size": 32}),
    "roformer": Model(MASKED, _masked, {**TEXT, "embedding_size": 32}),
    "longformer": Model(MASKED, _masked, {**TEXT, "attention_window": [4, 4]}),
    # Encoders with decoders.
    "t5": Model(TRANSLATION, _translation, T5),
    "umt5": Model(TRANSLATION, _translation, T5),
    "bart": Model(TRANSLATION, _translation, SEQUENCES),
    "mbart": Model(TRANSLATION, _translation, SEQUENCES),
    "pegasus": Model(TRANSLATION, _translation, SEQUENCES),
    "marian": Model(TRANSLATION, _translation, SEQUENCES),
    "blenderbot-small": Model(TRANSLATION, _translation, SEQUENCES),
    # Vision.
    "vit": Model(PICTURES, _pictures, IMAGE),
    "vit_msn": Model(PICTURES, _pictures, IMAGE),
    "beit": Model(PICTURES, _pictures, IMAGE),
    "dinov2": Model(PICTURES, _pictures, IMAGE),
    "swin": Model(
        PICTURES,
        _pictures,
        {
            "image_size": SIDE,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 5,
        },
    ),
    "convnext": Model(PICTURES, _pictures, {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 5}),
    "resnet": Model(
        PICTURES,
        _pictures,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 5},
    ),
    "mobilenet_v2": Model(PICTURES, _pictures, {"depth_multiplier": 0.25, "num_labels": 5}),
    "mobilevit": Model(
        PICTURES,
        _pictures,
        {
            "image_size": SIDE,
            "patch_size": 2,
            "hidden_sizes": [12, 16, 20],
            "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
            "num_attention_heads": 4,
            "num_labels": 5,
        },
    ),
    "poolformer": Model(PICTURES, _pictures, {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 5}),
    "segformer": Model(
        "ForSemanticSegmentation",
        _segments,
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
            "num_labels": 5,
        },
    ),
    "vit_mae": Model(
        "ForPreTraining",
        _pictures_alone,
        {
            **IMAGE,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
    ),
    "clip": Model("", _captions, {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}),
    "siglip": Model("", _captions, {"text_config": TEXT, "vision_config": IMAGE}),
    # Audio.
    "wav2vec2": Model("ForCTC", _transcripts, WAVE),
    "hubert": Model("ForAudioClassification", _sounds, WAVE),
    "wavlm": Model("ForAudioClassification", _sounds, WAVE),
    "sew": Model("ForAudioClassification", _sounds, {**WAVE, "squeeze_factor": 2}),
    "audio-spectrogram-transformer": Model(
        "ForAudioClassification",
        _spectra,
        {**IMAGE, "max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
    ),
    "whisper": Model(
        "ForSpeechSeq2Seq",
        _speech,
        {**SEQUENCES, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32},
    ),
    "speech_to_text": Model(
        "ForSpeechSeq2Seq",
        _long_speech,
        {
            **SEQUENCES,
            "input_feat_per_channel": 16,
            "conv_channels": 16,
            "max_source_positions": 40,
            "max_target_positions": 32,
        },
    ),
}

EXCLUDED: dict[str, str] = {}
"""Models that are not run, with the reason."""


def items() -> Items:
    """Return the models, by name and whether the batch is dynamic."""
    kinds = {"static": False, "dynamic": True}
    return {f"{name} {kind}": partial(_samples, name, kinds[kind]) for name in MODELS for kind in kinds}


def _samples(name: str, dynamic: bool) -> Iterator[Sample]:
    torch.manual_seed(0)
    model = MODELS[name]
    config = transformers.AutoConfig.for_model(name, **model.config)
    # Key-value caches serve generation, not training.
    config.use_cache = False
    module = getattr(transformers, f"AutoModel{model.auto}").from_config(config).float()
    inputs = model.inputs()
    shapes = {key: {0: BATCH_DIM} for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    options = {"dynamic_shapes": shapes} if dynamic else {}
    yield Sample(module, (), inputs, options)
