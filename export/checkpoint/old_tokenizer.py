"""A tokenizer.json from the files that checkpoints had before it, made by Transformers itself."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any, Self

from export.errors import ExportError
from export.progress import quiet

if TYPE_CHECKING:
    from types import TracebackType

    from export.checkpoint.folder import Folder

_WORDPIECE = "vocab.txt"
_BPE = ("vocab.json", "merges.txt")
_SENTENCEPIECE = ("sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model")
_PIECES = {1: "Unigram", 2: "BPE"}
"""SentencePiece's kinds of models, by their numbers."""
_ROLES = ("pad", "unk", "cls", "sep", "mask")


def convert(folder: Folder) -> tuple[dict[str, Any], dict[str, str]]:
    """Makes what tokenizer.json would hold, and the special tokens by their settings' names.

    Raises:
        ExportError: There are no such files, or they make no tokenizer.
    """
    file, least, kind = _checked(folder)
    # Imported here: it takes seconds, and most checkpoints have a tokenizer.json.
    from transformers import AutoTokenizer  # noqa: PLC0415

    failures = (ValueError, OSError, LookupError, TypeError, AttributeError, ImportError, RuntimeError)
    where = f"checkpoint {folder.path}: no tokenizer can be made of {file}"
    try:
        with quiet(), BareExceptions(where), folder.saved() as saved:
            # Nothing is looked up elsewhere, and no code that lies beside the files is run.
            made = AutoTokenizer.from_pretrained(saved, local_files_only=True, trust_remote_code=False)
            document = json.loads(made.backend_tokenizer.to_str())
    except failures as error:
        raise ExportError(f"{where}: {' '.join(str(error).split())[:200]}") from error
    # Where Transformers finds its class's files missing, it makes a tokenizer of the special tokens alone.
    if len(made) < least:
        raise ExportError(
            f"{where}: it holds {least} entries, of which {type(made).__name__} took {len(made)}; name its class in "
            "tokenizer_config.json (tokenizer_class)"
        )
    if (other := document["model"]["type"]) != kind:
        raise ExportError(
            f"{where}: it is for {kind}, and {type(made).__name__} makes {other} of it; name its class in "
            "tokenizer_config.json (tokenizer_class)"
        )
    tokens = {f"{role}_token": getattr(made, f"{role}_token", None) for role in _ROLES}
    return document, {name: str(token) for name, token in tokens.items() if token is not None}


def _checked(folder: Folder) -> tuple[str, int, str]:
    """The file that holds the vocabulary, how many entries it has, and what splits words into them."""
    for file in _SENTENCEPIECE:
        if folder.has(file):
            return file, *_pieces(folder, file)
    if folder.has(_BPE[0]) or folder.has(_BPE[1]):
        if absent := [file for file in _BPE if not folder.has(file)]:
            raise ExportError(f"checkpoint {folder.path}: {absent[0]} is missing, without which BPE cannot be done")
        return _BPE[0], len(folder.object(_BPE[0])), "BPE"
    if folder.has(_WORDPIECE):
        try:
            lines = (folder.path / _WORDPIECE).read_bytes().decode().rstrip("\n").split("\n")
        except UnicodeDecodeError as error:
            raise ExportError(f"checkpoint {folder.path}: {_WORDPIECE} is not UTF-8, at byte {error.start}") from error
        return _WORDPIECE, len(set(lines)), "WordPiece"
    raise ExportError(
        f"checkpoint {folder.path}: tokenizer.json is missing, and so are {_WORDPIECE}, {' with '.join(_BPE)} and "
        f"{', '.join(_SENTENCEPIECE)}, of which one could be made"
    )


def _pieces(folder: Folder, file: str) -> tuple[int, str]:
    if importlib.util.find_spec("sentencepiece") is None:
        raise ExportError(
            f"checkpoint {folder.path}: {file} is read with the module sentencepiece: pip install bertserve[export]"
        )
    from google.protobuf.message import DecodeError  # noqa: PLC0415  with what follows
    from transformers.convert_slow_tokenizer import SentencePieceExtractor  # noqa: PLC0415  takes seconds

    try:
        model = SentencePieceExtractor(str(folder.path / file)).proto
    except DecodeError as error:
        raise ExportError(f"checkpoint {folder.path}: {file} is not a SentencePiece model") from error
    if not model.pieces:
        raise ExportError(f"checkpoint {folder.path}: {file} is not a SentencePiece model, or one without a piece")
    return len(model.pieces), _PIECES.get(model.trainer_spec.model_type, "words or characters")


class BareExceptions:
    """Translates the bare `Exception` that the tokenizers library raises, and nothing more specific."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception:
            raise ExportError(f"{self._sentence}: {error}") from error
