"""A checkpoint's tokenizer, loaded by Transformers with all settings of the folder."""

from __future__ import annotations

import base64
import importlib.util
import json
from typing import TYPE_CHECKING, Any, Self

from tokenizers import AddedToken, Tokenizer, decoders, normalizers

from bertserve.export.errors import ExportError
from bertserve.export.progress import quiet
from bertserve.serving.errors import BundleError
from bertserve.serving.host import installing
from bertserve.serving.inference.tokenizer import check_ids, check_rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from bertserve.export.checkpoint.folder import Folder

TOKENIZER = "tokenizer.json"
_WORDPIECE = "vocab.txt"
_BPE = ("vocab.json", "merges.txt")
_SENTENCEPIECE = ("sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model")
_BARE: dict[str, Any] = {
    **dict.fromkeys(("pre_tokenizer", "post_processor", "decoder")),
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["", 0]]},
}
"""The other parts of a tokenizer.json, to try a normalizer alone."""

_PIECES = {1: "Unigram", 2: "BPE"}
"""SentencePiece's model types by number."""

_BESIDE = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""JSON files that Transformers reads with a tokenizer."""

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "model_input_names": ((list,), "a list"),
    "model_max_length": ((int, float, type(None)), "a number"),
    **dict.fromkeys(("split_special_tokens", "clean_up_tokenization_spaces"), ((bool, type(None)), "true or false")),
}
"""Settings that Transformers takes as they are, and their kinds."""

_ELSEWHERE = frozenset(
    {
        *("cache_dir", "code_revision", "config", "force_download", "gguf_file", "merges_file", "mistral_format"),
        *("proxies", "revision", "subfolder", "token", "tokenizer_file", "tokenizer_object", "tokenizer_type"),
        *("use_auth_token", "vocab_file"),
    }
)
"""Arguments of Transformers that refer to another place than the folder."""


def load(folder: Folder, options: Mapping[str, Any], *, lowercase: bool) -> Any:  # noqa: ANN401  of Transformers
    """The tokenizer that Transformers, or Sentence Transformers, creates from a folder.

    Raises:
        ExportError: It is missing, damaged, or cannot be expressed by `tokenizers`.
    """
    if elsewhere := sorted(_ELSEWHERE & options.keys()):
        raise folder.error(
            f"tokenizer argument {elsewhere[0]} refers to another tokenizer; copy its files "
            "into the folder, and remove the argument"
        )
    file, least, kind = _check_files(folder)
    where = f"checkpoint {folder.path}: cannot build a tokenizer from {file}"
    made = _build(folder, options, where)
    name = type(made).__name__
    if not made.is_fast:
        raise ExportError(
            f"{where}: {name} is a Python-only tokenizer, but a bundle needs one of the library tokenizers; save "
            f"it as {TOKENIZER} and set tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json"
        )
    if made.split_special_tokens:
        raise ExportError(f"{where}: split_special_tokens in tokenizer_config.json cannot be exported")
    # If files are missing, Transformers makes a tokenizer of the special tokens alone.
    if len(made) < least:
        raise ExportError(
            f"{where}: it has {least} entries, but {name} loaded {len(made)}; set tokenizer_class in "
            "tokenizer_config.json"
        )
    backend = made.backend_tokenizer
    if kind not in ("", other := type(backend.model).__name__):
        raise ExportError(
            f"{where}: it is for {kind}, but {name} loads it as {other}; set tokenizer_class in tokenizer_config.json"
        )
    if lowercase:
        backend.normalizer = _lowercase(backend.normalizer)
    if _cleans_up(made, other):
        backend.decoder = decoders.Sequence(
            [backend.decoder, decoders.Fuse(), *(decoders.Replace(spaced, bare) for spaced, bare in _CLEANED_UP)]
        )
    return made


def _build(folder: Folder, options: Mapping[str, Any], where: str) -> Any:  # noqa: ANN401  of Transformers
    # A slow import; file errors are reported first.
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415  with what follows
    from transformers import AutoTokenizer  # noqa: PLC0415

    # Nothing is downloaded, and no code beside the files runs.
    arguments = {**options, "local_files_only": True, "trust_remote_code": False}
    try:
        with quiet(), BareExceptions(where), folder.saved() as saved:
            return AutoTokenizer.from_pretrained(saved, **arguments)
    except StrictDataclassError as error:
        raise folder.error(f"Transformers cannot read config.json: {_one_line(error)}") from error
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(f"{where}: {_one_line(error)}") from error


def try_rules(folder: Folder, document: Mapping[str, Any], file: str = TOKENIZER) -> None:
    """Tries rules that may be unbounded, before a text or an added token meets them in this process.

    Raises:
        ExportError: One of them takes too much time or memory.
    """
    try:
        check_rules(document)
    except BundleError as error:
        raise folder.error(f"{file}: {error}") from error


def mark(made: Any, markers: Iterable[str]) -> None:  # noqa: ANN401  of Transformers
    """Makes markers of multi-vector models special tokens, as Sentence Transformers' MultiVectorEncoder does.

    Their trainers put them before a text as tokens; written before it, they would be split.
    """
    known = {*made.added_tokens_encoder, *made.get_vocab()}
    tokens = []
    for marker in markers:
        token = next((each for each in (marker, *marker.split(None, 1)[:1]) if each in known), None)
        if marker.strip() and token is not None and made.tokenize(token) != [token]:
            tokens.append(AddedToken(token, normalized=False, special=True))
    if tokens:
        made.add_special_tokens({"additional_special_tokens": tokens})


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


_CLEANED_UP = (
    *((f" {mark}", mark) for mark in ".?!,"),
    *((" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
"""Replacements of Transformers for `clean_up_tokenization_spaces`."""


def _cleans_up(made: Any, kind: str) -> bool:  # noqa: ANN401  of Transformers
    """Whether it cleans up: for byte-pair encoding only with a second setting."""
    insists = getattr(made, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    asked = made.clean_up_tokenization_spaces and made.backend_tokenizer.decoder is not None
    return bool(asked and (kind != "BPE" or insists))


def _lowercase(normalizer: Any) -> Any:  # noqa: ANN401  any of tokenizers
    """The normalizer as Sentence Transformers changes it for `do_lower_case`."""
    steps: list[Any] = [] if normalizer is None else [normalizer]
    if isinstance(normalizer, normalizers.Sequence):
        several: Any = normalizer
        steps = list(several)
    lowers = any(isinstance(step, normalizers.Lowercase) for step in steps)
    return normalizer if lowers else normalizers.Sequence([normalizers.Lowercase(), *steps])


def _check_files(folder: Folder) -> tuple[str, int, str]:
    """The vocabulary file, its number of entries, and how it splits words, if it says so."""
    _check_beside(folder)
    if document := folder.object(TOKENIZER):
        with BareExceptions(f"checkpoint {folder.path}: {TOKENIZER} is not a tokenizer"):
            try_rules(folder, document)
            model = Tokenizer.from_str(json.dumps(document)).model
        return TOKENIZER, len(document["model"]["vocab"]), type(model).__name__
    for file in _SENTENCEPIECE:
        if folder.has(file):
            return file, *_pieces(folder, file)
    if folder.has(_BPE[0]) or folder.has(_BPE[1]):
        if absent := [file for file in _BPE if not folder.has(file)]:
            raise folder.error(f"{absent[0]} is missing; a BPE tokenizer needs it")
        words = folder.object(_BPE[0])
        try:
            check_ids({"model": {"vocab": words}})
        except BundleError as error:
            raise folder.error(f"{_BPE[0]} {error}") from error
        return _BPE[0], len(words), "BPE"
    if folder.has(_WORDPIECE):
        try:
            lines = (folder.path / _WORDPIECE).read_bytes().decode().rstrip("\n").split("\n")
        except UnicodeDecodeError as error:
            raise folder.error(f"{_WORDPIECE} is not UTF-8, at byte {error.start}") from error
        return _WORDPIECE, len(set(lines)), "WordPiece"
    raise folder.error(
        f"no tokenizer found; add {TOKENIZER}, {_WORDPIECE}, {' with '.join(_BPE)}, or one "
        f"of {', '.join(_SENTENCEPIECE)}"
    )


def _check_beside(folder: Folder) -> None:
    """Checks the other files that Transformers reads, and the settings that it does not check."""
    for file in _BESIDE:
        settings = folder.object(file)
        for key, (kinds, words) in _KINDS.items():
            if key in settings and not isinstance(settings[key], kinds):
                raise folder.error(f"{key} in {file} must be {words}, not {settings[key]!r}")


def _pieces(folder: Folder, file: str) -> tuple[int, str]:
    if importlib.util.find_spec("sentencepiece") is None:
        raise folder.error(f"{file} needs the module sentencepiece: {installing('export')}")
    from google.protobuf.message import DecodeError  # noqa: PLC0415  with what follows
    from transformers.convert_slow_tokenizer import SentencePieceExtractor  # noqa: PLC0415  takes seconds

    try:
        model = SentencePieceExtractor(str(folder.path / file)).proto
    except DecodeError as error:
        raise folder.error(f"{file} is not a SentencePiece model") from error
    if not model.pieces:
        raise folder.error(f"{file} is not a SentencePiece model, or has no pieces")
    if charsmap := model.normalizer_spec.precompiled_charsmap:
        rule = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
        with BareExceptions(f"checkpoint {folder.path}: {file} is not a SentencePiece model"):
            try_rules(folder, {**_BARE, "normalizer": rule}, file)
    return len(model.pieces), _PIECES.get(model.trainer_spec.model_type, "words or characters")


class BareExceptions:
    """Translates errors of the tokenizers library, which raises a bare `Exception` or panics."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The class of panics cannot be imported.
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            raise ExportError(f"{self._sentence}: {error}") from error
