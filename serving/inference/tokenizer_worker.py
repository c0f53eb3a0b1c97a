"""The program of `tokenizer_process`: receives a tokenizer.json, then one call at a time, each with its own limits."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from tokenizers import Tokenizer

from bertserve.serving.errors import BertserveError, DeadlineExceeded, InternalError, InvalidRequest
from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.inference.tokenizer_process import (
    CPU_S,
    MEMORY_BYTES,
    MEMORY_PER_BYTE,
    OPEN,
    OPEN_S,
    PROBE,
    pack,
    unpack,
)
from bertserve.serving.inference.tokenizer_rules import MAX_GROWTH, SECTIONS, hostile_texts

if TYPE_CHECKING:
    from collections.abc import Callable

_STATM = Path("/proc/self/statm")


def main(descriptor: int) -> None:
    """Answers calls until the server closes the pipe or ends; a running call then ends by its limit."""
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # a single thread, so that the limits apply to it
    pipe = Connection(descriptor)
    content, arguments = unpack(pipe.recv_bytes())

    @cache
    def opened() -> TextTokenizer:
        return TextTokenizer(Tokenizer.from_str(content), *arguments)

    def run(method: str, args: list[Any], kwargs: dict[str, Any]) -> object:
        if method == OPEN:
            opened()
        elif method == PROBE:
            _probe(opened, *args)
        else:
            value = getattr(opened(), method)(*_texts(args), **kwargs)
            rows = isinstance(value, list)
            return [msgspec.structs.asdict(row) for row in value] if rows else value
        return None

    with contextlib.suppress(EOFError):
        while True:
            call = unpack(pipe.recv_bytes())
            if call[0] == OPEN:
                _limit(MEMORY_BYTES + MEMORY_PER_BYTE * len(content), OPEN_S)
            else:
                _limit(MEMORY_BYTES, CPU_S)
            pipe.send_bytes(pack(_try(lambda: run(*call))))  # noqa: B023  called here


def _texts(args: list[Any]) -> list[Any]:
    """The arguments of a method. Pairs in the first one arrive as lists and become tuples."""
    first, *rest = args
    if isinstance(first, list):
        first = [tuple(value) if isinstance(value, list) else value for value in first]
    return [first, *rest]


def _try(work: Callable[[], object]) -> tuple[str, object]:
    """The kind of error and its message, or "" and the result; other messages may repeat the text and are dropped."""
    try:
        return "", work()
    except InvalidRequest as error:
        return InvalidRequest.__name__, error.message
    except BertserveError as error:
        return InternalError.__name__, error.message
    except BaseException as error:  # noqa: BLE001  a panic of the library is no Exception
        kind = type(error).__name__
        if kind == "PanicException":  # its regex engine gives up after a number of steps
            return DeadlineExceeded.__name__, "a regex exceeded its limit"
        return InternalError.__name__, f"the tokenizer fails with {kind}"


def _probe(opened: Callable[[], TextTokenizer], section: str, rule: object, letters: str, length: int) -> None:
    """Runs a rule, or the whole tokenizer if it is None, on hostile texts."""
    for text in hostile_texts(letters, length):
        if rule is None:
            opened().encode([text], truncate=True)
            continue
        model = {"type": "WordLevel", "vocab": {text: 0}, "unk_token": text}
        whole: dict[str, Any] = {"version": "1.0", "added_tokens": [], "post_processor": None, "model": model}
        tokenizer = Tokenizer.from_str(json.dumps(whole | dict.fromkeys(SECTIONS) | {section: rule}))
        if section == "normalizer":
            written = tokenizer.normalizer.normalize_str(text)
        elif section == "decoder":
            written = tokenizer.decode([0])
        else:
            written = "".join(piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
        if len(written) > MAX_GROWTH * len(text):
            raise InternalError(f"it turns {len(text):,} letters into {len(written):,}")


def _limit(memory_bytes: int, cpu_s: float) -> None:
    """Limits further memory and CPU time of this process."""
    now = int(_STATM.read_bytes().split()[0]) * resource.getpagesize()
    for kind, limit in ((resource.RLIMIT_AS, now + memory_bytes), (resource.RLIMIT_CPU, time.process_time() + cpu_s)):
        _, hard = resource.getrlimit(kind)
        wanted = math.ceil(limit)
        resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


if __name__ == "__main__":
    main(int(sys.argv[1]))
