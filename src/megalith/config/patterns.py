"""What is written for layers one by one: a frequency N, or a list of 0 and 1 such as "[0]*3+[1]" or "([1]*3+[0])*2".

Megatron evaluates such a text as Python; here only lists, whole numbers, + and * mean anything.
"""

from __future__ import annotations

import ast

_LONGEST = 100_000


def read_pattern(text: str) -> int | tuple[int, ...]:
    """A frequency or the list, written out.

    Raises:
        ValueError: it is neither; says why.
    """
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        found = None
    if isinstance(found, int):
        if found < 1:
            raise ValueError(f"{found} is no frequency; it must be at least 1")
        return found
    if found is None:
        raise ValueError("it must be a number N, or a list of 0 and 1 such as [0]*3+[1]")
    if not set(found) <= {0, 1}:
        raise ValueError("the list may hold 0 and 1 only")
    return tuple(found)


def _value(node: ast.expr) -> int | list[int] | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        parts = [_value(part) for part in node.elts]
        return [part for part in parts if isinstance(part, int)] if all(isinstance(p, int) for p in parts) else None
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(node.op, ast.Mult):
        items, times = (left, right) if isinstance(left, list) else (right, left)
        if isinstance(items, list) and isinstance(times, int) and 0 <= times * len(items) <= _LONGEST:
            return items * times
    return None


def of_layers(text: str | None, num_layers: int) -> tuple[bool, ...]:
    """Which layers are marked: every N-th, or those with a 1 in the list; a text that says nothing marks none."""
    if text is None:
        return (False,) * num_layers
    pattern = read_pattern(text)
    if isinstance(pattern, int):
        return tuple((layer + 1) % pattern == 0 for layer in range(num_layers))
    return tuple(bool(mark) for mark in pattern[:num_layers])


def read_window(text: str) -> tuple[int, int]:
    """The two numbers of `--window-size LEFT,RIGHT`; parentheses or brackets around them do not matter.

    Raises:
        ValueError: it is something else.
    """
    parts = text.strip().strip("()[]").split(",")
    try:
        left, right = (int(part) for part in parts)
    except ValueError:
        raise ValueError("it must be two numbers LEFT,RIGHT such as 4096,0") from None
    if left < -1 or right < -1:
        raise ValueError("LEFT and RIGHT must be at least 0, or -1 for no limit")
    return left, right
