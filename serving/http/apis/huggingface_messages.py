"""What the routes of Hugging Face's inference API take."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from serving.fields import owners as documented
from serving.fields.owners import Owners  # noqa: TC001  msgspec reads the annotations
from serving.http.apis.tei_messages import Compared, Direction  # noqa: TC001  likewise
from serving.inference.requests import InputType  # noqa: TC001  likewise
from serving.tasks.messages import LongScored, Options


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
