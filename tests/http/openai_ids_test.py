"""The file of another tokenizer's ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bertserve.serving.errors import StartupError
from bertserve.serving.http.apis.openai_ids import OpenAiIds

if TYPE_CHECKING:
    from pathlib import Path


def test_ids_that_split_a_character(tmp_path: Path) -> None:
    """They are one again; bytes that are none are U+FFFD."""
    file = tmp_path / "ranks"
    file.write_text("w6k= 7\nww== 8\nqQ== 9\n")
    ids = OpenAiIds.open(f"cl100k_base={file}")
    assert ids is not None
    assert ids.texts([[7, 8, 9], "as it is", [8], []]) == ["éé", "as it is", "\ufffd", ""]


def test_nothing_is_read_unasked() -> None:
    """Without the setting there is no table."""
    assert OpenAiIds.open("") is None


@pytest.mark.parametrize("content", [b"{}", b"YQ== 1 2", b"YQ== a", b"Y 1", b"\xff\xfe 1", b"YQ==", None])
def test_files_of_another_kind(tmp_path: Path, content: bytes | None) -> None:
    """They end the start with their name and what they should be; so does one that is not there."""
    file = tmp_path / "ranks"
    if content is not None:
        file.write_bytes(b"YQ== 0\n" + content)
    said = "No such file" if content is None else r"--accept-token-ids \S+ranks: not a tiktoken file"
    with pytest.raises(StartupError, match=said):
        OpenAiIds.open(f"cl100k_base={file}")
