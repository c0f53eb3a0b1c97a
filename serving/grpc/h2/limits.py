"""What a peer can make a connection hold or do."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """The limits of one connection.

    Attributes:
        streams: Streams open at a time; told to the peer. A further one is refused.
        header_bytes: Size of a request's header list; told to the peer. Fields beyond are not kept.
        header_fields: Number of a request's fields. Fields beyond are not kept.
        granted_bytes: What all streams together may be granted beyond their first window (`H2Connection.expect`).
        credit: Frames in a burst that cost work and bring none: pings, settings, resets, empty data, late frames.
            A reply that ends gives one back, and so does `H2Connection.renew_credit`.
        turn_work: Work in one `H2Connection.receive`. A frame, a KiB of it and a decoded header field cost 1 each,
            and a new request 4, because its caller has to begin something.
    """

    streams: int = 256
    header_bytes: int = 16_384
    header_fields: int = 100
    granted_bytes: int = 16 << 20
    credit: int = 1000
    turn_work: int = 1000

    @property
    def decoded_header_bytes(self) -> int:
        """A header list, or its encoded block, beyond this size is not decoded to its end: the connection ends."""
        return 4 * self.header_bytes
