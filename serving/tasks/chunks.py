"""Long texts in chunks: the task `embed` with a vector for each chunk, and late chunking.

A chunk is embedded as if it were sent alone. Late chunking reads the whole text first, in windows if it does not fit,
and averages the vectors of each chunk's tokens (Günther et al., "Late Chunking", arXiv 2409.04701). The first and the
last chunk include the special tokens at their ends, so that a text of one chunk gets the mean of the whole text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from bertserve.serving.errors import InvalidRequest, WrongTask, quote
from bertserve.serving.records import EncodedChunk
from bertserve.serving.tasks import embed
from bertserve.serving.tasks.base import TaskOptions, TaskRoute, all_tokens, pairs_of, texts_of, with_checks
from bertserve.serving.tasks.embed import EmbedOptions
from bertserve.serving.tasks.parts import present
from bertserve.serving.tasks.prompts import Prepared, find_prompt
from bertserve.serving.tasks.windows import USUAL_OVERLAP, by_input, chunk_ranges, merge, too_many_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bertserve.serving.records import EncodedText, TextInput, Truncate
    from bertserve.serving.tasks.base import Facts, Tokenizer, Work


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """A part of a text and its vector, float32 [dimensions].

    Attributes:
        start: Position of its first character, in Unicode code points.
        end: Position after its last character.
    """

    start: int
    end: int
    embedding: NDArray[np.float32]


class ChunkOptions(TaskOptions[list[list[Chunk]]], frozen=True):
    """Options whose answer is, for each text, its chunks in order. A chunk ends with a word if words are short enough.

    Attributes:
        tokens: Maximum tokens of a chunk, including special tokens and a prompt; None means the model's limit.
        overlap_tokens: Approximate number of tokens that neighboring chunks share; at most half a chunk.
        vectors: Options of the vectors.
    """

    tokens: int | None = None
    overlap_tokens: int = 0
    vectors: EmbedOptions = EmbedOptions()


class LateChunkOptions(ChunkOptions, frozen=True):
    """Late chunking: the whole text is read first. A chunk's vector is the mean of its tokens' vectors."""


MAX_CHUNKS = 1000
"""Maximum chunks of all texts of a request."""

MIN_CHUNK = 8


def check(options: ChunkOptions, manifest: Facts) -> None:
    embed.check(options.vectors, manifest)
    tokens = options.tokens
    if tokens is not None and not MIN_CHUNK <= tokens <= manifest.max_length:
        raise InvalidRequest(f"`chunk_tokens` is {quote(tokens)}; it must be {MIN_CHUNK} to {manifest.max_length}")
    most = (tokens or manifest.max_length) // 2
    if not 0 <= options.overlap_tokens <= most:
        raise InvalidRequest(
            f"`chunk_overlap` is {quote(options.overlap_tokens)}; it must be 0 to {most}, half a chunk"
        )


def check_late(options: ChunkOptions, manifest: Facts) -> None:
    if manifest.multi_vector is not None:
        raise WrongTask("the vectors of this model's tokens are for MaxSim, not for late chunking")
    check(options, manifest)


def prepare(
    inputs: Sequence[TextInput], options: ChunkOptions, facts: Facts, prompt_name: str | None, input_type: str | None
) -> Prepared[ChunkOptions]:
    """Pairs of the prompt and each text."""
    texts = texts_of(inputs)
    if input_type is None and prompt_name is None:
        prompt_name = facts.default_prompt
    asked = input_type is not None or prompt_name is not None
    prompt = find_prompt(facts, prompt_name, input_type) if asked else ""
    return Prepared([(prompt, text) for text in texts], options)


def sizes_bytes(tokenizer: Tokenizer, inputs: Sequence[TextInput], _: ChunkOptions, *, truncate: Truncate) -> list[int]:
    return tokenizer.windows_sizes_bytes(pairs_of(inputs), truncate=truncate)


def encode(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], options: ChunkOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    del truncate  # nothing is truncated
    size = options.tokens or tokenizer.max_length
    return tokenizer.encode_chunks(pairs_of(inputs), tokens=size, overlap=options.overlap_tokens, most=MAX_CHUNKS)


def encode_whole(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], _: ChunkOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    length = tokenizer.max_length
    texts = [prompt + text for prompt, text in pairs_of(inputs)]
    overlap = min(USUAL_OVERLAP, length // 4)
    return tokenizer.encode_windows(texts, length=length, overlap=overlap, truncate=truncate, whole_words=False)


def _finish(work: Work[ChunkOptions]) -> list[list[Chunk]]:
    vectors = embed.finish(work.rows, work.options.vectors, normalize=present(work.manifest.embedding).normalize)
    answer: list[list[Chunk]] = [[] for _ in work.inputs]
    for text, vector in zip(work.texts, vectors, strict=True):
        if isinstance(text, EncodedChunk):
            answer[text.source].append(Chunk(text.start, text.end, vector))
    return answer


def _finish_late(work: Work[ChunkOptions]) -> list[list[Chunk]]:
    answer: list[list[Chunk]] = []
    pairs = pairs_of(work.inputs)
    room = (work.options.tokens or work.manifest.max_length) - len(work.tokenizer.frame)
    for source, windows, rows in by_input(work.texts, work.rows):
        before = len(pairs[source][0])
        whole, vectors = merge(windows, [row[0] for row in rows], work.check)
        count = len(whole.ids)
        spans = whole.spans[whole.head : count - whole.tail] - before
        prompt = int(np.count_nonzero(spans[:, 0] < 0))
        words = whole.words[whole.head + prompt : count - whole.tail]
        spans = spans[prompt:]
        means, places = [], []
        ranges = chunk_ranges(words, room, work.options.overlap_tokens) if len(words) else [(0, 0)]
        for begin, end in with_checks(ranges, work.check, 1):
            low = 0 if begin == 0 else whole.head + prompt + begin
            high = count if end == len(words) else whole.head + prompt + end
            means.append((vectors[low:high].astype(np.float32).mean(axis=0),))
            places.append((int(spans[begin, 0]), int(spans[end - 1, 1])) if end else (0, 0))
            if len(means) + sum(map(len, answer)) > MAX_CHUNKS:
                raise too_many_chunks(MAX_CHUNKS)
        made: NDArray[np.float32] = embed.finish(means, work.options.vectors, normalize=True)
        answer.append([Chunk(*place, vector) for place, vector in zip(places, made, strict=True)])
    return answer


WAY: TaskRoute[ChunkOptions, list[list[Chunk]]] = TaskRoute(
    ChunkOptions,
    "embed",
    _finish,
    check,
    sizes_bytes,
    prepare=prepare,
    encode=encode,
    text_numbers=lambda options, facts: embed.numbers(options.vectors, facts),
    token_outputs=True,
    windows=lambda _: True,
)

LATE: TaskRoute[ChunkOptions, list[list[Chunk]]] = TaskRoute(
    LateChunkOptions,
    "embed_tokens",
    _finish_late,
    check_late,
    sizes_bytes,
    prepare=prepare,
    encode=encode_whole,
    token_outputs=True,
    after=all_tokens,
    windows=lambda _: True,
)
