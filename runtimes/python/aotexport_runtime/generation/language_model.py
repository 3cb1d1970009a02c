"""What libraries ask of a model of transformers, beside calls: of bundles that `aotexport --recipe` made.

The data are an extension of the manifest, which means nothing to the programs.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from safetensors.torch import save_file
from torch import nn

from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.generation.generate import Processor, Streamer, generate
from aotexport_runtime.schema.manifest import TRANSFORMERS, Manifest
from aotexport_runtime.submodules.submodule import LoadedSubmodule
from aotexport_runtime.submodules.tables import module_at

log = logging.getLogger("aotexport_runtime")


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The extension of a manifest: configs of transformers, paths of layers that read, score, are `Conv1D`.

    `counts`: whether losses are divided by `num_items_in_batch`; None: calls take none.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    input_embeddings: str
    output_embeddings: str
    conv1d: tuple[str, ...] = ()
    counts: bool | None = None


class Config(dict[str, Any]):
    """A config as plain data, whose entries are attributes too, as in transformers."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the config has no `{name}`")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def to_dict(self) -> dict[str, Any]:
        """Return a copy as a plain dict."""
        return copy.deepcopy(dict(self))

    def to_json_string(self, **_: Any) -> str:
        """Return the config as JSON."""
        return json.dumps(self, indent=2) + "\n"

    def get_text_config(self, **_: Any) -> Config:
        """Return the config: the model reads nothing but text."""
        return self


def described(manifest: Manifest) -> Description:
    """Return the extension of a manifest (`NotSupported`: it is malformed)."""
    try:
        return msgspec.convert(manifest.extensions[TRANSFORMERS], Description)
    except msgspec.ValidationError as error:
        raise NotSupported(f"the bundle's extension `{TRANSFORMERS}` is malformed: {error}") from None


class OfTransformers:
    """Mixed into a module that `isinstance` also takes for one of a class of transformers, once that is imported."""

    _seen_as: ClassVar[tuple[str, str]]

    def __init_subclass__(cls) -> None:
        """Keep away what transformers does for its own classes."""

    @property
    def __class__(self) -> type[Any]:
        own, (module, name) = type(self), self._seen_as
        other = getattr(sys.modules.get(module), name, own)
        if not issubclass(own, other) and "_both" not in own.__dict__:
            own._both = type(own.__name__, (own, other), {"__module__": own.__module__})  # type: ignore[attr-defined]
        return own.__dict__.get("_both", own)

    @__class__.setter
    def __class__(self, value: type[Any]) -> None:
        object.__dict__["__class__"].__set__(self, value)


class Conv1D(OfTransformers, LoadedSubmodule):
    """A layer whose class is transformers' `Conv1D`, beside which peft puts adapters."""

    _seen_as = ("transformers.pytorch_utils", "Conv1D")


class LanguageModel(OfTransformers):
    """Methods of a loaded language model that libraries call: transformers' `Trainer`, peft, TRL."""

    config: Config
    """The model's config, which calls do not read."""
    is_gradient_checkpointing = is_activation_checkpointing = False
    """A bundle recomputes by the choice of its load."""
    _keys_to_ignore_on_save: None = None
    _seen_as = ("transformers.modeling_utils", "PreTrainedModel")
    _embeddings: tuple[str, str]
    _counts: bool | None
    _generation_config: Any

    def _describe(self: Any, manifest: Manifest) -> set[str]:
        """Take configs and classes of layers from a manifest (`NotSupported`); return names of settable attributes."""
        found = described(manifest)
        # Libraries may set these: calls do not read them.
        own = {"accepts_loss_kwargs": found.counts is not None, "config": Config(found.config)}
        embeddings = found.input_embeddings, found.output_embeddings
        self.__dict__ |= {**own, "_embeddings": embeddings, "_counts": found.counts}
        self.__dict__["_generation_config"] = Config(found.generation_config)
        for layer in (module_at(self, path) for path in found.conv1d):
            if type(layer) is LoadedSubmodule and "weight" in layer._parameters:
                object.__setattr__(layer, "__class__", Conv1D)
        return {*own, "generation_config"}

    @property
    def generation_config(self) -> Any:
        """Settings of `generate` that its caller leaves out: a `GenerationConfig` once transformers is imported."""
        found, other = self._generation_config, sys.modules.get("transformers.generation.configuration_utils")
        if type(found) is Config and other is not None:
            self._generation_config = found = other.GenerationConfig.from_dict(found)
        return found

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self._generation_config = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program of the current mode; without mask and positions every token counts, as for the model.

        For `num_items_in_batch`, by which `Trainer` weighs tokens of several calls alike, the loss is the sum over the
        call's labels, divided by it.

        Raises:
            CallInvalid: the call does not fit the program.
            NotSupported: the bundle has no program for this mode.
        """
        ids = kwargs.get("input_ids", *args[:1])
        told = len(args) > 1 or any(kwargs.get(name) is not None for name in ("attention_mask", "position_ids"))
        if not told and isinstance(ids, torch.Tensor):
            kwargs["attention_mask"] = torch.ones_like(ids)
        count = None if self._counts is None else kwargs.pop("num_items_in_batch", None)
        named = {} if count is None else inspect.signature(self.forward).bind_partial(*args, **kwargs).arguments
        if not self._counts or named.get("labels") is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        labels = named["labels"]
        own = (labels if self.config.get("is_encoder_decoder") else labels[..., 1:]).ne(_IGNORED).sum()
        # The mean over no label is no number, and so is its gradient.
        named["labels"] = labels.where(own > 0, 0)
        results = super().forward(**named)  # type: ignore[misc]
        loss = results["loss"]
        results["loss"] = loss * (own / count).to(loss.dtype)
        return results

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        streamer: Streamer | None = None,
        logits_processor: Sequence[Processor] = (),
        **settings: Any,
    ) -> torch.Tensor:
        """Return sequences of tokens, (batch, length), as `generate` of transformers does for the model.

        Args:
            inputs: prompts, or what an encoder reads, (batch, length); shorter prompts are padded on the left.
            generation_config: settings by name, or transformers' `GenerationConfig`; None: `self.generation_config`.
            input_ids: another name of `inputs`.
            attention_mask: 0 for padding; None: where a padding token stands that ends no sequence.
            streamer: hears of tokens as they come.
            logits_processor: functions of sequences and scores to scores, called in order.
            settings: by transformers' names; those that are left out are of `generation_config`.

        Raises:
            ArgumentInvalid: a setting is not supported, or out of its range.
            NotSupported: the module is in train mode, or has another `prepare_inputs_for_generation`.
        """
        ids = inputs if input_ids is None else input_ids
        if ids is None:
            raise ArgumentInvalid("`generate` needs prompts: `input_ids`, (batch, length)")
        own = getattr(self.prepare_inputs_for_generation, "__func__", None)
        if own is not LanguageModel.prepare_inputs_for_generation:
            raise NotSupported("`generate` calls no other `prepare_inputs_for_generation`, as prompt learning has it")
        chosen: dict[str, Any] = {}
        for given in (self.generation_config, generation_config, settings):
            plain: Mapping[str, Any] = getattr(given, "to_dict", dict)() if given is not settings else settings
            chosen |= {name: value for name, value in plain.items() if value is not None}
        options = options_of(chosen)
        is_seq2seq = bool(self.config.get("is_encoder_decoder"))
        if is_seq2seq:
            options["start"] = chosen.get("decoder_start_token_id", chosen.get("bos_token_id"))
        read = 1 if is_seq2seq else ids.shape[1]
        options.setdefault("max_new_tokens", self._most_tokens(chosen, read))
        options["logits_processor"] = (*forced(chosen, read + options["max_new_tokens"]), *logits_processor)
        pad, ends = options.get("pad"), ids.new_tensor(options.get("eos", []))
        if attention_mask is None and pad is not None and not torch.isin(pad, ends):
            attention_mask = (ids != pad).long()
        return generate(self, ids, attention_mask=attention_mask, streamer=streamer, **options)

    def _most_tokens(self, chosen: Mapping[str, Any], length: int) -> int:
        """Return how many tokens transformers adds to a prompt, if nothing says it."""
        most = self.config.get("max_position_embeddings") or length + _NEW_TOKENS
        return chosen.get("max_length", min(length + _NEW_TOKENS, most)) - length

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **named: Any) -> dict[str, Any]:
        """Return the arguments of a call as they are; peft asks for it."""
        return {"input_ids": input_ids, **named}

    def get_input_embeddings(self) -> nn.Module:
        """Return the layer that tokens are read by."""
        return self.get_submodule(self._embeddings[0])  # type: ignore[attr-defined]

    def get_output_embeddings(self) -> nn.Module:
        """Return the layer that scores tokens."""
        return self.get_submodule(self._embeddings[1])  # type: ignore[attr-defined]

    @property
    def _tied_weights_keys(self) -> dict[str, str]:
        """Names of weights that are that of the layer which reads tokens, as peft looks for them."""
        reads, manifest = f"{self._embeddings[0]}.weight", self.bundle.manifest  # type: ignore[attr-defined]
        ties = [(each.name, *each.tied) for each in manifest.state]
        return {name: reads for names in ties if reads in names for name in names if name != reads}

    def resize_token_embeddings(self, new_num_tokens: int) -> nn.Module:
        """Give the layers that read and score tokens so many rows, by new parameters; return the one that reads.

        New rows are drawn about the mean of the others, as in transformers. Tied weights stay tied.

        Raises:
            ArgumentInvalid: the number is below 1.
            NotSupported: a layer is not torch's own, or has an adapter.
        """
        if new_num_tokens < 1:
            raise ArgumentInvalid(f"`new_num_tokens` must be above 0, got {new_num_tokens}")
        whole: Any = self
        reads, scores = self.get_input_embeddings(), self.get_output_embeddings()
        tensors = [reads.weight, scores.weight, getattr(scores, "bias", None)]
        new = {id(each): _resized(each, new_num_tokens) for each in tensors if each is not None}
        found = [
            (path, layer, name)
            for path, layer in whole.named_modules()
            for name in ("weight", "bias")
            if id(getattr(layer, name, None)) in new
        ]
        known = {each.name for each in whole.bundle.manifest.modules if each.type is not None}
        for path, layer, _ in found:
            if path not in known or next(layer.children(), None) is not None:
                raise NotSupported(f"`{path}` is no layer of torch alone, so that nobody knows how it takes more rows")
        for _, layer, name in found:
            setattr(layer, name, new[id(getattr(layer, name))])
        self.config["vocab_size"] = new_num_tokens
        return reads

    @property
    def dtype(self) -> torch.dtype:
        """The floating dtype of the first weight that has one."""
        weights: Any = self.parameters()  # type: ignore[attr-defined]
        return next((each.dtype for each in weights if each.is_floating_point()), torch.get_default_dtype())

    def save_pretrained(
        self, save_directory: str | Path, *, state_dict: Any = None, is_main_process: bool = True, **_: Any
    ) -> None:
        """Write a directory that transformers reads: configs, and weights; a tied weight once, by its first name."""
        if not is_main_process:
            return
        (directory := Path(save_directory)).mkdir(parents=True, exist_ok=True)
        found: Any = self.state_dict() if state_dict is None else state_dict  # type: ignore[attr-defined]
        # The last one stays: of one weight its first name.
        names = {(x.data_ptr() or name, x.shape, x.stride()): name for name, x in reversed(found.items())}
        weights = {name: found[name].contiguous() for name in names.values()}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        own = {"architectures": [type(self).__name__], "dtype": str(self.dtype).removeprefix("torch.")}
        for name, config, more in (("config", self.config, own), ("generation_config", self.generation_config, {})):
            (directory / f"{name}.json").write_text(Config(config.to_dict() | more).to_json_string())

    def can_generate(self) -> bool:
        """Return True."""
        return True

    # Asked by transformers, which renames weights of its own code alone.
    is_custom_code = can_generate

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        """Keep activations as they are, and say how a bundle saves them: what is computed does not depend on it."""
        log.warning("gradient checkpointing is a choice of the load: `load(..., memory_budget=0.5)`")

    def enable_input_require_grads(self) -> None:
        """Do nothing: backward needs no gradients of inputs, as reentrant checkpoints would."""

    def add_model_tags(self, tags: Any) -> None:
        """Take tags for a card of the model, which a bundle has not."""


def _resized(values: Any, count: int) -> nn.Parameter:
    """Return rows of a matrix, or numbers, as so many; new ones have the mean, and a billionth of the variance."""
    kept, wide = values.detach()[:count], values.detach().float()
    mean, added = wide.mean(0), max(0, count - len(values))
    # A factor of the covariance, which may be singular.
    spread = (wide - mean) / max(len(wide), 1) ** 0.5
    drawn = torch.randn(added, len(wide), device=wide.device) @ spread * 1e-9**0.5
    new = torch.cat([kept, (mean + drawn).to(values.dtype)])
    return nn.Parameter(new, requires_grad=values.requires_grad)


_IGNORED = -100
"""The label of a token that has no loss."""

_NEW_TOKENS = 20
_SAME = ("max_new_tokens", "do_sample", "repetition_penalty", "num_beams", "length_penalty", "early_stopping")
_OF_DRAWS = ("temperature", "top_k", "top_p")
_TOKENS = {"eos_token_id": "eos", "pad_token_id": "pad"}
_FORCED = ("forced_bos_token_id", "forced_eos_token_id")
_ELSEWHERE = ("max_length", "bos_token_id", "decoder_start_token_id", "labels", "use_cache", "transformers_version")
_NEUTRAL = {"num_return_sequences": 1, "num_beam_groups": 1, "typical_p": 1.0, "encoder_repetition_penalty": 1.0}
"""Values of settings that change nothing, beside 0 and False."""


def forced(chosen: Mapping[str, Any], longest: int) -> tuple[Processor, ...]:
    """Return processors by which a first token, and a last one of `longest`, are those that settings name."""

    def at(length: int, tokens: Any) -> Processor:
        def process(sequences: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if sequences.shape[1] != length:
                return scores
            wanted = torch.tensor(tokens, device=scores.device).reshape(-1)
            return torch.full_like(scores, -float("inf")).index_fill(1, wanted, 0.0)

        return process

    pairs = zip((1, longest - 1), map(chosen.get, _FORCED), strict=True)
    return tuple(at(length, tokens) for length, tokens in pairs if tokens is not None)


def options_of(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of transformers as arguments of `generate` (`ArgumentInvalid`: it does not know one)."""
    known = (*_SAME, *_OF_DRAWS, *_TOKENS, *_FORCED, *_ELSEWHERE)
    for name, value in chosen.items():
        helps = name.startswith(("_", "assistant_", "num_assistant_", "target_lookbehind", "cache_"))
        if not (name in known or helps or not value or value == _NEUTRAL.get(name)):
            raise ArgumentInvalid(f"`{name}={value!r}` is not supported by `generate` of a bundle")
    options = {name: chosen[name] for name in _SAME if name in chosen}
    options |= {own: chosen[name] for name, own in _TOKENS.items() if name in chosen}
    if chosen.get("do_sample"):
        options |= {"top_k": 50, **{name: chosen[name] for name in _OF_DRAWS if name in chosen}}
        options["top_k"] = options["top_k"] or None
    return options
