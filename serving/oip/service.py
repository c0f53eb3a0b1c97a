"""What v2 answers, on both wires: HTTP routes and gRPC calls only write it in their own way."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from serving.errors import BertserveError, Forbidden, InvalidRequest, ModelNotFound, Unsupported
from serving.inference.requests import InferRequest
from serving.models.statistics import Duration, InferStatistics, ModelStatistics
from serving.oip.parameters import read_parameters
from serving.oip.tensors import IDS, PAIR, check_sizes, inputs_of, raw_tensor
from serving.oip.views import TOKENS, views
from serving.records import EncodedText

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from serving.inference.pipeline import Pipeline
    from serving.inference.requests import Outcome
    from serving.inference.served_models import Repository
    from serving.lifecycle import Lifecycle
    from serving.models.statistics import VersionState
    from serving.oip.tensors import Tensor
    from serving.oip.views import ModelConfig, View
    from serving.settings import Settings
    from serving.tasks.base import A

SERVER_NAME = "bertserve"
SERVER_VERSION = version("bertserve")
EXTENSIONS = (
    *("binary_tensor_data", "model_configuration", "model_repository", "parameters"),
    *("schedule_policy", "statistics"),
)

SHARED_MEMORY = "shared memory is not supported: send tensors in the request"

SETTINGS = "the settings of traces and logs are not changed by requests"

_NS_PER_US = 1000
_MS_PER_S = 1000
_SHARED = "shared_memory_region"
_VERSION = "version"
_FILE = "file:"


class ServerMetadata(msgspec.Struct):
    """What this server is."""

    name: str
    version: str
    extensions: list[str]


class StatisticsReply(msgspec.Struct):
    """The statistics of one model or of all."""

    model_stats: list[ModelStatistics]


class ModelState(msgspec.Struct):
    """A model of the repository."""

    name: str
    version: str
    state: str
    reason: str


class ModelVersions(Protocol):
    """What changes which versions are served."""

    async def load(self, name: str, version: int | None = None) -> None:
        """Serves a version, None for the newest, and takes its model into service.

        Raises:
            ModelNotFound: There is no such model or version.
            VersionRefused: It must not or cannot be served.
            VersionNotLoaded: It could not be loaded now.
        """

    def unload(self, name: str) -> None:
        """Takes a model out of service."""

    def others(self) -> Sequence[VersionState]:
        """The versions that are not served, and why."""


class V2Service:
    """The models under their names on v2.

    Attributes:
        max_inputs: Inputs of one request.
        control: Whether requests may load and unload models.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        repository: Repository,
        lifecycle: Lifecycle,
        settings: Settings,
        versions: ModelVersions,
    ) -> None:
        self._pipeline = pipeline
        self._repository = repository
        self.lifecycle = lifecycle
        self.max_inputs = settings.max_v2_batch_size
        self.control = settings.model_control
        self._caches = settings.response_cache_mb > 0
        self._versions = versions
        self._views = views(repository)
        self._failures: defaultdict[tuple[str, str], Duration] = defaultdict(Duration)
        repository.subscribe(self._look_again)

    def over(self, pipeline: Pipeline) -> V2Service:
        other = copy.copy(self)
        other._pipeline = pipeline  # noqa: SLF001  its own
        return other

    def _look_again(self) -> None:
        self._views = views(self._repository)

    @property
    def names(self) -> list[str]:
        return sorted(self._views)

    @property
    def versions(self) -> list[str]:
        return sorted({view.model.version for view in self._views.values()})

    def view(self, name: str, wanted: str | None = None) -> View:
        """What stands behind a name.

        Raises:
            ModelNotFound: Nothing of that name and version is served.
        """
        view = self._view(name)
        self._repository.find(view.served, wanted)
        return view

    def _view(self, name: str) -> View:
        view = self._views.get(name)
        if view is None:
            raise self._repository.unknown()
        return view

    def model_ready(self, name: str, wanted: str | None) -> bool:
        """Whether a model takes requests; one that is not served does not."""
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
        """What a request asks for, and the view that writes the answer; no `outputs` means all of them.

        Raises:
            InvalidRequest: It does not fit the model, or a parameter has a value that it cannot have.
            ModelNotFound: Nothing of that name is served.
        """
        view = self._view(name)
        if outputs:
            view.check_outputs(outputs)
        check_sizes(tensors, self.max_inputs)
        inputs = inputs_of(tensors)
        if not (view.takes_text or (inputs and isinstance(inputs[0], EncodedText))):
            raise InvalidRequest(f"under this name the model takes {IDS!r}; the name without {TOKENS!r} takes texts")
        if inputs and isinstance(inputs[0], tuple) and 2 not in view.model.task.texts:  # noqa: PLR2004  a pair
            raise InvalidRequest(f"the model takes no {PAIR!r}: the task {view.model.manifest.task} reads one text")
        request = InferRequest(inputs, view.options, self.max_inputs, view.served, version)
        if parameters:
            read_parameters(request, parameters)
        return view, request

    def raw_input(self, name: str, body: memoryview) -> Tensor:
        """What a raw binary request brings: its body is the data of a model's only input, one text or one row of ids.

        Raises:
            InvalidRequest: The model has two inputs, or the body is no row of ids.
            MalformedRequest: The text is not UTF-8.
            ModelNotFound: Nothing of that name is served.
        """
        view = self._view(name)
        if len(view.inputs) > 1:
            names = " and ".join(repr(info.name) for info in view.inputs)
            raise InvalidRequest(f"the model takes {names}: name them in JSON, a raw request has room for one input")
        return raw_tensor(view.inputs[0].name, view.inputs[0].datatype, body)

    async def infer_under(self, view: View, request: InferRequest[A]) -> Outcome[A]:
        """Has the pipeline answer a request, and counts it where it fails."""
        try:
            return await self._pipeline.infer(request)
        except BertserveError:
            failures = self._failures[view.name, view.model.version]
            failures.count += 1
            failures.ns += round((time.perf_counter() - request.arrival) * 1e9)
            raise

    def config(self, name: str, wanted: str | None) -> ModelConfig:
        """A model as Triton's clients want it described.

        Raises:
            ModelNotFound: Nothing of that name and version is served.
        """
        return self.view(name, wanted).config(self.max_inputs, self._repository.engine)

    def statistics(self, name: str | None, wanted: str | None = None) -> StatisticsReply:
        """What a model, or each, has answered since the server started.

        Raises:
            ModelNotFound: Nothing of that name and version is served.
        """
        chosen = [self.view(name, wanted)] if name else [view for view in self._views.values() if view.takes_text]
        return StatisticsReply([self._statistics(view) for view in chosen])

    def index(self, *, ready: bool) -> list[ModelState]:
        """The models of the repository: the version of each that is served, and the state of others.

        Args:
            ready: Only those that take requests.
        """
        states = []
        others = [] if ready else self._versions.others()
        for view in map(self._views.__getitem__, self.names):
            loaded = self._repository.serves(view.served)
            state = "READY" if loaded and self.lifecycle.ready else "UNAVAILABLE"
            if state == "READY" or not ready:
                reason = "" if state == "READY" else "unloaded" if not loaded else str(self.lifecycle.state)
                states.append(ModelState(view.name, view.model.version, state, reason))
            states += [ModelState(view.name, *state) for model, *state in others if model == view.served]
        return states

    async def load(self, name: str, parameters: Mapping[str, object]) -> None:
        """Serves a version of a model of the repository, the newest if the request names none.

        Where another version is served, that serves on until this one is warm; one that is served already is taken
        into service again if it was out of it.

        Args:
            name: Its name.
            parameters: Of the request; `version` is read.

        Raises:
            Forbidden: `model_control` is off.
            InvalidRequest: It brings a configuration or files, or a version that is no number.
            ModelNotFound: The repository had no such model when the server started, or has no such version.
            VersionRefused: The version must not or cannot be served; what is served serves on.
            VersionNotLoaded: It could not be loaded now, and the request may be repeated.
        """
        self._check_control(name)
        if any(name.startswith(_FILE) and value is not None for name, value in parameters.items()):
            raise InvalidRequest("a model is loaded as its bundle has it: a request brings no files")
        await self._versions.load(self._views[name].served, _version(parameters.get(_VERSION)))

    def unload(self, name: str) -> None:
        """Takes a model out of service; its memory stays with the engine until the server ends.

        Raises:
            Forbidden: `model_control` is off.
            ModelNotFound: The repository had no such model when the server started.
        """
        self._check_control(name)
        self._versions.unload(self._views[name].served)

    def _check_control(self, name: str) -> None:
        if not self.control:
            raise Forbidden("models are neither loaded nor unloaded by requests: the setting model_control is off")
        if name not in self._views:
            raise self._repository.unknown()

    def _statistics(self, view: View) -> ModelStatistics:
        totals = self._pipeline.totals(view.model)
        computed = totals.requests - totals.cached
        computed_us = totals.total_us - totals.cached_us
        output_us = computed_us - totals.tokenize_us - totals.queue_us - totals.compute_us
        queue, tokenize, compute, output = (
            Duration(computed, _ns(time_us))
            for time_us in (totals.queue_us, totals.tokenize_us, totals.compute_us, output_us)
        )
        return ModelStatistics(
            name=view.name,
            version=view.model.version,
            last_inference=round(totals.last_at * _MS_PER_S),
            inference_count=totals.texts,
            execution_count=self._pipeline.batches(view.model),
            batch_stats=self._pipeline.batch_statistics(view.model),
            inference_stats=InferStatistics(
                success=Duration(totals.requests, _ns(totals.total_us)),
                fail=self._failures[view.name, view.model.version],
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
    """The number of a version as requests write it; None where they name none."""
    if wanted is None:
        return None
    words = str(wanted)
    if isinstance(wanted, bool) or not (words.isascii() and words.isdigit() and str(int(words)) == words):
        raise InvalidRequest(f"the parameter `{_VERSION}` must be the number of a version, such as 2")
    return int(words)


def refuse_region(parameters: Mapping[str, object]) -> None:
    """Refuses parameters of a tensor that say that it lies in shared memory.

    Raises:
        Unsupported: They do.
    """
    if parameters.get(_SHARED) is not None:
        raise Unsupported(SHARED_MEMORY)


def refuse_unsupported(parameters: Mapping[str, object]) -> None:
    """Refuses parameters of an output that ask for what is not built.

    Raises:
        Unsupported: Shared memory, or Triton's classification; no classes, which is 0, ask for nothing.
    """
    refuse_region(parameters)
    classes = parameters.get("classification")
    if classes is not None and (classes != 0 or classes is False):
        raise Unsupported("outputs come as they are: the parameter `classification` is not supported")
