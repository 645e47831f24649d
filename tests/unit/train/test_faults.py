"""Faults are read strictly and strike only at their moment."""

from __future__ import annotations

import os
import signal

import pytest

from megalith.errors import ConfigError
from megalith.train.faults import Fault, parse_fault


def test_a_fault_is_read() -> None:
    assert parse_fault("kill9@step=7,point=mid_save") == Fault("kill9", 7, "mid_save", None, 0)
    assert parse_fault("sleep@rank=1,step=7,point=fwd") == Fault("sleep", 7, "fwd", 1, 0)
    assert parse_fault("raise@step=7,point=fwd,attempt=all").attempt is None
    assert parse_fault("raise@step=7,point=fwd,attempt=2").attempt == 2


@pytest.mark.parametrize(
    "text",
    ["", "kill9", "kill9@step=7", "explode@step=7,point=fwd", "stop@step=x,point=fwd", "stop@step=²,point=fwd"]
    + ["stop@step=1,point=fwd,rank=a"],
)
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="MEGALITH_FAULT"):
        parse_fault(text)


def test_an_unknown_point_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="nap.*data, fwd"):
        parse_fault("kill9@step=7,point=nap")


def test_a_fault_of_a_rank_that_is_not_there_is_refused() -> None:
    assert parse_fault("kill9@step=7,point=fwd,rank=1", 2).rank == 1
    with pytest.raises(ConfigError, match="rank=2"):
        parse_fault("kill9@step=7,point=fwd,rank=2", 2)


def test_a_fault_kills_at_its_point_of_its_step_only() -> None:
    fault = Fault("kill9", 2, "bwd")
    child = os.fork()
    if child == 0:
        fault("bwd", 1)
        fault("fwd", 2)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    child = os.fork()
    if child == 0:
        fault("bwd", 2)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_fault_concerns_its_rank_and_its_attempt() -> None:
    one = parse_fault("sleep@rank=1,step=7,point=fwd")
    assert [one.applies_to(rank, attempt) for rank, attempt in ((1, 0), (0, 0), (1, 1))] == [True, False, False]
    assert parse_fault("raise@step=7,point=fwd,attempt=all").applies_to(3, 5)


def test_faults_that_raise() -> None:
    with pytest.raises(RuntimeError, match="MEGALITH_FAULT .*2"):
        Fault("raise", 2, "bwd")("bwd", 2)
    with pytest.raises(SystemExit):
        Fault("leave", 2, "bwd")("bwd", 2)
    Fault("raise", 2, "bwd")("bwd", 3)
