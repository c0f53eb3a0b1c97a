"""What the routes of Hugging Face's inference API take."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from serving.fields import owners as documented
from serving.fields.owners import Owners  # noqa: TC001  msgspec reads the annotations
from serving.http.apis.tei_messages import Compared, Direction, LongScored, LongText
from serving.records import Aggregation, InputType  # noqa: TC001  likewise


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How Hugging Face's own servers should handle a request; not used here."""

    use_cache: bool | None = None
    use_gpu: bool | None = None
    wait_for_model: bool | None = None


class FeatureParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to embed.

    Attributes:
        normalize: Scale vectors to length 1; null means as the model's own folder says.
        truncate: Cut inputs that are too long; null means the server's default.
        truncation_direction: Which end is cut; null means the model's own.
        prompt_name: One of the model's prompts, put before each text.
        input_type: What the texts are for, which chooses a prompt in place of its name.
        dimensions: Keep only the first so many components.
    """

    owners: ClassVar[Owners] = documented.FEATURES

    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    dimensions: int | None = None


class FeatureRequest(FeatureParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts to embed, or sentences to compare with one; the fields beside `inputs` go before those in `parameters`.

    Attributes:
        inputs: One input or a list of them; or a sentence and those that it is compared with.
        encoding_format: Vectors are lists of numbers here.
        parameters: The same fields, where clients of other tasks have them.
        options: Not used.
    """

    inputs: str | list[str | list[int] | int] | Compared
    encoding_format: Literal["float"] | None = None
    parameters: FeatureParameters = FeatureParameters()
    options: Options | None = None


class TextPair(msgspec.Struct, forbid_unknown_fields=True):
    """A text, and another one that is read beside it."""

    text: str
    text_pair: str | None = None


class ClassifyParameters(LongScored, frozen=True, forbid_unknown_fields=True):
    """How to classify.

    Attributes:
        function_to_apply: What makes scores of logits; null means the model's own.
        top_k: Keep only the best so many classes.
        truncate: Cut inputs that are too long; null means the server's default.
        candidate_labels: Classes of the request's own, as a list or with commas between them (zero-shot
            classification); only a model of natural language inference takes them.
        hypothesis_template: With `candidate_labels`: a sentence with `{}` where a label goes.
        multi_label: With `candidate_labels`: labels are independent; otherwise their scores add up to 1.
        long: `window` reads long texts in windows, by `window_tokens`, `window_overlap` and `window_scores`.
    """

    owners: ClassVar[Owners] = documented.CLASSIFY

    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None
    top_k: int | None = None
    truncate: bool | None = None
    candidate_labels: str | list[str] | None = None
    hypothesis_template: str = "This example is {}."
    multi_label: bool = False


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to classify, or pairs of texts."""

    inputs: str | TextPair | list[str | TextPair]
    parameters: ClassifyParameters = ClassifyParameters()
    options: Options | None = None


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
        doc_stride: Tokens that neighbouring windows of a long context share; null means half of a window, 128 at most.
        max_seq_len: Tokens of a window, question included; at most the model's.
        max_question_len: Not used: a question may have half of a window.
        align_to_words: Answers begin and end with words, not with tokens inside of them.
        truncate: Cut a question that is too long; null means the server's default. A context is never cut.
    """

    owners: ClassVar[Owners] = documented.ANSWER

    top_k: int = 1
    max_answer_len: int = 15
    handle_impossible_answer: bool = False
    doc_stride: int | None = None
    max_seq_len: int = 384
    max_question_len: int | None = None
    align_to_words: bool = True
    truncate: bool | None = None


class AnswerRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Questions to answer."""

    inputs: Question | list[Question]
    parameters: AnswerParameters = AnswerParameters()
    options: Options | None = None


class TagParameters(LongText, frozen=True, forbid_unknown_fields=True):
    """How to tag.

    Attributes:
        aggregation_strategy: What decides the tag of a word: its `first` token, the `average` of its tokens, or the one
            with the highest probability (`max`). `simple`: each token has its own; `none`: tokens are not grouped.
            Null means `first` on `/tag`, and `simple` on `/` and `/models/{model}`.
        ignore_labels: Tags that are no entities.
        truncate: Cut inputs that are too long; null means the server's default.
        long: `window` reads long texts in windows, by `window_tokens` and `window_overlap`.
        stride: Tokens that neighbouring windows of a long text share, in place of `long`. Entities are found in each
            window, and of those that overlap the longest is kept, as in Transformers; not with the strategy `none`.
    """

    owners: ClassVar[Owners] = documented.TAG

    aggregation_strategy: Aggregation | None = None
    ignore_labels: tuple[str, ...] = ("O",)
    truncate: bool | None = None
    stride: int | None = None


class TagRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to find entities in."""

    inputs: str | list[str]
    parameters: TagParameters = TagParameters()
    options: Options | None = None


class FillMaskParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to fill masks.

    Attributes:
        top_k: Tokens wanted for each mask.
        targets: Only these words compete, by their first tokens. Each must be among the tokens that the model answers.
        truncate: Cut inputs that are too long; null means the server's default.
    """

    owners: ClassVar[Owners] = documented.FILL_MASK

    top_k: int = 5
    targets: str | list[str] | None = None
    truncate: bool | None = None


class FillMaskRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts with one or more masks, written `[MASK]` or as the model's own token."""

    inputs: str | list[str]
    parameters: FillMaskParameters = FillMaskParameters()
    options: Options | None = None


class VertexRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Requests that are answered together, or not at all.

    Attributes:
        instances: Each as `/` takes it.
        parameters: The `parameters` of instances that bring none; for rerankers and vectors of tokens, whose requests
            have none, fields that go beside their own.
    """

    instances: list[dict[str, Any]]
    parameters: dict[str, Any] | None = None


class VertexReply(msgspec.Struct):
    """For each instance what `/` answers."""

    predictions: list[Any]
