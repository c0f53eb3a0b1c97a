"""Slow tests that depend on few files, many of them with other people's software: `by_change` leaves them out."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.imported_names import imported_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[2]

_IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t].*", re.MULTILINE)


@dataclass(frozen=True)
class Outsider:
    """Tests and the files on which they depend, from the project's root.

    Attributes:
        tests: Test files, or single tests as `file::test`. These files, their `conftest.py` and all that both import of
            `tests/` count as well, and `constraints.txt`, which pins the other people's software.
        paths: The subject of the tests: files and folders.
        runs: Modules that the tests start as programs, so that no import shows them.
        beside: Code that they run and do not examine: tests of every run hold it. `paths` may lie within.
        imports_of: Folders of which only the names of source files, their imports, and all other files count.
    """

    tests: tuple[str, ...]
    paths: tuple[str, ...]
    runs: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    imports_of: tuple[str, ...] = ()

    @property
    def sources(self) -> set[Path]:
        files = {ROOT / test.partition("::")[0] for test in self.tests}
        folders = {folder for file in files for folder in file.parents if folder.is_relative_to(ROOT / "tests")}
        return files | {folder / "conftest.py" for folder in folders if (folder / "conftest.py").exists()}

    def digest(self) -> str:
        by_content = {ROOT / "constraints.txt", *reached(self.sources, ROOT / "tests"), *_files(self.paths)}
        total = hashlib.sha256(sys.version.encode())
        for file in sorted(by_content | set(_files(self.imports_of))):
            content = file.read_bytes()
            if file not in by_content and file.suffix == ".py":
                content = b"\n".join(_IMPORT.findall(content))
            total.update(f"{file.relative_to(ROOT)}\0".encode() + hashlib.sha256(content).digest())
        return total.hexdigest()


def _files(paths: Iterable[str]) -> Iterator[Path]:
    for path in paths:
        for file in (ROOT / path).rglob("*") if (ROOT / path).is_dir() else [ROOT / path]:
            if file.is_file() and "__pycache__" not in file.parts:
                yield file


def reached(starts: Iterable[Path], within: Path = ROOT) -> set[Path]:
    """The source files that these import, directly or not, and they themselves."""
    found: set[Path] = set()
    todo = set(starts)
    while todo:
        found |= todo
        todo = {file for source in todo for file in _imports(source) if file.is_relative_to(within)} - found
    return found


@functools.cache
def _imports(source: Path) -> set[Path]:
    """The project's files that a file imports anywhere in its code, but for types alone."""
    names = imported_names(ast.parse(source.read_bytes()), for_types=False)
    return {file for name in names for file in modules(name)}


@functools.cache
def modules(name: str) -> list[Path]:
    """A module's file and those of the packages in which it lies, where they are the project's."""
    parents = [ROOT.joinpath(*name.split(".")[:depth]) for depth in range(1, name.count(".") + 2)]
    files = [file for parent in parents for file in (parent.with_suffix(".py"), parent / "__init__.py")]
    return [file for file in files if file.is_file()]


_SERVER = "bertserve.py serving export"
"""The server and the exporter of its models. Hundreds of tests of every run hold that it starts, computes and answers;
the subject of an outsider is the code that deals with other people's software."""


def _row(tests: str, paths: str = "", runs: str = "serving.cli", beside: str = "", imports_of: str = "") -> Outsider:
    return Outsider(*(tuple(words.split()) for words in (tests, paths, runs, beside, imports_of)))


OUTSIDERS = {
    "Ray": _row(
        tests="tests/bulk/ray_job_test.py tests/deploy/ray_serve_test.py",
        # Ray kills and restarts what runs an engine's process.
        paths=(
            "bertserve.py serving/bulk serving/engine/process serving/rollout/engine_process.py"
            " deploy/ray docs/guides/bulk.md"
        ),
        runs="serving.bulk.cli deploy.ray.serve_app serving.cli",
        beside="serving export",
    ),
    "LoadGen": _row(
        tests=("tests/loadtest/mlperf_test.py"),
        paths="loadtest/errors.py loadtest/generator loadtest/mlperf.py",
        runs="loadtest.mlperf serving.cli",
        beside=f"loadtest {_SERVER}",
    ),
    "Locust": _row(
        tests="tests/loadtest/locust_test.py",
        paths="loadtest/errors.py loadtest/generator loadtest/locustfile.py",
        runs="loadtest.locustfile serving.cli",
        beside=f"loadtest {_SERVER}",
    ),
    "HAProxy": _row(
        tests="tests/fault/haproxy_test.py",
        # The way of a connection, what ends it, and the weight that a replica tells.
        paths=(
            "deploy/haproxy loadtest/errors.py loadtest/benchmarks/drive.py"
            " loadtest/generator serving/cli.py serving/lifecycle.py serving/server.py serving/settings.py"
            " serving/grpc serving/http serving/inference serving/net serving/operations serving/scheduling"
        ),
        beside=f"loadtest {_SERVER}",
    ),
    "wheel": _row(
        tests="tests/deploy/wheel_test.py",
        # A bare environment shows what is missing: a file, or a package that is imported and not asked for. What the
        # commands do beyond that is tested without a wheel.
        paths="pyproject.toml README.md LICENSE bertserve.py",
        runs=(
            "export.cli.export export.cli.verify export.cli.build export.cli.inspect loadtest.cli"
            " loadtest.capacity.simulate_cli serving.bulk.cli"
            " serving.operations.doctor serving.cli"
        ),
        imports_of="export loadtest serving",
    ),
    "clients": _row(
        tests="tests/contract/existing_clients_test.py",
        # What a client can see: routes, messages, errors, limits and the answers' form.
        paths=(
            "serving/errors.py serving/records.py serving/settings.py serving/security serving/grpc"
            " serving/http serving/inference serving/net serving/oip serving/tasks serving/tei tests/contract/clients"
        ),
        beside=_SERVER,
    ),
    "proxies": _row(
        tests="tests/contract/proxies_test.py",
        # What ends a connection, and what is read of a request on one that others share.
        paths="serving/grpc serving/http serving/net serving/settings.py",
        beside=_SERVER,
    ),
    "Triton": _row(
        tests="tests/contract/perf_analyzer_test.py",
        paths="loadtest/perf_analyzer serving/oip",
        beside=_SERVER,
    ),
    "HTTP/2 and gRPC": _row(
        tests="tests/contract/foreign_http2_test.py",
        paths="serving/grpc serving/net serving/oip tests/support/foreign",
        beside=f"loadtest {_SERVER}",
    ),
    "object stores": _row(
        tests="tests/deploy/fetch_test.py",
        # What the init container fetches a bundle with.
        paths="deploy",
        beside=_SERVER,
    ),
    "Kubernetes": _row(
        tests="tests/deploy/manifests_test.py",
        # The jobs' words are parsed by the commands that they start.
        paths="deploy export/cli loadtest/cli.py",
        beside=f"loadtest {_SERVER}",
        runs="",
    ),
    "Prometheus": _row(
        tests="tests/contract/monitoring_test.py",
        paths=(
            "deploy/monitoring docs/reference/alerts.md docs/guides/observability.md serving/errors.py"
            " serving/telemetry"
        ),
        beside=_SERVER,
    ),
    "PyTorch at a start": _row(
        tests=(
            "tests/contract/model_id_test.py::test_two_cold_starts_export_once"
            " tests/contract/model_id_test.py::test_a_warm_start_exports_nothing"
            " tests/contract/model_id_test.py::test_logs_of_an_export_are_json_too"
        ),
        # An export in a process of its own; what it makes is tested without a server.
        paths=(
            "bertserve.py export/cli serving/models serving/rollout/model_export.py serving/rollout/verb_process.py"
            " serving/settings.py"
        ),
        runs="export.cli.export serving.cli",
        beside="export serving",
    ),
    "TensorRT": _row(
        tests=(
            "tests/export/tensorrt_test.py"
            " tests/fault/engine_build_test.py::test_a_first_start_serves_while_it_builds_and_changes_over"
            " tests/fault/engine_build_test.py::test_what_was_built_is_proven_and_serves_the_next_start"
            " tests/fault/engine_build_test.py::test_an_engine_that_ends_soon_after_gives_way_to_the_one_before"
            " tests/fault/engine_build_test.py::test_a_server_that_ends_ends_its_build"
        ),
        # What makes the graphs that it parses, what orders the builds, and what takes them over.
        paths="export/engines export/graph export/precision serving/rollout",
        beside="bertserve.py export serving",
    ),
    "exports": _row(
        tests=(
            "tests/export/any_body_test.py tests/export/end_to_end_test.py tests/export/export_command_test.py"
            " tests/export/exported_tasks_test.py tests/export/folder_settings_test.py"
            " tests/export/folders_test.py tests/export/half_test.py tests/export/hub_test.py"
            " tests/export/large_model_test.py tests/export/long_texts_test.py tests/export/megatron_test.py"
            " tests/export/qdq_test.py tests/export/sentence_modules_test.py"
            " tests/export/tasks_test.py tests/export/verify_command_test.py"
            " tests/fault/hostile_checkpoint_test.py"
        ),
        # What makes a bundle of a checkpoint, and what computes its answers; models of servers' tests are exports, too.
        paths="export serving/engine/cpu serving/engine/specs.py serving/inference serving/models serving/records.py",
        runs="export.cli.export export.cli.verify serving.cli",
        beside="bertserve.py serving",
    ),
    "schedules": _row(
        tests=(
            "tests/scheduling/scheduler_test.py::test_no_item_is_lost_doubled_or_started_against_the_rules"
            " tests/scheduling/batcher_test.py::test_every_choice_keeps_every_rule"
            " tests/scheduling/queue_test.py::test_no_item_is_lost_doubled_or_overtaken"
            " tests/scheduling/bulk_test.py::test_bulk_work_has_its_share_of_a_device_that_never_rests"
            " tests/scheduling/bulk_test.py::test_queries_hardly_wait_for_a_saturating_bulk_job"
            " tests/scheduling/bulk_test.py::test_bulk_work_goes_on_while_queries_overload_the_server"
        ),
        # Pure functions of their arguments; the other tests of the room run always.
        paths="serving/scheduling loadtest/capacity/simulator.py",
        beside=f"loadtest {_SERVER}",
        runs="",
    ),
    "fuzz": _row(
        tests=(
            "tests/fuzz/bodies_test.py tests/fuzz/grpc_port_test.py tests/fuzz/http_test.py"
            " tests/fuzz/protobufs_test.py tests/fuzz/schema_test.py"
        ),
        paths="serving/grpc serving/http serving/net serving/oip serving/settings.py",
        beside=f"loadtest {_SERVER}",
    ),
    "load tools": _row(
        tests=(
            "tests/loadtest/generator/capacity_test.py tests/loadtest/options_test.py"
            " tests/loadtest/report/result_test.py tests/loadtest/secured_test.py"
            " tests/loadtest/capacity/simulate_test.py tests/loadtest/capacity/simulator_test.py"
        ),
        paths="loadtest",
        beside=_SERVER,
    ),
    "compatibility": _row(
        tests="tests/export/compatibility_test.py",
        paths=(
            "export loadtest/benchmarks/exports serving/models docs/reference/compatibility.md"
            " docs/benchmarks/compatibility.json"
        ),
        beside=f"loadtest {_SERVER}",
    ),
}
