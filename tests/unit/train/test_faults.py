"""Faults are read strictly and strike only at their moment."""

from __future__ import annotations

import os
import signal

import pytest

from megalith.errors import ConfigError
from megalith.train.faults import Fault, parse_fault


def test_a_fault_is_read() -> None:
    assert parse_fault("kill9@step=7,point=mid_save") == Fault(7, "mid_save")


@pytest.mark.parametrize("text", ["", "kill9", "kill9@step=7", "stop@step=7,point=fwd", "kill9@step=x,point=fwd"])
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write kill9@step=7,point=mid_save"):
        parse_fault(text)


def test_an_unknown_point_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no point nap; use one of data, fwd"):
        parse_fault("kill9@step=7,point=nap")


def test_a_fault_kills_at_its_point_of_its_step_only() -> None:
    fault = Fault(2, "bwd")
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
