"""Records of requests from generators, in a fixed binary format that costs a generator little CPU time."""

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
"""A request.

Four times in seconds from the run's start: when it was scheduled, when the generator got to it, when it was sent, when
its reply was complete. Four stage times that the server reports (-1: not reported). The kind of request, and its fault
as an index in the table of faults; 0 is none.
"""

PACK = struct.Struct("<ddddffffHH").pack
_SIZE = struct.Struct("<II")


def chunk(faults: list[str], records: list[bytes], cpu_s: float = 0.0) -> bytes:
    """A chunk of a generator's output.

    Args:
        faults: New entries of the table of faults.
        records: Packed by `PACK`.
        cpu_s: CPU time of the generator's whole loop; only in the last chunk.
    """
    head, data = json.dumps({"faults": faults, "cpu_s": cpu_s}).encode(), b"".join(records)
    return _SIZE.pack(len(head), len(data)) + head + data


READY = chunk([], [])
"""The first chunk: the generator is ready to start."""


@dataclass(slots=True)
class ChunkReader:
    """Reassembles a generator's output.

    Attributes:
        faults: The table of faults so far.
        cpu_s: CPU time of the loop, once it has ended.
    """

    faults: list[str]
    cpu_s: float = 0.0
    _data: bytes = b""

    def feed(self, data: bytes) -> list[NDArray[np.void]]:
        """The records that are complete now."""
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
