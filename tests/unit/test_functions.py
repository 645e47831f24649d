"""Functions over 60 lines and public functions with 9 or more parameters have a reason here, or there are none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "megalith"
MOST_LINES, MOST_PARAMETERS = 60, 8
LONG = {
    "distributed/launch.py:connect": "one generator: what is taken before the yield is given back behind it",
    "optim/build.py:build_optimizer": "documents eleven arguments",
}
MANY_PARAMETERS = {
    "kernels/partial_attention.py:attend_part_backward": "the tensors and options of a backward pass of attention",
    "models/gpt.py:forward": "inputs of training, pipelines and generation; all but the tokens have defaults",
    "nn/loss.py:forward": "an autograd function takes tensors by position",
    "nn/loss.py:vocabulary_loss": "tensors and options of that autograd function",
    "optim/build.py:build_optimizer": "what training loops of one's own choose, by keyword and with defaults",
    "optim/shards.py:flat_shards": "build_optimizer's choices about memory, by keyword",
}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file.relative_to(SOURCE).as_posix()}:{node.name}", node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


def test_functions_are_short_or_have_a_reason() -> None:
    long = {name for name, node in functions() if (node.end_lineno or node.lineno) - node.lineno + 1 > MOST_LINES}
    assert long == set(LONG)


def test_public_functions_have_few_parameters_or_a_reason() -> None:
    many = {name for name, node in functions() if not node.name.startswith("_") and parameters(node) > MOST_PARAMETERS}
    assert many == set(MANY_PARAMETERS)
