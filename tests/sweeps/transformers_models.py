"""Models of transformers whose configurations are written by hand, and the inputs of all models of transformers."""

from dataclasses import dataclass, field
from typing import Any

import torch

BATCH = 3
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
        config: fields of the configuration; none: those that `small_configs` makes small by their names.
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
STATES = {"state_size": 8, "expand": 2, "conv_kernel": 4, "use_mambapy": False}

BY_HAND: dict[str, Model] = {
    # Decoders.
    "gpt2": Model(CAUSAL, causal, TEXT),
    "gpt_neo": Model(CAUSAL, causal, {**TEXT, "attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "gpt_neox": Model(CAUSAL, causal, TEXT),
    "gptj": Model(CAUSAL, causal, {**TEXT, "rotary_dim": 4}),
    "codegen": Model(CAUSAL, causal, {**TEXT, "rotary_dim": 4}),
    "gpt_bigcode": Model(CAUSAL, causal, TEXT),
    "opt": Model(CAUSAL, causal, {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": Model(CAUSAL, causal, TEXT),
    "mpt": Model(CAUSAL, causal, {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2}),
    "falcon": Model(CAUSAL, causal, TEXT),
    "llama": Model(CAUSAL, causal, HEADS),
    "mistral": Model(CAUSAL, causal, {**HEADS, "sliding_window": 4}),
    "qwen2": Model(CAUSAL, causal, HEADS),
    "qwen3": Model(CAUSAL, causal, HEADS),
    "gemma": Model(CAUSAL, causal, HEADS),
    "gemma2": Model(CAUSAL, causal, {**HEADS, "sliding_window": 4}),
    "gemma3_text": Model(CAUSAL, causal, {**HEADS, "sliding_window": 4}),
    "phi": Model(CAUSAL, causal, TEXT),
    "phi3": Model(CAUSAL, causal, TEXT),
    "stablelm": Model(CAUSAL, causal, HEADS),
    "olmo2": Model(CAUSAL, causal, HEADS),
    "cohere": Model(CAUSAL, causal, HEADS),
    "granite": Model(CAUSAL, causal, HEADS),
    "smollm3": Model(CAUSAL, causal, HEADS),
    # Mixtures of experts.
    "mixtral": Model(CAUSAL, causal, {**EXPERTS, "num_local_experts": 4}),
    "qwen2_moe": Model(CAUSAL, causal, {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": Model(CAUSAL, causal, {**EXPERTS, "num_experts": 4}),
    "olmoe": Model(CAUSAL, causal, {**EXPERTS, "num_experts": 4}),
    "gpt_oss": Model(CAUSAL, causal, {**EXPERTS, "num_local_experts": 4}),
    "granitemoe": Model(CAUSAL, causal, {**EXPERTS, "num_local_experts": 4}),
    "switch_transformers": Model(
        TRANSLATION,
        translation,
        # Noise would choose other experts in every call.
        {**T5, "num_experts": 4, "expert_capacity": 8, "router_jitter_noise": 0.0, "dropout_rate": 0.0},
    ),
    # State spaces and other recurrences.
    "mamba": Model(CAUSAL, unmasked, {**TEXT, **STATES}),
    "mamba2": Model(
        CAUSAL, unmasked, {**TEXT, **STATES, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    ),
    "falcon_mamba": Model(CAUSAL, unmasked, {**TEXT, **STATES}),
    "jamba": Model(
        CAUSAL,
        causal,
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
        CAUSAL, causal, {**HEADS, "lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3}
    ),
    "rwkv": Model(CAUSAL, unmasked, {**TEXT, "attention_hidden_size": 32, "context_length": 64}),
    "lfm2": Model(CAUSAL, causal, {**HEADS, "layer_types": ["conv", "full_attention"]}),
    # Encoders.
    "bert": Model(MASKED, masked, TEXT),
    "roberta": Model(MASKED, masked, TEXT),
    "albert": Model(MASKED, masked, {**TEXT, "embedding_size": 16}),
    "distilbert": Model(MASKED, masked, {**TEXT, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
    "electra": Model(MASKED, masked, {**TEXT, "embedding_size": 16}),
    "deberta-v2": Model(MASKED, masked, {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "mpnet": Model(MASKED, masked, TEXT),
    "fnet": Model(MASKED, unmasked, TEXT),
    "modernbert": Model(
        MASKED, masked, {**TEXT, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2, "reference_compile": False}
    ),
    "convbert": Model(MASKED, masked, {**TEXT, "embedding_size": 16, "head_ratio": 2}),
    "squeezebert": Model(MASKED, masked, {**TEXT, "embedding_size": 32}),
    "roformer": Model(MASKED, masked, {**TEXT, "embedding_size": 32}),
    "longformer": Model(MASKED, masked, {**TEXT, "attention_window": [4, 4]}),
    # Encoders with decoders.
    "t5": Model(TRANSLATION, translation, T5),
    "umt5": Model(TRANSLATION, translation, T5),
    "bart": Model(TRANSLATION, translation, SEQUENCES),
    "mbart": Model(TRANSLATION, translation, SEQUENCES),
    "pegasus": Model(TRANSLATION, translation, SEQUENCES),
    "marian": Model(TRANSLATION, translation, SEQUENCES),
    "blenderbot-small": Model(TRANSLATION, translation, SEQUENCES),
    # Vision.
    "vit": Model(PICTURES, pictures, IMAGE),
    "vit_msn": Model(PICTURES, pictures, IMAGE),
    "beit": Model(PICTURES, pictures, IMAGE),
    "dinov2": Model(PICTURES, pictures, IMAGE),
    "swin": Model(
        PICTURES,
        pictures,
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
    "convnext": Model(PICTURES, pictures, {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 5}),
    "resnet": Model(
        PICTURES,
        pictures,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 5},
    ),
    "mobilenet_v2": Model(PICTURES, pictures, {"depth_multiplier": 0.25, "num_labels": 5}),
    "mobilevit": Model(
        PICTURES,
        pictures,
        {
            "image_size": SIDE,
            "patch_size": 2,
            "hidden_sizes": [12, 16, 20],
            "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
            "num_attention_heads": 4,
            "num_labels": 5,
        },
    ),
    "poolformer": Model(PICTURES, pictures, {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 5}),
    "segformer": Model(
        "ForSemanticSegmentation",
        segments,
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
        pictures_alone,
        {
            **IMAGE,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
    ),
    "clip": Model("", captions, {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}),
    "siglip": Model("", captions, {"text_config": TEXT, "vision_config": IMAGE}),
    # Audio.
    "wav2vec2": Model("ForCTC", transcripts, WAVE),
    "hubert": Model("ForAudioClassification", sounds, WAVE),
    "wavlm": Model("ForAudioClassification", sounds, WAVE),
    "sew": Model("ForAudioClassification", sounds, {**WAVE, "squeeze_factor": 2}),
    "audio-spectrogram-transformer": Model(
        "ForAudioClassification",
        spectra,
        {**IMAGE, "max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
    ),
    "whisper": Model(
        "ForSpeechSeq2Seq",
        speech,
        {**SEQUENCES, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32},
    ),
    "speech_to_text": Model(
        "ForSpeechSeq2Seq",
        long_speech,
        {
            **SEQUENCES,
            "input_feat_per_channel": 16,
            "conv_channels": 16,
            "max_source_positions": 40,
            "max_target_positions": 32,
        },
    ),
}
