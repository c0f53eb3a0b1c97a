"""The fields that the owners of the protocols document, by the message that our routes take.

Of each owner: the fields that we read, and those that we do not, with the values that ask for nothing special. The
owners' pages say what a field means and what it is by default; where they say nothing of a value, it is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


ANY: Sequence[object] = ("anything",)
"""In place of the values of a field that changes no answer, whatever it says."""


@dataclass(frozen=True, slots=True)
class Owner:
    """What one owner documents of one message.

    Attributes:
        name: The owner.
        source: Where it is documented.
        read: The fields that are read here, separated by spaces.
        unread: The others, with the values that ask for nothing special; none: every value asks for something.
        texts_for_booleans: Whether `"true"` is taken for true.
    """

    name: str
    source: str
    read: str = ""
    unread: Mapping[str, Sequence[object]] = field(default_factory=dict)
    texts_for_booleans: bool = False


class Owners:
    """Those of one message."""

    def __init__(self, *owners: Owner) -> None:
        self.all = owners
        self.texts_for_booleans = any(owner.texts_for_booleans for owner in owners)
        unread: dict[str, Sequence[object]] = {}
        for owner in owners:
            for name, harmless in owner.unread.items():
                before = unread.get(name, ())
                unread[name] = ANY if before is ANY or harmless is ANY else (*before, *harmless)
        read = {name for owner in owners for name in owner.read.split()}
        self.documented = frozenset(read | unread.keys())
        self.unread: Mapping[str, Sequence[object]] = {
            name: harmless for name, harmless in unread.items() if name not in read
        }


_VLLM = "https://docs.vllm.ai/en/latest/models/pooling_models/"
_INFINITY = "https://michaelfeil.eu/infinity/latest/swagger_ui/"
_XINFERENCE = "https://inference.readthedocs.io/en/latest/models/model_abilities/"
_COHERE = "https://docs.cohere.com/reference/"
_JINA = "https://api.jina.ai/redoc"
_VOYAGE = "https://docs.voyageai.com/reference/"
_TEI = "https://huggingface.github.io/text-embeddings-inference/"
_PIPELINES = "https://huggingface.co/docs/transformers/main_classes/pipelines"
_TASKS = "https://huggingface.co/docs/inference-providers/tasks/"
_TRITON = "https://github.com/triton-inference-server/server/blob/main/docs/protocol/"

_VLLM_POOLING: Mapping[str, Sequence[object]] = {
    "truncate_prompt_tokens": (-1,),
    "truncation_side": ("right",),
    "padding": ("do_not_pad",),
    "request_id": ANY,
    "priority": (0,),
    "mm_processor_kwargs": ({},),
    "cache_salt": ANY,
    "additional_data": ({},),
    "use_activation": (),
    "softmax": (),
    "activation": (),
}
_PIPELINE_LOADING: Mapping[str, Sequence[object]] = {"batch_size": ANY, "num_workers": ANY, "padding": ANY}
"""How Transformers' pipelines arrange their work: no answer depends on it."""

EMBEDDINGS = Owners(
    Owner(
        "OpenAI",
        "https://platform.openai.com/docs/api-reference/embeddings/create",
        "input model encoding_format dimensions user",
    ),
    Owner(
        "Jina",
        _JINA,
        "input model embedding_type normalized task dimensions truncate",
        {"late_chunking": (False,), "return_multivector": (False,), "return_tokenized_input": (False,)},
    ),
    Owner(
        "Voyage",
        f"{_VOYAGE}embeddings-api",
        "input model input_type encoding_format",
        {"truncation": (True,), "output_dimension": (), "output_dtype": ("float",)},
    ),
    Owner(
        "vLLM",
        f"{_VLLM}embed/",
        "input model encoding_format dimensions user",
        {
            **_VLLM_POOLING,
            "add_special_tokens": (True,),
            "embed_dtype": ("float32",),
            "endianness": ("native", "little"),
            "normalize": (),
        },
    ),
    Owner("text-embeddings-inference", _TEI, "input model encoding_format dimensions user"),
    Owner("infinity", _INFINITY, "input model encoding_format dimensions user", {"modality": ("text",)}),
    Owner(
        "Xinference",
        f"{_XINFERENCE}embed.html",
        "input model encoding_format dimensions user",
        {"truncate_prompt_tokens": (-1,), "kwargs": ("", "{}")},
        texts_for_booleans=True,
    ),
)
"""`/v1/embeddings`."""

EMBEDDING_INPUT = Owners(Owner("Jina", _JINA, "text", {"image": (), "url": (), "bytes": ()}))
"""An element of its `input` that is an object."""

COHERE_EMBED = Owners(
    Owner(
        "Cohere",
        f"{_COHERE}embed",
        "texts images model input_type inputs max_tokens output_dimension embedding_types truncate",
        {"priority": (0,)},
    ),
)
"""Cohere's `/v1/embed` and `/v2/embed`."""

RANKING = Owners(
    Owner(
        "Cohere",
        f"{_COHERE}rerank",
        "model query documents top_n rank_fields return_documents max_chunks_per_doc max_tokens_per_doc",
        {"priority": (0,)},
    ),
    Owner(
        "Jina",
        _JINA,
        "model query documents top_n return_documents",
        {"truncate": (True,), "truncation": (True,), "return_embeddings": (False,)},
    ),
    Owner(
        "Voyage",
        f"{_VOYAGE}reranker-api",
        "query documents model top_k return_documents",
        {"truncation": (True,)},
    ),
    Owner("text-embeddings-inference", _TEI, "query", {"texts": ()}),  # in place of `documents`
    Owner("vLLM", f"{_VLLM}score/", "model query documents top_n", {**_VLLM_POOLING, "user": ANY}),
    Owner("infinity", _INFINITY, "query documents return_documents model top_n", {"raw_scores": (False,)}),
    Owner(
        "Xinference",
        f"{_XINFERENCE}rerank.html",
        "model query documents top_n return_documents max_chunks_per_doc",
        {"return_len": (False, True), "kwargs": ("", "{}")},  # the tokens are counted in every reply
        texts_for_booleans=True,
    ),
)
"""`/v1/rerank`, `/v2/rerank`, and `/rerank` with `documents`."""

TEI_EMBED = Owners(
    Owner("text-embeddings-inference", _TEI, "inputs truncate truncation_direction prompt_name normalize dimensions")
)
TEI_EMBED_ALL = Owners(Owner("text-embeddings-inference", _TEI, "inputs truncate truncation_direction prompt_name"))
TEI_PREDICT = Owners(Owner("text-embeddings-inference", _TEI, "inputs truncate truncation_direction raw_scores"))
TEI_RERANK = Owners(
    Owner("text-embeddings-inference", _TEI, "query texts truncate truncation_direction raw_scores return_text")
)
TEI_TOKENIZE = Owners(Owner("text-embeddings-inference", _TEI, "inputs add_special_tokens prompt_name"))
TEI_DECODE = Owners(Owner("text-embeddings-inference", _TEI, "ids skip_special_tokens"))

FEATURES = Owners(
    Owner(
        "Hugging Face",
        f"{_TASKS}feature-extraction",
        "normalize prompt_name truncate truncation_direction dimensions",
    ),
    Owner("Transformers", _PIPELINES, "", {**_PIPELINE_LOADING, "truncation": (True,), "return_tensors": (False,)}),
)
CLASSIFY = Owners(
    Owner("Hugging Face", f"{_TASKS}text-classification", "function_to_apply top_k"),
    Owner("Hugging Face", f"{_TASKS}zero-shot-classification", "candidate_labels hypothesis_template multi_label"),
    Owner("Transformers", _PIPELINES, "", {**_PIPELINE_LOADING, "truncation": (True,), "return_all_scores": (True,)}),
)
ANSWER = Owners(
    Owner(
        "Hugging Face",
        f"{_TASKS}question-answering",
        "top_k doc_stride max_answer_len max_seq_len max_question_len handle_impossible_answer align_to_words",
    ),
    Owner("Transformers", _PIPELINES, "", _PIPELINE_LOADING),
)
TAG = Owners(
    Owner("Hugging Face", f"{_TASKS}token-classification", "ignore_labels stride aggregation_strategy"),
    Owner(
        "Transformers",
        _PIPELINES,
        "",
        {
            **_PIPELINE_LOADING,
            "grouped_entities": (),
            "ignore_subwords": (),
            "is_split_into_words": (False,),
            "delimiter": (),
        },
    ),
)
FILL_MASK = Owners(
    Owner("Hugging Face", f"{_TASKS}fill-mask", "top_k targets"),
    Owner("Transformers", _PIPELINES, "", {**_PIPELINE_LOADING, "tokenizer_kwargs": ({},)}),
)
"""The `parameters` of Hugging Face's inference API, by task."""

V2_PARAMETERS = Owners(
    Owner(
        "Triton",
        f"{_TRITON}extension_parameters.md",
        "priority timeout binary_data_output triton_enable_empty_final_response",
        # As for every model of Triton's without a sequence batcher.
        {"sequence_id": ANY, "sequence_start": ANY, "sequence_end": ANY},
    )
)
V2_INPUT = Owners(
    Owner(
        "Triton",
        f"{_TRITON}extension_binary_data.md",
        "binary_data_size shared_memory_region",
        {"shared_memory_byte_size": ANY, "shared_memory_offset": ANY},  # they say nothing without a region
    )
)
V2_OUTPUT = Owners(
    Owner(
        "Triton",
        f"{_TRITON}extension_classification.md",
        "binary_data classification shared_memory_region",
        {"shared_memory_byte_size": ANY, "shared_memory_offset": ANY},
    )
)
V2_CONTROL = Owners(
    Owner("Triton", f"{_TRITON}extension_model_repository.md", "", {"config": (), "unload_dependents": ANY})
)
"""The parameters of v2, of a request, an input, an output, and of a model that is loaded or unloaded."""

ELSEWHERE = Owners(
    Owner(
        "Alibaba Cloud Model Studio",
        "https://www.alibabacloud.com/help/en/model-studio/text-embedding-synchronous-api",
        "",
        {"dimension": (), "text_type": (), "output_type": ()},
    )
)
"""Words of other interfaces that clients carry over: they are meant as they stand."""

NO_OWNER = Owners()

_ALL = [value for value in list(globals().values()) if isinstance(value, Owners)]
DOCUMENTED = frozenset().union(*[owners.documented for owners in _ALL])
"""Every name that some owner documents: none of them is a slip of the pen."""
