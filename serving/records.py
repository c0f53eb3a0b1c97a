"""The records that layers hand to one another. Plain data; nothing of the project is imported here.

They are `msgspec.Struct`s: a request makes a dozen of them, and each is made in C, where a dataclass runs a
Python function. While a model's weights sweep the caches between any two requests, that is 4 us apiece.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence  # noqa: TC003  tools read the types of a struct's fields
from typing import Literal, NewType, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float32] | NDArray[np.int32]
"""One output of a graph."""

Row: TypeAlias = tuple[Array, ...]
"""One text's part of every output; outputs of a token each are as long as the batch was padded."""

TokenIds = array
"""Token ids as an `array('i')`: four bytes each in the machine's order, the wire's own layout."""

ModelIndex = NewType("ModelIndex", int)
"""Position of a model in the list that the engine process was started with."""

TextInput = str | tuple[str, str] | list[int]
"""One input: a text, a pair of texts, or token ids with their special tokens."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a graph; -1 stands for a dimension that varies."""

    name: str
    dtype: Literal["int32", "float32"]
    shape: tuple[int, ...]


class EmbedOptions(msgspec.Struct, frozen=True):
    """What a request may change about an embedding.

    Attributes:
        normalize: Scale each vector to length 1.
        dimensions: Keep only the first so many components (before normalising); None keeps all.
    """

    normalize: bool = True
    dimensions: int | None = None


class InferRequest(msgspec.Struct):
    """One client request, stripped of its protocol.

    Attributes:
        model: Name of the model; None means the only model of the task.
        version: Version asked for; None means the newest.
        inputs: One or more inputs; all are answered or none.
        options: Task options.
        truncate: Cut inputs that are too long; None means the server's default.
        prompt_name: Key of the model's prompts to put before each text.
        max_inputs: The limit of the route on `len(inputs)`.
        arrival: When the request was complete, in seconds of the clock `time.perf_counter`.
        timeout_ms: The client's own limit; None means the server's default.
        request_id: Echoed to the client and written into logs.
    """

    inputs: Sequence[TextInput]
    arrival: float
    request_id: str
    max_inputs: int
    model: str | None = None
    version: str | None = None
    options: EmbedOptions = EmbedOptions()
    truncate: bool | None = None
    prompt_name: str | None = None
    timeout_ms: float | None = None


class EncodedText(msgspec.Struct, frozen=True):
    """One input as token ids, special tokens included.

    Attributes:
        ids: Token ids.
        type_ids: Segment of each token; None when all are 0.
        truncated: Tokens that were cut off.
    """

    ids: TokenIds[int]
    type_ids: TokenIds[int] | None = None
    truncated: int = 0


class Batch(msgspec.Struct, frozen=True):
    """What an engine runs at once.

    Attributes:
        model: Which of the engine's models.
        texts: Between 1 and the token budget's worth of inputs.
    """

    model: ModelIndex
    texts: Sequence[EncodedText]

    @property
    def padded_length(self) -> int:
        """Tokens of the longest input: the sequence length of the tensors."""
        return max(len(text.ids) for text in self.texts)


class BatchOutput(msgspec.Struct, frozen=True):
    """What an engine answers.

    Attributes:
        arrays: The graph's outputs in the manifest's order, each [len(texts), ...].
        finite: For each input, whether all of its numbers are finite.
        compute_us: Time the engine spent, in microseconds.
    """

    arrays: Sequence[Array]
    finite: Sequence[bool]
    compute_us: float


class Timings(msgspec.Struct):
    """Where a request's time went, in microseconds.

    Of a request with several inputs, `queue` and `compute` are the longest of its inputs.
    """

    tokenize_us: float = 0.0
    queue_us: float = 0.0
    compute_us: float = 0.0
    total_us: float = 0.0


class Outcome(msgspec.Struct, frozen=True):
    """The answer to an `InferRequest`.

    Attributes:
        vectors: For the task embed, float32 [inputs, dimensions].
        model: Name of the model that answered.
        version: Its version.
        timings: Where the time went.
        tokens: Tokens computed, special tokens included, padding not.
        truncated_tokens: Tokens cut off, over all inputs.
    """

    vectors: NDArray[np.float32]
    model: str
    version: str
    timings: Timings
    tokens: int
    truncated_tokens: int
