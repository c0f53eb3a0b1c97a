"""Tokenizers made of the files before tokenizer.json: the ids are those of Transformers, on texts of many scripts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import transformers
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, Tokenizer

from bertserve.export.checkpoint import vocabulary
from bertserve.export.checkpoint.folder import Folder
from bertserve.export.errors import ExportError
from bertserve.export.texts import corpus
from bertserve.serving.inference.tokenizer import TextTokenizer
from tests.support.checkpoints import write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LENGTH = 128
SCRIPTS = {
    "latin": (0x61, 0x7A),
    "accents": (0xC0, 0x17F),
    "greek": (0x391, 0x3C9),
    "cyrillic": (0x410, 0x44F),
    "armenian": (0x531, 0x586),
    "hebrew": (0x5D0, 0x5EA),
    "arabic": (0x621, 0x64A),
    "devanagari": (0x904, 0x939),
    "bengali": (0x985, 0x9B9),
    "tamil": (0xB85, 0xBB9),
    "thai": (0xE01, 0xE2E),
    "lao": (0xE81, 0xEAE),
    "tibetan": (0xF40, 0xF6C),
    "georgian": (0x10D0, 0x10F0),
    "ethiopic": (0x1200, 0x1248),
    "cherokee": (0x13A0, 0x13F4),
    "khmer": (0x1780, 0x17B3),
    "mongolian": (0x1820, 0x1877),
    "hiragana": (0x3041, 0x3093),
    "katakana": (0x30A1, 0x30FA),
    "han": (0x4E00, 0x9FA5),
    "hangul": (0xAC00, 0xD7A3),
    "fullwidth": (0xFF01, 0xFF5E),
    "gothic": (0x10330, 0x1034A),
    "emoji": (0x1F600, 0x1F64F),
}
ODD = (
    *("", " ", "\t\n\r", "\x00a\x07b\x1f", "a\u200bb\ufeffc", "e\u0301\u0327 n\u0303", "\u202eabc\u202c", "\ufffd"),
    *(
        "👩\u200d👩\u200d👧 🇫🇷 👍🏽",
        "x" * 300,
        "ab" * 120 + " c",
        "don't... (what?!) 3.14 $5",
        "İstanbul ǅ ß ﬁ Ω",
        "   a   b  ",
    ),
    *("[MASK] [SEP]", "<mask></s>", "▁ a▁b", "##ing ##", "\u2028line\u2029", "1234567890" * 9),
)


def texts(count: int) -> list[str]:
    """Words of one script or of two, in short and long texts; odd ones first."""
    rng = random.Random(5)
    made = list(ODD)
    while len(made) < count:
        scripts = rng.sample(list(SCRIPTS.values()), rng.choice((1, 1, 2)))
        words = [
            "".join(chr(rng.randint(*rng.choice(scripts))) for _ in range(rng.randint(1, 9)))
            for _ in range(rng.choice((2, 5, 12, 60)))
        ]
        made.append(rng.choice((" ", " ", ", ", "")).join(words))
    return made


def training() -> list[str]:
    """Text to train on: the package's own, and a few of every script."""
    own = [text if isinstance(text, str) else text[0] for text in corpus.read()]
    return [text for text in (*own, *texts(120)) if text.strip() and len(text) < 2000]


def wordpiece(folder: Path, *, lowercase: bool) -> None:
    made = BertWordPieceTokenizer(lowercase=lowercase)
    made.train_from_iterator(training(), vocab_size=900, show_progress=False)
    made.save_model(str(folder))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": lowercase})


def byte_level(folder: Path) -> None:
    made = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made.train_from_iterator(training(), vocab_size=900, special_tokens=special, show_progress=False)
    made.save_model(str(folder))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "RobertaTokenizer"})


def pieces(folder: Path, file: str, kind: str, settings: dict[str, object] | None = None, **options: Any) -> None:
    """A SentencePiece model, as its own trainer makes it, with further settings of its tokenizer.

    The trainer has a process of its own: among the libraries that other tests load it aborts.
    """
    pytest.importorskip("sentencepiece", reason="the module sentencepiece is not installed")
    lines = (line for text in training() for line in text.splitlines() if line.strip())
    (folder / "training.txt").write_text("\n".join([line.replace("\x00", "") for line in lines]), encoding="utf-8")
    training_options = {
        "input": str(folder / "training.txt"),
        "model_prefix": str(folder / "trained"),
        "vocab_size": 2500,
        "character_coverage": 0.98,
        "hard_vocab_limit": options.get("model_type") == "bpe",
        "minloglevel": 2,
        "num_threads": 1,
        **options,
    }
    program = "import json, sys, sentencepiece as s; s.SentencePieceTrainer.train(**json.loads(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, json.dumps(training_options)], check=True)
    (folder / "trained.model").rename(folder / file)
    for left in ("training.txt", "trained.vocab"):
        (folder / left).unlink()
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": kind, **(settings or {})})


XLM_R = {"unk_id": 0, "bos_id": 1, "eos_id": 2}
ALBERT = {
    "pad_id": 0,
    "unk_id": 1,
    "bos_id": -1,
    "eos_id": -1,
    "pad_piece": "<pad>",
    "unk_piece": "<unk>",
    "control_symbols": "[CLS],[SEP],[MASK]",
}
DEBERTA = {**ALBERT, "pad_piece": "[PAD]", "unk_piece": "[UNK]", "control_symbols": "[CLS],[SEP]", "unk_id": 3}
DEBERTA |= {"bos_id": 1, "eos_id": 2, "bos_piece": "[CLS]", "eos_piece": "[SEP]", "control_symbols": ""}
BPE = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
BPE |= {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": 3, "user_defined_symbols": "<mask>"}
FRAME = {"add_bos_token": True, "add_eos_token": True, "cls_token": "<s>", "sep_token": "</s>"}
FRAME |= {"pad_token": "<pad>", "mask_token": "<mask>"}

KINDS: dict[str, Callable[[Path], None]] = {
    "tokenizer.model": lambda folder: pieces(folder, "tokenizer.model", "LlamaTokenizer", FRAME, **BPE),
    "vocab.txt": lambda folder: wordpiece(folder, lowercase=True),
    "vocab.txt-cased": lambda folder: wordpiece(folder, lowercase=False),
    "vocab.json": byte_level,
    "xlm-roberta": lambda folder: pieces(folder, "sentencepiece.bpe.model", "XLMRobertaTokenizer", **XLM_R),
    "albert": lambda folder: pieces(folder, "spiece.model", "AlbertTokenizer", **ALBERT),
    "deberta-v2": lambda folder: pieces(folder, "spm.model", "DebertaV2Tokenizer", **DEBERTA),
}


def read(folder: Path) -> vocabulary.Vocabulary:
    return vocabulary.read(Folder(folder), 5000, lowercase=False)


def check_same_ids(folder: Path, count: int) -> None:
    """Compares what a server makes of texts with what Transformers does."""
    made = read(folder)
    ours = TextTokenizer(Tokenizer.from_str(made.content.decode()), LENGTH, 5000)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for role, identity in made.special_ids.items():
        assert identity == getattr(theirs, f"{role}_token_id")
    wanted = texts(count)
    found = ours.encode(wanted, truncate=True)
    expected = theirs(wanted, truncation=True, max_length=LENGTH)["input_ids"]
    for text, one, other in zip(wanted, found, expected, strict=True):
        assert list(one.ids) == other, ascii(text)
    pairs = [(one[:12], other[:12]) for one, other in zip(wanted[30:60], wanted[60:90], strict=True)]
    found = ours.encode(pairs, truncate=False)
    whole = theirs(*map(list, zip(*pairs, strict=True)))
    assert [list(text.ids) for text in found] == whole["input_ids"]
    if "token_type_ids" in whole:
        assert [list(text.type_ids or ()) for text in found] == whole["token_type_ids"]


@pytest.mark.parametrize("count", [250, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(tmp_path: Path, kind: str, count: int) -> None:
    """Special tokens, lower-casing, cutting: token for token, over 25 scripts, emoji, controls and long words."""
    KINDS[kind](tmp_path)
    check_same_ids(tmp_path, count)


def test_pieces_of_another_kind_than_the_class_makes_are_refused(tmp_path: Path) -> None:
    """BPE's ranks are not Unigram's probabilities: other tokens would come out, and nobody would notice."""
    pieces(tmp_path, "sentencepiece.bpe.model", "XLMRobertaTokenizer", **XLM_R | {"model_type": "bpe"})
    with pytest.raises(ExportError, match=r"it is for BPE, but XLMRobertaTokenizer loads it as Unigram"):
        read(tmp_path)


def test_a_tokenizer_json_is_taken_as_it_is(tmp_path: Path) -> None:
    """Older files beside it are not looked at."""
    wordpiece(tmp_path, lowercase=True)
    made = read(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(made.content)
    (tmp_path / "vocab.txt").write_text("nothing")
    assert json.loads(read(tmp_path).content) == json.loads(made.content)
