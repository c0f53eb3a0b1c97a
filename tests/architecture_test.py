"""The architecture as a table: which room may import which, and what nobody may use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.support.imported_names import imported_names

ROOT = Path(__file__).parents[1]
PACKAGES = ("serving", "export", "loadtest")
GENERATED = "_pb2"

LOOSE = {
    *("cli", "server", "listeners", "settings", "options", "errors", "records", "lifecycle", "logs", "host"),
    "unawaited",
}
"""The modules of `serving/` that lie in no room, because every room needs them or they need every room."""

ARROWS = {
    "errors": "",
    "records": "",
    "host": "",
    "lifecycle": "errors",
    "logs": "errors",
    "unawaited": "errors",
    "security": "errors",
    "options": "host",
    # What requests may bring beside the fields that are read, for every wire.
    "fields": "errors",
    # A task says everything about itself, and knows nobody who asks.
    "tasks": "errors records fields",
    # What decides knows plain data alone.
    "scheduling": "errors records",
    # What runs a batch knows neither bundle nor wire nor task nor metric: it loads what it is given, by a digest.
    "engine": "errors unawaited records host logs scheduling.cost",
    # What there is of an engine to know before it runs, it says of itself.
    "settings": "errors options security engine.kinds tasks",
    "models": "errors records host engine.kinds engine.specs scheduling.cost tasks",
    # A request's way: a protocol talks to the pipeline and sees no queue and no engine.
    "inference": "errors unawaited records settings lifecycle scheduling models engine tasks",
    "telemetry": "errors records lifecycle logs scheduling models engine inference",
    "oip": "errors records settings lifecycle fields models engine.specs inference tasks",
    # Which engine runs, and how another one takes over.
    "rollout": "errors unawaited records host settings lifecycle logs scheduling models engine inference",
    # A job on Ray runs an engine of its own, chosen as the server chooses one, without wires and queues.
    "bulk": "errors records options host settings fields tasks models engine inference"
    " rollout.engine_choice rollout.engine_load",
    "net": "errors unawaited host settings security inference.requests",
    "http": "errors unawaited records settings lifecycle logs security fields engine.specs inference oip net tasks",
    "grpc": "errors unawaited settings lifecycle logs security fields inference oip net tasks",
    # Not on a request's way.
    "operations": "errors unawaited host settings lifecycle logs scheduling models engine inference telemetry"
    " rollout net http grpc",
    "listeners": "errors host settings lifecycle logs security inference telemetry oip net http grpc",
    # A front is a server whose pipeline has its device in another process.
    "fronts": "errors unawaited records host settings lifecycle logs scheduling tasks models engine inference telemetry"
    " net http grpc listeners",
    "server": "errors unawaited host settings lifecycle logs scheduling inference telemetry oip"
    " rollout net http fronts listeners operations",
    "cli": "errors lifecycle settings logs net rollout server",
}
"""Each room of `serving/` and what it may import of the others: only what stands above it. A dot names one module."""

OTHER_PACKAGES = {
    # The exporter shares the bundle and the engines with the server.
    # Its proof answers texts by the server's own way, up to the wires. Every report is shown with its pages.
    "export": "serving.errors serving.records serving.options serving.host serving.bulk.progress"
    " serving.models serving.engine serving.inference serving.scheduling.cost serving.tasks",
    # A load generator that shared code with the server would share its mistakes. Of the machine both say the same.
    # A task's module says how its requests are made and its replies are read here, in functions apart (`LoadFormat`).
    "loadtest": "export.pages serving.host serving.options serving.bulk.progress serving.tasks",
    # The server's decisions over the load generator's schedules, in the form of its reports.
    "loadtest.capacity": "export.pages serving.errors serving.records serving.options serving.scheduling"
    " loadtest.errors loadtest.generator loadtest.report",
    # What is measured with the exporter, declared for the runner of all benchmarks.
    "loadtest.benchmarks.exports": "export serving.errors serving.records serving.options"
    " serving.host serving.models serving.engine serving.inference serving.scheduling.cost"
    " serving.tasks"
    " loadtest.errors loadtest.generator loadtest.report loadtest.benchmarks",
}
"""The packages beside the server, and what they may import. A room with a row is no part of the one around it."""


@dataclass(frozen=True)
class Module:
    """A source file and what it imports, at any depth, for types alone or not."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree, for several tests to look through."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> set[str]:
        """Names of the modules imported, for types too: the project's without `bertserve.`."""
        return {name.removeprefix("bertserve.") for name in imported_names(self.tree, for_types=True)}

    def reaches(self, *targets: str) -> set[str]:
        """The imports that lie at or below one of these names."""
        return {name for name in self.imports if _lies_in(name, *targets)}

    @cached_property
    def project_imports(self) -> set[str]:
        """The modules of the project that it imports; a package counts where nothing below it is meant."""
        names = {name for name in self.imports if name in NAMES and name != self.name}
        return {name for name in names if not any(other.startswith(name + ".") for other in names)}


def _lies_in(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


def _row(name: str) -> str | None:
    """The innermost room of `OTHER_PACKAGES` in which a module lies."""
    return max((room for room in OTHER_PACKAGES if _lies_in(name, room)), key=len, default=None)


def _modules() -> list[Module]:
    paths = [
        *(ROOT / "src/bertserve").glob("*.py"),
        *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")),
    ]
    return [
        Module(
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("src.").removesuffix(".__init__"), path
        )
        for path in sorted(paths)
        if GENERATED not in path.name
    ]


MODULES = _modules()
NAMES = {module.name for module in MODULES}


@pytest.fixture(scope="module", autouse=True)
def parsed() -> None:
    """Parses every module once, and not while tests are collected."""
    for module in MODULES:
        _ = module.tree


def _below(*prefixes: str) -> list[Module]:
    below = [module for module in MODULES if _lies_in(module.name, *prefixes)]
    assert below, f"no module below {prefixes}: the test would prove nothing"
    return below


def test_the_table_shows_every_room_of_the_server() -> None:
    """A new room is given its place in the table, and hardly anything is loose beside the rooms."""
    children = {path.stem: path for path in (ROOT / "serving").iterdir() if path.suffix == ".py" or path.is_dir()}
    rooms = {name for name, path in children.items() if path.is_dir() and any(path.rglob("*.py"))}
    loose = {name for name, path in children.items() if path.is_file()} - {"__init__"}
    assert loose <= LOOSE
    assert rooms | loose <= ARROWS.keys()


def test_arrows_of_the_table_point_one_way() -> None:
    """Each room imports only what stands above it."""
    above: set[str] = set()
    for room, allowed in ARROWS.items():
        assert {name.partition(".")[0] for name in allowed.split()} <= above, room
        above.add(room)


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_of_the_server_imports_what_its_row_allows(room: str) -> None:
    """For types too; and neither PyTorch nor the exporter, the load generator or the simulator."""
    allowed = [room, *ARROWS[room].split()]
    for module in MODULES:
        if _lies_in(module.name, f"serving.{room}"):
            strangers = {
                name for name in module.project_imports if not _lies_in(name, *(f"serving.{a}" for a in allowed))
            }
            assert strangers - {"serving"} == set(), module.name
            assert not module.reaches("torch", "transformers", "onnx"), module.name


@pytest.mark.parametrize("package", OTHER_PACKAGES)
def test_a_package_beside_the_server_imports_what_its_row_allows(package: str) -> None:
    """The server's decisions, engines and bundles are shared; its wires are not."""
    for module in MODULES:
        if _row(module.name) != package:
            continue
        others = {name for name in module.project_imports if _row(name) != package}
        strangers = {name for name in others if not _lies_in(name, *OTHER_PACKAGES[package].split())}
        assert strangers - {"serving", "loadtest"} == set(), module.name


@pytest.mark.parametrize(
    ("asked", "strangers", "loaded"),
    [
        (
            "bertserve.serving.settings, bertserve.serving.inference.served_models",
            "onnxruntime openvino tensorrt tensorrt_rtx cuda onnx",
            "bertserve.serving.engine.kinds",
        ),
        (
            "bertserve, bertserve.serving.server, bertserve.serving.operations.doctor",
            "ray pyarrow pandas fastapi starlette",
            "bertserve.serving.server",
        ),
    ],
    ids=["what is known of engines", "the server"],
)
def test_what_a_missing_library_is_not_needed_for(asked: str, strangers: str, loaded: str) -> None:
    """Settings and models know of engines without their libraries; a server starts without Ray, Arrow and FastAPI."""
    program = f"import sys, {asked}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert loaded in modules
    assert not {name for name in modules if name.partition(".")[0] in strangers.split()}


@pytest.mark.parametrize(
    ("rooms", "strangers"),
    [
        # A clock is passed in, so that the simulator can drive the very same code.
        ("serving.scheduling", "time asyncio socket threading os"),
        # Bytes in, events and bytes out: no socket, no loop, no clock, no settings.
        ("serving.grpc.h2", "time asyncio socket ssl threading os logging"),
        # How work is queued and done is not a protocol's business.
        ("serving.http serving.grpc serving.oip serving.net", "serving.inference.dispatcher"),
        # The server speaks gRPC without gRPC's own library, which answers in threads of its own.
        ("serving", "grpc"),
    ],
)
def test_what_a_room_does_without(rooms: str, strangers: str) -> None:
    """It reads no clock and does no I/O, sees the pipeline alone, or speaks by itself."""
    for module in _below(*rooms.split()):
        assert not module.reaches(*strangers.split()), module.name


@pytest.mark.parametrize(
    ("room", "allowed"), [("serving.scheduling.cost", ()), ("serving.grpc.h2", ("serving.grpc.h2",))]
)
def test_what_stands_alone(room: str, allowed: tuple[str, ...]) -> None:
    """Engine, models and exporter use costs and see nothing else of scheduling; HTTP/2 knows nobody who uses it."""
    for module in _below(room):
        assert all(_lies_in(name, *allowed) for name in module.project_imports), module.name


def _folders() -> list[str]:
    return ["", *sorted({name.rpartition(".")[0] for name in NAMES if "." in name})]


@pytest.mark.parametrize("folder", _folders(), ids=lambda folder: folder or "project")
def test_a_folder_holds_no_import_circle(folder: str) -> None:
    """Its modules and subfolders import one another in one direction, types included."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        if (child := _child(module.name, folder)) is not None:
            targets = {_child(name, folder) for name in module.project_imports}
            graph.setdefault(child, set()).update(target for target in targets if target is not None)
    assert _circle(graph) == set()


def _child(name: str, folder: str) -> str | None:
    """The member of a folder in which a module lies; None for modules elsewhere, and for the package itself."""
    if not folder:
        return name.partition(".")[0]
    return name.removeprefix(folder + ".").partition(".")[0] if name.startswith(folder + ".") else None


def _circle(graph: dict[str, set[str]]) -> set[str]:
    """The members of a graph that lead back to themselves by way of others."""
    reached = {name: targets - {name} for name, targets in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reached[name]:
                reached[name] = reached[name] | reached[middle]
    return {name for name in graph if name in reached[name]}


@pytest.mark.parametrize(
    ("library", "owners"),
    [
        ("onnxruntime", {"serving.engine.cpu.ort", "serving.engine.gpu.ort_cuda"}),
        ("openvino", {"serving.engine.cpu.openvino"}),
        ("tensorrt", {"serving.engine.gpu.tensorrt_library"}),
        ("tensorrt_rtx", {"serving.engine.gpu.tensorrt_library"}),
        ("cuda", {"serving.engine.gpu.cuda_driver"}),
        ("opentelemetry", {"serving.telemetry.tracing"}),
        ("pyarrow", {f"serving.bulk.{name}" for name in ("answers", "predictor", "ray_job", "ray_store", "sources")}),
        ("ray", {"serving.bulk.ray_job"}),
        ("rich", {"serving.bulk.progress"}),
    ],
)
def test_a_library_that_may_be_missing_has_its_users(library: str, owners: set[str]) -> None:
    """A machine without the library still runs everything else."""
    users = {module.name for module in _below("serving") if module.reaches(library)}
    assert users == owners


TESTS_OF_TESTS = {"tests.fault.over_tls_test": "runs what connections promise once more, over TLS"}


def test_tests_import_no_tests() -> None:
    """What several share lies in `tests/support`, so that each file can be read, moved and run alone."""
    for path in (ROOT / "tests").rglob("*.py"):
        module = Module(".".join(path.relative_to(ROOT).with_suffix("").parts), path)
        imported = {name for name in module.imports if re.search(r"^tests\..*(_test|conftest)\b", name)}
        assert not imported or module.name in TESTS_OF_TESTS, module.name


BANNED_MODULES = ("pickle", "marshal", "shelve", "joblib", "cloudpickle", "dill")
BANNED_CALLS = {"eval", "exec", "torch.load", "yaml.load", "os.system", "os.popen"}
UNPICKLER = ("export.checkpoint.unpickle", "torch.load(stream, map_location='cpu', weights_only=True)")
"""The one module that reads pickles, in a process of its own, and how."""


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_nothing_turns_data_into_code(module: Module) -> None:
    """No pickle, no eval, no shell: a bundle or a request can never run."""
    assert not module.reaches(*BANNED_MODULES)
    for node in module.nodes:
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in BANNED_CALLS or (module.name, ast.unparse(node)) == UNPICKLER
            shell = [key.value for key in node.keywords if key.arg == "shell"]
            assert not any(ast.unparse(value) != "False" for value in shell)


BROAD_HANDLERS = {
    "serving.http.app": "the HTTP boundary",
    "serving.http.connection": "the same around the making of a reply, which nobody awaits",
    "serving.unawaited": "the boundary of all else that nobody awaits",
    "serving.grpc.boundary": "the gRPC boundary",
    "serving.engine.process.worker": "the engine's loop",
    "serving.fronts.core": "the boundary of the requests of a front",
    "export.proof.reference_library": "whatever a library raises for a folder that it does not load",
    "export.checkpoint.families.family": "whatever Transformers raises for settings that it rejects",
    "export.checkpoint.tokenizer": "the same for a tokenizer",
    "export.checkpoint.probes": "the tokenizers library raises a bare Exception for a text that it cannot read",
    "export.checkpoint.vocabulary": "the tokenizers library raises a bare Exception for a text that it cannot read",
    "export.checkpoint.unpickle": "whatever a hostile file makes PyTorch's loader raise, in a process of its own",
    "serving.inference.tokenizer": "the tokenizers library raises a bare Exception for a file that does not parse",
}


def test_every_exception_is_caught_at_the_boundaries_alone() -> None:
    """`except Exception` stands at the boundaries, and at the one library that leaves no choice."""
    found = {
        module.name
        for module in MODULES
        for node in module.nodes
        if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) == "Exception")
    }
    assert found <= BROAD_HANDLERS.keys()


AWAITED = {
    "serving.http.connection": "an exchange, which has a boundary of its own",
    "serving.grpc.call_kinds": "a call or a message of one, whose boundary is `answer`",
    "serving.http.apis.huggingface": "a group, which waits for its tasks",
    "serving.server": "what the server waits for until it ends",
    "serving.unawaited": "all others",
}
"""Modules that begin tasks, with who awaits them."""


def test_what_nobody_awaits_is_begun_in_one_place() -> None:
    """A task that raises is never silent: others than these begin theirs with `unawaited.start`."""
    begins = re.compile(r"\b(create_task|ensure_future)\(")
    found = {module.name for module in _below("serving") if begins.search(ast.unparse(module.tree))}
    assert found <= AWAITED.keys()
    assert AWAITED.keys() <= found


def test_settings_read_the_environment_alone() -> None:
    """No module but the settings looks at environment variables; the package, fronts and Ray's user set some."""
    readers = re.compile(r"\bos\.(environ|getenv)\b")
    found = {m.name for m in _below("serving") if readers.search(ast.unparse(m.tree))}
    assert found <= {"serving", "serving.settings", "serving.cli", "serving.bulk.cli", "serving.bulk.ray_job"}


def test_sources_do_not_check_input_with_assert() -> None:
    """`python -O` removes assertions; what guards a server must stay."""
    found = {m.name for m in MODULES for node in m.nodes if isinstance(node, ast.Assert)}
    assert not found
