"""Sequences that join and leave a batch between steps: each gets the tokens that it gets alone."""

from __future__ import annotations

import queue
import random
import threading

import pytest
import torch

from aotexport_runtime import ArgumentInvalid, NotSupported
from aotexport_runtime.errors import attempt
from aotexport_runtime.serving.generator import Generator
from tests.refusals import refusal
from tests.unit.serving.language_models import best_tokens, exported_model

KINDS = ["llama", pytest.param("t5", marks=pytest.mark.slow), pytest.param("gpt2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    found = {}

    def export(kind):
        if kind not in found:
            found[kind] = exported_model(kind, tmp_path_factory.mktemp(kind))
        return found[kind]

    return export


@pytest.fixture(scope="module")
def llama(exports):
    model, bundle = exports("llama")
    generator = Generator(bundle, max_batch_size=4, max_waiting=64)
    generator.warm_up()
    yield model, generator
    generator.close()


class Asked:
    """A sequence and what came of it."""

    def __init__(self, generator, prompt, most, **options):
        self.prompt, self.most, self.came, self.begun = prompt, most, queue.Queue(), []
        self.generation = generator.submit(prompt, self.came.put, most=most, **{"temperature": 0.0, **options})

    def tokens(self):
        found = self.begun
        while not found or not found[-1].ended:
            token = self.came.get(timeout=60)
            if isinstance(token, Exception):
                raise token
            found.append(token)
        return found

    def ids(self):
        return [token.id for token in self.tokens()]


def prompts(count, seed=0, longest=24):
    drawn = random.Random(seed)
    return [[drawn.randrange(4, 300) for _ in range(drawn.randrange(1, longest))] for _ in range(count)]


def test_long_prompt_is_read_while_steps_go_on(llama, monkeypatch):
    model, generator = llama
    first = Asked(generator, [5, 6], 200)
    first.begun = [first.came.get(timeout=60)]
    whole, going = generator._prefilled, threading.Event()

    def prefilled(new):
        assert going.wait(60), "the first sequence gets no token while a prompt is read"
        return whole(new)

    monkeypatch.setattr(generator, "_prefilled", prefilled)
    prompt = [4 + number % 290 for number in range(180)]
    long = Asked(generator, prompt, 8)
    for _ in range(30):
        first.begun.append(first.came.get(timeout=60))
    going.set()
    assert long.ids() == best_tokens(model, prompt, 8)
    assert first.ids() == best_tokens(model, [5, 6], 200)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_sequences_of_mixed_lengths_are_those_of_transformers(exports, kind):
    model, bundle = exports(kind)
    generator = Generator(bundle, max_batch_size=5)
    generator.warm_up()
    assert generator.not_joined == ""
    asked = []
    for number, prompt in enumerate(prompts(9)):
        asked.append(Asked(generator, prompt, 3 + number % 9))
        if number % 3 == 0:
            asked[-1].begun = [asked[-1].came.get(timeout=60)]  # the next ones come in the middle of it
    for each in asked:
        each.tokens()
        assert each.generation.tokens == best_tokens(model, each.prompt, each.most)
    assert max(each.generation.company for each in asked) > 1
    generator.close()


def test_model_that_takes_no_positions_from_the_mask_is_not_joined(exports):
    model, bundle = exports("unplaced")
    generator = Generator(bundle, max_batch_size=5)
    generator.warm_up()
    assert generator.not_joined == "a prompt that is padded gets other scores than alone"
    asked = [Asked(generator, prompt, 6) for prompt in prompts(6)]
    assert [each.ids() for each in asked] == [best_tokens(model, each.prompt, 6) for each in asked]
    assert {each.generation.company for each in asked} == {1}
    generator.close()


def test_draws_of_a_seed_are_those_of_transformers_in_any_company(llama):
    model, generator = llama
    options = [{"temperature": 0.8 - 0.4 * (seed % 2), "top_p": 0.9, "top_k": 40} for seed in range(5)]
    asked = [Asked(generator, prompt, 8, seed=seed, **options[seed]) for seed, prompt in enumerate(prompts(5, seed=1))]
    for seed, each in enumerate(asked):
        torch.manual_seed(seed)
        assert each.ids() == best_tokens(model, each.prompt, 8, do_sample=True, **options[seed])


def test_logarithms_are_those_of_the_models_scores(llama):
    model, generator = llama
    token = Asked(generator, [5, 6, 7], 1, logprobs=3).tokens()[0]
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0, -1].log_softmax(-1)
    assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-4)
    assert [place for place, _ in token.best] == expected.topk(3).indices.tolist()


def test_sequence_that_nobody_wants_leaves_its_place_to_others(llama):
    _, generator = llama
    held = [Asked(generator, [5, 6], 200, seed=1, temperature=2.0) for _ in range(4)]
    for each in held:
        each.came.get(timeout=60)
        each.generation.wanted = False
    assert len(Asked(generator, [7, 8], 2).ids()) <= 2
    assert all(len(each.generation.tokens) < 200 for each in held)


@pytest.mark.parametrize(
    ("prompt", "most", "options", "message"),
    [
        ([5] * 250, 7, {}, "the prompt has 250 tokens, and 7 are to come; the model takes 1 to 256, together"),
        ([], 7, {}, "the prompt has 0 tokens, and 7 are to come; the model takes 1 to 256, together"),
        ([5, 400, -1], 7, {}, "there is no token 400; the model knows 0 to 299"),
        ([5, -1], 7, {}, "there is no token -1; the model knows 0 to 299"),
        ([5], 1, {"adapter": "dutch"}, "there is no adapter `dutch`; there are none"),
    ],
)
def test_sequence_that_does_not_fit_is_refused(llama, prompt, most, options, message):
    assert refusal(ArgumentInvalid, llama[1].submit, prompt, print, most=most, **options) == message


def test_full_queue_refuses_and_a_closed_generator_ends_what_it_has(exports):
    model, bundle = exports("llama")
    generator = Generator(bundle, max_batch_size=1, max_waiting=1)
    generator.warm_up()
    go_on = threading.Event()
    first = Asked(generator, [5, 6], 9)
    first.begun = [first.came.get(timeout=60)]
    generator.submit([5], lambda _: go_on.wait(60), most=1)
    refused = [attempt(lambda: generator.submit([5], print, most=1)) for _ in range(3)]
    assert "1 sequences wait already" in str(refused[-1])
    go_on.set()
    generator.close()
    assert first.ids() == best_tokens(model, [5, 6], 9)
    with pytest.raises(NotSupported, match="the generator is closed"):
        generator.submit([5], print, most=1)
