"""Checks the server's SLO with Locust. By default, one user sends requests back to back.

    locust -f loadtest/locustfile.py --headless -u 1 -t 30s --host http://127.0.0.1:8000

Prints p50 and p99 with a resolution of 0.01 ms. Exits with 1 if p50 exceeds 2 ms (`--slo-p50-ms`, `--slo-p99-ms`) or a
request failed. With `--scenario`, the number of users follows a built-in scenario or a TOML file, and each user keeps a
constant pace.

Locust is closed-loop: its users wait for their answers, so tail latencies miss the effect of a stall on other requests.
For tails and capacity, use the open loop of `bertserve load`. With `https` in `--host`, both protocols use TLS. The
environment variable LOADTEST_API_KEY holds the server's API key.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import gevent
import locust
import locust.stats
from locust.runners import WorkerRunner

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.closed_loop import SILENCE_S, Lane, connect
from bertserve.loadtest.generator.messages import Target, api_key, messages
from bertserve.loadtest.generator.scenario import SCENARIOS, find_scenario
from bertserve.loadtest.generator.tls import Tls
from bertserve.loadtest.generator.workload import spoken_text

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from locust.env import Environment

    from bertserve.loadtest.generator.scenario import Scenario

_FINE_BELOW_MS = 100.0
_COARSE_DIGITS = 3
_STEP_DECIMALS = 2
_PROTOCOLS = {"http": ("HttpUser",), "grpc": ("GrpcUser",), "both": ("HttpUser", "GrpcUser")}
_OK = 200
_BATCH = 4


def bucket(response_time_ms: float) -> float:
    """Rounds a latency to its histogram bucket: 0.01 ms, and three significant digits from 100 ms on.

    By default, Locust counts in whole milliseconds below 100. Master and workers round alike and floats keep their
    values between them, so the buckets of all workers merge in one table.
    """
    if response_time_ms < _FINE_BELOW_MS:
        return round(response_time_ms, _STEP_DECIMALS)
    return float(round(response_time_ms, _COARSE_DIGITS - 1 - math.floor(math.log10(response_time_ms))))


locust.stats.bucket_response_time = bucket


@locust.events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this file to Locust's."""
    group = parser.add_argument_group("bertserve")
    group.add_argument(
        "--slo-p50-ms", type=_ms, default=2.0, help="Maximum p50, in milliseconds. Beyond it, exit with 1 (default: 2)."
    )
    group.add_argument(
        "--slo-p99-ms",
        type=_ms,
        default=None,
        help="Maximum p99, in milliseconds. Beyond it, exit with 1 (default: none).",
    )
    group.add_argument(
        "--scenario", type=_scenario_name, default=None, help=f"Scenario: {', '.join(SCENARIOS)}, or a TOML file."
    )
    group.add_argument(
        "--protocol", choices=tuple(_PROTOCOLS), default=None, help="Protocol (default: the scenario's, or http)."
    )
    group.add_argument(
        "--grpc-target", type=_target, default=None, help="Host and port of gRPC (default: port 8001 of --host)."
    )
    group.add_argument("--model", default="minilm", help="Model for gRPC and the OpenAI route (default: minilm).")
    group.add_argument(
        "--ca", type=Path, default=None, help="PEM file of the authority to trust (default: the system's)."
    )
    group.add_argument("--cert", type=Path, default=None, help="PEM file of the client certificate, for mutual TLS.")
    group.add_argument(
        "--key", type=Path, default=None, help="PEM file of its private key, if --cert does not hold it."
    )
    group.add_argument(
        "--tokens", type=_whole, default=None, help="Approximate length of all texts, in tokens (default: scenario's)."
    )


def _ms(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is not a time in milliseconds above 0")
    return value


def _whole(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"{word!r} is not an integer above 0")
    return int(word)


def _target(word: str) -> str:
    host, _, port = word.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not host:port")
    return word


def _scenario_name(word: str) -> str:
    """Checks that the word names a scenario. Returns the word, because workers receive options as plain values."""
    try:
        scenario = find_scenario(word)
    except BenchError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if scenario.protocol not in _PROTOCOLS:
        raise argparse.ArgumentTypeError(f"users send over http or grpc, not {scenario.protocol}")
    if others := scenario.tasks.keys() - {"embed"}:
        raise argparse.ArgumentTypeError(f"users request only embeddings, not {', '.join(sorted(others))}")
    return word


def _chosen(environment: Environment) -> Scenario | None:
    name = environment.parsed_options.scenario
    return find_scenario(name) if name else None


@locust.events.init.add_listener
def prepare(environment: Environment, **_: object) -> None:
    """Keeps the user classes of the chosen protocol, and lets a scenario set the number of users."""
    if isinstance(environment.runner, WorkerRunner):
        return  # the master tells a worker which users to start
    options, scenario = environment.parsed_options, _chosen(environment)
    protocol = options.protocol or (scenario.protocol if scenario else "http")
    asked = [kind for kind in environment.user_classes if kind.__name__ in _PROTOCOLS[protocol]]
    environment.user_classes[:] = asked
    if scenario is not None:
        environment.shape_class = Shape(scenario)


class Shape(locust.LoadTestShape):
    """The number of users of a scenario over time."""

    abstract = True  # otherwise Locust would use it even without a scenario

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self._scenario = scenario

    def tick(self) -> tuple[int, float] | None:
        """The number of users now, and how many may start per second; None at the end."""
        share = self._scenario.share(self.get_run_time())
        if share is None:
            return None
        return max(1, round(share * self._scenario.users)), max(1.0, self._scenario.users)


class _Asking:
    """Common part of all users: texts of the scenario's lengths, at its pace."""

    environment: Environment
    host: str

    def target(self, protocol: str, address: str) -> Target:
        """The target of this user over a protocol.

        Args:
            protocol: `http` or `grpc`.
            address: `host:port` of that protocol.
        """
        options = self.environment.parsed_options
        secured = urlsplit(self.environment.host or "").scheme == "https"
        url = f"{protocol}{'s' if secured else ''}://{address}"
        return Target.of(url, None, options.model, api_key(), Tls.of(options.ca, options.cert, options.key))

    def on_start(self) -> None:
        """Prepares the text lengths and the pace."""
        options, scenario = self.environment.parsed_options, _chosen(self.environment) or SCENARIOS["steady"]
        lengths = {options.tokens: 1.0} if options.tokens else scenario.lengths
        self._dice = random.Random()
        self._lengths, self._weights = list(lengths), list(lengths.values())
        self._pause = locust.constant_throughput(scenario.rate / scenario.users) if options.scenario else None

    def wait_time(self) -> float:
        """Seconds until the next request: 0, or this user's share of the scenario's rate."""
        return float(self._pause(self)) if self._pause else 0.0

    def text(self) -> str:
        """A random text with about the number of tokens of a random length."""
        [tokens] = self._dice.choices(self._lengths, self._weights)
        return spoken_text(tokens, self._dice)


class HttpUser(_Asking, locust.FastHttpUser):
    """Sends HTTP requests, most of them with one text."""

    def __init__(self, environment: Environment) -> None:
        """Configures the API key and TLS of Locust's client."""
        self.environment = environment
        target = self.target("http", urlsplit(environment.host or "").netloc or "127.0.0.1")
        authorization = {"Authorization": target.credentials} if target.credentials else {}
        self.default_headers = {"Content-Type": "application/json", **authorization}
        if target.tls is not None:
            self.insecure, self.ssl_context_factory = False, partial(target.tls.context, "http/1.1")
        super().__init__(environment)

    @locust.task(18)
    def one_text(self) -> None:
        """`POST /embed` with one text."""
        self._ask("/embed", {"inputs": self.text()}, b"[[")

    @locust.task(1)
    def some_texts(self) -> None:
        """`POST /embed` with several texts."""
        self._ask("/embed", {"inputs": [self.text() for _ in range(_BATCH)]}, b"[[", f"/embed, {_BATCH} texts")

    @locust.task(1)
    def openai(self) -> None:
        """`POST /v1/embeddings` with one text."""
        self._ask("/v1/embeddings", {"model": self.environment.parsed_options.model, "input": self.text()}, b"{")

    def _ask(self, path: str, body: object, begin: bytes, name: str | None = None) -> None:
        with self.client.post(path, json=body, name=name or path, catch_response=True) as response:
            if response.status_code != _OK:
                response.failure(f"{response.status_code or response.error}")
            elif not response.content.startswith(begin):
                response.failure("a reply without an embedding")


class GrpcUser(_Asking, locust.User):
    """Sends gRPC requests over a socket that gevent can schedule, because grpc is incompatible with gevent."""

    _lane: Lane | None = None

    def on_start(self) -> None:
        """Determines the target."""
        super().on_start()
        given = self.environment.parsed_options.grpc_target
        self._target = self.target("grpc", given or f"{urlsplit(self.host or '').hostname or '127.0.0.1'}:8001")

    def on_stop(self) -> None:
        if self._lane is not None:
            self._lane.connection.close()

    @locust.task
    def one_text(self) -> None:
        """`ModelInfer` with one text."""
        [message] = messages(self._target, "embed", [self.text()])
        fault, size, started = "", 0, time.perf_counter()
        try:
            with gevent.Timeout(SILENCE_S, BenchError(f"no reply within {SILENCE_S:g} s")):
                if self._lane is None:
                    self._lane = self._connected()
                    started = time.perf_counter()
                reply = self._lane.exchange(message)
            fault, size = reply.fault, len(reply.body)
        except BenchError as error:
            fault, self._lane = str(error), None
        self.environment.events.request.fire(
            request_type="gRPC",
            name="ModelInfer",
            response_time=(time.perf_counter() - started) * 1e3,
            response_length=size,
            exception=BenchError(fault) if fault else None,
            context={},
        )

    def _connected(self) -> Lane:
        return Lane(connect(*self._target.address()), self._target.wire(), lambda _: None)


@locust.events.quitting.add_listener
def judge(environment: Environment, **_: object) -> None:
    """Prints the latencies and sets the exit code."""
    if isinstance(environment.runner, WorkerRunner):
        return  # the master has the figures of all workers
    total, options = environment.stats.total, environment.parsed_options
    for entry in [*environment.stats.entries.values(), total]:
        print(_line(entry))
    if not total.num_requests - total.num_failures:
        print("no request was answered")
        environment.process_exit_code = 1
        return
    held = not total.num_failures
    for percent, limit in ((50, options.slo_p50_ms), (99, options.slo_p99_ms)):
        if limit is not None:
            found = total.get_response_time_percentile(percent / 100)
            verdict = "held" if found <= limit else "MISSED"
            print(f"SLO p{percent} at most {limit:g} ms: {verdict} with {found:.{_STEP_DECIMALS}f} ms")
            held = held and found <= limit
    if environment.process_exit_code is None:
        environment.process_exit_code = 0 if held else 1


def _line(entry: Any) -> str:  # noqa: ANN401  Locust's classes have no types
    p50, p99 = (entry.get_response_time_percentile(share) or 0.0 for share in (0.5, 0.99))
    return (
        f"{entry.method or ''} {entry.name}: p50 {p50:.{_STEP_DECIMALS}f} ms, p99 {p99:.{_STEP_DECIMALS}f} ms,"
        f" {entry.num_requests} requests, {entry.num_failures} failed"
    ).lstrip()
