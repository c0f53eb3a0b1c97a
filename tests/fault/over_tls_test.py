"""What connections promise, they promise over TLS as well: tests of plain ones, run again where both sides speak it.

The names of the tests are those of the modules that they come from. The short form runs one of each kind that TLS
changes: reading in pieces, writing at once, how a side ends the connection, and what that end finds under way.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.fault import engine_test, http2_test, http_connection_test, lifecycle_test
from tests.support.certificates import Certificates
from tests.support.server import FAKE, IMPATIENT, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType

SHORT = {
    *("test_requests_sent_ahead_are_answered_in_their_order", "test_a_client_that_waits_for_leave_gets_it"),
    *("test_rows_04_to_09_what_is_refused", "test_row_08_who_is_slow_or_silent_is_cut_off"),
    "test_row_13_http_client_vanishes_while_queued",
    *("test_a_call", "test_ways_to_send_a_call", "test_calls_side_by_side", "test_large_calls_side_by_side"),
    *("test_a_reply_larger_than_the_window", "test_row_55_requests_under_way_are_finished"),
}
LEFT_OUT = {
    # They speak plainly by intention, or look at another port or at a process.
    "test_row_01_garbage_on_the_grpc_port_is_closed",
    *("test_row_61_address_that_is_not_ours", "test_row_61_port_in_use"),
}
PARTS: dict[ModuleType, tuple[str, ...]] = {
    # Of each module the tests whose names begin so.
    http_connection_test: ("test_",),
    http2_test: ("test_",),
    engine_test: ("test_row_13", "test_row_14"),
    lifecycle_test: ("test_row_55", "test_row_56", "test_row_57", "test_row_58_second_signal_ends_the_drain"),
}

connection = http2_test.connection
hurried = http2_test.hurried
held_server = lifecycle_test.held_server


def _again(test: Callable[..., None]) -> Callable[..., None]:
    """A test as it is, so that its marks here are not its marks there."""

    def again(**keywords: Any) -> None:
        test(**keywords)

    again.__doc__, again.__name__ = test.__doc__, test.__name__
    again.__dict__.update(__wrapped__=test, pytestmark=list(getattr(test, "pytestmark", [])))
    return again if test.__name__ in SHORT else pytest.mark.slow(again)


RUN_AGAIN = {
    name: test
    for module, prefixes in PARTS.items()
    for name, test in vars(module).items()
    if name.startswith(prefixes) and name not in LEFT_OUT
}
globals().update({name: _again(test) for name, test in RUN_AGAIN.items()})


def test_the_lists_name_tests_that_exist() -> None:
    """A test that is renamed must be renamed here, or it would no longer run over TLS, or not in the short form."""
    assert set(RUN_AGAIN) >= SHORT
    for module, prefixes in PARTS.items():
        assert all(any(name.startswith(prefix) for name in vars(module)) for prefix in prefixes), module.__name__
    assert all(any(hasattr(module, name) for module in PARTS) for name in LEFT_OUT)


def test_no_two_modules_share_the_name_of_a_test() -> None:
    """Of two tests of one name only one would run again."""
    names = [name for module, prefixes in PARTS.items() for name in vars(module) if name.startswith(prefixes)]
    assert len(names) == len(set(names))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"), mutual=True)


@pytest.fixture(scope="module")
def fake_server(models: Path, certificates: Certificates) -> Iterator[Server]:
    with Server(models, *FAKE, tls=certificates) as server:
        yield server


@pytest.fixture(scope="module")
def impatient_server(models: Path, certificates: Certificates) -> Iterator[Server]:
    with Server(models, *IMPATIENT, tls=certificates) as server:
        yield server


@pytest.fixture(scope="module")
def patient_server(models: Path, certificates: Certificates) -> Iterator[Server]:
    with Server(models, *FAKE, "--threads", "1", tls=certificates) as server:
        yield server


faulty_server = patient_server


@pytest.fixture
def serve(models: Path, certificates: Certificates) -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:
        yield lambda *options, **more: stack.enter_context(Server(models, *options, tls=certificates, **more))
