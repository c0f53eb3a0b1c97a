"""The v2 API, independent of the transport: HTTP routes and gRPC calls only encode it."""

from __future__ import annotations

import copy
import re
import time
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from bertserve.serving.errors import BertserveError, Forbidden, InvalidRequest, ModelNotFound, Unsupported
from bertserve.serving.inference.requests import InferRequest
from bertserve.serving.models.statistics import Duration, InferStatistics, ModelStatistics
from bertserve.serving.oip.parameters import read_parameters
from bertserve.serving.oip.tensors import PAIR, check_sizes, inputs_of, raw_tensor
from bertserve.serving.oip.views import TOKENS, views
from bertserve.serving.records import IDS, EncodedText

if TYPE_CHECKING:
    from collections import defaultdict
    from collections.abc import Callable, Mapping, Sequence

    from bertserve.serving.inference.pipeline import Pipeline
    from bertserve.serving.inference.requests import Outcome, Totals
    from bertserve.serving.inference.served_models import Repository, ServedModel
    from bertserve.serving.lifecycle import Lifecycle
    from bertserve.serving.models.statistics import BatchStatistics, VersionState
    from bertserve.serving.oip.tensors import Tensor
    from bertserve.serving.oip.views import ModelConfig, View
    from bertserve.serving.settings import Settings
    from bertserve.serving.tasks.base import A, Check

R = TypeVar("R")

SERVER_NAME = "bertserve"
SERVER_VERSION = version("bertserve")
EXTENSIONS = (
    *("binary_tensor_data", "model_configuration", "model_repository", "parameters"),
    *("schedule_policy", "statistics"),
)

SHARED_MEMORY = "shared memory is not supported; send tensors in the request"

SETTINGS = "trace and log settings cannot be changed by requests"

_NS_PER_US = 1000
_MS_PER_S = 1000
_SHARED = "shared_memory_region"
_VERSION = "version"
_FILE = "file:"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


class ServerMetadata(msgspec.Struct):
    """The name, version and extensions of this server."""

    name: str
    version: str
    extensions: list[str]


class StatisticsReply(msgspec.Struct):
    """The statistics of one model or of all."""

    model_stats: list[ModelStatistics]


class ModelState(msgspec.Struct):
    """The state of a model in the repository."""

    name: str
    version: str
    state: str
    reason: str


class ModelVersions(Protocol):
    """Controls which model versions are served."""

    async def load(self, name: str, version: int | None = None) -> None:
        """Loads a version, None for the newest, and puts its model into service.

        Raises:
            ModelNotFound: There is no such model or version.
            VersionRefused: The version must not or cannot be served.
            VersionNotLoaded: The version cannot be loaded now.
        """

    def unload(self, name: str) -> None:
        """Takes a model out of service."""

    def others(self) -> Sequence[VersionState]:
        """The versions that are not served, with the reasons."""


class AnswerCounts(Protocol):
    """What has been counted of requests and batches.

    Attributes:
        totals: Answers of each model, by its name and version.
        failures: Failed v2 requests of each model, by its v2 name and version.
    """

    totals: defaultdict[tuple[str, str], Totals]
    failures: defaultdict[tuple[str, str], Duration]

    def batches(self, model: ServedModel) -> int: ...

    def batch_statistics(self, model: ServedModel) -> list[BatchStatistics]: ...


class V2Service:
    """The v2 API: the models by their v2 names.

    Attributes:
        max_inputs: Maximum inputs of one request.
        control: Whether requests may load and unload models.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        repository: Repository,
        lifecycle: Lifecycle,
        settings: Settings,
        versions: ModelVersions,
        counts: AnswerCounts,
    ) -> None:
        self._pipeline = pipeline
        self._repository = repository
        self.lifecycle = lifecycle
        self.max_inputs = settings.max_client_batch_size
        self.control = settings.model_control
        self._caches = settings.response_cache_mb > 0
        self._versions = versions
        self._counts = counts
        self._views = views(repository)
        repository.subscribe(self._update_views)

    def with_pipeline(self, pipeline: Pipeline) -> V2Service:
        other = copy.copy(self)
        other._pipeline = pipeline  # noqa: SLF001  a copy of this class
        return other

    def _update_views(self) -> None:
        self._views = views(self._repository)

    @property
    def names(self) -> list[str]:
        return sorted(self._views)

    @property
    def versions(self) -> list[str]:
        return sorted({view.model.version for view in self._views.values()})

    def view(self, name: str, wanted: str | None = None) -> View:
        """The view with a v2 name.

        Raises:
            ModelNotFound: No model of that name and version is served.
        """
        view = self._view(name)
        self._repository.find(view.model.name, wanted)
        return view

    def _view(self, name: str) -> View:
        view = self._views.get(name)
        if view is None:
            raise self._repository.unknown()
        return view

    def model_ready(self, name: str, wanted: str | None) -> bool:
        """Whether a model accepts requests; False for a model that is not served."""
        try:
            self.view(name, wanted)
        except ModelNotFound:
            return False
        return self.lifecycle.ready

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata(SERVER_NAME, SERVER_VERSION, list(EXTENSIONS))

    def request(
        self,
        name: str,
        version: str | None,
        tensors: Sequence[Tensor],
        outputs: Sequence[str],
        parameters: Mapping[str, Any],
    ) -> tuple[View, InferRequest[Any]]:
        """Decodes a request, and returns it with the view that writes its answer. No `outputs` means all of them.

        Raises:
            InvalidRequest: The request does not fit the model, or a parameter has an invalid value.
            ModelNotFound: No model of that name is served.
        """
        view = self._view(name)
        options = view.choose_options(outputs) if outputs else view.options
        check_sizes(tensors, self.max_inputs)
        inputs = inputs_of(tensors)
        if not (view.takes_text or (inputs and isinstance(inputs[0], EncodedText))):
            raise InvalidRequest(f"this model name takes {IDS!r}; for texts, use the name without {TOKENS!r}")
        if inputs and isinstance(inputs[0], tuple) and 2 not in view.model.task.texts:  # noqa: PLR2004  a pair
            raise InvalidRequest(f"the task {view.model.manifest.task} takes one text, without {PAIR!r}")
        request = InferRequest(inputs, options, view.model.name, version)
        if parameters:
            read_parameters(request, parameters)
        return view, request

    def raw_input(self, name: str, body: memoryview) -> Tensor:
        """The input tensor of a raw binary request.

        Its body is the data of the model's only input: one text, or one row of token ids.

        Raises:
            InvalidRequest: The model has two inputs, or the body is not a row of ids.
            MalformedRequest: The text is not UTF-8.
            ModelNotFound: No model of that name is served.
        """
        view = self._view(name)
        if len(view.inputs) > 1:
            names = " and ".join(repr(info.name) for info in view.inputs)
            raise InvalidRequest(f"the model takes {names}, and a raw request has one input; send JSON")
        return raw_tensor(view.inputs[0].name, view.inputs[0].datatype, body)

    async def answer(
        self, view: View, request: InferRequest[A], width: int, write: Callable[[Outcome[A], Check], R]
    ) -> tuple[Outcome[A], R]:
        """Answers a request, and makes the reply; counts it if either fails. `width` is that of `View.answer`."""
        try:
            outcome = await self._pipeline.infer(request)
            numbers = view.count_numbers(len(outcome.answer), outcome.tokens, width)
            return outcome, await self._pipeline.write(outcome, numbers, partial(write, outcome))
        except BertserveError:
            failures = self._counts.failures[view.name, view.model.version]
            failures.count += 1
            failures.ns += round((time.perf_counter() - request.arrival) * 1e9)
            raise

    def config(self, name: str, wanted: str | None) -> ModelConfig:
        """A model's configuration in Triton's form.

        Raises:
            ModelNotFound: No model of that name and version is served.
        """
        return self.view(name, wanted).config(self.max_inputs, self._repository.engine)

    def statistics(self, name: str | None, wanted: str | None = None) -> StatisticsReply:
        """The statistics of one model, or of all, since the server started.

        Raises:
            ModelNotFound: No model of that name and version is served.
        """
        chosen = [self.view(name, wanted)] if name else [view for view in self._views.values() if view.takes_text]
        return StatisticsReply([self._statistics(view) for view in chosen])

    def index(self, *, ready: bool) -> list[ModelState]:
        """The models of the repository: the served version of each, and the state of the others.

        Args:
            ready: Include only models that accept requests.
        """
        states = []
        others = [] if ready else self._versions.others()
        for view in map(self._views.__getitem__, self.names):
            loaded = self._repository.serves(view.model.name)
            state = "READY" if loaded and self.lifecycle.ready else "UNAVAILABLE"
            if state == "READY" or not ready:
                reason = "" if state == "READY" else "unloaded" if not loaded else str(self.lifecycle.state)
                states.append(ModelState(view.name, view.model.version, state, reason))
            states += [ModelState(view.name, *state) for model, *state in others if model == view.model.name]
        return states

    async def load(self, name: str, parameters: Mapping[str, object]) -> None:
        """Loads a version of a model in the repository, the newest if the request names none.

        If another version is served, it stays in service until the new one is warm. A version that is loaded already is
        put back into service if necessary.

        Args:
            name: The model's v2 name.
            parameters: Parameters of the request; `version` is read.

        Raises:
            Forbidden: `model_control` is off.
            InvalidRequest: The request contains a configuration or files, or its version is not a number.
            ModelNotFound: The repository had no such model when the server started, or has no such version.
            VersionRefused: The version must not or cannot be served. The current one stays in service.
            VersionNotLoaded: The version cannot be loaded now. The request may be retried.
        """
        self._check_control(name)
        if any(name.startswith(_FILE) and value is not None for name, value in parameters.items()):
            raise InvalidRequest("files cannot be loaded from a request; add the version to the repository")
        await self._versions.load(self._views[name].model.name, _version(parameters.get(_VERSION)))

    def unload(self, name: str) -> None:
        """Takes a model out of service. The engine keeps its memory until the server ends.

        Raises:
            Forbidden: `model_control` is off.
            ModelNotFound: The repository had no such model when the server started.
        """
        self._check_control(name)
        self._versions.unload(self._views[name].model.name)

    def _check_control(self, name: str) -> None:
        if not self.control:
            raise Forbidden("requests cannot load or unload models; start the server with --model-control")
        if name not in self._views:
            raise self._repository.unknown()

    def _statistics(self, view: View) -> ModelStatistics:
        model, counts = view.model, self._counts
        totals = counts.totals[model.name, model.version]
        computed = totals.requests - totals.cached
        computed_us = totals.total_us - totals.cached_us
        output_us = computed_us - totals.tokenize_us - totals.queue_us - totals.compute_us
        queue, tokenize, compute, output = (
            Duration(computed, _ns(time_us))
            for time_us in (totals.queue_us, totals.tokenize_us, totals.compute_us, output_us)
        )
        return ModelStatistics(
            name=view.name,
            version=model.version,
            last_inference=round(totals.last_at * _MS_PER_S),
            inference_count=totals.texts,
            execution_count=counts.batches(model),
            batch_stats=counts.batch_statistics(model),
            inference_stats=InferStatistics(
                success=Duration(totals.requests, _ns(totals.total_us)),
                fail=counts.failures[view.name, model.version],
                queue=queue,
                compute_input=tokenize,
                compute_infer=compute,
                compute_output=output,
                cache_hit=Duration(totals.cached, _ns(totals.cached_us)),
                cache_miss=Duration(computed, 0) if self._caches else Duration(),
            ),
        )


def _ns(time_us: float) -> int:
    return round(max(0.0, time_us) * _NS_PER_US)


def _version(wanted: object) -> int | None:
    """The version number in a request; None if it names none."""
    if wanted is None:
        return None
    words = str(wanted)
    if isinstance(wanted, bool) or not _NUMBER.fullmatch(words):
        raise InvalidRequest(f"the parameter `{_VERSION}` must be a version number, such as 2")
    return int(words)


def refuse_region(parameters: Mapping[str, object]) -> None:
    """Rejects parameters of a tensor that place it in shared memory.

    Raises:
        Unsupported: They do.
    """
    if parameters.get(_SHARED) is not None:
        raise Unsupported(SHARED_MEMORY)


def refuse_unsupported(parameters: Mapping[str, object]) -> None:
    """Rejects parameters of an output that ask for unsupported features.

    Raises:
        Unsupported: They ask for shared memory, or for Triton's classification. 0 classes are accepted: they ask for
            nothing.
    """
    refuse_region(parameters)
    classes = parameters.get("classification")
    if classes is not None and (classes != 0 or classes is False):
        raise Unsupported("the parameter `classification` is not supported; leave it out")
