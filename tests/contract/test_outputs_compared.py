"""The comparison itself: what a record forbids and what it allows."""

from __future__ import annotations

import pytest

from .outputs import fields_of, problems

RECORDED = {"step": {"loss": "null|number", "iteration": "integer", "sizes": "object", "sizes.*": "integer"}}


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"loss": 1.5, "iteration": 1, "sizes": {"a": 1}}, None),
        ({"loss": 1, "iteration": 1, "sizes": {"b": 1}, "more": "free"}, None),
        ({"loss": 1.5, "iteration": 1.0, "sizes": {"a": 1}}, "step: iteration was integer and is number"),
        ({"loss": "1.5", "iteration": 1, "sizes": {"a": 1}}, "step: loss was null|number and is string"),
        ({"loss": None, "iteration": 1, "sizes": {"a": 1}}, "step: loss was null|number and is null"),
        ({"loss": 1.5, "iteration": 1, "sizes": {}}, "step: sizes.* is missing"),
        ({"loss": 1.5, "sizes": {"a": 1}}, "step: iteration is missing"),
    ],
)
def test_answers_keep_their_names_and_types(value: object, complaint: str | None) -> None:
    found = {"step": fields_of([value], ("sizes",))}
    assert problems(RECORDED, found) == ([] if complaint is None else [complaint])


def test_a_value_that_some_machines_lack_may_be_null_alone() -> None:
    recorded = {"throughput": {"mfu_datasheet": "number?"}}
    assert problems(recorded, {"throughput": {"mfu_datasheet": "null"}}) == []
    assert problems(recorded, {"throughput": {"mfu_datasheet": "null|number"}}) == []
    assert problems(recorded, {"throughput": {"mfu_datasheet": "string"}}) != []


def test_a_section_that_is_gone_is_missing() -> None:
    assert len(problems(RECORDED, {})) == len(RECORDED["step"])


def test_requests_may_accept_more_but_not_less() -> None:
    recorded = {"PUT /api": {"top_k": "integer|null"}}
    assert problems(recorded, {"PUT /api": {"top_k": "integer|null|string"}}, accepted=True) == []
    assert problems(recorded, {"PUT /api": {"top_k": "integer"}}, accepted=True) != []
