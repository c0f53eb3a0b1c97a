"""Replicas behind HAProxy, restarted one after another under load: a proof that no request is lost."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.rolling import page
from loadtest.benchmarks.rolling.drive import Plan, experiment
from loadtest.benchmarks.runner import Benchmark

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from loadtest.benchmarks.runner import Page
    from loadtest.benchmarks.store import Step, Store

_STEP = "rolling"


class RollingBenchmark(Benchmark):
    """Fails where a promise was broken."""

    name = "rolling"
    purpose = "replicas behind HAProxy that are restarted under load: is a request lost?"
    rounds = 1
    seconds = 6.0

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> tuple[str, ...]:
        parser.add_argument("--restarts", type=int, default=20, help="at least so many (%(default)s)")
        parser.add_argument("--requests", type=int, default=200_000, help="at least so many (%(default)s)")
        parser.add_argument("--rate", type=float, help="requests a second (0.7 of the capacity, which is measured)")
        parser.add_argument("--lame-duck-s", type=float, default=5.0, help="of the servers (%(default)s)")
        parser.add_argument("--server", default="", metavar="WORDS", help="more options of each server, as one word")
        parser.add_argument("--logs", type=Path, help="keep the logs of servers and proxy there")
        return ("restarts", "requests", "rate")

    def facts(self) -> dict[str, Any]:
        return self.model_facts()

    def steps(self) -> Iterator[Step]:
        yield _STEP, self._experiment

    def _experiment(self) -> dict[str, Any]:
        options = self.options
        folder = options.logs or Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        more = tuple(shlex.split(options.server))
        plan = Plan(options.models, folder, options.restarts, options.requests, options.rate, more, options.lame_duck_s)
        server = shlex.join(["bertserve", "serve", "--lame-duck-s", f"{options.lame_duck_s:g}", *more])
        return {**experiment(plan, self.say).figures(), "server": server}

    def page(self, store: Store) -> Page:
        return page.page(store.steps[_STEP])

    def failed(self, store: Store) -> bool:
        return bool(store.steps[_STEP]["wrong"])
