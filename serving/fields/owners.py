"""The fields that protocol owners document, by the message that our routes take.

Each owner lists the fields that the server reads. It also lists the unread fields, with the values that have no effect
here. Each list was compared with its `source` in 2026: the owner's reference, request types or client. A value is
listed only if the source says that it is the default, or that it changes no answer. A comment marks sources that were
readable only in part or at second hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


ANY: Sequence[object] = ("anything",)
"""Stands for all values of a field that never changes an answer."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The fields that one owner documents for one message.

    Attributes:
        source: The documentation.
        read: The fields that this server reads, separated by spaces.
        unread: The other fields, with their values without effect. An empty list: every value has an effect.
        texts_for_booleans: Whether texts such as `"true"` are accepted as booleans.
    """

    name: str
    source: str
    read: str = ""
    unread: Mapping[str, Sequence[object]] = field(default_factory=dict)
    texts_for_booleans: bool = False


class Owners:
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


_GITHUB = "https://github.com/"
_VLLM = f"{_GITHUB}vllm-project/vllm/blob/main/vllm/entrypoints/pooling/"
_INFINITY = f"{_GITHUB}michaelfeil/infinity/blob/main/libs/infinity_emb/infinity_emb/fastapi_schemas/pymodels.py"
_XINFERENCE = f"{_GITHUB}xorbitsai/inference/blob/main/xinference/api/schemas/requests.py"
_COHERE = "https://docs.cohere.com/reference/"  # read in the client cohere 7.3.1, generated from it
_JINA = "https://api.jina.ai/openapi.json"  # read in clients generated from it, up to version 2026.06.03
_VOYAGE = "https://docs.voyageai.com/reference/"  # read in part, and in the types of its client for TypeScript
_TEI = f"{_GITHUB}huggingface/text-embeddings-inference/blob/main/router/src/http/types.rs"
_PIPELINES = f"{_GITHUB}huggingface/transformers/blob/"
_HUB = f"{_GITHUB}huggingface/huggingface_hub/blob/main/src/huggingface_hub/inference/"
_TASKS = f"{_HUB}_generated/types/"
_TRITON = f"{_GITHUB}triton-inference-server/server/blob/main/docs/protocol/"

_VLLM_POOLING: Mapping[str, Sequence[object]] = {
    "truncate_prompt_tokens": (-1,),
    "truncation_side": ("right",),
    "padding": ("do_not_pad",),
    "request_id": ANY,
    "priority": (0,),
    "mm_processor_kwargs": ({},),
    "cache_salt": ANY,
    "chat_template_kwargs": ({},),
}
_PIPELINE_LOADING: Mapping[str, Sequence[object]] = {"batch_size": ANY, "num_workers": ANY}
"""Execution options of Transformers' pipelines, which change no answer."""

_TRUNCATED: Sequence[object] = (True, "longest_first")
"""Values of a tokenizer's `truncation` that truncate long texts, as the server does."""

EMBEDDINGS = Owners(
    Owner(
        "OpenAI",
        "https://platform.openai.com/docs/api-reference/embeddings/create",
        "input model encoding_format dimensions user",
    ),
    Owner(
        "Jina",
        _JINA,
        "input model embedding_type normalized task input_type dimensions truncate",
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
        f"{_VLLM}embed/protocol.py",
        "input model encoding_format dimensions user",
        {
            **_VLLM_POOLING,
            "add_special_tokens": (True,),
            "embed_dtype": ("float32",),
            "endianness": ("native", "little"),
            "normalize": (),  # former name of `use_activation`
            "use_activation": (),
            # A chat instead of `input`.
            "messages": (),
            "add_generation_prompt": (False,),
            "continue_final_message": (False,),
            "chat_template": (),
            "media_io_kwargs": ({},),
        },
    ),
    Owner("text-embeddings-inference", _TEI, "input model encoding_format dimensions user"),
    # `dimensions` is documented in its pull request 490; the readable copy of the file is older.
    Owner("infinity", _INFINITY, "input model encoding_format dimensions user", {"modality": ("text",)}),
    Owner(
        "Xinference",
        _XINFERENCE,
        "input model encoding_format dimensions user",
        {"truncate_prompt_tokens": (-1,)},
        texts_for_booleans=True,
    ),
)
"""`/v1/embeddings`."""

EMBEDDING_INPUT = Owners(Owner("Jina", _JINA, "text", {"id": ANY, "image": (), "url": (), "bytes": ()}))
"""An object in the list `input` of `/v1/embeddings`."""

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
        {"priority": (0,), "relevant_spans": ({"mode": "disabled"},)},
    ),
    Owner(
        "Jina",
        _JINA,
        "model query documents top_n return_documents",
        {"truncation": (True,), "max_doc_length": (2048,), "return_embeddings": (False,)},
    ),
    Owner(
        "Voyage",
        f"{_VOYAGE}reranker-api",
        "query documents model top_k return_documents",
        {"truncation": (True,)},
    ),
    Owner(
        "text-embeddings-inference",
        _TEI,
        "query",
        {
            "texts": (),  # instead of `documents`
            "truncate": (True,),
            "truncation_direction": ("Right", "right"),
            "raw_scores": (False,),
            "return_text": (),
        },
    ),
    Owner(
        "vLLM",
        f"{_VLLM}scoring/protocol.py",
        "model query documents top_n max_tokens_per_doc",
        {
            **_VLLM_POOLING,
            "user": ANY,
            "max_tokens_per_query": (0,),
            "instruction": (),
            # The last two are former names of the first. The default is true, and scores here are between 0 and 1.
            "use_activation": (True,),
            "activation": (True,),
            "softmax": (True,),
        },
    ),
    Owner("infinity", _INFINITY, "query documents return_documents model top_n", {"raw_scores": (False,)}),
    Owner(
        "Xinference",
        _XINFERENCE,
        "model query documents top_n return_documents max_chunks_per_doc",
        {"return_len": (False, True), "kwargs": ("", "{}")},  # every reply counts the tokens
        texts_for_booleans=True,
    ),
)
"""`/v1/rerank`, `/v2/rerank`, and `/rerank` with `documents`."""

# `dimensions` was found in a fork of text-embeddings-inference and in Hugging Face's client; the readable copy of the
# original types is older.
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
        f"{_HUB}_client.py",
        "normalize prompt_name truncate truncation_direction dimensions",
    ),
    Owner(
        "Transformers",
        f"{_PIPELINES}main/src/transformers/pipelines/feature_extraction.py",
        "",
        {
            **_PIPELINE_LOADING,
            "truncation": _TRUNCATED,
            "tokenize_kwargs": ({}, {"truncation": True}),
            "return_tensors": (False,),
        },
    ),
)
CLASSIFY = Owners(
    Owner("Hugging Face", f"{_TASKS}text_classification.py", "function_to_apply top_k"),
    Owner("Hugging Face", f"{_TASKS}zero_shot_classification.py", "candidate_labels hypothesis_template multi_label"),
    Owner(
        "Transformers",
        # Its last parameters are those of a tokenizer.
        f"{_PIPELINES}01080c629600d4ff3121446bb4f4a2e240c2cf41/src/transformers/pipelines/text_classification.py",
        "",
        {
            **_PIPELINE_LOADING,
            "truncation": _TRUNCATED,
            "padding": ANY,
            "max_length": (),
            "return_all_scores": (True,),
        },
    ),
    Owner(
        "Transformers",
        f"{_PIPELINES}0c654085fb6ab4312e84c904035190a4277596a1/src/transformers/pipelines/zero_shot_classification.py",
        "",
        {"multi_class": (False,)},  # former name of `multi_label`
    ),
)
ANSWER = Owners(
    Owner(
        "Hugging Face",
        f"{_TASKS}question_answering.py",
        "top_k doc_stride max_answer_len max_seq_len max_question_len handle_impossible_answer align_to_words",
    ),
    Owner(
        "Transformers",
        f"{_PIPELINES}00f9309290bea255df7637f8043518f0f28f9d22/src/transformers/pipelines/question_answering.py",
        "",
        {**_PIPELINE_LOADING, "padding": ANY},
    ),
)
TAG = Owners(
    Owner("Hugging Face", f"{_TASKS}token_classification.py", "ignore_labels stride aggregation_strategy"),
    Owner(
        "Transformers",
        f"{_PIPELINES}main/src/transformers/pipelines/token_classification.py",
        "",
        {
            **_PIPELINE_LOADING,
            "is_split_into_words": (False,),
            "delimiter": ANY,  # separates words that the request has already split
            "offset_mapping": (),
        },
    ),
    Owner(
        "Transformers",
        f"{_PIPELINES}0dc6fe8ecb7458fdcac6cdd42d048813c92912bd/src/transformers/pipelines/token_classification.py",
        "",
        {"grouped_entities": (), "ignore_subwords": ()},  # replaced by `aggregation_strategy`
    ),
)
FILL_MASK = Owners(
    Owner("Hugging Face", f"{_TASKS}fill_mask.py", "top_k targets"),
    Owner(
        "Transformers",
        f"{_PIPELINES}main/src/transformers/pipelines/fill_mask.py",
        "",
        {**_PIPELINE_LOADING, "tokenizer_kwargs": ({}, {"truncation": True})},
    ),
)
"""The `parameters` of Hugging Face's inference API, by task."""

V2_PARAMETERS = Owners(
    Owner(
        "Triton",
        f"{_TRITON}extension_parameters.md",
        "priority timeout binary_data_output triton_enable_empty_final_response",
        # As for all Triton models without a sequence batcher.
        {"sequence_id": ANY, "sequence_start": ANY, "sequence_end": ANY},
    )
)
V2_INPUT = Owners(
    Owner(
        "Triton",
        f"{_TRITON}extension_binary_data.md",
        "binary_data_size shared_memory_region",
        # Triton ignores them without a region, although its documentation describes an error.
        {"shared_memory_byte_size": ANY, "shared_memory_offset": ANY},
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
"""The parameters of v2: of a request, an input, an output, and of loading or unloading a model."""

ELSEWHERE = Owners(
    Owner(
        "Alibaba Cloud Model Studio",
        "https://www.alibabacloud.com/help/en/model-studio/text-embedding-synchronous-api",
        "",
        # The page was readable only in part; the names come from request bodies of clients.
        {"dimension": (), "text_type": (), "output_type": (), "instruct": ()},
    )
)
"""Fields of other APIs that clients carry over on purpose."""

NO_OWNER = Owners()

_ALL = [value for value in list(globals().values()) if isinstance(value, Owners)]
DOCUMENTED = frozenset().union(*[owners.documented for owners in _ALL])
"""Every name that an owner documents; none of these is a typo."""
