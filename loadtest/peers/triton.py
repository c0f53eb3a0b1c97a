"""Triton, from the wheel `nvidia-pytriton`: the real `tritonserver`, with its Python backend alone."""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.errors import BenchError
from loadtest.server import HOST, ServerProcess, free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence

_MODEL = Path(__file__).parent / "inside" / "triton_model.py"

_CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: {batch}
input {{ name: "text" data_type: TYPE_STRING dims: 1 }}
output {{ name: "embedding" data_type: TYPE_FP32 dims: {hidden_size} }}
instance_group {{ count: {instances} kind: KIND_CPU }}
{batching}
parameters {{ key: "engine" value {{ string_value: "{engine}" }} }}
parameters {{ key: "artifact" value {{ string_value: "{artifact}" }} }}
parameters {{ key: "tokenizer" value {{ string_value: "{tokenizer}" }} }}
parameters {{ key: "threads" value {{ string_value: "{threads}" }} }}
parameters {{ key: "together" value {{ string_value: "{together}" }} }}
"""


@dataclass(slots=True, frozen=True)
class TritonModel:
    """A model of a Triton repository.

    Attributes:
        name: Its name.
        engine: `onnxruntime` or `openvino`.
        artifact: The ONNX file.
        tokenizer: Its `tokenizer.json`.
        hidden_size: Numbers in an embedding.
        instances: Processes of the Python backend.
        threads: Of each instance.
        batch: Texts that Triton's dynamic batcher may put together; 1: no batching.
        together: Whether they are computed as one batch rather than one after the other.
    """

    name: str
    engine: str
    artifact: Path
    tokenizer: Path
    hidden_size: int
    instances: int
    threads: int
    batch: int = 1
    together: bool = False

    @property
    def config(self) -> str:
        """Its `config.pbtxt`."""
        return _CONFIG.format(
            name=self.name,
            batch=self.batch,
            hidden_size=self.hidden_size,
            instances=self.instances,
            batching="dynamic_batching { }" if self.batch > 1 else "",
            engine=self.engine,
            artifact=self.artifact.absolute(),
            tokenizer=self.tokenizer.absolute(),
            threads=self.threads,
            together="true" if self.together else "false",
        )


class TritonServer(ServerProcess):
    """A tritonserver with all models of a repository.

    Attributes:
        http_port: Its port of HTTP.
        grpc_port: Its port of gRPC.
    """

    def __init__(self, environment: Path, work: Path, models: Sequence[TritonModel]) -> None:
        """Writes the repository.

        Args:
            environment: The virtual environment that holds the wheel.
            work: A directory to write to; what is in it is removed.
            models: What to serve.

        Raises:
            BenchError: The environment has no tritonserver for its Python.
        """
        self.http_port, self.grpc_port = free_ports(2)
        packages = _packages(environment)
        installed = packages / "pytriton" / "tritonserver"
        version = packages.parent.name.removeprefix("python")
        stub = installed / "python_backend_stubs" / version / "triton_python_backend_stub"
        libpython = Path(sysconfig.get_config_var("LIBDIR"), str(sysconfig.get_config_var("INSTSONAME")))
        if not stub.is_file():
            raise BenchError(f"{environment} has no tritonserver for Python {version}")
        if ".so" not in libpython.name or not libpython.is_file():
            raise BenchError("this Python has no shared library, which Triton's Python backend needs")
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(installed / "backends", work / "backends")
        shutil.copy(stub, work / "backends" / "python")
        for model in models:
            folder = work / "repository" / model.name
            (folder / "1").mkdir(parents=True)
            (folder / "config.pbtxt").write_text(model.config, encoding="utf-8")
            shutil.copy(_MODEL, folder / "1" / "model.py")
        command = [
            str(installed / "bin" / "tritonserver"),
            *("--model-repository", str(work / "repository"), "--backend-directory", str(work / "backends")),
            *("--http-address", HOST, "--http-port", str(self.http_port)),
            *("--grpc-address", HOST, "--grpc-port", str(self.grpc_port), "--allow-metrics", "false"),
        ]
        # The stub finds its libraries by the one, and its packages by the first `python3` of the other.
        libraries = [str(libpython.parent), str(packages / "nvidia_pytriton.libs")]
        path = [str(environment.absolute() / "bin"), os.environ["PATH"]]
        variables = {"LD_LIBRARY_PATH": os.pathsep.join(libraries), "PATH": os.pathsep.join(path)}
        super().__init__(command, isolated(variables), (self.http_port, "/v2/health/ready"))


def isolated(variables: dict[str, str]) -> dict[str, str]:
    """This process's environment without what would let another Python find this project, and these variables."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **variables}


def _packages(environment: Path) -> Path:
    found = sorted((environment.absolute() / "lib").glob("python3.*/site-packages"))
    if not found:
        raise BenchError(f"{environment} is no virtual environment; make it with `make bench-peers`")
    return found[0]
