"""The task `tag`: from a tag for each token to entities in the text."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers, processors

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.tasks import tag
from bertserve.serving.tasks.tag import Entity, TagOptions
from bertserve.serving.tasks.windows import Windows
from tests.support.checkpoints import byte_tokenizer, stripped_tokenizer, vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.serving.records import Side


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    """Known words are one token, others one for each character."""
    return TextTokenizer(Tokenizer.from_str(stripped_tokenizer()), 24, len(vocabulary()))


def test_a_long_text_is_cut_and_says_so(tokenizer: TextTokenizer) -> None:
    """What is cut off is counted, or the text is refused."""
    text = " ".join(["server"] * 40)
    (aligned,) = tokenizer.encode_aligned([text], truncate=True)
    assert (len(aligned.ids), aligned.truncated) == (24, 18)
    with pytest.raises(InvalidRequest, match="input 0 has 42 tokens"):
        tokenizer.encode_aligned([text], truncate=False)


def test_a_long_text_keeps_its_places() -> None:
    """A byte-level tokenizer leaves blanks out of a token's characters once, whether the text is cut or not."""
    made = ByteLevelBPETokenizer(trim_offsets=True)
    made.train_from_iterator(["the server the text"] * 9, vocab_size=300, special_tokens=["<s>", "</s>"])
    inner = Tokenizer.from_str(made.to_str())
    inner.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), add_prefix_space=False)
    text = " ".join(["the", "server"] * 20)
    (cut,) = TextTokenizer(inner, 24, 300).encode_aligned([text], truncate=True)
    (whole,) = TextTokenizer(inner, 64, 300).encode_aligned([text], truncate=True)
    assert (len(cut.ids), len(whole.ids)) == (24, 42)
    assert cut.spans[:23].tolist() == whole.spans[:23].tolist()
    assert {text[start:end] for start, end in cut.spans[1:23].tolist()} == {"the", "server"}


def test_a_pair_has_no_places(tokenizer: TextTokenizer) -> None:
    """Only texts can be tagged."""
    with pytest.raises(InvalidRequest, match="one text"):
        tag.encode(tokenizer, [("a", "b")], TagOptions(), truncate=True)


NER = ("O", "B-place", "I-place", "S-thing", "I-thing", "bare", "a-b-c")


def unigram_tokenizer() -> Tokenizer:
    """As SentencePiece makes them: a blank is part of the word behind it, and some characters are unknown."""
    pieces = ["<unk>", "\u2581", "\u2581the", "ser", "ver", *"abcdefghijklmnopqrstuvwxyz.,", "\u2581a"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0 - at / 10) for at, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


VOCABULARIES: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "WordPiece": (lambda: Tokenizer.from_str(stripped_tokenizer()), "[UNK]"),
    "BPE": (byte_tokenizer, "<unk>"),
    "Unigram": (unigram_tokenizer, "<unk>"),
}


@cache
def beside(name: str) -> tuple[TextTokenizer, Any]:
    """A tokenizer as the server opens it, and Transformers' pipeline around it; its model is never run."""
    make, unknown = VOCABULARIES[name]
    tokenizer = make()
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), 1)
    config = transformers.BertConfig(**sizes, vocab_size=8, id2label=dict(enumerate(NER)))
    with torch.device("meta"):
        model = transformers.BertForTokenClassification(config)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=make(), unk_token=unknown)
    pipe = transformers.TokenClassificationPipeline(model=model.to_empty(device="cpu"), tokenizer=fast)
    return TextTokenizer(tokenizer, 512, tokenizer.get_vocab_size()), pipe


@given(
    name=st.sampled_from(list(VOCABULARIES)),
    text=st.text(st.sampled_from([*"aabrstuvxyzABR  .,-é\u0301ßİ中→\U0001f642\t\u3000"]), max_size=24)
    | st.sampled_from(["the server is", "a server, the ᚠ text", "x→y z", "the[UNK] <unk>"]),
    seed=st.integers(0, 1 << 16),
    sure=st.sampled_from([1.0, 8.0, 60.0]),
    strategy=st.sampled_from(["none", "simple", "first", "average", "max"]),
    ignored=st.sampled_from([("O",), (), ("O", "place")]),
)
@settings(max_examples=300, deadline=None)
def test_entities_are_those_of_transformers(
    name: str, text: str, seed: int, sure: float, strategy: Any, ignored: tuple[str, ...]
) -> None:
    """Whatever tokens and scores a text has: the same words, groups, borders and scores, for each vocabulary."""
    tokenizer, pipe = beside(name)
    encoding = pipe.tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    length = len(encoding["input_ids"])
    logits = (np.random.default_rng(seed).standard_normal((length, len(NER))) * sure).astype(np.float32)
    output = {
        "logits": torch.from_numpy(logits[None]),
        "sentence": text,
        "input_ids": np.array([encoding["input_ids"]]),
        "offset_mapping": [encoding["offset_mapping"]],
        "special_tokens_mask": torch.tensor([encoding["special_tokens_mask"]]),
    }
    kind = transformers.pipelines.token_classification.AggregationStrategy(strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the tokenizer knows no words
        expected = pipe.postprocess([output], aggregation_strategy=kind, ignore_labels=ignored)
    (aligned,) = tokenizer.encode_aligned([text], truncate=True)
    assert list(aligned.ids) == encoding["input_ids"]
    unknown = pipe.tokenizer.unk_token_id
    found = tag.finish(text, aligned, (logits,), TagOptions(strategy, ignored), NER, tokenizer, unknown)
    if strategy == "none":
        assert [(one.entity, one.index, one.word, one.start, one.end) for one in found] == [
            (one["entity"], one["index"], one["word"], one["start"], one["end"]) for one in expected
        ]
    else:
        assert [(one.entity_group, one.start, one.end) for one in found] == [
            (one["entity_group"], one["start"], one["end"]) for one in expected
        ]
    assert [one.score for one in found] == pytest.approx([float(one["score"]) for one in expected], rel=1e-6)


def test_windows_whose_entities_overlap_keep_what_transformers_keeps() -> None:
    """Of each group the longest entity, or the surest of equally long ones."""
    _, pipe = beside("WordPiece")
    random = np.random.default_rng(0)
    for _ in range(200):
        starts, lengths = random.integers(0, 30, 8).tolist(), random.integers(1, 6, 8).tolist()
        scores = random.choice([0.5, 0.7, 0.9], 8).tolist()
        found = [
            Entity("place", score, "", start, start + length)
            for start, length, score in zip(starts, lengths, scores, strict=True)
        ]
        named = [{"start": one.start, "end": one.end, "score": one.score} for one in found]
        expected = [(one["start"], one["end"], one["score"]) for one in pipe.aggregate_overlapping_entities(named)]
        assert [(one.start, one.end, one.score) for one in tag.longest(found)] == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_windows_are_those_of_a_stride(side: Side) -> None:
    """A long text is tagged to its end; each window is a text of its own."""
    tokenizer = TextTokenizer(Tokenizer.from_str(stripped_tokenizer()), 24, len(vocabulary()), truncation_side=side)
    text = " ".join(f"server {number}" for number in range(20))
    options = TagOptions("simple", windows=Windows(overlap_tokens=4), by_window=True)
    parts = tag.encode(tokenizer, [text], options, truncate=True)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(stripped_tokenizer()), model_max_length=24, truncation_side=side
    )
    windows = fast(text, truncation=True, max_length=24, stride=4, return_overflowing_tokens=True)
    assert [list(part.ids) for part in parts] == windows["input_ids"]
