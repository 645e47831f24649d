"""Run a command in which opening a network socket is fatal: `python no_network.py COMMAND ARGUMENT...`.

The kernel kills the process (SIGSYS) at `socket(AF_INET or AF_INET6, ...)`, whether Python or a C++ library asks for
it, in any of its threads and children. Unix sockets and pipes work. Needs Linux on x86-64 or ARM64.
Source: Linux, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

SOCKET_CALL = {"x86_64": 41, "aarch64": 198}
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
KILL_PROCESS, ALLOW = 0x80000000, 0x7FFF0000
CALL_NUMBER_AT, FIRST_ARGUMENT_AT = 0, 16
AF_INET, AF_INET6 = 2, 10


def instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def socket_filter() -> bytes:
    """Build the program: kill when the call is `socket` and its family is of the internet."""
    return b"".join(
        [
            instruction(LOAD, 0, 0, CALL_NUMBER_AT),
            instruction(JUMP_IF_EQUAL, 0, 4, SOCKET_CALL[platform.machine()]),
            instruction(LOAD, 0, 0, FIRST_ARGUMENT_AT),
            instruction(JUMP_IF_EQUAL, 1, 0, AF_INET),
            instruction(JUMP_IF_EQUAL, 0, 1, AF_INET6),
            instruction(RETURN, 0, 0, KILL_PROCESS),
            instruction(RETURN, 0, 0, ALLOW),
        ]
    )


class FilterProgram(ctypes.Structure):
    """`struct sock_fprog` of <linux/filter.h>."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def forbid_network() -> None:
    """Install the filter on this process; there is no way back."""
    code = socket_filter()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = FilterProgram(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl refused the filter")


if __name__ == "__main__":
    forbid_network()
    os.execvp(sys.argv[1], sys.argv[1:])
