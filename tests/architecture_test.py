"""The arrows of docs/architecture.md: which part may import which, and what nobody may use."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("serving", "export", "loadtest", "simulate")
GENERATED = "_pb2"
TRANSPORT = ("serving.http", "serving.grpc", "serving.oip", "serving.net")


@dataclass(frozen=True)
class Module:
    """A source file and what it imports, at any depth, for types alone or not."""

    name: str
    tree: ast.Module

    @property
    def imports(self) -> set[str]:
        """Full names of the modules imported; `from a import b` counts as a and a.b."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return found

    def reaches(self, *targets: str) -> set[str]:
        """The imports that lie at or below one of these names."""
        return {name for name in self.imports for target in targets if name == target or name.startswith(target + ".")}


def _modules() -> list[Module]:
    paths = [ROOT / "bertserve.py", *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]
    return [
        Module(
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"),
            ast.parse(path.read_text()),
        )
        for path in sorted(paths)
        if GENERATED not in path.name
    ]


MODULES = _modules()


def _below(*prefixes: str) -> list[Module]:
    found = [m for m in MODULES if any(m.name == prefix or m.name.startswith(prefix + ".") for prefix in prefixes)]
    assert found, f"no module below {prefixes}: the test would prove nothing"
    return found


def test_records_errors_buckets_and_cost_stand_alone() -> None:
    """The bottom of the picture imports nothing of the project."""
    for module in _below(
        "serving.records", "serving.models.statistics", "serving.errors", "serving.scheduling.buckets"
    ):
        assert not module.reaches(*PACKAGES), module.name
    for module in _below("serving.scheduling.cost"):
        assert module.reaches(*PACKAGES) <= module.reaches("serving.scheduling.buckets"), module.name


def test_scheduling_knows_records_and_errors_alone() -> None:
    """Decisions depend on plain data, never on what is around them."""
    allowed = ("serving.records", "serving.errors", "serving.scheduling")
    for module in _below("serving.scheduling"):
        assert module.reaches(*PACKAGES) <= module.reaches(*allowed), module.name


def test_scheduling_reads_no_clock_and_does_no_io() -> None:
    """A clock is passed in, so that the simulator can drive the very same code."""
    for module in _below("serving.scheduling"):
        assert not module.reaches("time", "asyncio", "socket", "threading", "os"), module.name


def test_engine_knows_nothing_above_it() -> None:
    """What runs a batch knows neither wire nor task nor metric."""
    above = ("http", "grpc", "oip", "net", "inference", "telemetry", "rollout", "server", "lifecycle", "settings")
    for module in _below("serving.engine"):
        assert not module.reaches(*(f"serving.{name}" for name in above)), module.name


def test_transport_sees_no_engine_and_no_queue() -> None:
    """A protocol talks to the pipeline; how work is done is not its business."""
    below = ("serving.engine", "serving.scheduling", "serving.inference.dispatcher", "serving.inference.tasks")
    for module in _below(*TRANSPORT):
        assert not module.reaches(*below), module.name


def test_telemetry_knows_no_protocol() -> None:
    """What is counted is the same whichever wire it came over."""
    for module in _below("serving.telemetry"):
        assert not module.reaches(*TRANSPORT), module.name


def test_keys_and_certificates_know_nothing_of_requests_or_settings() -> None:
    """What they are can be checked before anything else is there, and by the settings themselves."""
    for module in _below("serving.security"):
        allowed = module.reaches("serving.errors", "serving.security")
        assert module.reaches(*PACKAGES) - {"serving"} <= allowed, module.name


def test_serving_never_needs_pytorch_or_the_other_packages() -> None:
    """The server's image carries no PyTorch, and it does not depend on export or loadtest."""
    for module in _below("serving"):
        assert not module.reaches("torch", "transformers", "onnx", "export", "loadtest", "simulate"), module.name


@pytest.mark.parametrize(
    ("library", "owners"),
    [
        ("onnxruntime", {"serving.engine.cpu.ort", "serving.engine.gpu.ort_cuda"}),
        ("openvino", {"serving.engine.cpu.openvino"}),
        ("tensorrt", {"serving.engine.gpu.tensorrt_library"}),
        ("tensorrt_rtx", {"serving.engine.gpu.tensorrt_library"}),
        ("cuda", {"serving.engine.gpu.cuda_driver"}),
        ("pynvml", {"serving.telemetry.gpus"}),
        ("opentelemetry", {"serving.telemetry.otlp"}),
    ],
)
def test_a_library_that_may_be_missing_has_its_users(library: str, owners: set[str]) -> None:
    """A machine without the library still runs everything else."""
    users = {module.name for module in _below("serving") if module.reaches(library)}
    assert users == owners


def test_the_wire_is_ours() -> None:
    """The server speaks gRPC without gRPC's own library, which answers in threads of its own."""
    assert not {module.name for module in _below("serving") if module.reaches("grpc")}


def test_export_uses_of_serving_what_writes_and_checks_a_bundle() -> None:
    """The exporter shares the bundle and the engines with the server, nothing else."""
    allowed = (
        "serving.host",
        "serving.models.staging_dir",
        "serving.models.bundle",
        "serving.models.node_cache",
        "serving.models.manifest",
        "serving.models.node",
        "serving.models.verified_dir",
        "serving.records",
        "serving.scheduling.buckets",
        "serving.engine",
        "serving.errors",
    )
    for module in _below("export"):
        assert module.reaches("serving", "loadtest", "simulate") - {"serving", "serving.models"} <= module.reaches(
            *allowed
        ), module.name


def test_loadtest_knows_the_server_by_its_wire() -> None:
    """A load generator that shared code with the server would share its mistakes."""
    for module in _below("loadtest"):
        assert not module.reaches("serving", "export", "simulate"), module.name


def test_the_simulator_joins_decisions_and_arrivals() -> None:
    """It runs the server's decisions over the load generator's schedules, and draws with its charts."""
    tools = ("arrivals", "scenario", "capacity", "sample", "charts", "page")
    allowed = ("serving.scheduling", "serving.records", "serving.errors", *(f"loadtest.{name}" for name in tools))
    for module in _below("simulate"):
        strangers = module.reaches("serving", "export", "loadtest") - {"serving", "loadtest"}
        assert strangers <= module.reaches(*allowed), module.name


def test_there_is_no_import_cycle() -> None:
    """Importing in any order works, and every arrow points one way."""
    names = {module.name for module in MODULES}
    graph = {m.name: {name for name in _runtime_imports(m) if name in names and name != m.name} for m in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def _runtime_imports(module: Module) -> set[str]:
    """Imports that happen when the module is loaded: those for types and those inside functions do not."""
    top = [node for node in module.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return Module(module.name, ast.Module(body=list(top), type_ignores=[])).imports


BANNED_MODULES = ("pickle", "marshal", "shelve", "joblib", "cloudpickle", "dill")
BANNED_CALLS = {"eval", "exec", "torch.load", "yaml.load", "os.system", "os.popen"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_nothing_turns_data_into_code(module: Module) -> None:
    """No pickle, no eval, no shell: a bundle or a request can never run."""
    assert not module.reaches(*BANNED_MODULES)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in BANNED_CALLS
            shell = [key.value for key in node.keywords if key.arg == "shell"]
            assert not any(ast.unparse(value) != "False" for value in shell)


BROAD_HANDLERS = {
    "serving.http.exchange": "the HTTP boundary",
    "serving.grpc.guard": "the gRPC boundary",
    "serving.engine.process.worker": "the engine's loop",
    "serving.rollout.repository_watch": "the watch's loop, which nobody awaits",
    "serving.rollout.upgrade": "the same: without it the reason would say for ever that an engine is being built",
    "serving.telemetry.gpus": "the thread that asks for metrics, which nobody joins",
    "serving.inference.tokenizer": "the tokenizers library raises a bare Exception for a file that does not parse",
}


def test_every_exception_is_caught_at_the_boundaries_alone() -> None:
    """`except Exception` stands at the boundaries, and at the one library that leaves no choice."""
    found = {
        module.name
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) == "Exception")
    }
    assert found <= BROAD_HANDLERS.keys()


def test_settings_read_the_environment_alone() -> None:
    """No module but the settings looks at environment variables; the front of `serve` and the package set one each."""
    readers = re.compile(r"\bos\.(environ|getenv)\b")
    found = {m.name for m in _below("serving") if readers.search(ast.unparse(m.tree))}
    assert found <= {"serving", "serving.settings", "serving.cli"}


def test_sources_do_not_check_input_with_assert() -> None:
    """`python -O` removes assertions; what guards a server must stay."""
    found = {m.name for m in MODULES for node in ast.walk(m.tree) if isinstance(node, ast.Assert)}
    assert not found
