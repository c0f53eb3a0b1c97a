"""Decodes token ids of OpenAI's `cl100k_base` to text.

Clients made for OpenAI's server, LangChain first, may send ids instead of texts. Decoding needs only the encoding's
table of byte sequences and none of its rules, so the file is enough.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import TYPE_CHECKING

from bertserve.serving.errors import ForeignTokenIds, InvalidRequest, StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MAX_IDS = 8192
"""Maximum ids per input, as OpenAI's models accept."""


class OpenAiIds:
    """Decodes ids to text.

    The table maps each id to its bytes. A character may span several ids.
    """

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._table = table

    @classmethod
    def open(cls, setting: str) -> OpenAiIds | None:
        """Reads the file of `accept_token_ids`, with base64 and an id on each line. None for "".

        Raises:
            StartupError: The file is missing or has another format.
        """
        if not setting:
            return None
        path = Path(setting.partition("=")[2])
        try:
            lines = path.read_bytes().splitlines()
            pairs = [line.split() for line in lines if line]
            return cls({int(number): base64.b64decode(text, validate=True) for text, number in pairs})
        except OSError as error:
            raise StartupError(f"--accept-token-ids {path}: {error.strerror}") from error
        except (ValueError, binascii.Error) as error:
            raise StartupError(
                f"--accept-token-ids {path}: not a tiktoken file, which has base64 and a number on each line"
            ) from error

    def texts(self, rows: Sequence[str | list[int]]) -> list[str]:
        """The texts, decoded if given as ids. Invalid UTF-8 becomes U+FFFD, as in tiktoken.

        Raises:
            ForeignTokenIds: An id is not in the encoding.
            InvalidRequest: A row has more ids than OpenAI's models accept.
        """
        return [row if isinstance(row, str) else self._text(index, row) for index, row in enumerate(rows)]

    def _text(self, index: int, ids: Sequence[int]) -> str:
        if len(ids) > _MAX_IDS:
            raise InvalidRequest(f"input {index} has {len(ids)} token IDs; the maximum is {_MAX_IDS}")
        try:
            return b"".join([self._table[token] for token in ids]).decode("utf-8", "replace")
        except KeyError:
            raise ForeignTokenIds(f"input {index} has a token ID outside cl100k_base; send strings") from None
