"""Trains a small Llama on conversations about Python's library, and chats with it behind the server.

From random weights to answers: a tokenizer, a recipe bundle, `aotexport finetune`, the server, OpenAI's route. Needs
aotexport, aotexport_runtime[serve], transformers and tokenizers: `make chat-demo` installs them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODULES = ("math", "os.path", "random", "shutil", "statistics", "textwrap", "time", "json", "glob", "bisect", "heapq")
SPECIAL = ["<pad>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def facts() -> dict[str, str]:
    """Return questions about functions of Python's library, with the first sentences of their documentation."""
    found = {}
    for module in MODULES:
        for name, function in inspect.getmembers(importlib.import_module(module), inspect.isroutine):
            first = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
            sentence = first.partition(". ")[0].removesuffix(".") + "."
            if not name.startswith("_") and 20 < len(sentence) < 100 and "->" not in sentence:
                found[f"What does {module}.{name} do?"] = sentence
    return found


def make_model(answers: dict[str, str], directory: Path) -> None:
    """Write a Llama of random weights, and a tokenizer that was trained on the conversations."""
    trained = ByteLevelBPETokenizer()
    texts = [text for pair in answers.items() for text in pair]
    trained.train_from_iterator(texts, vocab_size=1024, special_tokens=SPECIAL, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="</s>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def aotexport(*words: str | Path) -> None:
    """Show and run a command of the exporter."""
    print("$", shlex.join(["aotexport", *map(str, words)]), flush=True)
    subprocess.run([sys.executable, "-m", "aotexport", *words], check=True)


@contextlib.contextmanager
def served(models: Path) -> Iterator[int]:
    """Serve bundles in the block; yield the port, once the model answers."""
    options = ["--http-port", "0", "--grpc-port", "0", "--access-log", "off"]
    command = [sys.executable, "-m", "aotexport_runtime", "serve", models, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            log = [{}]
            while log[-1].get("message") != "model is served":
                line = server.stderr.readline()
                if not line:
                    sys.exit("\n".join(["the server has ended:", *(str(each) for each in log[-20:])]))
                log.append(json.loads(line) if line.startswith("{") else {"message": line})
            yield next(each["http_port"] for each in log if "http_port" in each)
        finally:
            server.terminate()


def ask(port: int, question: str) -> str:
    """Return the model's answer, by OpenAI's route."""
    asked = {"model": "chat", "temperature": 0, "messages": [{"role": "user", "content": question}]}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(asked).encode()) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/chat-demo"), help="directory of everything")
    parser.add_argument("--epochs", default="30", help="how often each conversation is seen")
    options = parser.parse_args()
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    answers = facts()
    make_model(answers, output / "llama")
    rows = ([{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in answers.items())
    (output / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    aotexport(output / "llama", "--recipe", "causal-lm", "-o", output / "base", "--fast", "--force")
    aotexport(
        *("finetune", output / "base", "--data", output / "chats.jsonl", "--tokenizer", output / "llama"),
        *("--loss", "completion", "--epochs", options.epochs, "--batch-size", "16", "--lr", "3e-3"),
        *("--validation", "0", "-o", output / "models/chat/1", "--run", output / "run", "--force"),
    )
    with served(output / "models") as port:
        given = {question: ask(port, question) for question in [*answers][::8]}
    for question, answer in [*given.items()][:6]:
        print(f"> {question}\n  {answer}")
    right = sum(answer == answers[question] for question, answer in given.items())
    print(f"{right} of {len(given)} answers are the documentation's own words")
    return int(right < len(given) / 2)


if __name__ == "__main__":
    sys.exit(main())
