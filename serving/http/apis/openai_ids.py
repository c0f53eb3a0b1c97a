"""The token ids of OpenAI's `cl100k_base`, back to text.

Clients made for OpenAI's server, LangChain first, may send ids in place of texts. Reading them takes the table of the
encoding's byte sequences and none of its rules, so that the file is all that is needed.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import TYPE_CHECKING

from serving.errors import ForeignTokenIds, InvalidRequest, StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MAX_IDS = 8192
"""Of one input, as OpenAI's models take."""


class OpenAiIds:
    """Turns ids into text.

    The table has for each id its bytes; characters may lie across several ids.
    """

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._table = table

    @classmethod
    def open(cls, setting: str) -> OpenAiIds | None:
        """Reads the file that `accept_token_ids` names, a line of base64 and id for each sequence; None for "".

        Raises:
            StartupError: There is none, or it is another kind of file.
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
                f"--accept-token-ids {path}: not a file of tiktoken's, which has a line of base64 and a number for each"
                " token"
            ) from error

    def texts(self, rows: Sequence[str | list[int]]) -> list[str]:
        """The texts, those given as ids read back; bytes that are no UTF-8 become U+FFFD, as tiktoken has it.

        Raises:
            ForeignTokenIds: An id is none of the encoding.
            InvalidRequest: A row has more ids than OpenAI's models take.
        """
        return [row if isinstance(row, str) else self._text(index, row) for index, row in enumerate(rows)]

    def _text(self, index: int, ids: Sequence[int]) -> str:
        if len(ids) > _MAX_IDS:
            raise InvalidRequest(f"input {index} has {len(ids)} token ids; at most {_MAX_IDS} are read")
        try:
            return b"".join([self._table[token] for token in ids]).decode("utf-8", "replace")
        except KeyError:
            raise ForeignTokenIds(
                f"input {index} holds a token id that cl100k_base does not have; send strings"
            ) from None
