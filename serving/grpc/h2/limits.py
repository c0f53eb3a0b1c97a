"""What a peer can make a connection hold or do.

Work is counted in units of about a microsecond of one core: what frames, fields and bytes of each kind were measured to
take, and for a request what its caller has to begin.
"""

from __future__ import annotations

import msgspec

WINDOW_WORK = 3
"""A WINDOW_UPDATE, beside its frame."""

SMALL_DATA_WORK = 3
"""A frame of a body that is small and not the last, beside its frame."""

CONTINUATION_BYTES = 256
"""What a CONTINUATION counts for beside its bytes: many small ones are refused like a few large ones."""

REQUEST_WORK = 30
"""A request that is handed to the caller."""

RESET_WORK = 20
"""Giving up a stream that is open: its caller has to stop what it began."""

REPLY_CREDIT = 100
"""What an answer is worth beyond what its request has cost: pings, windows, and a request that is given up."""


class Limits(msgspec.Struct, frozen=True):
    """The limits of one connection.

    Attributes:
        streams: Streams open at a time; told to the peer. A further one is refused.
        header_bytes: Size of a request's header list; told to the peer. Fields beyond are not kept.
        header_fields: Number of a request's fields. Fields beyond are not kept.
        granted_bytes: What all streams together may be granted beyond their first window (`H2Connection.expect`).
        turn_work: Work in one `H2Connection.receive`; what is over waits for the next.
        credit: Work that may be done for the peer beyond what its answered requests were worth. All work is taken from
            it; each answer, each larger piece of a body and each second give some back. A peer that overdraws it is
            sent away.
        credit_per_s: What a second gives back.
        settings: Settings in one frame; a peer that sends more is sent away, as nghttp2 does.
    """

    streams: int = 256
    header_bytes: int = 16_384
    header_fields: int = 100
    granted_bytes: int = 16 << 20
    turn_work: int = 1000
    credit: int = 30_000
    credit_per_s: int = 30_000
    settings: int = 32

    @property
    def decoded_header_bytes(self) -> int:
        """A header list, or its encoded block, beyond this size is not decoded to its end: the connection ends."""
        return 4 * self.header_bytes

    @property
    def decoded_header_fields(self) -> int:
        """Likewise the number of fields."""
        return 4 * self.header_fields
