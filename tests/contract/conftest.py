from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.tasks import TinyModel


@pytest.fixture(scope="session")
def tiny_models() -> dict[str, TinyModel]:
    """A small random model of every task, as PyTorch has it."""
    from tests.support.tasks import TASKS, tiny_model  # noqa: PLC0415  PyTorch is slow to import

    return {task: tiny_model(task) for task in TASKS}


@pytest.fixture(scope="session")
def tasks_repository(tiny_models: dict[str, TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundles of all of them, each called after its task."""
    from tests.support.tasks import write_bundle  # noqa: PLC0415  likewise

    repository: Path = tmp_path_factory.mktemp("tasks")
    for model in tiny_models.values():
        write_bundle(repository, model)
    return repository


@pytest.fixture(scope="session")
def tasks_server(tasks_repository: Path) -> Iterator[Server]:
    """A server of all of them."""
    with Server(tasks_repository) as running:
        yield running
