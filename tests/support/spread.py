"""A pytest plugin that keeps the files whose tests need PyTorch in half of the processes, as long as others are left.

Its import, and what comes with it, costs a process six seconds of CPU and half a gigabyte.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support.models import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

_HEAVY = re.compile(
    r"\b(?:torch|transformers|sentence_transformers|sentence_vectors|tiny_models|tasks_repository|tasks_server|exports"
    r"|checkpoints|simulated_gpus|support\.tasks)\b"
)
"""What a file says whose tests import it, or use fixtures that do."""


def is_heavy(file: str) -> bool:
    """Whether a file's tests need PyTorch, as far as its text tells; `tests/export` has a fixture for all of its."""
    return file.startswith("tests/export/") or bool(_HEAVY.search((ROOT / file).read_text(encoding="utf-8")))


def next_file(files: Iterable[str], heavy: set[str], *, takes_heavy: bool) -> str:
    """The first file of the kind that a process takes, or else the first of all."""
    first, *rest = files
    return next((file for file in (first, *rest) if (file in heavy) == takes_heavy), first)


class Spread(LoadFileScheduling):  # type: ignore[misc]  xdist's classes have no types here
    def _assign_work_unit(self, node: Any) -> None:
        if not hasattr(self, "_heavy"):
            self._heavy = {file for file in self.workqueue if is_heavy(file)}
        takes_heavy = self.nodes.index(node) % 2 == 0
        file = next_file(self.workqueue, self._heavy, takes_heavy=takes_heavy)
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Spread | None:
    """In place of xdist's own where files stay together."""
    return Spread(config, log) if config.getoption("dist") == "loadfile" else None
