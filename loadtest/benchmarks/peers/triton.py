"""Triton from the wheel `nvidia-pytriton`: the real `tritonserver`, with its Python backend only."""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bertserve.loadtest.benchmarks.server_process import HOST, ServerProcess, free_ports, isolated
from bertserve.loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bertserve.loadtest.generator.workload import Bundle

_MODEL = Path(__file__).parent / "inside" / "triton_model.py"
_CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: {batch}
input {{ name: "text" data_type: TYPE_STRING dims: 1 }}
output {{ name: "embedding" data_type: TYPE_FP32 dims: {hidden_size} }}
instance_group {{ count: {instances} kind: KIND_CPU }}
{scheduling}
"""
_PARAMETER = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'


@dataclass(slots=True, frozen=True)
class TritonModel:
    """A model of a Triton repository.

    Attributes:
        name: Its name.
        engine: `onnxruntime` or `openvino`.
        bundle: Its artifact and its tokenizer. Longer texts are truncated, as in our server.
        instances: Processes of the Python backend.
        threads: Threads per instance.
        batch: Maximum batch of Triton's dynamic batcher; 1 for no batching.
        together: Whether a batch is computed as one, padded to its longest text, instead of text by text.
        multiple: Inputs are padded to multiples of it: OpenVINO prepares its kernels for each new length.
        queue_ms: Maximum queue time; Triton then refuses the request. A shorter timeout of the request takes
            precedence. 0 for no limit.
    """

    name: str
    engine: str
    bundle: Bundle
    instances: int
    threads: int
    batch: int = 1
    together: bool = False
    multiple: int = 1
    queue_ms: int = 0

    @property
    def config(self) -> str:
        """Its `config.pbtxt`."""
        scheduling = "dynamic_batching { }" if self.batch > 1 else ""
        if self.queue_ms:
            policy = f"timeout_action: REJECT default_timeout_microseconds: {1000 * self.queue_ms}"
            scheduling = f"dynamic_batching {{ default_queue_policy {{ {policy} allow_timeout_override: true }} }}"
        parameters = {
            "engine": self.engine,
            "artifact": self.bundle.artifact.absolute(),
            "tokenizer": self.bundle.path.absolute() / "tokenizer.json",
            "threads": self.threads,
            "together": "true" if self.together else "false",
            "multiple": self.multiple,
            "max_tokens": self.bundle.max_length,
        }
        own = {"name": self.name, "batch": self.batch, "instances": self.instances}
        made = _CONFIG.format(hidden_size=self.bundle.hidden_size, scheduling=scheduling, **own)
        return made + "".join(_PARAMETER.format(name, value) for name, value in parameters.items())


class Installation:
    """The `tritonserver` of the wheel in a virtual environment."""

    def __init__(self, environment: Path) -> None:
        """Looks for its files; `obstacle` tells if something is missing."""
        self._bin = environment.absolute() / "bin"
        found = sorted((environment.absolute() / "lib").glob("python3.*/site-packages"))
        self._packages = found[0] if found else environment.absolute()
        self._server = self._packages / "pytriton" / "tritonserver"
        self._python = self._packages.parent.name.removeprefix("python")
        self._stub = self._server / "python_backend_stubs" / self._python / "triton_python_backend_stub"
        self._library = Path(sysconfig.get_config_var("LIBDIR"), str(sysconfig.get_config_var("INSTSONAME")))

    def obstacle(self) -> str | None:
        """Why it cannot be started here; None if it can."""
        if not self._server.is_dir():
            return "nvidia-pytriton is not installed"
        if not self._stub.is_file():
            return f"nvidia-pytriton has no Python backend for Python {self._python}"
        if not self._library.is_file() or ".so" not in self._library.name:
            return "this Python has no shared library for Triton's Python backend"
        return None

    def command(self, repository: Path, work: Path, http: str, grpc: str) -> list[str]:
        """Command line without metrics, listening on two `host:port`.

        A copy of the Python backend goes into `work`, because its stub must lie beside its library.
        """
        backends = work / "backends"
        shutil.copytree(self._server / "backends", backends)
        shutil.copy(self._stub, backends / "python")
        (http_host, _, http_port), (grpc_host, _, grpc_port) = http.rpartition(":"), grpc.rpartition(":")
        return [
            str(self._server / "bin" / "tritonserver"),
            *("--model-repository", str(repository), "--backend-directory", str(backends)),
            *("--http-address", http_host, "--http-port", http_port),
            *("--grpc-address", grpc_host, "--grpc-port", grpc_port, "--allow-metrics", "false"),
        ]

    def variables(self) -> dict[str, str]:
        """Environment in which the stub finds its libraries, and its packages by the first `python3` of the path."""
        libraries = [str(self._library.parent), str(self._packages / "nvidia_pytriton.libs")]
        path = [str(self._bin), os.environ["PATH"]]
        return {"LD_LIBRARY_PATH": os.pathsep.join(libraries), "PATH": os.pathsep.join(path)}


class TritonServer(ServerProcess):
    """A tritonserver with all models of a repository."""

    def __init__(self, environment: Path, work: Path, models: Iterable[TritonModel]) -> None:
        """Writes the repository into `work`, which is emptied; the environment holds the wheel.

        Raises:
            BenchError: The environment has no tritonserver for its Python.
        """
        installation = Installation(environment)
        if obstacle := installation.obstacle():
            raise BenchError(f"{environment}: {obstacle}")
        http_port, grpc_port = free_ports(2)
        shutil.rmtree(work, ignore_errors=True)
        for model in models:
            folder = work / "repository" / model.name
            (folder / "1").mkdir(parents=True)
            (folder / "config.pbtxt").write_text(model.config, encoding="utf-8")
            shutil.copy(_MODEL, folder / "1" / "model.py")
        command = installation.command(work / "repository", work, f"{HOST}:{http_port}", f"{HOST}:{grpc_port}")
        super().__init__(command, isolated(installation.variables()), (http_port, "/v2/health/ready"))
        self.grpc_port = grpc_port
