"""What generators tell of their requests: fixed binary records, which cost a generator next to nothing."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECORD = np.dtype(
    [
        ("intended", "<f8"),
        ("due", "<f8"),
        ("sent", "<f8"),
        ("done", "<f8"),
        ("tokenize_us", "<f4"),
        ("queue_us", "<f4"),
        ("compute_us", "<f4"),
        ("total_us", "<f4"),
        ("kind", "<u2"),
        ("fault", "<u2"),
    ]
)
"""A request: four times in seconds from the run's start (when it should have been sent, when the generator got to
it, when it was sent, when its answer was whole), what the server says of its stages (-1: nothing), which kind of
request it was, and its fault as an index in the table of faults; 0 is none."""

PACK = struct.Struct("<ddddffffHH").pack
_SIZE = struct.Struct("<II")


def chunk(faults: list[str], records: list[bytes], cpu_s: float = 0.0) -> bytes:
    """A piece of a generator's output.

    Args:
        faults: New to the table of faults.
        records: As `PACK` makes them.
        cpu_s: CPU time of the generator's whole loop, with the last piece.
    """
    head, data = json.dumps({"faults": faults, "cpu_s": cpu_s}).encode(), b"".join(records)
    return _SIZE.pack(len(head), len(data)) + head + data


READY = chunk([], [])
"""The first chunk: the generator can start."""


@dataclass(slots=True)
class ChunkReader:
    """Puts a generator's output together again.

    Attributes:
        faults: The table of faults so far.
        cpu_s: CPU time of the loop, once it has ended.
    """

    faults: list[str]
    cpu_s: float = 0.0
    _data: bytes = b""

    def feed(self, data: bytes) -> list[NDArray[np.void]]:
        """The records that are whole now."""
        self._data += data
        found = []
        while len(self._data) >= _SIZE.size:
            head_size, size = _SIZE.unpack_from(self._data)
            start = _SIZE.size + head_size
            stop = start + size
            if len(self._data) < stop:
                break
            head = json.loads(self._data[_SIZE.size : start])
            self.faults += head["faults"]
            self.cpu_s += head["cpu_s"]
            found.append(np.frombuffer(self._data[start:stop], RECORD))
            self._data = self._data[stop:]
        return found
