from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from bertserve.serving.bulk.progress import ProgressLine

if TYPE_CHECKING:
    import pytest


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It does."""
        return True


def test_a_terminal_has_one_line_that_changes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bar; markup in the words is shown as it is."""
    monkeypatch.setenv("TERM", "xterm")
    with ProgressLine(stream := Terminal()) as line:
        line.say("reading [bold]", 0.25)
        line.say("writing", 0.5)
        assert "reading [bold]" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")
    assert "━" in stream.getvalue()


def test_elsewhere_a_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a terminal without rich, which the server's image does not bring."""
    for stream in (io.StringIO(), Terminal()):
        if stream.isatty():
            monkeypatch.setitem(sys.modules, "rich", None)
        with ProgressLine(stream) as line:
            line.say("first")
            line.say("too soon", 0.5)
        assert stream.getvalue() == "first\n"
