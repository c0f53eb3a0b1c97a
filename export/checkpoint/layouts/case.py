"""Whether a checkpoint of another layout is cased."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from bertserve.export.checkpoint.folder import Folder

Case: TypeAlias = Literal["cased", "uncased"]
CASES: tuple[Case, ...] = get_args(Case)

_VOCABULARY = "vocab.txt"
_SETTINGS = "tokenizer_config.json"


def tokenizer_settings(folder: Folder, asked: Case | None, known: Case | None = None) -> dict[str, Any]:
    """tokenizer_config.json for a WordPiece vocabulary.

    The option, the training's settings or the vocabulary decide: a cased vocabulary has an entry for each letter A to
    Z, and an uncased one has no entry with a capital.

    Raises:
        ExportError: Nothing decides, or two sources disagree.
    """
    settings = folder.object(_SETTINGS)
    if folder.has("tokenizer.json") or "do_lower_case" in settings:
        if asked is not None:
            raise folder.error("the tokenizer files define the case; remove --case")
        return settings
    if not folder.has(_VOCABULARY):
        raise folder.error(f"{_VOCABULARY} is missing; add the vocabulary that the model was trained with")
    stated = known or _case_of(folder)
    if asked is not None and stated is not None and asked != stated:
        raise folder.error(f"its files say {stated}, not {asked}; remove --case")
    case = asked or stated
    if case is None:
        raise folder.error(
            f"{_VOCABULARY} does not show whether the model is cased; set --case cased "
            "or --case uncased, as in training (do_lower_case)"
        )
    return {"tokenizer_class": "BertTokenizer", **settings, "do_lower_case": case == "uncased"}


def _case_of(folder: Folder) -> Case | None:
    lines = (folder.path / _VOCABULARY).read_text(encoding="utf-8", errors="replace").splitlines()
    words = {line.strip() for line in lines}
    # Special tokens are upper-case in either case.
    ordinary = [word for word in words if not (word.startswith("[") and word.endswith("]"))]
    if words.issuperset(string.ascii_uppercase):
        return "cased"
    has_capitals = any(letter in string.ascii_uppercase for word in ordinary for letter in word)
    return "uncased" if words.issuperset(string.ascii_lowercase) and not has_capitals else None
