"""What a client probably meant by a path that has no route."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.serving.fields.rule import near_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_MODEL = "{model}"
_MAX_CHARACTERS = 256
_MOST = 3


class KnownPaths:
    """The paths of an application's routes."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._routes = sorted({tuple(_segments(path)) for path in paths}, key=lambda route: (len(route), route))
        self._plain = [_path(route) for route in self._routes if "{" not in "".join(route)]
        self._above_models = {route[: route.index(_MODEL)] for route in self._routes if _MODEL in route}

    def names_no_model(self, path: str, models: Collection[str]) -> bool:
        """Whether the path has something else where routes have the name of a model."""
        steps = tuple(_segments(path))
        if steps in self._routes:
            return False
        heads = [steps[: len(above)] for above in self._above_models if len(steps) > len(above)]
        return any(head in self._above_models and steps[len(head)] not in models for head in heads)

    def near(self, path: str, models: Collection[str]) -> Sequence[str]:
        """The routes that resemble a path, at most three; they repeat nothing of it but the name of a model.

        They differ from it by slashes, or else by what is before them, or else by their spelling.
        """
        if len(path) > _MAX_CHARACTERS:
            return ()
        steps = _segments(path)
        model = next((step for step in steps if step in models), None)
        named = [[model if step == _MODEL and model else step for step in route] for route in self._routes]
        known = [_path(route) for route in named if not any(step.startswith("{") for step in route)]
        if _path(steps) in known:
            return (_path(steps),)
        for start in range(1, len(steps)):
            ending = _path(steps[start:])
            if ending in known:
                return [ending, *(one for one in self._plain if one != ending and one.endswith(ending))][:_MOST]
        return near_names(_path(steps), tuple(known))[:1]


def _segments(path: str) -> list[str]:
    return [step for step in path.split("/") if step]


def _path(steps: Sequence[str]) -> str:
    return "/" + "/".join(steps)
