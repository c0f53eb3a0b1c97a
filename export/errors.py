"""Why an export stops."""

from __future__ import annotations

import os


class ExportError(Exception):
    """The export cannot go on; the message is one sentence for the person who started it."""

    exit_code = 1


class NoRoomError(ExportError):
    """Memory or disk is short now; another time it may suffice."""

    exit_code = os.EX_TEMPFAIL


class LeftOutError(ExportError):
    """The bundle is written, without an artifact that was asked for."""

    exit_code = 3


class BrokenLimitError(ExportError):
    """An artifact does not keep a limit beside PyTorch."""
