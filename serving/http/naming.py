"""Routes of a task: the plain one, and the same below the name of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.http.documentation import UNLISTED
from serving.http.exchange import Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.http.exchange import Handler
    from serving.inference.served_models import Repository
    from serving.models.manifest import Task

_BELOW = "/models/{model}"


class Named:
    """Makes the routes of one protocol."""

    def __init__(self, repository: Repository, tag: str) -> None:
        """Remembers what all of them share.

        Args:
            repository: Says which models there are; a route that none of them answers is not listed.
            tag: Of the documentation.
        """
        self._repository = repository
        self._tag = tag

    def routes(
        self,
        task: Task,
        path: str,
        handler: Handler,
        summary: str,
        request: Any = None,  # noqa: ANN401  any type that msgspec decodes
        reply: Any = None,  # noqa: ANN401
        example: Any = None,  # noqa: ANN401
    ) -> list[Operation]:
        """`path`, answered by the task's default or only model, and `/models/{model}/path`."""
        names = [model.name for model in self._repository.of_task(task)]
        return self.of_models(names, "POST", path, handler, summary, request, reply, example)

    def of_models(
        self,
        names: Sequence[str],
        method: str,
        path: str,
        handler: Handler,
        summary: str,
        request: Any = None,  # noqa: ANN401
        reply: Any = None,  # noqa: ANN401
        example: Any = None,  # noqa: ANN401
    ) -> list[Operation]:
        """The same for a route that these models answer."""
        tag = self._tag if names else UNLISTED
        return [
            Operation(method, path, handler, summary, tag, request, reply, example),
            Operation(
                method,
                _BELOW + path,
                handler,
                f"{summary[:-1]}, by a model named.",
                tag,
                request,
                reply,
                example,
                values={"model": names},
            ),
        ]
