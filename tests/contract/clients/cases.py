"""What the clients that people have are asked, as their users write it; nothing here knows the server.

`python cases.py FAMILY URL ALONE GRPC` does all that is to be asked of the clients of a family and prints what came, as
JSON by the case's name. It runs where the clients are installed; where they are not, this module still tells its cases.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Nothing here is to ask anybody but the server.
QUIET = {
    "ANONYMIZED_TELEMETRY": "False",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

TEXTS = ["A T4 is a graphics card for servers.", "The cat sleeps on the sofa.", "What is a T4?"]
QUERY = "Which card computes?"
DOCUMENTS = ["the server is on", "It is a text, and not on the server.", "a text of it", "not the server"]
SENTENCE = "the server is not on it"
CONTEXT = "It is a text. The server is in the text, and that is not on it for a server with text."
QUESTION = "what is in the text"
MASKED = "the [MASK] is on"
LABELS = ["text", "server", "it is"]
LONG = " ".join([SENTENCE] * 30)
STRIDE = 16
KEY = "unused"
TOKENIZERS = "litellm_core_utils/tokenizers"
CL100K_BASE = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
"""What tiktoken calls its copy of the vocabulary of that name."""

BUILD = Path(__file__).parents[3] / "build"

VERSIONS = {
    "ab": "2.3 (Debian's apache2-utils)",
    "elasticsearch": "at 3d73c0a, 4979002 and f41bfb9",
    "java.net.http": "(Debian's OpenJDK 17)",
    "weaviate": "at 12366b4 and 0ad6035",
}
"""Of what is no package of Python. Databases that ask by themselves are not run: what is sent is the body that the
source of this version makes, and what comes is read as that source reads it."""

PROGRAMS = {"ab": "apache2-utils/usr/bin/ab", "java.net.http": "java/java"}
"""Of them what is run, below `BUILD`."""


@dataclass(frozen=True)
class Server:
    """Where to ask.

    Attributes:
        url: Of a server of a model of every task.
        alone: Of one of a model for embeddings and nothing else, which reads OpenAI's token ids.
        grpc: `host:port` of the first.
    """

    url: str
    alone: str
    grpc: str


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        client: The package, as it is installed.
        call: What its user writes; URL and GRPC stand for the server's addresses.
        gives: What must come, one of the right answers of the test; empty where the client cannot.
        words: What it shows then.
        cure: What to do instead.
    """

    client: str
    call: str
    gives: str
    words: str
    cure: str
    run: Callable[[Server], Any]

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def family(self) -> str:
        """Packages of one family import much of the same, and are asked by one process."""
        return self.client.partition("-")[0]

    @property
    def is_here(self) -> bool:
        """Whether its program is; packages are all installed together."""
        return self.client not in PROGRAMS or (BUILD / PROGRAMS[self.client]).exists()


CASES: list[Case] = []


def case(client: str, call: str, gives: str = "", *, words: str = "", cure: str = "") -> Any:
    """Lists a function as a case."""

    def add(run: Callable[[Server], Any]) -> Callable[[Server], Any]:
        CASES.append(Case(client, call, gives, words, cure, run))
        return run

    return add


# OpenAI's client.


@case("openai", '`OpenAI(base_url="URL/v1", ...).embeddings.create(model=..., input=[...])`', "vectors")
def openai_embeddings(server: Server) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    return [one.embedding for one in client.embeddings.create(model="text-embedding-3-small", input=TEXTS).data]


@case("openai", "the same with `AsyncOpenAI`", "vectors")
def openai_async(server: Server) -> Any:
    import asyncio

    from openai import AsyncOpenAI

    async def ask() -> Any:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            return await client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")

    return [one.embedding for one in asyncio.run(ask()).data]


@case("openai", "`OpenAI(...).models.list()`", "models")
def openai_models(server: Server) -> Any:
    from openai import OpenAI

    return [one.id for one in OpenAI(base_url=f"{server.url}/v1", api_key=KEY).models.list()]


@case("openai", 'the same with `input=[""]`', words="`input` cannot be empty", cure="leave empty texts out")
def openai_empty(server: Server) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key=KEY).embeddings.create(model="minilm", input=[""]).data


# LangChain.


@case(
    "langchain-openai",
    '`OpenAIEmbeddings(base_url="URL/v1", check_embedding_ctx_length=False, ...).embed_documents([...])`',
    "vectors",
)
def langchain_openai(server: Server) -> Any:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(base_url=f"{server.url}/v1", api_key=KEY, check_embedding_ctx_length=False)
    return embeddings.embed_documents(TEXTS)


@case(
    "langchain-openai",
    '`OpenAIEmbeddings(base_url="URL/v1", ...).embed_documents([...])`',
    words="`input` has token IDs without this model's special tokens",
    cure="`check_embedding_ctx_length=False`",
)
def langchain_openai_tokens(server: Server) -> Any:
    return _langchain_by_tokens(server.url)


@case("langchain-openai", "the same, the server with `--accept-token-ids cl100k_base=PATH`", "vectors")
def langchain_openai_tokens_read(server: Server) -> Any:
    return _langchain_by_tokens(server.alone)


def _langchain_by_tokens(url: str) -> Any:
    from langchain_openai import OpenAIEmbeddings

    # The vocabulary, which it would load from elsewhere, lies in another client.
    package = importlib.util.find_spec("litellm")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(package.origin).parent / TOKENIZERS)
    return OpenAIEmbeddings(base_url=f"{url}/v1", api_key=KEY).embed_documents(TEXTS)


def _endpoint(server: Server) -> Any:
    from huggingface_hub import InferenceClient
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    embeddings = HuggingFaceEndpointEmbeddings(model="minilm")
    embeddings.client = InferenceClient(base_url=f"{server.url}/models/minilm")
    return embeddings


@case(
    "langchain-huggingface",
    '`embeddings = HuggingFaceEndpointEmbeddings(model="minilm"); embeddings.client = '
    'InferenceClient(base_url="URL/models/minilm"); embeddings.embed_documents([...])`',
    "vectors",
)
def langchain_huggingface(server: Server) -> Any:
    return _endpoint(server).embed_documents(TEXTS)


@case(
    "langchain-huggingface",
    '`HuggingFaceEndpointEmbeddings(model="URL")`',
    words="`model` must be a HuggingFace repo ID, not a URL.",
    cure="set `client`, as above",
)
def langchain_huggingface_url(server: Server) -> Any:
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    return HuggingFaceEndpointEmbeddings(model=server.url).embed_documents(TEXTS)


# LlamaIndex.


@case(
    "llama-index-embeddings-openai",
    '`OpenAIEmbedding(api_base="URL/v1", ...).get_text_embedding_batch([...])`',
    "vectors",
)
def llama_openai(server: Server) -> Any:
    from llama_index.embeddings.openai import OpenAIEmbedding

    return OpenAIEmbedding(api_base=f"{server.url}/v1", api_key=KEY).get_text_embedding_batch(TEXTS)


@case(
    "llama-index-embeddings-openai",
    '`OpenAIEmbedding(model="minilm", ...)`',
    words="'minilm' is not a valid OpenAIEmbeddingModelType",
    cure='`model_name="minilm"`, or leave it out',
)
def llama_openai_model(server: Server) -> Any:
    from llama_index.embeddings.openai import OpenAIEmbedding

    embedding = OpenAIEmbedding(model="minilm", api_base=f"{server.url}/v1", api_key=KEY)
    return embedding.get_text_embedding_batch(TEXTS)


@case(
    "llama-index-embeddings-openai-like",
    '`OpenAILikeEmbedding(model_name="minilm", api_base="URL/v1").get_query_embedding(...)`',
    "vector",
)
def llama_openai_like(server: Server) -> Any:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    return OpenAILikeEmbedding(model_name="minilm", api_base=f"{server.url}/v1").get_query_embedding(TEXTS[0])


@case(
    "llama-index-embeddings-text-embeddings-inference",
    '`TextEmbeddingsInference(model_name=..., base_url="URL").get_text_embedding_batch([...])`',
    "vectors",
)
def llama_tei(server: Server) -> Any:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    return TextEmbeddingsInference(model_name="minilm", base_url=server.url).get_text_embedding_batch(TEXTS)


@case(
    "llama-index-embeddings-huggingface-api",
    '`HuggingFaceInferenceAPIEmbedding(model_name="URL/models/minilm").get_text_embedding(...)`',
    "vector",
)
def llama_huggingface(server: Server) -> Any:
    from llama_index.embeddings.huggingface_api import HuggingFaceInferenceAPIEmbedding

    embedding = HuggingFaceInferenceAPIEmbedding(model_name=f"{server.url}/models/minilm")
    return embedding.get_text_embedding(TEXTS[0])


# Haystack.


def _embedded(embedder: Any) -> Any:
    from haystack import Document

    embedder.warm_up()
    return [one.embedding for one in embedder.run([Document(content=text) for text in TEXTS])["documents"]]


@case("haystack-ai", '`OpenAIDocumentEmbedder(api_base_url="URL/v1", ...).run([...])`', "vectors")
def haystack_openai(server: Server) -> Any:
    from haystack.components.embedders import OpenAIDocumentEmbedder
    from haystack.utils import Secret

    key = Secret.from_token(KEY)
    return _embedded(OpenAIDocumentEmbedder(api_key=key, api_base_url=f"{server.url}/v1", progress_bar=False))


@case("haystack-ai", '`OpenAITextEmbedder(api_base_url="URL/v1", ...).run(...)`', "vector")
def haystack_openai_text(server: Server) -> Any:
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.utils import Secret

    embedder = OpenAITextEmbedder(api_key=Secret.from_token(KEY), api_base_url=f"{server.url}/v1")
    return embedder.run(TEXTS[0])["embedding"]


@case(
    "haystack-ai",
    "`OpenAIDocumentEmbedder(..., raise_on_failure=True).run([...])` with an empty text",
    words="`input` cannot be empty",
    cure="leave empty texts out; without `raise_on_failure`, the embedder only logs the error",
)
def haystack_openai_empty(server: Server) -> Any:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder
    from haystack.utils import Secret

    key = Secret.from_token(KEY)
    embedder = OpenAIDocumentEmbedder(api_key=key, api_base_url=f"{server.url}/v1", raise_on_failure=True)
    return embedder.run([Document(content="")])


def _haystack_tei(name: str, url: str, **options: Any) -> Any:
    from haystack_integrations.components.embedders import huggingface_api

    embedder = getattr(huggingface_api, name)
    return embedder(api_type="text_embeddings_inference", api_params={"url": url}, **options)


@case(
    "huggingface-api-haystack",
    '`HuggingFaceAPIDocumentEmbedder(api_type="text_embeddings_inference", '
    'api_params={"url": "URL/models/minilm"}).run([...])`',
    "vectors",
)
def haystack_tei(server: Server) -> Any:
    return _embedded(_haystack_tei("HuggingFaceAPIDocumentEmbedder", f"{server.url}/models/minilm", progress_bar=False))


@case("huggingface-api-haystack", "`HuggingFaceAPITextEmbedder(...).run(...)`, the same parameters", "vector")
def haystack_tei_text(server: Server) -> Any:
    embedder = _haystack_tei("HuggingFaceAPITextEmbedder", f"{server.url}/models/minilm")
    return embedder.run(TEXTS[0])["embedding"]


def _ranked(ranker: Any) -> Any:
    from haystack import Document

    ranker.warm_up()
    documents = [Document(id=str(index), content=text) for index, text in enumerate(DOCUMENTS)]  # it drops equal ids
    found = ranker.run(query=QUESTION, documents=documents)["documents"]
    return [[DOCUMENTS.index(one.content), one.score] for one in found]


@case("huggingface-api-haystack", '`HuggingFaceTEIRanker(url="URL").run(query=..., documents=[...])`', "ranks")
def haystack_ranker(server: Server) -> Any:
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    return _ranked(HuggingFaceTEIRanker(url=server.url))


# Hugging Face's own client.


def _inference(url: str) -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(base_url=url)


def _spans(found: Any, *keys: str) -> Any:
    return [{key: one[key] for key in keys} for one in found]


@case("huggingface-hub", '`InferenceClient(base_url="URL").feature_extraction([...])`, one model served', "vectors")
def hub_features(server: Server) -> Any:
    return _inference(server.alone).feature_extraction(TEXTS).tolist()


@case("huggingface-hub", "the same, `.sentence_similarity(sentence, [...])`", "cosines")
def hub_similarity(server: Server) -> Any:
    return _inference(server.alone).sentence_similarity(TEXTS[0], TEXTS[1:])


@case(
    "huggingface-hub",
    '`InferenceClient(base_url="URL").feature_extraction([...])`, several models served',
    words="models are available",
    cure='`base_url="URL/models/NAME"`',
)
def hub_several(server: Server) -> Any:
    return _inference(server.url).feature_extraction(TEXTS).tolist()


@case("huggingface-hub", '`InferenceClient(base_url="URL/models/NAME").text_classification(...)`', "classes")
def hub_classes(server: Server) -> Any:
    return _spans(_inference(f"{server.url}/models/classify").text_classification(SENTENCE), "label", "score")


@case("huggingface-hub", "the same, `.token_classification(...)`", "entities")
def hub_entities(server: Server) -> Any:
    found = _inference(f"{server.url}/models/tag").token_classification(SENTENCE)
    return _spans(found, "entity_group", "start", "end", "score")


@case(
    "huggingface-hub",
    f'the same, `.token_classification(long_text, aggregation_strategy="simple", stride={STRIDE})`',
    "entities of a long text",
)
def hub_entities_of_windows(server: Server) -> Any:
    client = _inference(f"{server.url}/models/tag")
    found = client.token_classification(LONG, aggregation_strategy="simple", stride=STRIDE)
    return _spans(found, "entity_group", "start", "end", "score")


@case("huggingface-hub", "the same, `.question_answering(question=..., context=...)`", "answers")
def hub_answer(server: Server) -> Any:
    found = _inference(f"{server.url}/models/answer").question_answering(question=QUESTION, context=CONTEXT)
    return _spans([found], "answer", "start", "end", "score")


@case("huggingface-hub", "the same, `.fill_mask(...)`", "masked words")
def hub_masked(server: Server) -> Any:
    return _spans(_inference(f"{server.url}/models/fill_mask").fill_mask(MASKED), "token", "token_str", "score")


@case("huggingface-hub", "the same, `.zero_shot_classification(text, [...])`", "labels")
def hub_labels(server: Server) -> Any:
    return _spans(_inference(f"{server.url}/models/nli").zero_shot_classification(SENTENCE, LABELS), "label", "score")


# LiteLLM, by the providers whose servers it takes this one for.


def _litellm_embedding(**options: Any) -> Any:
    import litellm

    return [one["embedding"] for one in litellm.embedding(input=TEXTS, **options).data]


def _litellm_rerank(**options: Any) -> Any:
    import litellm

    found = litellm.rerank(query=QUESTION, documents=DOCUMENTS, **options).results
    return [[one["index"], one["relevance_score"]] for one in found]


@case("litellm", '`embedding(model="openai/minilm", api_base="URL/v1", ...)`', "vectors")
def litellm_openai(server: Server) -> Any:
    return _litellm_embedding(model="openai/minilm", api_base=f"{server.url}/v1", api_key=KEY)


@case("litellm", '`embedding(model="hosted_vllm/minilm", api_base="URL/v1")`', "vectors")
def litellm_vllm(server: Server) -> Any:
    return _litellm_embedding(model="hosted_vllm/minilm", api_base=f"{server.url}/v1")


@case("litellm", '`rerank(model="hosted_vllm/rerank", api_base="URL", ...)`, or `"URL/v1"`', "ranks")
def litellm_vllm_rerank(server: Server) -> Any:
    return _litellm_rerank(model="hosted_vllm/rerank", api_base=server.url)


@case("litellm", '`embedding(model="infinity/minilm", api_base="URL/v1", ...)`', "vectors")
def litellm_infinity(server: Server) -> Any:
    return _litellm_embedding(model="infinity/minilm", api_base=f"{server.url}/v1", api_key=KEY)


@case("litellm", '`rerank(model="infinity/rerank", api_base="URL/v1", return_documents=False, ...)`', "ranks")
def litellm_infinity_rerank(server: Server) -> Any:
    return _litellm_rerank(model="infinity/rerank", api_base=f"{server.url}/v1", api_key=KEY, return_documents=False)


@case(
    "litellm",
    '`rerank(model="infinity/rerank", ...)`, which requests the documents',
    words="results.0.document.text",
    cure="`return_documents=False`",
)
def litellm_infinity_documents(server: Server) -> Any:
    return _litellm_rerank(model="infinity/rerank", api_base=f"{server.url}/v1", api_key=KEY)


@case("litellm", '`embedding(model="jina_ai/minilm", api_base="URL/v1", ...)`', "vectors")
def litellm_jina(server: Server) -> Any:
    return _litellm_embedding(model="jina_ai/minilm", api_base=f"{server.url}/v1", api_key=KEY)


@case("litellm", '`rerank(model="jina_ai/rerank", api_base="URL", ...)`', "ranks")
def litellm_jina_rerank(server: Server) -> Any:
    return _litellm_rerank(model="jina_ai/rerank", api_base=server.url, api_key=KEY)


@case("litellm", "the same with `top_n=-1`", words="the minimum is 0, which returns all", cure="`top_n=4`")
def litellm_jina_refused(server: Server) -> Any:
    return _litellm_rerank(model="jina_ai/rerank", api_base=server.url, api_key=KEY, top_n=-1)


@case("litellm", '`rerank(model="voyage/rerank", api_base="URL", top_n=4, ...)`', "ranks")
def litellm_voyage_rerank(server: Server) -> Any:
    return _litellm_rerank(model="voyage/rerank", api_base=server.url, api_key=KEY, top_n=len(DOCUMENTS))


@case(
    "litellm",
    "the same without `top_n`",
    words="No results found in the response",
    cure="`top_n`, by which the server knows Voyage's clients",
)
def litellm_voyage_rerank_all(server: Server) -> Any:
    return _litellm_rerank(model="voyage/rerank", api_base=server.url, api_key=KEY)


@case("litellm", '`embedding(model="huggingface/minilm", api_base="URL/embed", input_type="embed")`', "vectors")
def litellm_huggingface(server: Server) -> Any:
    return _litellm_embedding(model="huggingface/minilm", api_base=f"{server.url}/embed", input_type="embed")


@case("litellm", '`rerank(model="huggingface/rerank", api_base="URL", ...)`', "ranks")
def litellm_huggingface_rerank(server: Server) -> Any:
    return _litellm_rerank(model="huggingface/rerank", api_base=server.url)


@case("litellm", '`rerank(model="huggingface/rerank", api_base="URL", top_n=2, ...)`', "best two")
def litellm_huggingface_best(server: Server) -> Any:
    return _litellm_rerank(model="huggingface/rerank", api_base=server.url, top_n=2)


@case("litellm", '`embedding(model="triton/minilm", api_base="URL/v2/models/minilm/infer")`', "vectors")
def litellm_triton(server: Server) -> Any:
    return _litellm_embedding(model="triton/minilm", api_base=f"{server.url}/v2/models/minilm/infer")


# Cohere's clients of both versions of its API.


def _cohere_ranks(client: Any) -> Any:
    found = client.rerank(model="rerank-v3.5", query=QUESTION, documents=DOCUMENTS)
    return [[one.index, one.relevance_score] for one in found.results]


@case("cohere", '`Client(base_url="URL", ...).rerank(query=..., documents=[...])`', "ranks")
def cohere_v1_rerank(server: Server) -> Any:
    import cohere

    return _cohere_ranks(cohere.Client(KEY, base_url=server.url))


@case("cohere", '`ClientV2(base_url="URL", ...).rerank(model=..., query=..., documents=[...])`', "ranks")
def cohere_v2_rerank(server: Server) -> Any:
    import cohere

    return _cohere_ranks(cohere.ClientV2(KEY, base_url=server.url))


@case("cohere", "the same with `top_n=-1`", words="the minimum is 0, which returns all", cure="`top_n=4`")
def cohere_refused(server: Server) -> Any:
    import cohere

    client = cohere.ClientV2(KEY, base_url=server.url)
    return client.rerank(model="rerank-v3.5", query=QUESTION, documents=DOCUMENTS, top_n=-1)


@case("cohere", '`Client(base_url="URL", ...).embed(texts=[...], input_type="search_document")`', "vectors")
def cohere_v1_embed(server: Server) -> Any:
    import cohere

    client = cohere.Client(KEY, base_url=server.url)
    return client.embed(texts=TEXTS, model="embed-english-v3.0", input_type="search_document").embeddings


def _cohere_types(client: Any) -> Any:
    kinds = ["float", "ubinary"]
    found = client.embed(texts=TEXTS, model="embed-v4.0", input_type="search_document", embedding_types=kinds)
    return {"vectors": found.embeddings.float_, "bits": found.embeddings.ubinary}


@case("cohere", '`Client(...).embed(..., embedding_types=["float", "ubinary"])`', "vectors and bits")
def cohere_v1_types(server: Server) -> Any:
    import cohere

    return _cohere_types(cohere.Client(KEY, base_url=server.url))


@case("cohere", '`ClientV2(base_url="URL", ...).embed(..., embedding_types=["float", "ubinary"])`', "vectors and bits")
def cohere_v2_embed(server: Server) -> Any:
    import cohere

    return _cohere_types(cohere.ClientV2(KEY, base_url=server.url))


# Stores of vectors.


def _chroma(function: Any) -> Any:
    import chromadb

    collection = chromadb.EphemeralClient().create_collection(function.name(), embedding_function=function)
    collection.add(ids=[str(index) for index in range(len(TEXTS))], documents=TEXTS)
    return [int(one) for one in collection.query(query_texts=[QUERY], n_results=len(TEXTS))["ids"][0]]


@case("chromadb", '`OpenAIEmbeddingFunction(api_base="URL/v1", ...)`, `add` and `query` of a collection', "nearest")
def chroma_openai(server: Server) -> Any:
    from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction

    return _chroma(OpenAIEmbeddingFunction(api_key=KEY, api_base=f"{server.url}/v1"))


@case("chromadb", '`HuggingFaceEmbeddingServer(url="URL/embed")`, the same', "nearest")
def chroma_tei(server: Server) -> Any:
    from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer

    return _chroma(HuggingFaceEmbeddingServer(url=f"{server.url}/embed"))


@case("chromadb", "`CohereEmbeddingFunction(...)`, the same, with `CO_API_URL=URL` in the environment", "nearest")
def chroma_cohere(server: Server) -> Any:
    os.environ["CO_API_URL"] = server.url  # which Cohere's client reads when it is imported
    from chromadb.utils.embedding_functions import CohereEmbeddingFunction

    return _chroma(CohereEmbeddingFunction(api_key=KEY))


@case("qdrant-client", "`upsert` and `query_points` of vectors from OpenAI's client", "nearest")
def qdrant(server: Server) -> Any:
    from openai import OpenAI
    from qdrant_client import QdrantClient
    from qdrant_client.models import Distance, PointStruct, VectorParams

    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    *vectors, asked = [one.embedding for one in client.embeddings.create(model="minilm", input=[*TEXTS, QUERY]).data]
    store = QdrantClient(":memory:")
    store.create_collection("texts", VectorParams(size=len(asked), distance=Distance.COSINE))
    store.upsert("texts", [PointStruct(id=index, vector=vector) for index, vector in enumerate(vectors)])
    return [point.id for point in store.query_points("texts", query=asked).points]


# KServe's clients of the Open Inference Protocol.


def _kserve(rest: str, grpc: str, **options: Any) -> Any:
    import asyncio

    import numpy as np
    from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

    text = InferInput("text", [len(TEXTS), 1], "BYTES")
    text.set_data_from_numpy(np.array([[one.encode()] for one in TEXTS], np.object_), **options)
    asked = InferRequest("minilm", [text])

    async def ask() -> Any:
        if grpc:
            async with InferenceGRPCClient(grpc) as caller:
                assert await caller.is_model_ready("minilm")
                return await caller.infer(asked)
        async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
            assert await client.is_model_ready(rest, "minilm")
            return await client.infer(rest, asked, model_name="minilm")

    (output,) = asyncio.run(ask()).outputs
    return output.as_numpy().tolist()


@case(
    "kserve",
    '`InferenceRESTClient(RESTConfig(protocol="v2")).infer("URL", InferRequest(...), model_name=...)`',
    "vectors",
)
def kserve_rest(server: Server) -> Any:
    return _kserve(server.url, "", binary_data=False)


@case("kserve", "the same with binary data from `set_data_from_numpy`", "vectors")
def kserve_rest_binary(server: Server) -> Any:
    return _kserve(server.url, "", binary_data=True)


@case("kserve", '`InferenceGRPCClient("GRPC").infer(InferRequest(...))`', "vectors")
def kserve_grpc(server: Server) -> Any:
    return _kserve("", server.grpc, binary_data=True)


# Databases that ask for vectors themselves, by the bodies that their sources make.


def _posted(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body, separators=(",", ":")).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as reply:  # noqa: S310  the server's
        return json.load(reply)


@case("elasticsearch", 'service `hugging_face` with `"url": "URL/embed"`', "vectors")
def elasticsearch_huggingface(server: Server) -> Any:
    # x-pack/plugin/inference: HuggingFaceEmbeddingsRequestEntity, HuggingFaceEmbeddingsResponseEntity
    return _posted(f"{server.alone}/embed", {"inputs": TEXTS})


@case("elasticsearch", 'service `openai` with `"url": "URL/v1/embeddings"`', "vectors")
def elasticsearch_openai(server: Server) -> Any:
    # x-pack/plugin/inference: OpenAiEmbeddingsRequestEntity, OpenAiEmbeddingsResponseEntity
    reply = _posted(f"{server.url}/v1/embeddings", {"input": TEXTS, "model": "minilm", "user": "elastic"})
    return [one["embedding"] for one in reply["data"]]


def _elasticsearch_ranks(server: Server, **settings: Any) -> Any:
    # x-pack/plugin/inference: HuggingFaceRerankRequestEntity, HuggingFaceRerankResponseEntity. It throws at a field
    # that it does not know, and puts the documents in order itself.
    found = _posted(f"{server.url}/rerank", {"texts": DOCUMENTS, "query": QUESTION, **settings})
    for one in found:
        if unknown := one.keys() - {"index", "score", "relevance_score", "text", "document"}:
            raise ValueError(f"unknown field {unknown}")
        if settings.get("return_text") and one["text"] != DOCUMENTS[one["index"]]:
            raise ValueError(f"another document than {one['index']}")
    return sorted(([one["index"], one["score"]] for one in found), key=lambda one: -one[1])


@case("elasticsearch", 'service `hugging_face` for rerank with `"url": "URL/rerank"`', "ranks")
def elasticsearch_rerank(server: Server) -> Any:
    return _elasticsearch_ranks(server)


@case("elasticsearch", 'the same with `"task_settings": {"return_documents": true, "top_n": 2}`', "best two")
def elasticsearch_rerank_best(server: Server) -> Any:
    return _elasticsearch_ranks(server, return_text=True, top_n=2)


@case("weaviate", 'module `text2vec-huggingface` with `"endpointURL": "URL/embed"` and its `options`', "vectors")
def weaviate_huggingface(server: Server) -> Any:
    # modules/text2vec-huggingface/clients/huggingface.go
    options = {"wait_for_model": True, "use_gpu": True, "use_cache": True}
    return _posted(f"{server.alone}/embed", {"inputs": TEXTS, "options": options})


@case(
    "weaviate",
    'module `text2vec-transformers` with `"inferenceUrl": "URL"`',
    words="404",
    cure="`text2vec-huggingface`, as above",
)
def weaviate_transformers(server: Server) -> Any:
    # usecases/modulecomponents/clients/transformers/transformers.go
    config = {"pooling_strategy": "masked_mean", "task_type": "passage"}
    body = {"text": TEXTS[0], "dims": 0, "vector": None, "error": "", "config": config}
    return _posted(f"{server.alone}/vectors", body)["vector"]


# Programs.


def _run(client: str, *words: str) -> str:
    program = PROGRAMS[client]
    folders = BUILD.joinpath(program.partition("/")[0], "usr", "lib").glob("*-linux-gnu")
    libraries = {"LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [str(BUILD / program), *words], env=os.environ | libraries, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return done.stdout


_JAVA = """
import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.*;
import java.net.http.HttpRequest.BodyPublishers;
import java.util.List;

public class Ask {
  public static void main(String[] given) throws Exception {
    var client = HttpClient.newHttpClient();
    var bytes = given[1].getBytes("UTF-8");
    var stream = BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(bytes));
    for (var body : List.of(BodyPublishers.ofByteArray(bytes), stream)) {
      var request = HttpRequest.newBuilder(URI.create(given[0])).header("Content-Type", "application/json").POST(body);
      var reply = client.send(request.build(), HttpResponse.BodyHandlers.ofString());
      if (reply.statusCode() != 200) throw new Exception(reply.body());
      System.out.println(reply.body());
    }
  }
}
"""


@cache
def _by_java(url: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "Ask.java")
        source.write_text(_JAVA, encoding="utf-8")
        # The options let it start sooner.
        words = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", str(source), url, json.dumps({"input": TEXTS}))
        lines = _run("java.net.http", *words).splitlines()
    return [[one["embedding"] for one in json.loads(line)["data"]] for line in lines]


@case(
    "java.net.http", "`HttpClient.newHttpClient()`, which offers h2c, and `BodyPublishers.ofByteArray(...)`", "vectors"
)
def java_bytes(server: Server) -> Any:
    return _by_java(f"{server.url}/v1/embeddings")[0]


@case("java.net.http", "the same with `BodyPublishers.ofInputStream(...)`, which is sent in chunks", "vectors")
def java_stream(server: Server) -> Any:
    return _by_java(f"{server.url}/v1/embeddings")[1]


@case("ab", "`ab -k -n 20 -c 2 -p body.json -T application/json URL/embed`", "20 answers on kept connections")
def ab_kept(server: Server) -> Any:
    with tempfile.NamedTemporaryFile() as body:
        body.write(json.dumps({"inputs": TEXTS[0]}).encode())
        body.flush()
        words = ("-k", "-n", "20", "-c", "2", "-s", "20", "-p", body.name, "-T", "application/json")
        said = _run("ab", *words, f"{server.alone}/embed")
    assert "Non-2xx" not in said, said
    return [int(re.search(rf"{name} requests: +(\d+)", said)[1]) for name in ("Complete", "Failed", "Keep-Alive")]


def main() -> None:
    family, *addresses = sys.argv[1:]
    os.environ.update(QUIET)
    warnings.simplefilter("ignore")
    logging.disable()
    server = Server(*addresses)
    told = {}
    for one in CASES:
        if one.family == family:
            try:
                told[one.name] = {"gives": one.run(server)}
            except Exception as error:  # noqa: BLE001  whatever the client raises is what its user sees
                told[one.name] = {"words": f"{type(error).__name__}: {error}"}
    print(f"\n{json.dumps(told)}")


if __name__ == "__main__":
    main()
