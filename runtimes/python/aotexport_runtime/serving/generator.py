"""`Generator`: a bundle that generates tokens for many callers at once, by its programs `prefill` and `decode`.

Between two steps sequences join the batch and leave it: each gets the tokens that it gets alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from aotexport_runtime.adapters import use_adapter
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.commands.results import check_results
from aotexport_runtime.engines.candidates import MODEL_ENGINES
from aotexport_runtime.errors import ArgumentInvalid, NotSupported, Overloaded, attempt
from aotexport_runtime.generation.generate import Choice
from aotexport_runtime.generation.language_model import described, forced, options_of
from aotexport_runtime.rows.analysis import dependence, row_axes
from aotexport_runtime.serving.batcher import Batcher, Waiting
from aotexport_runtime.serving.options import ServableOptions
from aotexport_runtime.serving.program import least_of, load_served, run_recorded, without_gradients
from aotexport_runtime.serving.sequences import Generation, SequenceBatch, Token, agree, likely_tokens, padded
from aotexport_runtime.serving.tokenizer import Tokenizer
from aotexport_runtime.values.arguments import keywords_of

Read = tuple[SequenceBatch, torch.Tensor]
"""A batch of prompts that were read, and the scores of their next tokens."""

METHODS = ("prefill", "decode")
_PREFILL_TOKENS = 1024
"""Tokens of prompts that are read at once, with their padding."""
_BESIDE_TOKENS = 128
"""More than these are read while steps go on."""


class Generator:
    """A loaded bundle that generates tokens. Sequences may come from any thread; steps run in a thread of its own.

    Attributes:
        tokenizer: that of the bundle.
        choice: how tokens are chosen where nobody says it, by the model's generation config.
        adapters: names of the adapters that sequences may ask for.
        batcher: the queue of steps.
        longest: the most tokens of a prompt and of what comes after it; of an encoder-decoder model, of each.
        not_joined: why sequences are not decoded together; empty: they are.
    """

    inputs = outputs = texts = ()
    batch_axes = engine = None

    @keywords_of(ServableOptions)
    def __init__(self, path: str | os.PathLike[str], options: ServableOptions) -> None:
        """Load the bundle at `path`; nothing has run yet, see `warm_up`.

        Args:
            path: directory of the bundle.
            options: as keywords, see below.

        Raises:
            ArgumentInvalid: an argument is of a wrong type, or below its least value; or an adapter cannot be read.
            BundleInvalid: see `load`.
            NotSupported: see `load`; or the bundle has no tokenizer, or its generation config asks for what `generate`
                does not know.
        """
        bundle = self._bundle = open_bundle(path, limits=options.limits)
        self._target = options.engine or "auto"
        if self._target in MODEL_ENGINES:
            raise NotSupported(f"engine `{self._target}` generates no tokens; serve the bundle by torch")
        self._least = least_of(options)
        self.tokenizer = Tokenizer.of(bundle)
        config = described(bundle.manifest).generation_config
        chosen = self._settings = {name: value for name, value in config.items() if value is not None}
        known = options_of(chosen)
        self._ends = frozenset([known["eos"]] if isinstance(known.get("eos"), int) else known.get("eos", ()))
        self._start = chosen.get("decoder_start_token_id", chosen.get("bos_token_id", 0))
        names = ("temperature", "top_k", "top_p", "repetition_penalty")
        self.choice = Choice(**{name: chosen[name] for name in names if name in chosen})
        past, prompts = self._most("decode", "past"), self._most("prefill", "prompt")
        self.longest = min(options.max_tokens, *prompts, *(most + 1 for most in past))
        self.adapters = tuple(options.adapters or ())
        self.not_joined = ""
        self._joins_ages = True
        self._programs = [name for method in METHODS for name in bundle.manifest.with_variants(method)]
        self._most_rows = min([options.max_batch_size, *self._most("prefill", "batch"), *self._most("decode", "batch")])
        self._most_waiting = options.max_waiting
        self._waiting: deque[Generation] = deque()
        self._batches: list[SequenceBatch] = []
        self._reading: tuple[list[Generation], Future[Read | Exception]] | None = None
        self._changed = threading.Condition()
        self._is_running = self._is_closed = False
        self._without_gradients = without_gradients(map(bundle.program, METHODS))
        self.batcher = Batcher(lambda _: (), replace(options, max_batch_size=1, max_latency_ms=0))
        self._reader = ThreadPoolExecutor(1, "aotexport prompts", self.batcher.begin)
        self._module: Any = self.batcher.apply(lambda: load_served(bundle, self._target, options))
        self._device: Any = self._module.device
        self._vocabulary = len(self._module.get_input_embeddings().weight)

    @property
    def _is_seq2seq(self) -> bool:
        return len(self._bundle.program("prefill").parameters) == 3

    def _most(self, program: str, name: str) -> list[int]:
        dimensions = self._bundle.program(program).dimensions
        return [each.max for each in dimensions if each.name == name and each.max is not None]

    @property
    def waiting(self) -> int:
        """How many sequences wait until their prompt is read."""
        return len(self._waiting)

    def recorded_call(self) -> None:
        """Return None: calls have no inputs by name."""

    def warm_up(self) -> None:
        """Run the recorded calls, compare with what eager gave, and find out whether sequences keep apart in a batch.

        Raises:
            SelfTestFailed: an answer differs; the message lists the differences.
            NotSupported: calls change the module's state.
        """
        entries = [entry for entry in self._bundle.manifest.testvectors if entry.program in self._programs]

        def prove() -> None:
            with self._applying(None):
                check_results(result for _, _, result in run_recorded(self._module, entries, self._target, self._least))
                self.not_joined = self._why_not_joined()
                self._joins_ages = not self.not_joined and (not self._is_seq2seq or self._keeps_ages_apart())

        self.batcher.apply(prove)

    def submit(
        self,
        prompt: Sequence[int],
        put: Callable[[Token | Exception], None],
        *,
        most: int,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """Queue a sequence.

        Args:
            prompt: see `Generation`.
            put: see there; it is called in the generator's thread.
            most: see there; at least 1.
            temperature: of draws; 0: none, the likeliest token each; None: that of `choice`.
            top_k: draw from so many best tokens; 0: from all; None: that of `choice`.
            top_p: draw from the best tokens that have this much of the probability; None: that of `choice`.
            seed: of draws, which are then those of `generate` for this sequence alone; None: any.
            logprobs: see `Generation`.
            adapter: see there.

        Returns:
            The sequence; with `wanted` off, it ends.

        Raises:
            ArgumentInvalid: the prompt is empty, too long or no tokens of the model, or there is no such adapter.
            Overloaded: as many sequences wait already as may.
            NotSupported: the generator is closed.
        """
        self._check(prompt, most, adapter)
        given: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        processors = forced(self._settings, most + (1 if self._is_seq2seq else len(prompt)))
        chosen = {name: value for name, value in given.items() if value is not None}
        choice = replace(self.choice, processors=processors, **chosen)
        source = None
        if choice.temperature > 0:
            choice, source = replace(choice, do_sample=True), torch.Generator(self._device)
            source.manual_seed(seed) if seed is not None else source.seed()
        generation = Generation(
            prompt=prompt, put=put, most=most, choice=choice, source=source, logprobs=logprobs, adapter=adapter
        )
        with self._changed:
            if self._is_closed:
                raise NotSupported("the generator is closed")
            if len(self._waiting) >= self._most_waiting:
                raise Overloaded(
                    f"{self._most_waiting} sequences wait already. Try again later, or allow more: `max_waiting`"
                )
            self._waiting.append(generation)
            self._go_on()
        return generation

    def _check(self, prompt: Sequence[int], most: int, adapter: str | None) -> None:
        """Refuse an adapter that there is not, and a prompt that the model does not read or go on with by `most`."""
        if adapter is not None and adapter not in self.adapters:
            there = ", ".join(f"`{name}`" for name in self.adapters) or "none"
            raise ArgumentInvalid(f"there is no adapter `{adapter[:100]}`; there are {there}")
        read = len(prompt)
        whole = max(read, most) if self._is_seq2seq else read + most
        if read == 0 or whole > self.longest:
            together = "each" if self._is_seq2seq else "together"
            raise ArgumentInvalid(
                f"the prompt has {read} tokens, and {most} are to come; the model takes 1 to {self.longest}, {together}"
            )
        if unknown := [token for token in prompt if not 0 <= token < self._vocabulary]:
            raise ArgumentInvalid(f"there is no token {unknown[0]}; the model knows 0 to {self._vocabulary - 1}")

    def most_after(self, prompt: Sequence[int]) -> int:
        """Return how many tokens may come after a prompt."""
        return self.longest if self._is_seq2seq else self.longest - len(prompt)

    def close(self) -> None:
        """Refuse further sequences, and return when those that came have ended."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._is_running)
        self.batcher.close()
        self._reader.shutdown()
        self._module = None

    def _applying(self, adapter: str | None) -> AbstractContextManager[None]:
        return use_adapter(self._module, [adapter] if adapter else []) if self.adapters else nullcontext()

    def _why_not_joined(self) -> str:
        """Return why a sequence may get other tokens beside others, by graphs and by a trial; empty: it does not."""
        for name in self._programs:
            program = self._bundle.program(name)
            axes = next((axes for axes in row_axes(program) if axes.dimension.name == "batch"), None)
            graph = self._bundle.graph(name, program.forward.file)
            reason = "it has no batch" if axes is None else dependence(graph, axes)
            if reason is not None:
                return f"program `{name}`: {reason}"
        # Padding is harmless where positions come from the mask, which rows do not tell.
        alone, together = (self._tried(prompts) for prompts in ([[3, 1, 2]], [[3, 1, 2], [4, 5, 1, 2, 6, 3]]))
        if not all(agree(one, two[:1], self._least) for one, two in zip(alone, together, strict=True)):
            return "a prompt that is padded gets other scores than alone"
        return ""

    def _keeps_ages_apart(self) -> bool:
        """Return whether a sequence gets the scores that it gets alone beside one that is older, by a trial."""
        if len(self._programs) == len(METHODS):
            return False
        with self._without_gradients():
            old, new, alone = (
                self._prefilled([Generation(prompt=each, most=4, tokens=[1])])[0]
                for each in ([3, 1, 2], [4, 5, 1, 2, 6, 3], [4, 5, 1, 2, 6, 3])
            )
            for _ in range(2):
                self._decoded(old)
            old.join(new)
            return agree(self._decoded(alone), self._decoded(old)[1:], self._least)

    def _tried(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        """Return the scores of two steps."""
        with self._without_gradients():
            new = [Generation(prompt=each, most=2, tokens=[1]) for each in prompts]
            batch, first = self._prefilled(new)
            return [first, self._decoded(batch)]

    def _go_on(self) -> None:
        if not self._is_running:
            self._is_running = True
            self.batcher.submit(Waiting(function=self._step))

    def _step(self) -> None:
        """Read prompts that wait, if there is room, and generate a token for every sequence."""
        try:
            with self._without_gradients():
                self._read_prompts()
                for batch in self._batches:
                    self._decode(batch)
        finally:
            self._batches = [batch for batch in self._batches if batch.rows]
            with self._changed:
                self._is_running = False
                if self._batches or self._waiting or self._reading:
                    self._go_on()
                self._changed.notify_all()

    def _next_prompts(self) -> list[Generation]:
        """Remove sequences from the queue: the first, and those behind it that are read with it."""
        taken: list[Generation] = []
        with self._changed:
            room = self._most_rows - sum(len(batch.rows) for batch in self._batches)
            while self._waiting and len(taken) < room:
                first = self._waiting[0]
                if first.wanted:
                    longest = max(len(each.prompt) for each in [*taken, first])
                    is_alike = not taken or (first.adapter == taken[0].adapter and not self.not_joined)
                    if taken and not (is_alike and longest * (len(taken) + 1) <= _PREFILL_TOKENS):
                        break
                    taken.append(first)
                self._waiting.popleft()
        return taken

    def _read_prompts(self) -> None:
        """Read the next prompts, or look for those that are read beside steps; nobody waits who has a step to do."""
        if self._reading is None and (new := self._next_prompts()):
            for sequence in new:
                sequence.began = time.monotonic()
            is_long = len(new) * max(len(each.prompt) for each in new) > _BESIDE_TOKENS
            # An adapter is the whole module's, and so is a GPU.
            if is_long and self._batches and not self.adapters and self._device.type == "cpu":
                self._reading = new, self._reader.submit(self._read, new)
            else:
                self._begin(new, self._read(new))
        elif self._reading is not None and (self._reading[1].done() or not self._batches):
            (new, read), self._reading = self._reading, None
            self._begin(new, read.result())

    def _read(self, new: list[Generation]) -> Read | Exception:
        """Read prompts together."""
        with self._without_gradients(), self._applying(new[0].adapter):
            return attempt(lambda: self._prefilled(new))

    def _begin(self, new: list[Generation], found: Read | Exception) -> None:
        """Let sequences whose prompts are read join a batch."""
        if isinstance(found, Exception):
            for sequence in new:
                sequence.put(found)
            return
        batch, scores = found
        self._advance(batch, scores)
        alike = (each for each in self._batches if each.rows[0].adapter == new[0].adapter)
        if batch.rows and self._joins_ages and not self.not_joined and (other := next(alike, None)):
            other.join(batch)
        elif batch.rows:
            self._batches.append(batch)

    def _prefilled(self, new: list[Generation]) -> Read:
        """Return a batch of prompts that were read, and the scores of their next tokens."""
        # What an encoder reads begins at its first position; what a decoder goes on with ends at the last.
        ids, mask = padded([each.prompt for each in new], self._device, on_the_left=not self._is_seq2seq)
        if not self._is_seq2seq:
            scores, cache = self._module.prefill(ids, mask)
            return SequenceBatch(new, mask, cache, [len(each.prompt) for each in new]), scores
        first = ids.new_full((len(new), 1), self._start)
        scores, cache = self._module.prefill(ids, mask, first)
        return SequenceBatch(new, torch.ones_like(first), cache, [1] * len(new), mask), scores

    def _decode(self, batch: SequenceBatch) -> None:
        batch.keep([place for place, each in enumerate(batch.rows) if each.wanted])
        if not batch.rows:
            return
        with self._applying(batch.rows[0].adapter):
            scores = attempt(lambda: self._decoded(batch))
        if isinstance(scores, Exception):
            for each in batch.rows:
                each.put(scores)
            batch.rows = []
            return
        self._advance(batch, scores)

    def _decoded(self, batch: SequenceBatch) -> torch.Tensor:
        """Return the scores after the last token of each sequence."""
        tokens = torch.tensor([[each.tokens[-1]] for each in batch.rows], device=batch.mask.device)
        batch.mask = torch.nn.functional.pad(batch.mask, (0, 1), value=1)
        batch.read = [length + 1 for length in batch.read]
        if batch.encoded is None:
            scores, batch.cache = self._module.decode(tokens, batch.mask, batch.cache)
        else:
            written = (batch.mask,) if len({*batch.read}) > 1 else ()
            scores, batch.cache = self._module.decode(tokens, batch.encoded, batch.cache, *written)
        return scores

    def _advance(self, batch: SequenceBatch, scores: torch.Tensor) -> None:
        """Choose a token for each sequence of a batch, and keep those that go on."""
        going: list[int] = []
        best, scores = scores.argmax(-1).tolist(), scores.float()
        for row, (each, likely) in enumerate(zip(batch.rows, likely_tokens(batch.rows, scores), strict=True)):
            each.company = max(each.company, len(batch.rows))
            token = attempt(lambda: self._token(each, scores[row : row + 1], best[row], likely))  # noqa: B023
            each.put(token)
            if isinstance(token, Token) and not token.ended and each.wanted:
                going.append(row)
        batch.keep(going)

    def _token(self, sequence: Generation, scores: torch.Tensor, best: int, likely: torch.Tensor | None) -> Token:
        """Return the next token of a sequence, by its scores, (1, vocabulary), and its probabilities if there are."""
        chosen, choice = best, sequence.choice
        if likely is not None:
            chosen = int(torch.multinomial(likely, 1, generator=sequence.source))
        elif choice.repetition_penalty != 1.0 or choice.processors or choice.do_sample:
            before = [self._start] if self._is_seq2seq else sequence.prompt
            read = torch.tensor([[*before, *sequence.tokens]], device=scores.device)
            processed = choice.processed(read, read.new_zeros(1), scores)
            chosen = int(choice.chosen(processed, sequence.source))
        sequence.tokens.append(chosen)
        ended = "stop" if chosen in self._ends else "length" if len(sequence.tokens) >= sequence.most else ""
        if sequence.logprobs is None:
            return Token(chosen, ended=ended)
        logarithms = scores[0].log_softmax(-1)
        values, places = logarithms.topk(sequence.logprobs)
        pairs = tuple(zip(places.tolist(), values.tolist(), strict=True))
        return Token(chosen, float(logarithms[chosen]), pairs, ended)
