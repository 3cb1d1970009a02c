"""Small language models with a tokenizer, as transformers saves them, and their bundles."""

from __future__ import annotations

import tokenizers
import torch
import transformers

import aotexport

TEMPLATE = """\
{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
SMALL = {"vocab_size": 300, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL, num_attention_heads=2, max_position_embeddings=256, **ENDS),
    "gpt2": transformers.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=128, **ENDS),
    "t5": transformers.T5Config(
        vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, **ENDS
    ),
}


class Unplaced(transformers.GPT2LMHeadModel):
    """Takes positions from the length of the cache alone, whatever the mask says."""

    def forward(self, input_ids, attention_mask=None, cache=None, use_cache=None, labels=None, **more):
        more.pop("position_ids", None)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": use_cache, "labels": labels}
        return super().forward(cache=cache, **given, **more)


def saved(kind, path):
    """Save a model of random weights, which scores tokens far apart, and a tokenizer of bytes; return the model."""
    torch.manual_seed(4)
    if kind == "unplaced":
        model = Unplaced(CONFIGS["gpt2"])
    else:
        automatic = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
        model = automatic.from_config(CONFIGS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    model.save_pretrained(path)
    bytes_ = tokenizers.Tokenizer(tokenizers.models.BPE())
    bytes_.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = tokenizers.decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    bytes_.train_from_iterator(["the model that is served answers the one that asks the other"], trainer)
    bytes_.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return type(model).from_pretrained(path).eval()


def exported_model(kind, root):
    """Return the model, and the directory of its bundle, which only generates."""
    model = saved(kind, root / "model")
    recipe = aotexport.recipe("seq2seq" if kind == "t5" else "causal-lm", model)
    programs = [program for program in recipe.programs if program.name in ("prefill", "decode")]
    aotexport.export(recipe.model, (), programs=programs, output=root / "bundle", verify=False)
    return model, root / "bundle"


def best_tokens(model, prompt, most, **options):
    """Return what `generate` of transformers adds to one prompt."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, **options}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, **options)[0].tolist()
    return found[1:] if model.config.is_encoder_decoder else found[len(prompt) :]
