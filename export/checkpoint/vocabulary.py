"""A checkpoint's tokenizer, freed of lengths, and what it has to agree on with the model."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from export.checkpoint import old_tokenizer
from export.checkpoint.old_tokenizer import BareExceptions
from export.errors import ExportError
from serving.records import EncodedText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from export.checkpoint.folder import Folder

TOKENIZER = "tokenizer.json"
_ROLES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
"""The special tokens, as BERT and as RoBERTa write them where a checkpoint does not say."""
_REQUIRED_ROLES = ("pad", "cls", "sep")


@dataclass(slots=True, frozen=True)
class Vocabulary:
    """A tokenizer as the bundle carries it.

    Attributes:
        content: The bytes of tokenizer.json, with neither truncation nor padding in it.
        special_ids: Ids of the special tokens by role: pad, unk, cls, sep, mask.
        length_limit: The tokenizer's own limit in tokens; None when it names none.
    """

    content: bytes
    special_ids: dict[str, int]
    length_limit: int | None

    def encode(self, texts: Sequence[str | tuple[str, str]], max_length: int) -> list[EncodedText]:
        """Encodes texts and pairs, cutting them to `max_length` tokens, the special ones included."""
        tokenizer = Tokenizer.from_str(self.content.decode())
        tokenizer.enable_truncation(max_length)
        encodings = tokenizer.encode_batch(texts)
        return [EncodedText(array("i", e.ids), array("i", e.type_ids) if any(e.type_ids) else None) for e in encodings]


def read(folder: Folder, vocab_size: int, *, lowercase: bool) -> Vocabulary:
    """Reads a checkpoint's tokenizer.json, or makes it from older files, and checks that the model can take its ids.

    Args:
        folder: The folder with the tokenizer's files.
        vocab_size: Rows of the model's word embedding.
        lowercase: Whether texts are lower-cased before they reach the tokenizer.

    Raises:
        ExportError: The tokenizer is missing, damaged, or not this model's.
    """
    document, settings = folder.object(TOKENIZER), folder.object("tokenizer_config.json")
    if not document:
        document, own_tokens = old_tokenizer.convert(folder)
        settings |= own_tokens
    # A checkpoint may carry the lengths of its training data; lengths belong to the manifest.
    document["truncation"] = document["padding"] = None
    content = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
    with BareExceptions(f"checkpoint {folder.path}: {TOKENIZER} is not a tokenizer"):
        tokenizer = Tokenizer.from_str(content.decode())
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= largest < vocab_size:
        raise ExportError(
            f"checkpoint {folder.path}: {TOKENIZER} has ids up to {largest}, the model takes ids below {vocab_size}"
        )
    if lowercase and (tokenizer.normalizer is None or tokenizer.normalizer.normalize_str("A") != "a"):
        raise ExportError(
            f"checkpoint {folder.path}: lower-cases texts before a tokenizer that keeps case: not supported"
        )
    special_ids = _special_ids(folder, tokenizer, settings)
    _check_frame(folder, tokenizer, special_ids)
    limit = settings.get("model_max_length")
    # "No limit" is written as 10^30.
    return Vocabulary(content, special_ids, limit if isinstance(limit, int) and limit < 1 << 31 else None)


def _special_ids(folder: Folder, tokenizer: Tokenizer, settings: dict[str, Any]) -> dict[str, int]:
    named_tokens = {**folder.object("special_tokens_map.json"), **settings}
    ids = {}
    for role, usual in _ROLES.items():
        token = named_tokens.get(f"{role}_token")
        named = token.get("content") if isinstance(token, dict) else token
        candidates = (str(named),) if named else usual
        known_ids = [identity for word in candidates if (identity := tokenizer.token_to_id(word)) is not None]
        if known_ids:
            ids[role] = known_ids[0]
        elif role in _REQUIRED_ROLES:
            raise ExportError(f"checkpoint {folder.path}: {TOKENIZER} has no {role} token {candidates[0]!r}")
    return ids


def _check_frame(folder: Folder, tokenizer: Tokenizer, special_ids: dict[str, int]) -> None:
    with BareExceptions(f"checkpoint {folder.path}: {TOKENIZER} cannot encode"):
        ids = tokenizer.encode("a").ids
    if len(ids) <= 1 or ids[0] != special_ids["cls"] or ids[-1] != special_ids["sep"]:
        raise ExportError(f"checkpoint {folder.path}: {TOKENIZER} does not put its cls and sep tokens around a text")
