"""What the routes of Hugging Face's inference API take."""

from __future__ import annotations

from typing import Literal

import msgspec


class ClassifyParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to classify.

    Attributes:
        function_to_apply: What makes scores of logits; null means the model's own.
        top_k: Keep only the best so many classes.
        truncate: Cut inputs that are too long; null means the server's default.
    """

    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None
    top_k: int | None = None
    truncate: bool | None = None


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to classify."""

    inputs: str | list[str]
    parameters: ClassifyParameters = ClassifyParameters()


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """A question and the text that should hold its answer, of any length."""

    question: str
    context: str


class AnswerParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to answer.

    Attributes:
        top_k: Answers wanted; more than one are answered as a list.
        max_answer_len: Tokens of the longest answer.
        handle_impossible_answer: Answer nothing where that is likelier than every answer.
        doc_stride: Tokens that neighbouring windows of a long context share; half a window at most.
        truncate: Cut a question that is too long; null means the server's default. A context is never cut.
    """

    top_k: int = 1
    max_answer_len: int = 30
    handle_impossible_answer: bool = False
    doc_stride: int = 128
    truncate: bool | None = None


class AnswerRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Questions to answer."""

    inputs: Question | list[Question]
    parameters: AnswerParameters = AnswerParameters()


class TagParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to tag.

    Attributes:
        aggregation_strategy: `first`: a word's first token decides its tag; `simple`: each token has its own.
        ignore_labels: Tags that are no entities.
        truncate: Cut inputs that are too long; null means the server's default.
    """

    aggregation_strategy: Literal["first", "simple"] = "first"
    ignore_labels: tuple[str, ...] = ("O",)
    truncate: bool | None = None


class TagRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to find entities in."""

    inputs: str | list[str]
    parameters: TagParameters = TagParameters()


class FillMaskParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to fill masks.

    Attributes:
        top_k: Tokens wanted for each mask.
        truncate: Cut inputs that are too long; null means the server's default.
    """

    top_k: int = 5
    truncate: bool | None = None


class FillMaskRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts with one or more masks, written `[MASK]` or as the model's own token."""

    inputs: str | list[str]
    parameters: FillMaskParameters = FillMaskParameters()
