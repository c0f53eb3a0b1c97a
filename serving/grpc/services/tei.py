"""`tei.v1`: the services of text-embeddings-inference, with one input per message."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_args

import msgspec

from serving.errors import EmptyInput, InvalidRequest
from serving.grpc.calls import Method
from serving.grpc.services import tei_pb2 as pb
from serving.grpc.status import outcome_metadata
from serving.inference.pipeline import check_not_empty
from serving.inference.requests import InferRequest, InputType
from serving.tasks.base import checked
from serving.tasks.classify import ClassifyOptions
from serving.tasks.embed import EmbedOptions
from serving.tasks.embed_sparse import EmbedSparseOptions
from serving.tasks.embed_tokens import EmbedTokensOptions
from serving.tei.service import text_or_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from serving.errors import BertserveError
    from serving.grpc.calls import Call
    from serving.inference.requests import Outcome, RequestTrace
    from serving.records import TextInput, Truncate
    from serving.tasks.base import Check
    from serving.tei.service import TeiService

SERVICES = tuple(f"tei.v1.{name}" for name in ("Info", "Embed", "Predict", "Rerank", "Tokenize"))

_MODEL, _INPUT_TYPE = b"model", b"input_type"
"""Metadata keys for the model, and for the purpose of a text. The messages have no fields for them."""

_DIRECTIONS = tuple(pb.TruncationDirection.values())


class TeiServices:
    """The methods of the services, each a coroutine from message to message."""

    def __init__(self, service: TeiService) -> None:
        self._service = service

    def methods(self) -> dict[str, Method | BertserveError]:
        """The methods by path."""
        each: dict[str, tuple[Any, Any]] = {
            "Embed/Embed": (self.embed, pb.EmbedRequest),
            "Embed/EmbedAll": (self.embed_all, pb.EmbedAllRequest),
            "Embed/EmbedSparse": (self.embed_sparse, pb.EmbedSparseRequest),
            "Predict/Predict": (self.predict, pb.PredictRequest),
            "Predict/PredictPair": (self.predict_pair, pb.PredictPairRequest),
            "Tokenize/Tokenize": (self.tokenize, pb.EncodeRequest),
            "Tokenize/Decode": (self.decode, pb.DecodeRequest),
        }
        methods: dict[str, Method | BertserveError] = {
            "Info/Info": Method(pb.InfoRequest, unary=self.info),
            "Rerank/Rerank": Method(pb.RerankRequest, unary=self.rerank),
            "Rerank/RerankStream": Method(pb.RerankStreamRequest, gathered=self.rerank_stream),
        }
        for name, (method, kind) in each.items():
            methods[name] = Method(kind, unary=method)
            methods[f"{name}Stream"] = Method(kind, duplex=method)
        return {f"/tei.v1.{name}": method for name, method in methods.items()}

    async def info(self, _: pb.InfoRequest, call: Call) -> pb.InfoResponse:
        """Describes a model and the server's limits."""
        told = msgspec.structs.asdict(self._service.info(_model(call)))
        (kind,) = told.pop("model_type")
        values = {name: told[name] for name in pb.InfoResponse.DESCRIPTOR.fields_by_name if name in told}
        return pb.InfoResponse(model_type=f"MODEL_TYPE_{kind.upper()}", **values)

    async def embed(self, request: pb.EmbedRequest, call: Call, trace: RequestTrace | None = None) -> pb.EmbedResponse:
        """The embedding of a text."""
        normalize = request.normalize if request.HasField("normalize") else None
        dimensions = request.dimensions if request.HasField("dimensions") else None
        options = EmbedOptions(normalize, dimensions)
        outcome = await self._run_task(call, trace, [request.inputs], options, _cut(request), _prompt(request))
        metadata = _metadata(outcome, request.inputs)
        return pb.EmbedResponse(embeddings=outcome.answer[0].tolist(), metadata=metadata)

    async def embed_all(
        self, request: pb.EmbedAllRequest, call: Call, trace: RequestTrace | None = None
    ) -> pb.EmbedAllResponse:
        """The embeddings of a text's tokens."""
        options = EmbedTokensOptions()
        outcome = await self._run_task(
            call, trace, [request.inputs], options, _cut(request), _prompt(request), input_type=_input_type(call)
        )
        rows = outcome.answer[0]
        embeddings = await self._service.pipeline.write(outcome, rows.size, partial(_rows, rows))
        return pb.EmbedAllResponse(token_embeddings=embeddings, metadata=_metadata(outcome, request.inputs))

    async def embed_sparse(
        self, request: pb.EmbedSparseRequest, call: Call, trace: RequestTrace | None = None
    ) -> pb.EmbedSparseResponse:
        """The sparse vector of a text."""
        options = EmbedSparseOptions()
        outcome = await self._run_task(
            call, trace, [request.inputs], options, _cut(request), _prompt(request), input_type=_input_type(call)
        )
        (vector,) = outcome.answer
        weights = zip(vector.indices.tolist(), vector.values.tolist(), strict=True)
        values = [pb.SparseValue(index=index, value=value) for index, value in weights]
        return pb.EmbedSparseResponse(sparse_embeddings=values, metadata=_metadata(outcome, request.inputs))

    async def predict(
        self, request: pb.PredictRequest, call: Call, trace: RequestTrace | None = None
    ) -> pb.PredictResponse:
        """The classes of a text, best first."""
        return await self._predict(request, call, trace, [request.inputs])

    async def predict_pair(
        self, request: pb.PredictPairRequest, call: Call, trace: RequestTrace | None = None
    ) -> pb.PredictResponse:
        """The classes of a text or of a text pair, best first."""
        return await self._predict(request, call, trace, request.inputs)

    async def rerank(self, request: pb.RerankRequest, call: Call) -> pb.RerankResponse:
        """Ranks texts by how well they answer a query."""
        pairs = [(request.query, text) for text in request.texts]
        most = self._service.settings.max_client_batch_size
        outcome = await self._rank(call, pairs, _cut(request), raw_scores=request.raw_scores, most=most)
        texts = request.texts if request.return_text else []
        return _ranking(outcome, texts, _metadata(outcome, request.query, *request.texts))

    async def rerank_stream(self, requests: list[pb.RerankStreamRequest], call: Call) -> pb.RerankResponse:
        """Ranks pairs, each of which comes in its own message."""
        if not requests:
            raise EmptyInput("the stream has no message; send at least one")
        first, (cut, *others) = requests[0], {_cut(request) for request in requests}
        if others:
            raise InvalidRequest("`truncate` and `truncation_direction` must be the same in all messages of a stream")
        pairs = [(request.query, request.text) for request in requests]
        outcome = await self._rank(call, pairs, cut, raw_scores=first.raw_scores, most=len(pairs))
        texts = [text for _, text in pairs] if first.return_text else []
        return _ranking(outcome, texts, _metadata(outcome, *(part for pair in pairs for part in pair)))

    async def tokenize(self, request: pb.EncodeRequest, call: Call, _: RequestTrace | None = None) -> pb.EncodeResponse:
        """The tokens of a text."""
        return await self._service.tokenize(
            _model(call),
            [request.inputs],
            lambda texts: pb.EncodeResponse(
                tokens=[pb.SimpleToken(**msgspec.structs.asdict(token)) for token in texts[0]]
            ),
            special=request.add_special_tokens,
            prompt_name=_prompt(request),
        )

    async def decode(self, request: pb.DecodeRequest, call: Call, _: RequestTrace | None = None) -> pb.DecodeResponse:
        """The text of token ids."""
        return await self._service.decode(
            _model(call),
            [request.ids] if request.ids else [],
            lambda texts: pb.DecodeResponse(text=texts[0]),
            bare=request.skip_special_tokens,
        )

    async def _predict(
        self,
        request: pb.PredictRequest | pb.PredictPairRequest,
        call: Call,
        trace: RequestTrace | None,
        texts: Sequence[str],
    ) -> pb.PredictResponse:
        options = ClassifyOptions("none" if request.raw_scores else None)
        outcome = await self._run_task(call, trace, [text_or_pair(texts)], options, _cut(request))
        predictions = [pb.Prediction(score=one.score, label=one.label) for one in outcome.answer[0]]
        return pb.PredictResponse(predictions=predictions, metadata=_metadata(outcome, *texts))

    async def _rank(
        self, call: Call, pairs: Sequence[TextInput], truncate: Truncate, *, raw_scores: bool, most: int
    ) -> Outcome[list[float]]:
        model, options = self._service.ranking(_model(call), raw_scores=raw_scores)
        return await self._run_task(call, None, pairs, options, truncate, most=most, model=model)

    async def _run_task(
        self,
        call: Call,
        trace: RequestTrace | None,
        inputs: Sequence[TextInput],
        options: Any,  # noqa: ANN401  those of the task
        truncate: Truncate,
        prompt_name: str | None = None,
        *,
        most: int = 1,
        input_type: InputType | None = None,
        model: str | None = None,
    ) -> Outcome[Any]:
        check_not_empty(inputs)
        named = model or _model(call)
        request = InferRequest(
            *(inputs, options, most, named), truncate=truncate, prompt_name=prompt_name, input_type=input_type
        )
        outcome = await self._service.pipeline.infer(call.stamp(request, time.perf_counter(), trace))
        call.set_trailing_metadata(outcome_metadata(outcome))
        return outcome


def _model(call: Call) -> str | None:
    name = call.metadata(_MODEL)
    return None if name is None else name.decode("latin-1")


def _input_type(call: Call) -> InputType | None:
    value = call.metadata(_INPUT_TYPE)
    if value is None:
        return None
    if (name := value.decode("latin-1")) not in get_args(InputType):
        raise InvalidRequest(f"the metadata `input_type` must be one of {', '.join(get_args(InputType))}")
    return cast("InputType", name)


def _cut(request: Any) -> Truncate:  # noqa: ANN401  any message with the two fields
    direction = request.truncation_direction
    if direction not in _DIRECTIONS:
        raise InvalidRequest(f"`truncation_direction` is {direction}; send 0 to cut the right end, 1 the left end")
    return "left" if request.truncate and direction == pb.TRUNCATION_DIRECTION_LEFT else request.truncate


def _prompt(request: Any) -> str | None:  # noqa: ANN401  any message with the field
    return request.prompt_name if request.HasField("prompt_name") else None


def _rows(vectors: NDArray[np.float32], check: Check) -> list[pb.TokenEmbedding]:
    return [pb.TokenEmbedding(embeddings=row.tolist()) for row in checked(vectors, check, 16)]


def _ranking(outcome: Outcome[list[float]], texts: Sequence[str], metadata: pb.Metadata) -> pb.RerankResponse:
    ranks = [
        pb.Rank(index=index, score=score, text=texts[index] if texts else None)
        for index, score in sorted(enumerate(outcome.answer), key=lambda rank: -rank[1])
    ]
    return pb.RerankResponse(ranks=ranks, metadata=metadata)


def _metadata(outcome: Outcome[Any], *texts: str) -> pb.Metadata:
    times = outcome.timings
    return pb.Metadata(
        compute_chars=sum(map(len, texts)),
        compute_tokens=outcome.tokens,
        total_time_ns=round(times.total_us * 1e3),
        tokenization_time_ns=round(times.tokenize_us * 1e3),
        queue_time_ns=round(times.queue_us * 1e3),
        inference_time_ns=round(times.compute_us * 1e3),
    )
