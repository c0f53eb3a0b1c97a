"""Forms with a file (multipart/form-data, RFC 7578), parsed while they arrive."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from serving.errors import InvalidRequest, MalformedRequest, UnsupportedMediaType

if TYPE_CHECKING:
    from collections.abc import Callable

# python_multipart logs a warning for each malformed body. The client gets the error, so the log does not need it.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 4096
_LONGEST_NAME = 255
_LONGEST_PREAMBLE = 4096
_NO_BOUNDARY = (
    "the body is not valid multipart/form-data: it does not begin with the boundary of its Content-Type and CRLF"
)
_ENCODED = {b"base64", b"quoted-printable"}


class FileForm:
    """A form of some short fields and one file.

    Attributes:
        fields: Values of the fields that have arrived, by name.
        file_name: The client's name of the file, perhaps empty; None before the file.
    """

    def __init__(self, content_type: bytes, file_field: str, write: Callable[[bytes], None]) -> None:
        """Prepares to parse a form.

        Raises:
            UnsupportedMediaType: The content type is not such a form.
        """
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise UnsupportedMediaType("the Content-Type must be multipart/form-data with a boundary")
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self._file_field, self._write = file_field, write
        self._header_name = self._header_value = self._disposition = b""
        self._name: str | None = None
        self._value = bytearray()
        self._parts, self._ended = 0, False
        self._begun, self._preamble = False, b"\r\n"  # as if a line preceded the first boundary
        self._boundary = re.compile(rb"\r\n--(%b)([ \t]*\r\n|--)" % re.escape(options[b"boundary"]))
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_to_name,
                    "on_header_value": self._add_to_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._name_part,
                    "on_part_data": self._take,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError:
            raise MalformedRequest("the form's boundary is longer than 256 bytes") from None

    def feed(self, data: bytes) -> None:
        """Parses a piece; blocks while `write` blocks.

        Raises:
            MalformedRequest: The bytes are not such a form.
            InvalidRequest: Too many fields, or a field is too long.
        """
        if not self._begun:
            data = self._after_preamble(data)
        try:
            self._parser.write(data)
        except FormParserError:
            raise MalformedRequest(
                "the body is not valid multipart/form-data: end each line with CRLF and each part with the boundary"
            ) from None

    def _after_preamble(self, data: bytes) -> bytes:
        """The data from the first boundary on; lines before it are ignored (RFC 2046, section 5.1.1)."""
        self._preamble += data
        first = self._boundary.search(self._preamble)
        if first is None or first.start() > _LONGEST_PREAMBLE:
            if len(self._preamble) > 2 * _LONGEST_PREAMBLE:
                raise MalformedRequest(_NO_BOUNDARY)
            return b""
        self._begun = True
        return b"--%b%b%b" % (first[1], first[2].lstrip(b" \t"), self._preamble[first.end() :])

    def finish(self) -> None:
        """Raises `MalformedRequest` if the form is incomplete."""
        if not self._ended:
            raise MalformedRequest("the form is truncated" if self._begun else _NO_BOUNDARY)

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MAX_FIELDS:
            raise InvalidRequest(f"the form has more than {_MAX_FIELDS} fields")
        self._disposition = b""
        self._name = None
        self._value.clear()

    def _add_to_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        name = self._header_name.lower()
        if name == b"content-disposition":
            self._disposition = self._header_value
        elif name == b"content-transfer-encoding" and self._header_value.strip().lower() in _ENCODED:
            raise InvalidRequest("a part of the form has a Content-Transfer-Encoding; leave it out (RFC 7578, 4.7)")
        self._header_name = self._header_value = b""

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name in self.fields or (self._name == self._file_field and self.file_name is not None):
            raise InvalidRequest("the form has a field twice")
        if self._name == self._file_field:
            if b"filename" not in self._disposition.lower():
                raise InvalidRequest(f"`{self._file_field}` has no file name; send a file (curl -F file=@PATH)")
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.file_name = "".join(letter for letter in name if letter.isprintable())[:_LONGEST_NAME]

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == self._file_field:
            self._write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise InvalidRequest(f"a field of the form has more than {_MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._name is not None and self._name != self._file_field:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True
