"""Errors of an export."""

from __future__ import annotations

import os


class ExportError(Exception):
    """The export cannot continue; the message is one sentence for the user."""

    exit_code = 1


class NoRoomError(ExportError):
    """Memory or disk is short; a later export may succeed."""

    exit_code = os.EX_TEMPFAIL


class LeftOutError(ExportError):
    """The bundle was written without a requested artifact."""

    exit_code = 3


class BrokenLimitError(ExportError):
    """An artifact breaks a limit of the comparison with PyTorch."""
