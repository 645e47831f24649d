"""Functions over 60 lines, and public functions and constructors with 9 or more parameters, have a reason here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "megalith"
MOST_LINES, MOST_PARAMETERS = 60, 8
LONG = {
    "distributed/launch.py:connect": "one generator: what is taken before the yield is given back behind it",
    "optim/build.py:build_optimizer": "documents eleven arguments",
}
MANY_PARAMETERS = {
    "evaluate/harness.py:MegalithLM.__init__": "the --model_args of lm-eval, by keyword and with defaults",
    "kernels/partial_attention.py:attend_part": "the tensors of attention, and what its kinds differ in, by keyword",
    "kernels/partial_attention.py:attend_part_backward": "the tensors and options of a backward pass of attention",
    "kernels/partial_attention.py:attend_varlen": "the tensors of attention, and what its kinds differ in, by keyword",
    "models/gpt.py:GPT.forward": "inputs of training, pipelines and generation; all but the tokens have defaults",
    "models/language_model.py:LanguageModel.__init__": "the parts of a model, by keyword and with defaults",
    "models/transformer.py:Block.__init__": "the ports of a layer, which each module passes to those inside",
    "models/transformer.py:Transformer.__init__": "the ports of a layer, and the options of the stack",
    "nn/loss.py:vocabulary_loss": "tensors and options of the autograd function",
    "nn/moe/experts.py:Experts.__init__": "sizes, ports and options of the layers of an expert",
    "nn/moe/layer.py:MoE.__init__": "the ports of a layer, and the sizes of its experts",
    "nn/registered_attention.py:RegisteredAttention.__init__": "the ports and options of an attention layer",
    "optim/build.py:build_optimizer": "what training loops of one's own choose, by keyword and with defaults",
    "optim/shards.py:flat_shards": "build_optimizer's choices about memory, by keyword",
}


@cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return `file:qualified name` and node of all functions."""
    return [
        (f"{file.relative_to(SOURCE).as_posix()}:{name}", node)
        for file in sorted(SOURCE.rglob("*.py"))
        for name, node in _within(ast.parse(file.read_text(encoding="utf-8")), "")
    ]


def _within(parent: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(parent):
        name = f"{prefix}{node.name}" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
        yield from _within(node, f"{name}." if name else prefix)


def is_public(name: str) -> bool:
    """Return whether no part of a qualified name is private; a constructor is as public as its class."""
    parts = name.partition(":")[2].split(".")
    return not any(part.startswith("_") and part != "__init__" for part in parts)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


def test_functions_are_short_or_have_a_reason() -> None:
    long = {name for name, node in functions() if (node.end_lineno or node.lineno) - node.lineno + 1 > MOST_LINES}
    assert long == set(LONG)


def test_public_functions_have_few_parameters_or_a_reason() -> None:
    many = {name for name, node in functions() if is_public(name) and parameters(node) > MOST_PARAMETERS}
    assert many == set(MANY_PARAMETERS)
