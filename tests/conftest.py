from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import random
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.browser import Browser, chromium
from tests.support.models import demo_repository
from tests.support.server import EVERY_SERVER, FAKE, IMPATIENT, MEASURED, RUNNING, Server, measured
from tests.support.skips import fail_in_ci

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.support.browser import Page
    from tests.support.tasks import TinyModel

# Before PyTorch is imported: where test processes share cores its threads mostly spin, waiting for one another.
os.environ["OMP_NUM_THREADS"] = "1"

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
"""Of glibc."""

# Time on a busy machine says nothing about a property; the same examples on every run say it reliably.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def models() -> Path:
    return demo_repository()


@pytest.fixture(autouse=True)
def _with_fronts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a fifth of the contract's tests, always the same, front processes; half of these have a module's server."""
    nodeid = request.node.nodeid
    if nodeid.startswith("tests/contract/") and zlib.crc32(nodeid.encode()) % 5 == 0:
        monkeypatch.setitem(EVERY_SERVER, "BERTSERVE_FRONT_PROCESSES", "2")


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Callable[..., Server]]:
    """Servers by their model and options, for every test that changes nothing of them; one with fronts beside each."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(models: Path, options: Sequence[str], _fronts: tuple[tuple[str, str], ...]) -> Server:
            return stack.enter_context(Server(models, *options))

        yield lambda models, *options: start(models, options, tuple(EVERY_SERVER.items()))


def _server(*options: str) -> Any:
    """A shared server of the demo model."""

    @pytest.fixture
    def server(models: Path, shared_server: Callable[..., Server]) -> Server:
        return shared_server(models, *options)

    return server


int8_server = _server("--precision", "int8", *MEASURED)
fp32_server = _server("--precision", "fp32", *MEASURED)
fake_server = _server(*FAKE)
impatient_server = _server(*IMPATIENT)


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


@pytest.fixture
def tasks_server(tasks_repository: Path, shared_server: Callable[..., Server]) -> Server:
    """A server of all of them."""
    return shared_server(tasks_repository, *measured(tasks_repository))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("no Chromium here (see make programs)")
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of its own, which asks for nothing elsewhere and of which the browser does not complain."""
    with contextlib.closing(browser.page()) as opened:
        yield opened
    # What the browser says of replies with an error's status is no fault of the page.
    assert [problem for problem in opened.problems if "Failed to load resource" not in problem] == []
    assert [url for url in opened.requests if not url.startswith(("http://127.0.0.1:", "data:", "file:"))] == []


@pytest.fixture
def serve(models: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers for one test: `serve("--engine", "fake", ...)`."""
    with contextlib.ExitStack() as stack:

        def start(*options: str, repository: Path = models, **keywords: Any) -> Server:
            return stack.enter_context(Server(repository, *options, **keywords))

        yield start


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Lets the garbage collector look at what tests make and not at tests and libraries, which are most of it."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """At the end of Python some libraries need what they made to be collected."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what a sample leaves out, the same with every run, and what needs a browser."""
    families: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("external")
        if item.get_closest_marker("sampled") and not any(map(item.get_closest_marker, ("slow", "endurance"))):
            families[item.nodeid.partition("[")[0]].append(item)
    for name, family in families.items():
        (count,) = next(family[0].iter_markers("sampled")).args
        drawn = random.Random(name).sample(range(len(family)), min(count, len(family)))
        for number, item in enumerate(family):
            if number not in drawn:
                item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test before its fixtures start anything where its program is missing."""
    for marker in item.iter_markers("external"):
        if reason := next(iter(marker.args), None):
            pytest.skip(reason)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Returns free memory to the system between files, as exports leave hundreds of MB in each process."""
    if nextitem is None or nextitem.path != item.path:
        _TRIM(0)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[pytest.CollectReport]:
    """Lets no file be skipped in CI that could run there."""
    report = yield
    fail_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Fails what CI may not skip, and shows the ends of the servers' logs beside a test that failed."""
    report = yield
    fail_in_ci(report)
    if report.failed:
        # Few lines of each, as what failed stands above them: it shall be seen where only an output's end is kept.
        report.sections += [(f"log of server {server.pid}", server.log_tail(8)) for server in RUNNING]
    return report
