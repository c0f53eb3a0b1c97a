"""Compares the server's tokens with those of the library that the checkpoint was written for."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint.vocabulary import AT_ONCE, UNCUT
from bertserve.export.errors import ExportError
from bertserve.export.progress import quiet
from bertserve.export.texts import corpus
from bertserve.serving.inference.tokenizer import opened_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.export.checkpoint.vocabulary import Vocabulary
    from bertserve.serving.inference.tokenizer import TextTokenizer
    from bertserve.serving.records import EncodedText

_SHORT = (16, 17)
"""Limits that leave a pair an even and an odd number of tokens, and that most texts exceed."""
_MAX_REST = 400
"""Maximum combinations of overflowing parts of a pair: the tokenizers library computes all of them."""
_SHOWN = 12
_BEFORE = 3


def check(where: str, words: Vocabulary, vocab_size: int, max_length: int) -> None:
    """Compares token ids and types on texts/probes.jsonl: whole, truncated to the model's limit, and to short ones.

    The server's side is the class that encodes requests, with the tokenizer.json of the bundle.

    Raises:
        ExportError: They differ, or a rule is too slow for some text.
    """
    content, theirs = words.content.decode(), words.reference
    arguments = (vocab_size, words.special_ids.get("mask"), words.truncation_side)
    ours = opened_tokenizer(content, UNCUT, *arguments, tried=True)
    texts = corpus.probes()
    alone = [text for text in texts if isinstance(text, str)]
    pairs = [text for text in texts if isinstance(text, tuple)]
    for length in dict.fromkeys((UNCUT, max_length, *_SHORT)):
        if ours.turn is None:
            ours.max_length = length
        else:  # a process of its own, which would not see that
            ours = opened_tokenizer(content, length, *arguments, tried=True)
        fit = [pair for pair in pairs if len(pair[0]) * len(pair[1]) <= _MAX_REST * length**2]
        for group in _groups(alone, ours) + _groups(fit, ours):
            try:
                found = ours.encode(group, truncate=True)
            except Exception as error:
                raise ExportError(f"{where}: tokenizer.json: {error}") from error
            if not any(encoded.ids for encoded in found):
                raise ExportError(f"{where}: tokenizer.json gives no tokens to texts such as {group[0]!r}")
            columns = [group] if isinstance(group[0], str) else list(map(list, zip(*group, strict=True)))
            with quiet():  # after ours, which rules of the tokenizer's own cannot hold up
                wanted = theirs(*columns, truncation="longest_first", max_length=length)
            for index, (text, encoded) in enumerate(zip(group, found, strict=True)):
                expected = {name: rows[index] for name, rows in wanted.items()}
                if max(expected["input_ids"], default=0) >= vocab_size:
                    continue  # the model itself fails on it
                if (difference := _difference(encoded, expected)) is not None:
                    raise ExportError(_sentence(where, theirs, text, length, *difference))


def _groups(texts: Sequence[corpus.Text], ours: TextTokenizer) -> list[Sequence[corpus.Text]]:
    """All texts, or as many at once as share the limits of a call."""
    size = len(texts) if ours.turn is None else AT_ONCE
    return [texts[at : at + size] for at in range(0, len(texts), max(1, size))]


def _difference(found: EncodedText, expected: dict[str, list[int]]) -> tuple[str, list[int], list[int]] | None:
    """The first difference and both sides of it; None if there is none."""
    ids, zeros = list(found.ids), [0] * len(found.ids)
    if ids != expected["input_ids"]:
        return "tokens", ids, expected["input_ids"]
    # A model without token types takes 0 for each.
    types, wanted = list(found.type_ids or zeros), expected.get("token_type_ids", zeros)
    if types != wanted:
        return "token types", types, wanted
    mask = expected.get("attention_mask", [1] * len(ids))
    return None if all(mask) else ("masks", [1] * len(ids), mask)


def _sentence(
    where: str,
    theirs: Any,  # noqa: ANN401  of Transformers
    text: corpus.Text,
    length: int,
    what: str,
    ours: Sequence[int],
    wanted: Sequence[int],
) -> str:
    first = next(at for at, (one, other) in enumerate(zip_longest(ours, wanted)) if one != other)
    shown = slice(max(0, first - _BEFORE), first + _SHOWN)
    sides = [list(side)[shown] for side in (ours, wanted)]
    if what == "tokens":
        sides = [theirs.convert_ids_to_tokens(side) for side in sides]
    cut = "" if length == UNCUT else f", truncated to {length} tokens"
    settings = {"token types": "model_input_names", "masks": "padding"}
    setting = settings.get(what, "the tokenizer's own rules" if length == UNCUT else "truncation_side")
    return (
        f"{where}: the server's {what} differ from those of {type(theirs).__name__} in Transformers, so answers "
        f"would differ. Text {corpus.shown(text)!a}{cut}, from token {shown.start}: {sides[0]} here, {sides[1]} there. "
        f"Check {setting} in tokenizer_config.json and tokenizer.json"
    )
