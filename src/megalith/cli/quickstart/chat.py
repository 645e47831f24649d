"""Make a small instruction set of this Python's docstrings, and check the answers of the model that learned it."""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from megalith.tokenizers.byte_level import END_OF_TEXT, byte_level_tokenizer, read_byte_pair_vocabulary

SPECIAL = ("<|im_start|>", "<|im_end|>")
"""Tokens around the messages of a dialogue, in the form of ChatML."""

VOCAB_SIZE = 1024
"""Small, so that each token occurs in many names: a small model copies only tokens that it has learnt to copy. On 180
held-out names, 3 x 96 and 1,000 steps, 130 were copied with 4,096 tokens and 175 with 1,024. With 4,096, 38 of 52
tokens were wrong that the names to learn have fewer than 10 times, and 3 of 474 that they have 20 times or more. The
price: 1.86 instead of 1.74 bits per character of the base model, after 4.1 instead of 4.4 million characters."""

Messages = list[dict[str, str]]

QUESTIONS = ("What does `{}` do?", "What is `{}` for?", "Explain `{}`.", "Describe `{}`.", "Tell me about `{}`.")
ANSWER = re.compile(r"`(\w+)\([^`\n]*\)`: [^\n]*[^\n.]\.")
"""The form of every answer: the call in backticks, and one sentence."""

WORD = re.compile(r"[A-Za-z][a-z0-9]+")
PLAIN = re.compile(r"[A-Za-z][\w ,'()/.-]*", re.ASCII)
"""Sentences to learn; others have code in them."""

MAX_SUMMARY, MAX_ARGUMENTS, MAX_NAME = 64, 32, 24  # characters
MADE_UP, SHORT_SUMMARY = 4, 40  # made-up names for each function; characters
HELD_OUT = 16  # one name of so many is not trained on
NUM_ASKED, MAX_ANSWER = 50, 64  # held-out questions; tokens


@dataclass(frozen=True)
class Function:
    """A documented function: its name, the names of its arguments and the first sentence of its docstring."""

    name: str
    arguments: str
    summary: str

    @property
    def answer(self) -> str:
        return f"`{self.name}({self.arguments})`: {self.summary}"


def documented_functions(sources: Sequence[str]) -> list[Function]:
    """Return the public functions and methods of Python sources whose docstring begins with a short sentence."""
    found = {}
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (function := read_function(node)):
                found[function.answer] = function
    return sorted(found.values(), key=lambda function: function.answer)


def read_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function | None:
    """Return a function with its summary, or None where it is private or has no summary that makes one sentence."""
    text = re.split(r"\n\s*\n", (ast.get_docstring(node) or "").strip(), maxsplit=1)[0]
    sentence = re.split(r"(?<!\.\w)[.!?:;]\s", " ".join(text.split()), maxsplit=1)[0].rstrip(".!?:;")
    given = node.args
    arguments = [arg.arg for arg in (*given.posonlyargs, *given.args) if arg.arg not in ("self", "cls")]
    arguments += [f"*{given.vararg.arg}"] if given.vararg else []
    arguments += [arg.arg for arg in given.kwonlyargs] + ([f"**{given.kwarg.arg}"] if given.kwarg else [])
    call = ", ".join(arguments)
    plain = PLAIN.fullmatch(sentence) is not None and sentence.count(" ") >= 2
    short = len(sentence) <= MAX_SUMMARY and len(call) <= MAX_ARGUMENTS and len(node.name) <= MAX_NAME
    if node.name.startswith("_") or not plain or not short:
        return None
    return Function(node.name, call, f"{sentence[0].upper()}{sentence[1:]}.")


def is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT == 0


def write_dialogues(sources: Sequence[str], folder: Path) -> tuple[int, int]:
    """Write dialogues.jsonl to train on and held-out.jsonl, of other names; return the number of lines of both."""
    functions = documented_functions(sources)
    trained = [function for function in functions if not is_held_out(function.name)]
    choose = random.Random(1)
    held_out = {function.name: function for function in functions if is_held_out(function.name)}
    asked = [held_out[name] for name in sorted(held_out)]
    choose.shuffle(asked)
    lines = list(dialogues(trained, choose)), [dialogue(function, choose) for function in asked[:NUM_ASKED]]
    for name, some in zip(("dialogues", "held-out"), lines, strict=True):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"messages": messages}) + "\n" for messages in some)
    return len(lines[0]), len(lines[1])


def dialogues(functions: Sequence[Function], choose: random.Random) -> Iterator[Messages]:
    """Yield a question and its answer for each function, and for short ones again and again under made-up names.

    Made-up names, of words and parts of words, teach the model to take the name from the question.
    """
    words = sorted({word for one in functions for word in WORD.findall(f"{one.name} {one.summary}")})
    short = [one for one in functions if len(one.summary) <= SHORT_SUMMARY]

    def part() -> str:
        first, last = choose.sample(words, 2)
        return first if choose.random() < 0.5 else first[: choose.randint(1, 4)] + last[-choose.randint(1, 4) :]

    for function in functions:
        yield dialogue(function, choose)
        for _ in range(MADE_UP):
            name = "_".join(part() for _ in range(choose.randint(1, 3)))
            if not is_held_out(name):
                yield dialogue(replace(choose.choice(short), name=name), choose)


def dialogue(function: Function, choose: random.Random) -> Messages:
    question = choose.choice(QUESTIONS).format(function.name)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": function.answer}]


@dataclass(frozen=True)
class Answer:
    """What the model answered, and whether it has the form: the name of the question, one sentence, and an end."""

    question: str
    text: str
    right: bool


def ask(checkpoint: Path, dialogues: Path, device: str) -> list[Answer]:
    """Ask the model the questions of a file of dialogues."""
    from megalith.assemble.model import choose_device
    from megalith.assemble.trained import load_trained
    from megalith.text_model import TextModel

    model = TextModel(load_trained(checkpoint, choose_device(device)))
    asked = [json.loads(line)["messages"] for line in dialogues.read_text(encoding="utf-8").splitlines()]
    texts = [model.render(messages[:1]) for messages in asked]
    found = model.generate(texts, chat=True, temperature=0.0, max_new_tokens=MAX_ANSWER)
    return [
        Answer(messages[0]["content"], one.text, one.finish_reason == "stop" and is_answer(messages, one.text))
        for messages, one in zip(asked, found, strict=True)
    ]


def is_answer(messages: Messages, text: str) -> bool:
    """Tell whether a text has the form of the dialogue's answer, with the name of its question."""
    wanted, found = ANSWER.fullmatch(messages[-1]["content"]), ANSWER.fullmatch(text)
    return wanted is not None and found is not None and found[1] == wanted[1]


def write_chat_tokenizer(folder: Path) -> None:
    """Write the tokenizer of vocab.json and merges.txt as a Hugging Face folder with the tokens of a dialogue."""
    vocabulary = read_byte_pair_vocabulary(str(folder / "vocab.json"), str(folder / "merges.txt"))
    byte_level_tokenizer(vocabulary, (END_OF_TEXT, *SPECIAL)).save(str(folder / "tokenizer.json"))
    template = (files("megalith.tokenizers.chat_templates") / "chatml.jinja").read_text(encoding="utf-8")
    config = {"eos_token": END_OF_TEXT, "chat_template": template, "tokenizer_class": "GPT2TokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
