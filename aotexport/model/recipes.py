"""Recipes: programs by which a model of transformers trains and generates, keys and values as plain tensors."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.export import Dim

from aotexport.errors import ModelFileInvalid
from aotexport.model.programs import Example, ModelSource, Program
from aotexport.model.source import load_target
from aotexport_runtime.generation.language_model import Description, LanguageModel
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.schema.manifest import CLASSES, TOKENIZER, TOKENIZER_FILES, TRANSFORMERS

_PACKED = "causal-lm-packed"
RECIPES = ("causal-lm", _PACKED, "seq2seq")

Layers = list[tuple[torch.Tensor, ...]]
"""Keys and values per layer; of an encoder-decoder model, those of the encoded tokens after them."""

_BATCH, _PROMPT = 2, 4
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Recipe:
    """What to export so that a bundle trains and generates.

    Attributes:
        model: the model.
        programs: those of `forward`, `train` and `infer`, with labels and without; `prefill` and `decode`; with their
            example calls; `aotexport.export(recipe.model, (), programs=recipe.programs)`.
    """

    model: nn.Module
    programs: tuple[Program, ...]


def recipe(name: str, model: nn.Module) -> Recipe:
    """Return the programs by which a model trains and generates.

    Args:
        name: `causal-lm`, `seq2seq`, or `causal-lm-packed`: `forward` then takes sequences behind one another too, with
            their positions.
        model: a model of transformers with a head for tokens; put in eval mode.

    Raises:
        ModelFileInvalid: there is no such recipe, or the model reads something else than tokens, keeps something else
            than keys and values, or does not keep packed sequences apart.
    """
    _check(name, model)
    model.eval()
    is_seq2seq, config = name == "seq2seq", model.config
    calls: Any = Seq2Seq if is_seq2seq else CausalLM
    ids = torch.arange(1, 1 + _BATCH * _PROMPT).reshape(_BATCH, _PROMPT) % 8
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    tokens = ids[:, :1].contiguous()
    first = (ids, mask, tokens) if is_seq2seq else (ids, mask)
    with torch.no_grad():
        _, cache = calls.prefill(model, *first)
        grown = mask if is_seq2seq else torch.cat([mask, torch.ones_like(tokens)], 1)
        _, cache = calls.decode(model, tokens, grown, cache)
    longest = min(getattr(config, "max_position_embeddings", None) or _LONGEST, _LONGEST)
    batch, prompt, past = Dim("batch", min=1), Dim("prompt", min=1, max=longest), Dim("past", min=1, max=longest - 1)
    grown = mask if is_seq2seq else torch.cat([grown, torch.ones_like(tokens)], 1)
    keys = ({0: batch, 2: past},) * 2 + ({0: batch, 2: prompt},) * 2 * is_seq2seq
    sizes = {0: batch, 1: prompt if is_seq2seq else past + 1}
    begins = Example(first, dynamic_shapes=({0: batch, 1: prompt},) * 2 + ({0: batch},) * is_seq2seq)
    goes_on = Example((tokens, grown, cache), dynamic_shapes=({0: batch}, sizes, [keys] * len(cache)))
    # Sequences of several ages are padded where the decoder has written nothing.
    pads = is_seq2seq and "decoder_attention_mask" in _options(model)
    grown = torch.ones(_BATCH, cache[0][0].shape[2] + 1, dtype=mask.dtype)
    padded = Example((*goes_on.args, grown), dynamic_shapes=(*goes_on.dynamic_shapes, {0: batch, 1: past + 1}))
    learns, reads = _with_and_without_labels(ids, mask, batch, prompt, is_seq2seq=is_seq2seq)
    others = (reads, _packed(model, ids, batch, prompt)) if name == _PACKED else (reads,)
    programs = [
        Program("train", mode="train", grad=True, method=calls.forward, example=learns, variants=others),
        Program("infer", method=calls.forward, example=learns, variants=others),
        Program("prefill", method=calls.prefill, example=begins),
        Program("decode", method=calls.decode, example=goes_on, variants=(padded,) if pads else ()),
    ]
    if not is_seq2seq:
        programs += [
            Program("train-base", mode="train", grad=True, method=calls.base_model, example=reads),
            Program("infer-base", method=calls.base_model, example=reads),
        ]
    return Recipe(model, tuple(programs))


def _with_and_without_labels(
    ids: torch.Tensor, mask: torch.Tensor, batch: Any, prompt: Any, *, is_seq2seq: bool
) -> tuple[Example, Example]:
    """Return example calls of `forward`; without labels an encoder-decoder model reads what the decoder has written."""
    read = {"input_ids": ids, "attention_mask": mask}
    of_read = {0: batch, 1: prompt}
    sizes: dict[str, Any] = {"input_ids": of_read, "attention_mask": of_read}
    written = ids[:, 1:].clone() if is_seq2seq else ids.clone()
    of_written = {0: batch, 1: Dim("written", min=1, max=_LONGEST)} if is_seq2seq else of_read
    further = {"decoder_input_ids": written} if is_seq2seq else {}
    return (
        Example(kwargs={**read, "labels": written}, dynamic_shapes={**sizes, "labels": of_written}),
        Example(kwargs={**read, **further}, dynamic_shapes={**sizes, **dict.fromkeys(further, of_written)}),
    )


def _packed(model: Any, ids: torch.Tensor, batch: Any, prompt: Any) -> Example:
    """Return an example call of sequences in a row; refuse a model that gives them other scores than each alone."""
    places = (torch.arange(ids.shape[1]) % 2).expand(ids.shape).contiguous()
    with torch.no_grad():
        found = [
            model(input_ids=ids.view(shape), position_ids=places.view(shape), use_cache=False).logits.flatten(0, 1)
            for shape in (ids.shape, (-1, 2))
            if "position_ids" in _options(model)
        ]
    error = 64 * torch.finfo(model.dtype).eps
    if not found or float((found[0] - found[1]).abs().max()) > error * float(found[1].abs().max()):
        raise ModelFileInvalid(
            f"recipe `{_PACKED}` takes models that keep sequences apart by their positions, and "
            f"`{type(model).__name__}` gives packed ones other scores than each alone. Use recipe `causal-lm`"
        )
    given = {"input_ids": ids, "position_ids": places, "labels": ids.clone()}
    return Example(kwargs=given, dynamic_shapes={name: {0: batch, 1: prompt} for name in given})


def _check(name: str, model: nn.Module) -> None:
    if name not in RECIPES:
        raise ModelFileInvalid(f"there is no recipe `{name}`; there are {', '.join(RECIPES)}")
    config: Any = getattr(model, "config", None)
    if config is None or bool(getattr(config, "is_encoder_decoder", False)) != (name == "seq2seq"):
        wanted = "an encoder-decoder model" if name == "seq2seq" else "a causal language model"
        raise ModelFileInvalid(f"recipe `{name}` takes {wanted} of transformers, got `{type(model).__name__}`")
    read = getattr(model, "main_input_name", "input_ids")
    if read != "input_ids":
        raise ModelFileInvalid(
            f"recipe `{name}` takes models that read tokens, and `{type(model).__name__}` reads `{read}`. Export its "
            "encoder and its decoder as programs of their own"
        )
    if getattr(model, "_is_stateful", False):
        raise ModelFileInvalid(
            f"recipe `{name}` takes models that keep keys and values from token to token, and "
            f"`{type(model).__name__}` keeps another state"
        )


def extensions_of(module: Any, methods: Collection[str]) -> dict[str, Any]:
    """Return the extensions of a bundle with these methods: those of a loaded one, or of a model, in eval mode."""
    if isinstance(module, BundleModule):
        found = module.bundle.manifest.extensions
        own = {"config": module.config.to_dict()} if isinstance(module, LanguageModel) else {}
        return {**found, TRANSFORMERS: {**found[TRANSFORMERS], **own}} if own else found
    if "prefill" not in methods or not hasattr(module, "generation_config"):
        # Attributes alone: code of other modules may do anything for a name.
        names = inspect.getattr_static(inspect.getattr_static(module, "config", None), "id2label", None)
        if isinstance(names, dict) and any(name != f"LABEL_{index}" for index, name in names.items()):
            return {CLASSES: [str(names[index]) for index in sorted(names)]}
        return {}
    paths = {id(child): path for path, child in module.named_modules()}
    description = Description(
        config=_plain(module.config),
        generation_config=_plain(module.generation_config),
        input_embeddings=paths[id(module.get_input_embeddings())],
        output_embeddings=paths[id(module.get_output_embeddings())],
        counts=_counts(module),
        conv1d=tuple(at for at, m in module.named_modules() if type(m).__module__ == "transformers.pytorch_utils"),
    )
    return {TRANSFORMERS: msgspec.to_builtins(description)}


def _counts(model: Any) -> bool | None:
    """Return whether losses are divided by `num_items_in_batch`; None: only in part, or `Trainer` 5.24 passes none."""
    if not getattr(model, "accepts_loss_kwargs", "kwargs" in _options(model)):
        return None
    ids, counts = torch.ones(1, 4, dtype=torch.long, device=model.device), ({}, {"num_items_in_batch": 1})
    with torch.no_grad():
        mean, counted = (model(input_ids=ids, attention_mask=ids, labels=ids, **count).loss for count in counts)
    factors = 1, 4 - (not model.config.is_encoder_decoder)
    return next((factor > 1 for factor in factors if torch.allclose(mean * factor, counted)), None)


def write_tokenizer(module: nn.Module | None, directory: Path) -> None:
    """Write the tokenizer of a language model, where it was saved beside the model, or is in its bundle."""
    if isinstance(module, BundleModule):
        bundle = module.bundle
        listed = {entry.path for entry in bundle.manifest.files}
        found = {
            name: bundle.file(f"{TOKENIZER}/{name}") for name in TOKENIZER_FILES if f"{TOKENIZER}/{name}" in listed
        }
    else:
        root = Path(str(getattr(module, "name_or_path", None) or "."))
        found = {name: root / name for name in TOKENIZER_FILES if (root / name).is_file()}
    if TOKENIZER_FILES[0] in found:
        (directory / TOKENIZER).mkdir(exist_ok=True)
        for name, path in found.items():
            shutil.copyfile(path, directory / TOKENIZER / name)


def _plain(config: Any) -> dict[str, Any]:
    """Return a config of transformers as JSON, by common names too, without paths of this machine."""
    found = json.loads(config.to_json_string(use_diff=False))
    found |= {name: found[own] for name, own in getattr(config, "attribute_map", {}).items() if own in found}
    return {name: value for name, value in found.items() if not name.startswith("_")}


def load_recipe(name: str, where: str) -> ModelSource:
    """Return the source of an export by the recipe `name`.

    `where` is a directory that `save_pretrained` of transformers wrote, or a model file, whose `model` is such a model.
    `ModelFileInvalid`: the model cannot be loaded, or does not fit the recipe.
    """
    if Path(where, "config.json").is_file():
        # Type checkers read all of `transformers` where it is imported whole, a fifth of their time.
        from transformers.models.auto import modeling_auto

        automatic: Any = getattr(modeling_auto, f"AutoModelFor{'Seq2SeqLM' if name == 'seq2seq' else 'CausalLM'}")
        model, root = automatic.from_pretrained(where), Path(where)
    else:
        model, root = load_target(where)
    found = recipe(name, model)
    return ModelSource(where, found.model, Example(), root, found.programs)


class CausalLM:
    """The calls of a causal language model, with keys and values as tensors.

    `forward` takes, and leaves to the model, what trainers pass without a value.
    """

    @staticmethod
    def forward(
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inputs_embeds: None = None,
        output_attentions: None = None,
        output_hidden_states: None = None,
        return_dict: None = None,
        use_cache: bool = False,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        """Return the scores of each next token, and for labels the loss."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        more = {} if position_ids is None else {"position_ids": position_ids}
        return model(**given, **more, use_cache=False)

    @staticmethod
    def base_model(
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        inputs_embeds: None = None,
        output_attentions: None = None,
        output_hidden_states: None = None,
        return_dict: None = None,
        use_cache: bool = False,
    ) -> Any:
        """Return what the head reads; losses of TRL apply the head themselves."""
        return model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)

    @staticmethod
    def prefill(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, Layers]:
        """Return the scores of the next token, (batch, vocabulary), and keys and values of the prompt."""
        from transformers.cache_utils import DynamicCache

        return CausalLM._step(model, input_ids, attention_mask, DynamicCache())

    @staticmethod
    def decode(
        model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, cache: Layers
    ) -> tuple[torch.Tensor, Layers]:
        """Return the scores of the token after `input_ids`, (batch, 1), and the longer keys and values."""
        return CausalLM._step(model, input_ids, attention_mask, _cache(cache))

    @staticmethod
    def _step(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Layers]:
        known = _options(model)
        wanted = {"logits_to_keep": 1, "output_router_logits": False}
        options: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
        if "position_ids" in known:
            options["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options[_cache_name(known)] = cache
        output = model(input_ids=ids, attention_mask=mask, use_cache=True, return_dict=True, **options)
        return output.logits[:, -1], list(zip(*_kept(cache), strict=True))


class Seq2Seq:
    """The calls of an encoder-decoder model, with keys and values as tensors; see `CausalLM`."""

    @staticmethod
    def forward(
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        decoder_input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inputs_embeds: None = None,
        decoder_attention_mask: None = None,
        decoder_inputs_embeds: None = None,
        output_attentions: None = None,
        output_hidden_states: None = None,
        return_dict: None = None,
        use_cache: bool = False,
    ) -> Any:
        """Return the scores of each next token, and for labels the loss."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        return model(**given, decoder_input_ids=decoder_input_ids, use_cache=False)

    @staticmethod
    def prefill(
        model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, Layers]:
        """Return the scores of the first token after `decoder_input_ids`, (batch, 1), and keys and values."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        encoder = model.get_encoder()
        encoded = encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).last_hidden_state
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        return Seq2Seq._step(model, decoder_input_ids, attention_mask, encoded, cache)

    @staticmethod
    def decode(
        model: Any,
        decoder_input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Layers,
        written: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Layers]:
        """Return the scores of the token after `decoder_input_ids`, (batch, 1), and the longer keys and values.

        `written` is 0 where the decoder's own keys and values are padding, (batch, length after the token).
        """
        from transformers.cache_utils import EncoderDecoderCache

        # What the encoder gave is read by its keys and values alone.
        encoded = cache[0][2].new_zeros((*attention_mask.shape, model.config.hidden_size))
        caches = _cache([layer[:2] for layer in cache]), _cache([layer[2:] for layer in cache])
        return Seq2Seq._step(model, decoder_input_ids, attention_mask, encoded, EncoderDecoderCache(*caches), written)

    @staticmethod
    def _step(
        model: Any,
        ids: torch.Tensor,
        mask: torch.Tensor,
        encoded: torch.Tensor,
        cache: Any,
        written: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Layers]:
        from transformers.modeling_outputs import BaseModelOutput

        output = model(
            decoder_input_ids=ids,
            attention_mask=mask,
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),  # type: ignore[arg-type]
            use_cache=True,
            return_dict=True,
            **{_cache_name(_options(model)): cache},
            **({} if written is None else {"decoder_attention_mask": written}),
        )
        own, others = _kept(cache.self_attention_cache), _kept(cache.cross_attention_cache)
        return output.logits[:, -1], list(zip(*own, *others, strict=True))


def _options(model: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(model.forward).parameters)


def _cache_name(options: tuple[str, ...]) -> str:
    """Return what the model calls its cache: `past_key_values` before transformers 5.24."""
    return "cache" if "cache" in options else "past_key_values"


def _cache(layers: Any) -> Any:
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for keys, values in layers:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _kept(cache: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the keys and the values of a cache, per layer; refuse one that keeps something else."""
    for layer in cache.layers:
        if type(layer).__name__ != "DynamicLayer" or not layer.is_initialized:
            raise ModelFileInvalid(
                f"the model keeps a `{type(layer).__name__}` from token to token, and recipes take models that keep "
                "keys and values"
            )
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
