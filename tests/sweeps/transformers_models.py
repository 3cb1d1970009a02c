"""Models of transformers whose configurations need more than small sizes, and the inputs of all of its models."""

from dataclasses import dataclass, field
from typing import Any

import torch

BATCH = 3
VOCABULARY = 100
LENGTH = 10
SIDE = 32
SOUND = 800

WAVE = {
    "vocab_size": 20,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 5),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "classifier_proj_size": 16,
}


@dataclass(frozen=True)
class Model:
    """A model of the zoo.

    Attributes:
        auto: name after `AutoModel` of the class that picks the architecture.
        inputs: function from a batch size to the keyword arguments of a call.
        config: fields of the configuration beside those that `small_configs` makes small by their names.
    """

    auto: str
    inputs: Any
    config: dict[str, Any] = field(default_factory=dict)


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape)


def causal() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def unmasked() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": _tokens(BATCH, LENGTH)}


def translation() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": _tokens(BATCH, 6)}


def pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE), "labels": torch.randint(5, (BATCH,))}


def pictures_alone() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE)}


def segments() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE), "labels": torch.randint(5, (BATCH, SIDE, SIDE))}


def captions() -> dict[str, Any]:
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "return_loss": True, **pictures_alone()}


def sounds() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, SOUND), "labels": torch.randint(5, (BATCH,))}


def transcripts() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, SOUND), "labels": torch.randint(1, 20, (BATCH, 6))}


def spectra() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, 32, 16), "labels": torch.randint(5, (BATCH,))}


def speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 16, 40), "labels": _tokens(BATCH, 6)}


def long_speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 40, 16), "labels": _tokens(BATCH, 6)}


CAUSAL, MASKED, TRANSLATION = "ForCausalLM", "ForMaskedLM", "ForSeq2SeqLM"
PICTURES = "ForImageClassification"
NARROW = {"hidden_sizes": [8, 8, 16, 16]}

SPECIAL: dict[str, Model] = {
    # Decoders.
    "gpt_neo": Model(CAUSAL, causal, {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "gptj": Model(CAUSAL, causal, {"rotary_dim": 4}),
    "codegen": Model(CAUSAL, causal, {"rotary_dim": 4}),
    # Noise would choose other experts in every call.
    "switch_transformers": Model(
        TRANSLATION,
        translation,
        {"expert_capacity": 8, "router_jitter_noise": 0.0, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    # State spaces and other recurrences.
    "mamba": Model(CAUSAL, unmasked, {"use_mambapy": False}),
    "mamba2": Model(CAUSAL, unmasked, {"num_heads": 8}),
    "falcon_mamba": Model(CAUSAL, unmasked, {"use_mambapy": False}),
    "jamba": Model(
        CAUSAL, causal, {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_local_experts": 2}
    ),
    "recurrent_gemma": Model(CAUSAL, causal, {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3}),
    "rwkv": Model(CAUSAL, unmasked, {"context_length": 64}),
    "lfm2": Model(CAUSAL, causal, {"layer_types": ["conv", "full_attention"]}),
    # Encoders.
    "deberta-v2": Model(MASKED, masked, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "fnet": Model(MASKED, unmasked),
    "modernbert": Model(
        MASKED, masked, {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2, "reference_compile": False}
    ),
    "convbert": Model(MASKED, masked, {"head_ratio": 2}),
    "squeezebert": Model(MASKED, masked, {"embedding_size": 32}),
    "t5": Model(TRANSLATION, translation, {"decoder_start_token_id": 0}),
    "umt5": Model(TRANSLATION, translation, {"decoder_start_token_id": 0}),
    # Vision.
    "swin": Model(
        PICTURES, pictures, {"patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
    ),
    "convnext": Model(PICTURES, pictures, NARROW | {"patch_size": 4}),
    "resnet": Model(
        PICTURES, pictures, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    ),
    "mobilenet_v2": Model(PICTURES, pictures, {"depth_multiplier": 0.25}),
    "mobilevit": Model(
        PICTURES,
        pictures,
        {"patch_size": 2, "hidden_sizes": [12, 16, 20], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32]},
    ),
    "poolformer": Model(PICTURES, pictures, NARROW),
    "segformer": Model(
        "ForSemanticSegmentation", segments, NARROW | {"num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16}
    ),
    "vit_mae": Model(
        "ForPreTraining",
        pictures_alone,
        {
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
    ),
    "clip": Model("", captions, {"projection_dim": 16}),
    "siglip": Model("", captions),
    # Audio.
    "wav2vec2": Model("ForCTC", transcripts, WAVE),
    "hubert": Model("ForAudioClassification", sounds, WAVE),
    "wavlm": Model("ForAudioClassification", sounds, WAVE),
    "sew": Model("ForAudioClassification", sounds, WAVE | {"squeeze_factor": 2}),
    "audio-spectrogram-transformer": Model(
        "ForAudioClassification",
        spectra,
        {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
    ),
    "whisper": Model(
        "ForSpeechSeq2Seq", speech, {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
    ),
    "speech_to_text": Model(
        "ForSpeechSeq2Seq",
        long_speech,
        {"input_feat_per_channel": 16, "conv_channels": 16, "max_source_positions": 40, "max_target_positions": 32},
    ),
}
"""Types by name, with what their configurations need beside small sizes, or with calls of their own."""
