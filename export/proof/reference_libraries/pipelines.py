"""Transformers: models, and pipelines that read texts for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from transformers.pipelines.token_classification import AggregationStrategy

from export.proof.reference_libraries.answers import FEW, MANY, NEAR, Answer, Form, entities, fillings, labels, tagged
from export.proof.reference_libraries.library import Library, tokens
from serving.records import ClassifyOptions, FillMaskOptions, TagOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from export.checkpoint.reader import Checkpoint
    from export.proof.reference_libraries.library import Tokens
    from export.texts.corpus import Text

    Shake = Callable[[torch.Tensor], torch.Tensor]

_LONGEST_WITH_ONE_MASK = 16


def surely(read: Callable[[Shake], Answer]) -> Answer:
    """An answer read from logits; one without content where it changes with their last digits.

    Of two logits that are nearly equal, one of two opposite changes makes the other one larger.
    """
    answer = read(lambda logits: logits)
    others = [read(lambda logits, sign=sign: logits + sign * NEAR * _noise(logits.shape)) for sign in (1, -1)]  # type: ignore[misc]
    stays = all(
        other.decisions == answer.decisions and np.allclose(other.numbers, answer.numbers, atol=10 * NEAR)
        for other in others
    )
    return answer if stays else Answer(answer.structure, (), np.array([]), sure=False)


def _noise(shape: Sequence[int]) -> torch.Tensor:
    """From -1 to 1, and always the same."""
    return 2 * torch.rand(*shape, generator=torch.Generator().manual_seed(0)) - 1


class Transformers(Library):
    """Transformers: a model, and a pipeline that reads texts for it."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self.name = f"Transformers {transformers.__version__}"
        self.checkpoint = checkpoint
        own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        kind = getattr(transformers, self._kind)
        model, info = kind.from_pretrained(str(folder), dtype=torch.float32, output_loading_info=True, **own)
        self.model = model.eval()
        self.missing = bool(info["missing_keys"])
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **own)
        self.raw: dict[str, Any] = {}  # of a text that is asked in several ways
        self._pipe: Any = None
        if self._pipeline:
            pipeline: Any = transformers.pipeline  # has one type for each name
            self._pipe = pipeline(self._pipeline, model=model, tokenizer=self.tokenizer, device="cpu")

    _kind: str
    _pipeline = ""

    def asked(self, text: Text) -> Text | None:
        return text if isinstance(text, str) else None


class Classifier(Transformers):
    _kind, _pipeline = "AutoModelForSequenceClassification", "text-classification"

    def forms(self) -> list[Form]:
        return [Form(ClassifyOptions()), Form(ClassifyOptions(function="none"), "as raw scores", most=FEW)]

    def asked(self, text: Text) -> Text | None:
        """Transformers takes a pair whose second text is empty for a single text."""
        return text if isinstance(text, str) or text[1] else None

    def encode(self, text: Text) -> list[Tokens]:
        return [tokens(self._pipe.preprocess(_keyed(text), truncation=True))]

    def answer(self, texts: Sequence[Text], form: Form) -> list[Answer]:
        named = self.checkpoint.labels
        asked = form.options.function if isinstance(form.options, ClassifyOptions) else None
        # A value is what the person asks for by `--task regression`, whatever the folder says.
        function = asked or ("none" if named.regression else None)
        replies = self._pipe(list(map(_keyed, texts)), top_k=None, truncation=True, function_to_apply=function)
        chosen = not (named.regression or named.multi_label)
        return [labels(((str(one["label"]), one["score"]) for one in reply), chosen=chosen) for reply in replies]


def _keyed(text: Text) -> dict[str, str]:
    return {"text": text} if isinstance(text, str) else {"text": text[0], "text_pair": text[1]}


class Tagger(Transformers):
    _kind, _pipeline = "AutoModelForTokenClassification", "token-classification"

    def forms(self) -> list[Form]:
        grouped = [
            Form(TagOptions(name, ignore_labels=()), f"aggregated by {name!r}", most=MANY, exact=True)
            for name in ("simple", "first", "average", "max")
        ]
        return [Form(TagOptions("none", ignore_labels=())), *grouped, Form(TagOptions(), most=FEW, exact=True)]

    def encode(self, text: Text) -> list[Tokens]:
        return [tokens(one) for one in self._pipe.preprocess(text, is_split_into_words=False)]

    def answer(self, texts: Sequence[Text], form: Form) -> list[Answer]:
        options = form.options
        return [self._answer(str(text), options) for text in texts if isinstance(options, TagOptions)]

    def _answer(self, text: str, options: TagOptions) -> Answer:
        pipe = self._pipe
        raw = self.raw.get(text)
        if raw is None:
            raw = [pipe.forward(one) for one in pipe.preprocess(text, is_split_into_words=False)]
            self.raw[text] = raw
        return surely(lambda shake: self._read(raw, options, shake))

    def _read(self, raw: Sequence[dict[str, Any]], options: TagOptions, shake: Shake) -> Answer:
        strategy = AggregationStrategy(options.aggregation)
        shaken = [{**one, "logits": shake(one["logits"])} for one in raw]
        found = self._pipe.postprocess(shaken, aggregation_strategy=strategy, ignore_labels=list(options.ignore_labels))
        if options.aggregation == "none":
            return tagged(
                (str(one["entity"]), one["score"], one["index"], one["word"], one["start"], one["end"]) for one in found
            )
        return entities((one["entity_group"], one["score"], one["start"], one["end"]) for one in found)


class Filler(Transformers):
    _kind, _pipeline = "AutoModelForMaskedLM", "fill-mask"

    def forms(self) -> list[Form]:
        return [Form(FillMaskOptions(top_k=min(FillMaskOptions().top_k, self.checkpoint.candidates)))]

    def asked(self, text: Text) -> Text | None:
        """With a mask behind it, and one before a longer text, so that one is left whichever end is cut.

        A request may write any model's mask as BERT's, and Transformers does not know that.
        """
        mask = str(self.tokenizer.mask_token)
        if not isinstance(text, str) or ("[MASK]" in text and mask != "[MASK]"):
            return None
        # A byte is a token at most; beside the text stand a blank, the mask and two special tokens.
        short = min(_LONGEST_WITH_ONE_MASK, self.longest - 4)
        before = "" if len(text.encode()) <= short else f"{mask} "
        return f"{before}{text} {mask}"

    def encode(self, text: Text) -> list[Tokens]:
        return [tokens(self._pipe.preprocess(text, tokenizer_kwargs={"truncation": True}))]

    def answer(self, texts: Sequence[Text], form: Form) -> list[Answer]:
        top_k = form.options.top_k if isinstance(form.options, FillMaskOptions) else None
        return [self._answer(text, top_k) for text in texts]

    def _answer(self, text: Text, top_k: int | None) -> Answer:
        found = self._pipe(text, top_k=top_k, tokenizer_kwargs={"truncation": True})
        masks = found if isinstance(found[0], list) else [found]
        return fillings(
            [(one["score"], one["token"], one["token_str"], one["sequence"]) for one in best] for best in masks
        )
