"""Models of transformers by the names of their types: every configuration is made small by the names of its fields."""

from typing import Any

import transformers

from tests.sweeps.transformers_models import (
    CAUSAL,
    MASKED,
    PICTURES,
    SIDE,
    TRANSLATION,
    VOCABULARY,
    Model,
    causal,
    masked,
    pictures,
    translation,
)

WIDTH, HEADS, INNER, LAYERS, POSITIONS = 32, 4, 64, 2, 64
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "attention_hidden_size", "mlp_hidden_size"), WIDTH
    ),
    **dict.fromkeys(
        (
            *("intermediate_size", "hidden_dim", "ffn_dim", "d_inner", "d_ff", "ffn_hidden_size"),
            *("encoder_ffn_dim", "decoder_ffn_dim", "mamba_d_ssm"),
        ),
        INNER,
    ),
    **dict.fromkeys(
        (
            *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"),
            *("num_encoder_layers", "num_decoder_layers"),
        ),
        LAYERS,
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"),
            *("decoder_attention_heads", "linear_num_value_heads"),
        ),
        HEADS,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "linear_num_key_heads", "num_global_key_value_heads", "index_n_heads"), HEADS // 2
    ),
    **dict.fromkeys(
        (
            *("head_dim", "d_kv", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "linear_key_head_dim"),
            *("linear_value_head_dim", "global_head_dim", "index_head_dim", "hidden_size_per_layer_input"),
            *("mamba_d_state", "mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim", "state_size"),
        ),
        WIDTH // HEADS,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), POSITIONS),
    **dict.fromkeys(
        (
            *("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
            *("q_lora_rank", "kv_lora_rank", "embedding_size"),
        ),
        WIDTH // 2,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_mem_blocks"), 1),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("sliding_window", "attention_window", "index_topk"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "conv_kernel"), 4),
    **dict.fromkeys(("dropout", "attention_dropout"), 0.0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "mamba_expand": 2,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "forced_eos_token_id": None,
    "use_mamba_kernels": False,
    "num_labels": 5,
    "image_size": SIDE,
    "patch_size": 8,
}
"""A small value for each name that configurations use for a size; the rest is as published."""

WIDTHS = ("hidden_sizes", "embed_dim", "embed_dims", "encoder_hidden_sizes")
"""Fields with one width a stage, which become an eighth."""

LAYER_KINDS = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Fields with one entry a layer."""

TYPES: tuple[tuple[Model, str], ...] = (
    (
        Model(CAUSAL, causal),
        """
        afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid beam bert-generation big_bird
        bigbird_pegasus biogpt bitnet blenderbot bloom camembert cohere cohere2 cohere2_moe cpmant ctrl cwm
        data2vec-text deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dory dots1 ernie ernie4_5
        ernie4_5_moe exaone exaone4 exaone_moe falcon flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe
        glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss granite
        granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
        hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling_text internlm3 iquestcoder jais2 jetmoe kimi_linear
        kolibri1 laguna lara_mini lfm3 llama llama4_text longcat_flash megatron-bert mellum mimo_v2_flash
        minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder
        moshi mpt mvp nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon
        phi phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next rembert
        roberta-prelayernorm sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 trocr
        vaultgemma xglm xlm xlm-roberta xlm-roberta-xl xlstm youtu
        """,
    ),
    (
        Model(MASKED, masked),
        """
        albert bert deberta distilbert electra esm eurobert flaubert gte ibert jina_embeddings_v3 layoutlm
        longformer mobilebert mpnet mra nomic_bert nystromformer roberta roformer tapas ultrabert yoso
        """,
    ),
    (
        Model(TRANSLATION, translation),
        """
        bart blenderbot-small led m2m_100 marian mbart mt5 nllb-moe pegasus pegasus_x seamless_m4t
        seamless_m4t_v2
        """,
    ),
    (
        Model(PICTURES, pictures),
        """
        beit cvt data2vec-vision dinov2 dinov2_with_registers ijepa pvt pvt_v2 regnet swiftformer vit vit_msn
        """,
    ),
)
"""Types that are made small by the names of their fields, by what calls give them."""


def small(name: str) -> dict[str, Any]:
    """Return the fields of a type's configuration, and of those in it, that make it small."""
    published = transformers.AutoConfig.for_model(name)
    fields = {key: value for key, value in SMALL.items() if _is_set(published, key) and not _stages(published, key)}
    fields |= {key: [size // 8 for size in _stages(published, key)] for key in WIDTHS if _stages(published, key)}
    if depths := _stages(published, "depths"):
        fields["depths"] = [1 for _ in depths]
        fields.pop("num_hidden_layers", None)
    if "kv_lora_rank" in fields:
        # Keys come from one latent vector, so that they have as many heads as queries.
        fields["num_key_value_heads"] = HEADS
    parts = {key: getattr(part, "model_type", "") for key, part in published.sub_configs.items()}
    fields |= {key: small(name) for key, name in parts.items() if name}
    for key in LAYER_KINDS:
        kinds = _stages(published, key)
        if len(kinds) > LAYERS and _is_set(published, key):
            # One layer of each of the first two kinds.
            fields[key] = [*dict.fromkeys(kinds), kinds[0]][:LAYERS]
    return fields


def _stages(config: transformers.PretrainedConfig, key: str) -> list[Any]:
    """Return the entries of a field that is a list, else none."""
    value = getattr(config, key, None)
    return list(value) if isinstance(value, (list, tuple)) else []


def _is_set(config: transformers.PretrainedConfig, key: str) -> bool:
    """Return whether a configuration has a field that its constructor takes."""
    computed = getattr(type(config), config.attribute_map.get(key, key), None)
    if isinstance(computed, property) and computed.fset is None:
        return False
    return hasattr(config, key) or key in config.attribute_map
