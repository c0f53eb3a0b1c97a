"""A checkpoint's tokenizer without lengths, and its checks against the model."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from bertserve.export.checkpoint import tokenizer as checkpoint_tokenizer
from bertserve.export.checkpoint.tokenizer import TOKENIZER, BareExceptions
from bertserve.export.errors import ExportError
from bertserve.serving.errors import BertserveError
from bertserve.serving.inference.tokenizer import opened_tokenizer
from bertserve.serving.inference.tokenizer_rules import foreign_rules
from bertserve.serving.records import EncodedText
from bertserve.serving.tasks.embed_tokens import fill_queries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.export.checkpoint.folder import Folder
    from bertserve.serving.records import Side
    from bertserve.serving.tasks.parts import MultiVector

    Text = str | tuple[str, str]

_ROLES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
"""Special tokens of BERT and RoBERTa, if Transformers knows none."""
_REQUIRED_ROLES = ("pad", "cls", "sep")
_TYPES = "token_type_ids"
UNCUT = 1 << 20
"""A maximum length that no text reaches."""

AT_ONCE = 16
"""Texts that share the limits of one call, if rules may be unbounded."""


@dataclass(slots=True, frozen=True)
class Vocabulary:
    """The tokenizer of a bundle.

    Attributes:
        content: The bytes of tokenizer.json, without truncation and padding.
        special_ids: Ids of the special tokens by role: pad, unk, cls, sep, mask.
        length_limit: The tokenizer's own limit in tokens; None if it has none.
        truncation_side: The end of a text that is truncated.
        has_segments: Whether any token of a text or pair is in the second segment.
        reference: The tokenizer that Transformers loads from the checkpoint; None without a checkpoint.
    """

    content: bytes
    special_ids: dict[str, int]
    length_limit: int | None
    truncation_side: Side = "right"
    has_segments: bool = True
    reference: Any = field(default=None, repr=False, compare=False)

    def encode(self, texts: Sequence[Text], max_length: int) -> list[EncodedText]:
        """Encodes texts and pairs, truncated to `max_length` tokens including special ones.

        Raises:
            ExportError: Rules of the tokenizer's own take too much time or memory on a text, or the library fails.
        """
        if not self.has_own_rules:
            tokenizer = Tokenizer.from_str(self.content.decode())
            tokenizer.enable_truncation(max_length, direction=self.truncation_side)
            try:
                encodings = tokenizer.encode_batch(texts)
            except Exception as error:
                raise ExportError(f"{TOKENIZER}: the tokenizers library cannot read a text with it: {error}") from error
            return [_encoded(encoding.ids, encoding.type_ids) for encoding in encodings]
        mask = self.special_ids.get("mask")
        # Its rules were tried, or a bundle's are limited on these texts alone.
        opened = opened_tokenizer(self.content.decode(), max_length, UNCUT, mask, self.truncation_side, tried=True)
        try:
            parts = [opened.encode(texts[at : at + AT_ONCE], truncate=True) for at in range(0, len(texts), AT_ONCE)]
        except BertserveError as error:
            raise ExportError(f"{TOKENIZER}: {error}") from error
        return [_encoded(text.ids, text.type_ids or ()) for part in parts for text in part]

    @property
    def has_own_rules(self) -> bool:
        """Whether texts are read in a process that can be killed, because a rule may be unbounded."""
        return bool(foreign_rules(json.loads(self.content)))

    def tokenizer_for(self, texts: Sequence[Text]) -> Tokenizer:
        """The library's own tokenizer for these texts, which rules of the tokenizer's own have read within limits."""
        if self.has_own_rules:
            self.encode(texts, UNCUT)
        return Tokenizer.from_str(self.content.decode())

    def encode_side(
        self, texts: Sequence[Text], sides: MultiVector, prompts: Mapping[str, str], *, query: bool
    ) -> list[EncodedText]:
        """Encodes queries or documents of a multi-vector model with their prompts, which pairs do not get."""
        prompt = prompts.get("query" if query else "document", "")
        prompted = [prompt + text if isinstance(text, str) else text for text in texts]
        encoded = self.encode(prompted, sides.length(query=query))
        return fill_queries(encoded, sides.expansion) if query else encoded

    def encode_sides(self, texts: Sequence[Text], sides: MultiVector, prompts: Mapping[str, str]) -> list[EncodedText]:
        """Encodes texts for a multi-vector model: documents, and every second one as a query."""
        documents, queries = (self.encode_side(texts[first::2], sides, prompts, query=bool(first)) for first in (0, 1))
        return [(queries if at % 2 else documents)[at // 2] for at in range(len(texts))]


def read(
    folder: Folder,
    vocab_size: int,
    options: Mapping[str, Any] | None = None,
    *,
    lowercase: bool = False,
    markers: Sequence[str] = (),
) -> Vocabulary:
    """Reads a checkpoint's tokenizer as Transformers does, and checks it against the model.

    Args:
        folder: The checkpoint.
        vocab_size: Rows of the model's word embedding.
        options: Arguments that Sentence Transformers passes to Transformers (`processor_kwargs`, formerly
            `tokenizer_args`).
        lowercase: Whether Sentence Transformers lower-cases texts first.
        markers: Prompts of which the whole or the first word is one token, if the vocabulary has it.

    Raises:
        ExportError: The tokenizer is missing, damaged, or not this model's.
    """
    made = checkpoint_tokenizer.load(folder, options or {}, lowercase=lowercase)
    checkpoint_tokenizer.mark(made, markers)
    document = json.loads(made.backend_tokenizer.to_str())
    # A checkpoint may carry the lengths of its training data; lengths belong to the manifest.
    document["truncation"] = document["padding"] = None
    # A class adds special tokens that a vocabulary lacks; the model has no rows for them.
    named = set(map(str, made.special_tokens_map.values()))
    document["added_tokens"] = [
        token for token in document["added_tokens"] if token["id"] < vocab_size or token["content"] not in named
    ]
    if _TYPES not in made.model_input_names:
        document["post_processor"] = _of_one_segment(document["post_processor"])
    content = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    with BareExceptions(f"checkpoint {folder.path}: the tokenizer of {type(made).__name__} cannot be reloaded"):
        checkpoint_tokenizer.try_rules(folder, document)
        tokenizer = Tokenizer.from_str(content.decode())
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= largest < vocab_size:
        raise folder.error(
            f"{TOKENIZER} has token IDs up to {largest} "
            f"({tokenizer.id_to_token(largest)!r}), but the model's vocab_size is {vocab_size}"
        )
    with BareExceptions(f"checkpoint {folder.path}: {TOKENIZER} cannot encode"):
        frame, alone, pair = Vocabulary(content, {}, None).encode(["", "a", ("a", "a")], UNCUT)
    _check_rows(folder, made, vocab_size, (*frame.ids, *alone.ids, *pair.ids))
    special_ids = _special_ids(folder, tokenizer, list(frame.ids), made)
    _check_frame(folder, list(alone.ids), special_ids)
    limit = made.model_max_length
    # "No limit" is written as 10^30.
    length_limit = int(limit) if isinstance(limit, int | float) and 0 < limit < 1 << 31 else None
    has_segments = alone.type_ids is not None or pair.type_ids is not None
    return Vocabulary(content, special_ids, length_limit, made.truncation_side, has_segments, made)


def _encoded(ids: Sequence[int], type_ids: Sequence[int]) -> EncodedText:
    return EncodedText(array("i", ids), array("i", type_ids) if any(type_ids) else None)


def _of_one_segment(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """A post-processor that puts every token in the first segment, for models without token types."""
    if processor is None:
        return None
    kind = processor["type"]
    if kind == "Sequence":
        return {**processor, "processors": [_of_one_segment(part) for part in processor["processors"]]}
    if kind == "BertProcessing":
        (sep, sep_id), (cls, cls_id) = processor["sep"], processor["cls"]
        around = {cls: cls_id, sep: sep_id}
        ids = {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in around.items()}
        start, end = [{"SpecialToken": {"id": token, "type_id": 0}} for token in (cls, sep)]
        first, second = [{"Sequence": {"id": part, "type_id": 0}} for part in "AB"]
        single = [start, first, end]
        return {"type": "TemplateProcessing", "single": single, "pair": [*single, second, end], "special_tokens": ids}
    if kind != "TemplateProcessing":
        return processor
    pieces = {
        form: [{name: {**piece, "type_id": 0}} for part in processor[form] for name, piece in part.items()]
        for form in ("single", "pair")
    }
    return {**processor, **pieces}


def _special_ids(
    folder: Folder,
    tokenizer: Tokenizer,
    frame: list[int],
    made: Any,  # noqa: ANN401  of Transformers
) -> dict[str, int]:
    around = {"cls": frame[:1], "sep": frame[-1:]}
    ids = {}
    for role, usual in _ROLES.items():
        own = getattr(made, f"{role}_token", None)
        names = usual if own is None else (str(own),)
        known = [*map(tokenizer.token_to_id, names), *around.get(role, ())]
        found = [token for token in known if token is not None]
        if found:
            ids[role] = found[0]
        elif role in _REQUIRED_ROLES:
            raise folder.error(f"the tokenizer has no {role} token; set one in tokenizer_config.json ({role}_token)")
    return ids


def _check_rows(
    folder: Folder,
    made: Any,  # noqa: ANN401  of Transformers
    vocab_size: int,
    ids: Sequence[int],
) -> None:
    """Checks that the model has a row for each token of a text; a class may add special tokens that it lacks."""
    if (largest := max(ids, default=0)) >= vocab_size:
        raise folder.error(
            f"the tokenizer adds the token {largest} "
            f"({made.convert_ids_to_tokens(largest)!r}) to texts, but the model's vocab_size is {vocab_size}; check "
            "tokenizer_config.json"
        )


def _check_frame(folder: Folder, ids: list[int], special_ids: dict[str, int]) -> None:
    if len(ids) <= 1 or ids[0] != special_ids["cls"] or ids[-1] != special_ids["sep"]:
        raise folder.error(
            f"the tokenizer does not add its cls and sep tokens around a text; check "
            f"post_processor in {TOKENIZER}, or add_bos_token and add_eos_token in tokenizer_config.json"
        )
