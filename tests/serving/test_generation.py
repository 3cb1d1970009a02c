"""Texts and chats by an OpenAI client as it is, beside what transformers generates."""

from __future__ import annotations

import concurrent.futures
import queue
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the environment of `make test-serve` has it")

import numpy as np
import openai
import tokenizers
import torch
import tritonclient.grpc as triton

import aotexport_runtime
from aotexport_runtime import adapters
from tests.serving.server import serving, wait_for
from tests.serving.test_page import BROWSER
from tests.unit.serving.language_models import best_tokens, exported_model

CHAT = [{"role": "user", "content": [{"type": "text", "text": "who serves?"}]}]
CHAT_TEXT = "<s><|user|>who serves?</s><|assistant|>"


class Models:
    """A server of a small Llama and a small T5, and what transformers says."""

    def __init__(self, repository, exports):
        self.models = {name: model for name, (model, _) in exports.items()}
        self.words = tokenizers.Tokenizer.from_file(str(repository / "llama/1/tokenizer/tokenizer.json"))

    def tokens(self, text, special=True):
        return self.words.encode(text, add_special_tokens=special).ids

    def expected(self, prompt, most, model="llama", **options):
        return self.words.decode(best_tokens(self.models[model], prompt, most, **options))


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    return {kind: exported_model(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "t5")}


@pytest.fixture(scope="module")
def repository(exports, tmp_path_factory):
    root = tmp_path_factory.mktemp("texts")
    for kind, (_, bundle) in exports.items():
        shutil.copytree(bundle, root / kind / "1")
    return root


@pytest.fixture(scope="module")
def models(repository, exports):
    return Models(repository, exports)


@pytest.fixture(scope="module")
def server(repository):
    with serving(repository, "--max-batch-size", "8", "--max-waiting", "64") as server:
        yield server.wait_until_ready()


def client_of(server, **options):
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, **options)


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as client:
        yield client


@pytest.mark.parametrize("model", ["llama", "t5"])
def test_completion_is_what_transformers_generates(client, models, model):
    answer = client.completions.create(model=model, prompt=["the one", "serves"], max_tokens=12, temperature=0)
    prompts = [models.tokens("the one"), models.tokens("serves")]
    assert [choice.text for choice in answer.choices] == [models.expected(each, 12, model) for each in prompts]
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == sum(len(best_tokens(models.models[model], each, 12)) for each in prompts)


def test_chat_is_rendered_and_streamed_with_its_usage(client, models):
    prompt = models.tokens(CHAT_TEXT, special=False)
    asked = {"model": "llama", "messages": CHAT, "max_completion_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == models.expected(prompt, 20)
    assert whole.usage.prompt_tokens == len(prompt)
    chunks = [*client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 5
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == whole.choices[0].finish_reason
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


@pytest.mark.parametrize("model", ["llama", "t5"])
def test_texts_of_clients_together_are_those_of_each_alone(client, server, models, model):
    prompts = [models.tokens("who serves the model that answers others"[: 3 + 2 * n]) for n in range(16)]

    def streamed(number):
        asked = {"model": model, "prompt": prompts[number], "max_tokens": 5 + 3 * (number % 5), "temperature": 0}
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = [*pool.map(streamed, range(16))]
    assert found == [models.expected(prompt, 5 + 3 * (n % 5), model) for n, prompt in enumerate(prompts)]
    lines = server.lines("request", protocol="openai", outcome="ok", model=model)
    assert max(line["batch"] for line in lines) > 1
    metrics = server.ask("/metrics")[1].decode()
    assert f'aotexport_generated_tokens_total{{model="{model}"}}' in metrics
    assert f'aotexport_first_token_seconds_count{{model="{model}"}}' in metrics


def test_texts_end_before_a_stop_sequence(client, models):
    text = models.expected(models.tokens("the one"), 24)
    stop = text[4:6]
    asked = {"model": "llama", "prompt": "the one", "max_tokens": 24, "temperature": 0, "stop": ["never", stop]}
    whole = client.completions.create(**asked).choices[0]
    assert (whole.text, whole.finish_reason) == (text[: text.index(stop)], "stop")
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == whole.text


def test_draws_follow_seeds_and_logarithms_follow_scores(client, models):
    prompt = models.tokens("the one")
    asked = {"model": "llama", "prompt": prompt, "max_tokens": 6, "temperature": 0.7, "top_p": 0.9}
    answer = client.completions.create(**asked, seed=5, n=2, logprobs=2)
    for number, choice in enumerate(answer.choices):
        torch.manual_seed(5 + number)
        options = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
        assert choice.text == models.expected(prompt, 6, **options)
    with torch.no_grad():
        scores = models.models["llama"](torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    best = answer.choices[0].logprobs.top_logprobs[0]
    assert max(best.values()) == pytest.approx(float(scores.max()), abs=1e-3)
    asked = {"model": "llama", "messages": CHAT, "max_tokens": 2, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    token = client.chat.completions.create(**asked).choices[0].logprobs.content[0]
    assert (token.token, token.logprob) == (token.top_logprobs[0].token, token.top_logprobs[0].logprob)


REFUSED = [
    ({"model": "gpt"}, openai.NotFoundError, "there is no model `gpt`"),
    ({"model": "llama:dutch"}, openai.BadRequestError, "there is no adapter `dutch`; there are none"),
    ({"prompt": [5, 100_000]}, openai.BadRequestError, "there is no token 100000; the model knows 0 to"),
    ({"prompt": "x" * 20_000}, openai.BadRequestError, "has 20000 characters; the model reads 256 tokens"),
    ({"prompt": ["a", [0.5]]}, openai.BadRequestError, "expected a text, a list of tokens, or a list of either"),
    ({"presence_penalty": 0.5}, openai.BadRequestError, "presence_penalty"),
    ({"echo": True}, openai.BadRequestError, "echo"),
    ({"extra_body": {"tools": []}}, openai.BadRequestError, "unknown field `tools`"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_what_is_not_served_is_refused_as_clients_read_it(client, change, error, message):
    with pytest.raises(error) as caught:
        client.completions.create(**{"model": "llama", "prompt": "the", "max_tokens": 3, **change})
    assert message in caught.value.body["message"]


def test_other_protocols_and_models_name_the_way(client, server):
    status, answer, _ = server.ask("/v2/models/llama/infer", {"inputs": []})
    assert (status, answer) == (400, {"error": "model `llama` generates text; ask POST /v1/completions"})


def test_texts_are_streamed_by_grpc_as_tritons_client_reads_them(server, models):
    def input_of(name, text):
        tensor = triton.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode()], object))
        return tensor

    answers = queue.Queue()
    with triton.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for options in ('{"max_tokens": "12", "temperature": 0}', '{"echo": true}'):
            inputs = [input_of("text_input", "the one"), input_of("sampling_parameters", options)]
            client.async_stream_infer("llama", inputs, request_id="7")
        pieces, is_last = [], False
        while not is_last:
            result, error = answers.get(timeout=60)
            assert error is None
            pieces.append(result.as_numpy("text_output")[0].decode())
            is_last = result.get_response().parameters["triton_final_response"].bool_param
        assert len(pieces) > 5
        assert "".join(pieces) == models.expected(models.tokens("the one"), 12)
        assert "`sampling_parameters` are the fields of a completion" in str(answers.get(timeout=60)[1])
        client.stop_stream()
    assert server.lines("request", protocol="grpc", model="llama", outcome="ok", id="7")


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium, which Debian packages as `chromium`")
def test_page_shows_a_text_as_it_comes(server, models):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
    with playwright.sync_playwright() as started:
        page = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--headless"]).new_page()
        page.goto(f"http://{server.http}/ui")
        page.get_by_label("Prompt").fill("the one")
        page.get_by_label("Most tokens").fill("24")
        page.get_by_role("button", name="Generate").click()
        playwright.expect(page.locator("#texts-took")).to_contain_text("24 tokens in")
        written = page.locator("#written").evaluate("element => element.textContent")
        assert written == models.expected(models.tokens("the one"), 24)
        page.get_by_label("Most tokens").fill("2000")
        page.get_by_role("button", name="Generate").click()
        playwright.expect(page.locator("#texts-error")).to_contain_text("2000 are to come; the model takes 1 to 256")


def test_full_queue_and_deadline_are_told(repository):
    with serving(repository, "--max-batch-size", "1", "--max-waiting", "1", "--request-timeout-s", "0.4") as server:
        server.wait_until_ready()
        asked = {"model": "llama", "prompt": "the", "max_tokens": 250, "temperature": 2, "n": 1}
        with client_of(server) as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked["prompt"] = [[5]] * 3
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(**asked)
            assert caught.value.response.headers["retry-after"] == "1"
            asked["prompt"] = "the"
            answers = [pool.submit(client.completions.create, **asked, seed=n) for n in range(8)]
            codes = {getattr(answer.exception(), "status_code", 200) for answer in answers}
            assert codes <= {200, 429, 504}
            assert 504 in codes or 429 in codes


def test_field_model_names_an_adapter(repository, exports, tmp_path, models):
    version = tmp_path / "models" / "llama" / "1"
    shutil.copytree(repository / "llama" / "1", version)
    module = aotexport_runtime.load(version).eval()
    adapters.add_lora(module, r=2, alpha=64)
    torch.manual_seed(0)
    for parameter in module.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    prompt = models.tokens("the one")
    tuned = module.generate(torch.tensor([prompt]), max_new_tokens=12)[0, len(prompt) :].tolist()
    adapters.save_adapter(module, version.with_name("1.adapters") / "german")
    with (
        serving(tmp_path / "models") as server,
        client_of(server) as client,
        concurrent.futures.ThreadPoolExecutor() as p,
    ):
        server.wait_until_ready()
        wait_for(lambda: [model.id for model in client.models.list()] == ["llama", "llama:german"], server)
        asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        answers = [p.submit(client.completions.create, model=name, **asked) for name in ("llama", "llama:german") * 3]
        texts = [answer.result().choices[0].text for answer in answers]
        assert texts == [models.expected(prompt, 12), models.words.decode(tuned)] * 3
        assert texts[0] != texts[1]


@pytest.mark.slow
def test_chat_demo_answers_in_the_words_that_it_learnt(tmp_path):
    demo = Path(__file__).parents[2] / "examples" / "chat" / "demo.py"
    done = subprocess.run([sys.executable, demo, "--output", tmp_path], capture_output=True, text=True, check=True)
    count, _, whole = done.stdout.splitlines()[-1].split()[:3]
    assert int(count) > 0.9 * int(whole), done.stdout[-1000:]
