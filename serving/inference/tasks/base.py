"""What a task is to the pipeline: functions between a request's inputs, the graph's rows and the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from serving.errors import InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from serving.inference.tokenizer import TextTokenizer
    from serving.models.manifest import Manifest
    from serving.models.manifest import Task as TaskName
    from serving.records import EncodedText, Row, TextInput, Truncate

O = TypeVar("O")  # noqa: E741  the options
O_contra = TypeVar("O_contra", contravariant=True)
A = TypeVar("A", bound=Sized)


class Work(msgspec.Struct, Generic[O]):
    """A request that the engine has answered.

    Attributes:
        texts: What went to the engine; at least one for each input.
        rows: Each text's row of every output; outputs of a token each are padded.
    """

    inputs: Sequence[TextInput]
    options: O
    texts: Sequence[EncodedText]
    rows: Sequence[Row]
    manifest: Manifest
    tokenizer: TextTokenizer


class SizesBytes(Protocol[O_contra]):
    def __call__(
        self, tokenizer: TextTokenizer, inputs: Sequence[TextInput], options: O_contra, /, *, truncate: Truncate
    ) -> list[int]: ...


class Encode(Protocol[O_contra]):
    """Inputs to token ids; raises `InvalidRequest`."""

    def __call__(
        self, tokenizer: TextTokenizer, inputs: Sequence[TextInput], options: O_contra, /, *, truncate: Truncate
    ) -> Sequence[EncodedText]: ...


def accept(_: object, __: Manifest) -> None: ...


def sizes_bytes(tokenizer: TextTokenizer, inputs: Sequence[TextInput], _: object, *, truncate: Truncate) -> list[int]:
    return tokenizer.sizes_bytes(inputs, truncate=truncate)


def never(_: object) -> bool:
    return False


@dataclass(slots=True, frozen=True)
class Task(Generic[O, A]):
    """A task's functions.

    Attributes:
        name: As manifests call it; None suits models of every task.
        check: Refuses options that a model cannot follow, with `InvalidRequest`.
        sizes_bytes: Size of each input; refuses those that are too long to be read.
        expand: Makes the inputs that the model reads of the request's; None where they are the same.
        encode: None where each input is encoded by itself, as `TextTokenizer.encode` does.
        token_outputs: Whether finishing takes time for each token, so that long texts need a thread for it.
        prompt_apart: Whether inputs are pairs of the prompt and the text, in place of both in one.
        windows: Whether a text that is too long is read in several windows with these options; otherwise it is cut.
    """

    name: TaskName | None
    finish: Callable[[Work[O]], A]
    check: Callable[[O, Manifest], None] = accept
    sizes_bytes: SizesBytes[O] = sizes_bytes
    expand: Callable[[Sequence[TextInput], O], Sequence[TextInput]] | None = None
    encode: Encode[O] | None = None
    token_outputs: bool = False
    windows: Callable[[O], bool] = never
    prompt_apart: bool = False


def check_top_k(top_k: int | None, most: int) -> None:
    if top_k is not None and not 1 <= top_k <= most:
        raise InvalidRequest(f"`top_k` is {top_k}; between 1 and {most} are given")


def texts_of(inputs: Sequence[TextInput]) -> list[str]:
    """The inputs of a task whose answer points into its text; anything else is an `InvalidRequest`."""
    texts = [value for value in inputs if isinstance(value, str)]
    if len(texts) != len(inputs):
        raise InvalidRequest("each input must be one text")
    return texts


def pairs_of(inputs: Sequence[TextInput]) -> list[tuple[str, str]]:
    """The inputs of a task that looks at two texts at once; anything else is an `InvalidRequest`."""
    pairs = [value for value in inputs if isinstance(value, tuple)]
    if len(pairs) != len(inputs):
        raise InvalidRequest("each input must be a pair of texts")
    return pairs


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Probabilities along the last axis; the largest logit is subtracted first, so that none overflows."""
    scaled = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=np.float64)
    probabilities: NDArray[np.float64] = scaled / scaled.sum(axis=-1, keepdims=True)
    return probabilities


def sigmoid(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Each number between 0 and 1 by itself; no logit overflows."""
    probabilities: NDArray[np.float64] = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
    return probabilities
