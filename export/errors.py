"""Why an export stops."""

from __future__ import annotations


class ExportError(Exception):
    """The export cannot go on; the message is one sentence for the person who started it."""


class BrokenLimitError(ExportError):
    """An artifact does not keep a limit beside PyTorch."""
