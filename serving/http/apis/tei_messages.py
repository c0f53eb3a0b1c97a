"""What text-embeddings-inference's routes take and answer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from serving.fields import owners as documented
from serving.fields.owners import Owners  # noqa: TC001  msgspec reads the annotations
from serving.inference.requests import InputType, Token
from serving.tasks.windows import LongScored

Direction = Literal["Right", "right", "Left", "left"]
"""Which end of a text that is too long is cut."""


class EmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to embed. A list of numbers is one input as token ids, special tokens included.

    Attributes:
        inputs: One input or a list of them.
        truncate: Cut inputs that are too long; null means the server's default.
        truncation_direction: Which end is cut; null means the model's own: its end, unless its folder says otherwise.
        prompt_name: One of the model's prompts, put before each text; null means the default one, if it has one.
        input_type: What the texts are for, which chooses a prompt in place of its name.
        normalize: Scale vectors to length 1; null means as the model's own folder says.
        dimensions: Keep only the first so many components.
        chunk: Cut each text into chunks and answer a vector for each, `EmbeddedChunk`, in a list for each text.
        chunk_tokens: Of the largest chunk; null means as many as the model takes.
        chunk_overlap: Tokens that neighbouring chunks share.
        late_chunking: Read the text whole before its tokens' vectors are meant chunk by chunk; asks for a model of the
            task `embed_tokens`.
    """

    owners: ClassVar[Owners] = documented.TEI_EMBED

    inputs: str | list[str | list[int] | int]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    chunk: bool = False
    chunk_tokens: int | None = None
    chunk_overlap: int = 0
    late_chunking: bool = False


class EmbeddedChunk(msgspec.Struct):
    """A chunk's characters in its text, from `start` to before `end` in Unicode code points, and its vector."""

    start: int
    end: int
    embedding: list[float]


class EmbedAllRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts whose tokens are to be embedded."""

    owners: ClassVar[Owners] = documented.TEI_EMBED_ALL

    inputs: str | list[str | list[int] | int]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None


class PredictRequest(LongScored, frozen=True, forbid_unknown_fields=True):
    """Texts or pairs of texts to classify.

    Attributes:
        inputs: A text; a pair as a list of two texts; or a list whose elements are lists of one or two texts.
        truncate: Cut inputs that are too long; null means the server's default.
        truncation_direction: Which end is cut; null means the model's own: its end, unless its folder says otherwise.
        raw_scores: Answer the logits themselves.
        long: `window` reads long texts in windows, by `window_tokens`, `window_overlap` and `window_scores`.
    """

    owners: ClassVar[Owners] = documented.TEI_PREDICT

    inputs: str | list[str | list[str]]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    raw_scores: bool = False


class RerankRequest(LongScored, frozen=True, forbid_unknown_fields=True):
    """Texts to order by how well they answer a query.

    Attributes:
        query: The query.
        texts: The texts.
        truncate: Cut what is too long; null means the server's default.
        truncation_direction: Which end is cut; null means the model's own: its end, unless its folder says otherwise.
        raw_scores: Answer the logits themselves, or else their sigmoids; null means as the model's own folder says.
        return_text: Repeat each text beside its score.
        top_n: Answer the best so many, as LiteLLM asks; null means all.
        long: `window` reads long texts in windows, by `window_tokens`, `window_overlap` and `window_scores`.
    """

    owners: ClassVar[Owners] = documented.TEI_RERANK

    query: str
    texts: list[str]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    raw_scores: bool | None = None
    return_text: bool = False
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None


class Rank(msgspec.Struct, omit_defaults=True):
    """A text's score and its index in the request."""

    index: int
    score: float
    text: str | None = None


class Compared(msgspec.Struct, forbid_unknown_fields=True):
    """A sentence, and those that it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to embed what is compared; each as `/embed` has it."""

    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None


class SimilarityRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Sentences to compare with one."""

    inputs: Compared
    parameters: SimilarityParameters | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to tokenise; `add_special_tokens` adds those that a model sees around them."""

    owners: ClassVar[Owners] = documented.TEI_TOKENIZE

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None
    input_type: InputType | None = None


class DecodeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Token ids to turn into text: of one text, or a list for each."""

    owners: ClassVar[Owners] = documented.TEI_DECODE

    ids: list[int | list[int]]
    skip_special_tokens: bool = True


TokenizeReply = list[list[Token]]
"""The tokens of each text."""
