"""Every file of a folder counts: the answers are those of the libraries that users load the same folder with."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sentence_transformers
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from batch.predictor import Model, Predictor
from export.checkpoint import probes
from export.checkpoint.reader import open_checkpoint
from export.checkpoint.source import find
from export.cli.export import main
from export.errors import ExportError
from export.graph import task_model
from serving.inference.tokenizer import TextTokenizer
from tests.support.checkpoints import (
    BYTE_ROLES,
    ROLES,
    byte_tokenizer,
    write_json,
    write_task_checkpoint,
)
from tests.support.clients import post_json
from tests.support.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from export.checkpoint.reader import Checkpoint

    Edit = Callable[[Path], None]

WORDS = ["the", "a", "of", "and", "to", "in", "is", "river", "house", "Berlin", "berlin", "café", "cafe", "É"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789éÉü.,-[]/中国"]
TOKENS = list(dict.fromkeys([*ROLES.values(), *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]))
SIZE = len(TOKENS) + 3
"""With room for three more."""
MORE = {"[E1]": SIZE - 3, "[/E1]": SIZE - 2, "<user>": SIZE - 1}
LENGTH = 64
TEXTS = (
    *("Alice Works in BERLIN", "Café É naïve", "ALICE [E1] and [/E1] <user>", "中国 in the House", "[MASK] a", ""),
    " ".join(f"{word} {at}" for at, word in enumerate(WORDS * 4)),
)
PAIRS = tuple(
    (" ".join((WORDS * 9)[:first]), " ".join((WORDS * 9)[3 : second + 3]))
    for first, second in ((2, 3), (5, 100), (100, 5), (40, 50), (50, 40), (45, 45), (31, 90), (90, 31), (30, 90))
)


def words(*, lowercase: bool = True, strip_accents: bool | None = None) -> Tokenizer:
    """BERT's tokenizer over a cased vocabulary."""
    ids = {token: at for at, token in enumerate(TOKENS)}
    made = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))  # noqa: S106  no password
    made.add_special_tokens(list(ROLES.values()))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    single = "[CLS]:0 $A:0 [SEP]:0"
    frame = [(token, ids[token]) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single, f"{single} $B:1 [SEP]:1", frame)
    return made


def bert(tokenizer: Tokenizer | None = None, sentence: dict[str, Any] | None = None, **settings: Any) -> Edit:
    """Writes a BERT's tokenizer, the settings beside it, and Sentence Transformers' own."""

    def edit(folder: Path) -> None:
        (folder / "tokenizer.json").write_text((tokenizer or words()).to_str())
        own = {"tokenizer_class": "BertTokenizer", "model_max_length": LENGTH, **ROLES}
        write_json(folder / "tokenizer_config.json", {**own, **settings})
        if sentence is not None:
            write_json(folder / "sentence_bert_config.json", {"max_seq_length": LENGTH, **sentence})
            kind = "sentence_transformers.models."
            modules = [
                {"idx": 0, "name": "0", "path": "", "type": f"{kind}Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{kind}Pooling"},
            ]
            write_json(folder / "modules.json", modules)
            pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
            write_json(folder / "1_Pooling" / "config.json", pooling)

    return edit


def with_lengths(side: str = "right") -> Tokenizer:
    """A tokenizer that brings the lengths of its training data along."""
    made = words()
    made.enable_truncation(24, direction=side)
    made.enable_padding(length=24)
    return made


def added_decoder() -> dict[str, Any]:
    """Tokens that tokenizer_config.json alone names."""
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    decoder = {str(at): {"content": token, "special": True, **flags} for token, at in MORE.items()}
    return {"added_tokens_decoder": decoder, "additional_special_tokens": list(MORE)}


def older(folder: Path) -> None:
    """The files before tokenizer.json, with tokens of their own."""
    bert()(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(TOKENS) + "\n", encoding="utf-8")
    write_json(folder / "added_tokens.json", MORE)
    write_json(folder / "special_tokens_map.json", ROLES)


def spaced(folder: Path) -> None:
    """A RoBERTa whose settings put a blank before each text, which its tokenizer.json does not."""
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    settings = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True, "model_max_length": 10**30}
    write_json(folder / "tokenizer_config.json", {**settings, **BYTE_ROLES})


EMBEDDING: dict[str, tuple[str, Edit]] = {
    "the-beginning-is-cut": ("bert", bert(truncation_side="left")),
    "tokenizer-json-cuts-the-beginning": ("bert", bert(with_lengths("left"))),
    "lengths-in-tokenizer-json": ("bert", bert(with_lengths(), max_length=24, stride=0, padding_side="left")),
    "case-is-kept": ("bert", bert(do_lower_case=False)),
    "case-is-not-kept": ("bert", bert(words(lowercase=False), do_lower_case=True)),
    "accents-are-kept": ("bert", bert(do_lower_case=True, strip_accents=False)),
    "accents-are-not-kept": ("bert", bert(words(lowercase=False), do_lower_case=False, strip_accents=True)),
    "chinese-is-not-split": ("bert", bert(tokenize_chinese_chars=False)),
    "added-tokens-decoder": ("bert", bert(**added_decoder())),
    "added-tokens-of-old": ("bert", older),
    "lower-case-of-sentences-kept": ("bert", bert(sentence={"do_lower_case": False}, do_lower_case=True)),
    "lower-case-of-sentences-twice": ("bert", bert(sentence={"do_lower_case": True}, do_lower_case=True)),
    "lower-case-of-sentences-alone": ("bert", bert(sentence={"do_lower_case": True}, do_lower_case=False)),
    "arguments-of-sentences": ("bert", bert(sentence={"processor_kwargs": {"truncation_side": "left"}})),
    "old-arguments-of-sentences": ("bert", bert(sentence={"tokenizer_args": {"do_lower_case": False}})),
    "no-class": ("bert", bert(tokenizer_class=None, do_lower_case=False)),
    "the-library-class": ("bert", bert(tokenizer_class="PreTrainedTokenizerFast", do_lower_case=False)),
    "no-limit": ("bert", bert(model_max_length=1e30)),
    "a-blank-before-each-text": ("roberta", spaced),
}
RERANKING: dict[str, Edit] = {
    "two-segments": bert(),
    "no-token-types": bert(model_input_names=["input_ids", "attention_mask"]),
    "the-beginning-is-cut": bert(truncation_side="left"),
    "an-even-room": bert(model_max_length=LENGTH - 1),
}


def opened(folder: Path, **asked: Any) -> Checkpoint:
    """Opens a folder for an export."""
    return open_checkpoint(find(str(folder)), None, lambda _: None, **asked)


def answers(checkpoint: Checkpoint, texts: Sequence[str] | Sequence[tuple[str, str]]) -> NDArray[np.float32]:
    """The model's raw answers to the tokens that a server would make of the texts."""
    words, size = checkpoint.vocabulary, checkpoint.size("vocab_size")
    tokenizer = TextTokenizer(
        Tokenizer.from_str(words.content.decode()), checkpoint.max_length, size, truncation_side=words.truncation_side
    )
    model = task_model.load(checkpoint)
    return np.stack([model.answer(text)[0] for text in tokenizer.encode(texts, truncate=True)])


@pytest.mark.parametrize("case", EMBEDDING)
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, case: str) -> None:
    """Whichever file of the folder says how texts become tokens, and where they are cut."""
    family, edit = EMBEDDING[case]
    sizes: dict[str, Any] = {"vocab_size": SIZE} if family == "bert" else {}
    folder = write_task_checkpoint(tmp_path / "small", family, "embed", **sizes)
    edit(folder)
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    # Beyond the positions, which RoBERTa counts from 2 on, Transformers fails.
    theirs.max_seq_length = min(theirs.max_seq_length or LENGTH, LENGTH)
    found = answers(opened(folder), TEXTS)
    # One at a time: a batch would be padded, on either side.
    wanted = np.stack([theirs.encode([text])[0] for text in TEXTS])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", RERANKING)
def test_scores_are_those_of_a_cross_encoder(tmp_path: Path, case: str) -> None:
    """Of pairs within the limit and around it, with and without the types of tokens."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "rerank", vocab_size=SIZE)
    RERANKING[case](folder)
    theirs = sentence_transformers.CrossEncoder(
        str(folder), device="cpu", local_files_only=True, activation_fn=torch.nn.Identity()
    )
    found = answers(opened(folder, asked="rerank"), PAIRS)[:, 0]
    wanted = np.stack([theirs.predict([pair])[0] for pair in PAIRS])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def japanese(folder: Path) -> None:
    """A tokenizer that splits words in Python."""
    older(folder)
    settings = {"word_tokenizer_type": "mecab", "subword_tokenizer_type": "wordpiece"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertJapaneseTokenizer", **settings})


def in_python(folder: Path) -> None:
    """A tokenizer that needs nothing but Python."""
    bert(tokenizer_class="CanineTokenizer")(folder)


def wrong_kind(folder: Path) -> None:
    """A tokenizer.json that the class is not for."""
    bert(tokenizer_class="XLMRobertaTokenizer")(folder)


REFUSED: dict[str, tuple[Edit, str]] = {
    "words-in-japanese": (japanese, r"no tokenizer can be made of vocab\.txt"),
    "a-tokenizer-in-python": (in_python, r"CanineTokenizer"),
    "another-kind": (wrong_kind, r"no tokenizer can be made of tokenizer\.json"),
    "split-special-tokens": (bert(split_special_tokens=True), r"split_special_tokens in tokenizer_config\.json"),
    "a-side-that-is-none": (bert(truncation_side="middle"), r"middle"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_bundle_cannot_hold_is_refused_by_name(tmp_path: Path, case: str) -> None:
    """In one sentence, which names the folder and the setting or the class."""
    edit, sentence = REFUSED[case]
    folder = write_task_checkpoint(tmp_path / "small", "bert", "embed", vocab_size=SIZE)
    edit(folder)
    with pytest.raises(ExportError, match=sentence) as refusal:
        opened(folder)
    assert str(folder) in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda document: document["normalizer"].update(lowercase=False), r"'ber', '##lin'|tokens are not those"),
        (lambda document: document["post_processor"]["pair"][3]["Sequence"].update(type_id=0), "model_input_names"),
    ],
    ids=["tokens", "types"],
)
def test_a_difference_names_the_text_and_both_sides(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], named: str
) -> None:
    """Where a bundle's tokenizer would make something else of a text than Transformers, nothing is exported."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "embed", vocab_size=SIZE)
    bert()(folder)
    checkpoint = opened(folder)
    document = json.loads(checkpoint.vocabulary.content)
    change(document)
    other = replace(checkpoint.vocabulary, content=json.dumps(document).encode())
    with pytest.raises(ExportError, match=named) as refusal:
        probes.check("checkpoint small", other, SIZE, LENGTH)
    assert "BertTokenizer in Transformers" in str(refusal.value)
    assert " here, " in str(refusal.value)


def test_another_side_than_transformers_names_the_setting(tmp_path: Path) -> None:
    """Cut at the other end, a text has other tokens."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "embed", vocab_size=SIZE)
    bert(truncation_side="left")(folder)
    right = replace(opened(folder).vocabulary, truncation_side="right")
    with pytest.raises(ExportError, match=r"cut to \d+ tokens.*Look at truncation_side"):
        probes.check("checkpoint small", right, SIZE, LENGTH)


def test_the_end_that_a_request_names_wins_over_the_folders(tmp_path: Path) -> None:
    """On every protocol that can name one; where a request names none, and in bulk, the folder's own end is cut."""
    folder = write_task_checkpoint(tmp_path / "small", "bert", "embed", vocab_size=SIZE)
    bert(truncation_side="left")(folder)
    assert main([str(folder), "--out", str(tmp_path / "models"), "--precision", "fp32"]) == 0
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    own = theirs.encode([TEXTS[-1]])[0]
    theirs.tokenizer.truncation_side = "right"
    other = theirs.encode([TEXTS[-1]])[0]
    assert np.abs(own - other).max() > 0.01
    bulk = Predictor(Model(tmp_path / "models", "embed", truncate=True, threads=1))
    (found,) = bulk.predict([TEXTS[-1]])
    np.testing.assert_allclose(found.answer, own, atol=1e-5)
    text = {"inputs": [TEXTS[-1]]}
    cohere = {"texts": [TEXTS[-1]], "model": "small", "input_type": "clustering", "embedding_types": ["float"]}
    asked: list[tuple[str, dict[str, Any], NDArray[np.float32]]] = [
        ("/embed", text, own),
        ("/embed", {**text, "truncation_direction": None}, own),
        ("/embed", {**text, "truncate": True}, own),
        ("/embed", {**text, "truncation_direction": "Left"}, own),
        ("/embed", {**text, "truncation_direction": "Right"}, other),
        ("/", text, own),
        ("/", {**text, "parameters": {"truncation_direction": "right"}}, other),
        ("/v2/embed", cohere, own),
        ("/v2/embed", {**cohere, "truncate": "START"}, own),
        ("/v2/embed", {**cohere, "truncate": "END"}, other),
    ]
    with Server(tmp_path / "models") as server:
        for path, body, wanted in asked:
            reply = post_json(server.http, path, json.dumps(body).encode())
            assert reply.status == 200, reply.body
            vectors = reply.json()["embeddings"]["float"] if path == "/v2/embed" else reply.json()
            np.testing.assert_allclose(vectors[0], wanted, atol=1e-4, err_msg=f"{path} {body}")
