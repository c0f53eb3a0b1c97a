"""Runs a command as on a kernel without IPv6: `python without_ipv6.py COMMAND ...`.

A filter of system calls refuses sockets of that family with the error that such a kernel gives.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys

_SOCKET = {"x86_64": 41, "aarch64": 198}[platform.machine()]
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_NUMBER, _FIRST_ARGUMENT = 0, 16  # in struct seccomp_data
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_PROGRAM = (
    (_LOAD, 0, 0, _NUMBER),
    (_IF_EQUAL, 0, 3, _SOCKET),
    (_LOAD, 0, 0, _FIRST_ARGUMENT),
    (_IF_EQUAL, 0, 1, socket.AF_INET6),
    (_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT),
    (_RETURN, 0, 0, _ALLOW),
)
_NO_NEW_PRIVILEGES, _SET_FILTER, _MODE = 38, 22, 2

if __name__ == "__main__":
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in _PROGRAM))
    program = struct.pack("@HP", len(_PROGRAM), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_FILTER, _MODE, program, 0, 0)):
        if libc.prctl(*call) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606  it is for that
