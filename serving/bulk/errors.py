"""Errors that end a bulk job."""

from __future__ import annotations


class BatchError(Exception):
    """A bulk job cannot begin or go on; the message is the one line that the user reads.

    Attributes:
        exit_code: 2 for invalid options, 1 for an environment that does not fit them.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        # Both in `args`, so that the error crosses processes.
        super().__init__(message, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])
