"""Chooses what ranks texts: a cross-encoder, a multi-vector model by MaxSim, or a model with several outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.tasks.hybrid import HybridOptions
from bertserve.serving.tasks.maxsim import MaxSimOptions
from bertserve.serving.tasks.rerank import RerankOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bertserve.serving.inference.served_models import Repository
    from bertserve.serving.models.manifest import Manifest
    from bertserve.serving.tasks.windows import Windows


_TASKS = ("embed_tokens", "embed_sparse")
"""The tasks of models that may embed query and text."""


def rankers(repository: Repository) -> list[str]:
    """Names of the models that rank texts; cross-encoders first."""
    return [*(model.name for model in repository.of_task("rerank")), *filter(None, _by_vectors(repository))]


def named_or_only(repository: Repository, name: str | None) -> str | None:
    """As the repository's, for the models that rank texts."""
    by_vectors = _by_vectors(repository)
    several = len(by_vectors) > 1 and not repository.of_task("rerank")
    return repository.named_or_only(name, _task(by_vectors) if several else "rerank")


def ranking(
    repository: Repository,
    name: str | None,
    *,
    raw_scores: bool | None = None,
    windows: Windows | None = None,
    weights: dict[str, float] | None = None,
) -> tuple[str | None, RerankOptions | MaxSimOptions | HybridOptions]:
    """The name of the model that ranks, and the options of the request.

    The named model decides. Without a name, cross-encoders go before models that embed query and text.

    Raises:
        InvalidRequest: There are `windows` or `weights`, and the model that ranks has no use for them.
        ModelNotNamed: There is no name, and several models embed query and text.
    """
    by_vectors = _by_vectors(repository)
    if name is None and by_vectors and not repository.of_task("rerank"):
        # Beside one multi-vector model there may be others of its task.
        several = len(by_vectors) > 1
        name = repository.find(None, task=_task(by_vectors)).name if several else next(iter(by_vectors))
    ranks_by_vectors = name in by_vectors
    if ranks_by_vectors and windows is not None:
        raise InvalidRequest("a multi-vector model reads no windows; leave them out to truncate long texts")
    if name in by_vectors and by_vectors[name].also:
        return name, HybridOptions(weights)
    if weights is not None:
        said = "`weights` needs a model with several outputs, such as bge-m3; leave it out"
        raise InvalidRequest(said, param="weights")
    return name, MaxSimOptions(raw_scores) if ranks_by_vectors else RerankOptions(raw_scores, windows)


def _task(by_vectors: Mapping[str | None, Manifest]) -> str:
    """The task whose only or default model ranks if a request names none."""
    return next(task for task in _TASKS if any(manifest.answers(task) for manifest in by_vectors.values()))


def _by_vectors(repository: Repository) -> Mapping[str | None, Manifest]:
    """The models that embed query and text: multi-vector models, and those with several outputs."""
    models = [model for task in _TASKS for model in repository.of_task(task)]
    return {model.name: model.manifest for model in models if model.manifest.multi_vector or model.manifest.also}
