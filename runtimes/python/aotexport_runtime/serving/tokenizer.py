"""The tokenizer of a model: texts to tokens and back, and chats to texts. `tokenizers` and `jinja2` are extras."""

from __future__ import annotations

import datetime
import functools
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import ArgumentInvalid, NotSupported, attempt, first_line
from aotexport_runtime.schema.manifest import TOKENIZER, TOKENIZER_FILES

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Texts to tokens and back, as the fast tokenizers of transformers do it.

    Attributes:
        has_template: whether it makes texts of chats.
        padding: the token that fills up short texts.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Read those of `TOKENIZER_FILES` that there are, by name; the first is there.

        Raises:
            NotSupported: they are malformed, or `tokenizers` is not installed.
        """
        first, config, template = TOKENIZER_FILES
        for package in ("tokenizers", "jinja2"):
            if importlib.util.find_spec(package) is None:
                raise NotSupported(f"`{package}` reads texts: pip install {package}")
        import tokenizers

        def parse() -> tuple[Any, dict[str, Any], Callable[..., str] | None]:
            settings = msgspec.json.decode(files.get(config, b"{}"), type=dict[str, Any])
            found = files[template].decode() if template in files else settings.get("chat_template")
            return tokenizers.Tokenizer.from_str(files[first].decode()), settings, _renderer(found) if found else None

        if isinstance(parts := attempt(parse), Exception):
            raise NotSupported(f"the tokenizer cannot be read: {first_line(parts)}")
        self._tokens, self._config, self._render = parts
        self.has_template = self._render is not None
        named = self._tokens.token_to_id(self.special("pad_token"))
        self.padding: int = (self._tokens.padding or {}).get("pad_id", 0) if named is None else named
        # Files say what a trainer cut and padded to.
        self._tokens.no_truncation()
        self._tokens.no_padding()

    @classmethod
    def of(cls, bundle: Bundle) -> Tokenizer:
        """Return the tokenizer of a bundle; `NotSupported`: it has none, or see above."""
        listed = {entry.path for entry in bundle.manifest.files}
        paths = {name: f"{TOKENIZER}/{name}" for name in TOKENIZER_FILES}
        if (first := paths[TOKENIZER_FILES[0]]) not in listed:
            raise NotSupported(
                f"the bundle has no `{first}`, so that it cannot read text. Save the tokenizer beside the model "
                "(`tokenizer.save_pretrained`), and export that directory again"
            )
        return cls({name: bundle.read(path) for name, path in paths.items() if path in listed})

    def special(self, name: str) -> str:
        """Return the text of a special token, such as `eos_token`; empty: there is none."""
        token = self._config.get(name) or ""
        return str(token.get("content", "")) if isinstance(token, dict) else str(token)

    def encoded(self, texts: Sequence[Any], *, special: bool, in_words: bool) -> list[Any]:
        """Return what `tokenizers` tells of texts, or of lists of words: their tokens, and where these stand."""
        return self._tokens.encode_batch(list(texts), is_pretokenized=in_words, add_special_tokens=special)

    def tokens(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text; `special`: with those that begin and end one."""
        return self._tokens.encode(text, add_special_tokens=special).ids

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self._tokens.decode(tokens)

    def stream(self) -> Callable[[int], str]:
        """Return a function from each token of a text to what the text goes on with, as far as that is certain."""
        from tokenizers.decoders import DecodeStream

        stream: Any = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._tokens, token) or ""

    def name(self, token: int) -> str:
        """Return a token as text by itself."""
        return self._tokens.decode([token], skip_special_tokens=False)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, asks: bool = True) -> str:
        """Return the text of a chat; `asks`: with what the model's answer begins with.

        Raises:
            ArgumentInvalid: the template refuses the messages, or there is none.
        """
        if self._render is None:
            raise ArgumentInvalid("the model's tokenizer has no chat template; ask for completions")
        special = {name: self.special(name) for name in _SPECIAL if self._config.get(name)}
        render = functools.partial(self._render, messages=messages, add_generation_prompt=asks, **special)
        if isinstance(text := attempt(render), Exception):
            raise ArgumentInvalid(f"the chat template refuses the messages: {first_line(text)}")
        return text


class Text:
    """The text of tokens, as they come; what a stop sequence may begin with is kept back.

    Attributes:
        stopped: whether a stop sequence has come; the text ends before it.
    """

    stopped = False

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        """Begin with no token."""
        self._tokenizer, self._stops = tokenizer, stops
        self._stream = tokenizer.stream()
        self._tokens: list[int] = []
        self._given = self._kept = ""

    def add(self, token: int) -> str:
        """Return the text that is certain with one more token; bytes that are no whole character wait."""
        self._tokens.append(token)
        return self._certain(self._stream(token))

    def end(self) -> str:
        """Return the rest of the text."""
        if self.stopped:
            return ""
        whole = self._tokenizer.text(self._tokens)
        rest = self._certain(whole[len(self._given) :] if whole.startswith(self._given) else "")
        return rest + ("" if self.stopped else self._kept)

    def _certain(self, text: str) -> str:
        self._given += text
        text = self._kept + text
        found = min((place for stop in self._stops if (place := text.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped = True
            return text[:found]
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]


def _renderer(template: str | list[dict[str, str]]) -> Callable[..., str]:
    """Return what renders a chat template as transformers does: in jinja's sandbox, with the same names."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace as BaseNamespace

    class Generation(Extension):
        """The tag around what a model has written, which trainers look for."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(BaseNamespace):
        """Variables of a template, none of which is private."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.TemplateError(f"no variable is named {name[:50]!r}")
            super().__setitem__(name, value)

    def namespace(**values: Any) -> Any:
        made = Namespace()
        for name, value in values.items():
            made[name] = value
        return made

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    names: dict[str, Any] = {
        "raise_exception": refuse,
        "strftime_now": strftime_now,
        "dict": lambda **values: values,
        "namespace": namespace,
    }
    environment.globals.update(names)
    if isinstance(template, list):
        template = next(each["template"] for each in template if each["name"] == "default")
    return environment.from_string(template).render
