"""A real `tritonserver` in a process of its own, from the wheel `nvidia-pytriton`, which `make triton` installs.

The wheel carries the server and its Python backend, no other. The backend's stub needs numpy 1, so it has an
environment of its own that borrows the rest from this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.support.clients import get
from tests.support.models import ROOT
from tests.support.server import free_port
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from types import TracebackType

ENVIRONMENT = ROOT / "build" / "triton"
START_LIMIT_S = 60.0
_STOP_LIMIT_S = 30.0
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_PACKAGES = ENVIRONMENT / "lib" / f"python{_PYTHON}" / "site-packages"
_INSTALLED = _PACKAGES / "pytriton" / "tritonserver"
_STUB = _INSTALLED / "python_backend_stubs" / _PYTHON / "triton_python_backend_stub"
_LIBPYTHON = Path(sysconfig.get_config_var("LIBDIR"), str(sysconfig.get_config_var("INSTSONAME")))


def obstacle() -> str | None:
    """Why no tritonserver can be started here; None where one can."""
    if not _INSTALLED.is_dir():
        return "nvidia-pytriton is not installed: make triton"
    if not _STUB.is_file():
        return f"nvidia-pytriton has no Python backend for Python {_PYTHON}"
    if not _LIBPYTHON.is_file() or ".so" not in _LIBPYTHON.name:
        return "this Python has no shared library for Triton's Python backend"
    return None


class Triton:
    """A tritonserver that has loaded some models of a repository; use it in a `with` block.

    Attributes:
        http: `host:port` of HTTP.
        grpc: `host:port` of gRPC.
    """

    def __init__(self, repository: Path, work: Path, *models: str) -> None:
        """Prepares; nothing runs before the `with` block.

        Args:
            repository: The Triton model repository.
            work: A directory to write to.
            *models: What to load; the others are left alone.
        """
        self._repository = repository
        self._work = work
        self._models = models
        self.http, self.grpc = (f"127.0.0.1:{free_port()}" for _ in range(2))

    def __enter__(self) -> Self:
        """Starts the server and waits until it is ready."""
        backends = self._work / "backends"
        shutil.copytree(_INSTALLED / "backends", backends)
        shutil.copy(_STUB, backends / "python")
        self.log_path = self._work / "tritonserver.log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                self._command(backends), env=_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            wait_for(self._ready_or_gone, "a ready tritonserver", START_LIMIT_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        if self.process.poll() is not None:
            raise AssertionError(f"tritonserver ended with {self.process.returncode}:\n{self.log}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the server, by force if it does not go."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        """Everything that the server wrote so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def _command(self, backends: Path) -> list[str]:
        (http, grpc) = (address.rpartition(":")[2] for address in (self.http, self.grpc))
        return [
            str(_INSTALLED / "bin" / "tritonserver"),
            *("--model-repository", str(self._repository), "--backend-directory", str(backends)),
            *("--http-address", "127.0.0.1", "--http-port", http, "--grpc-address", "127.0.0.1", "--grpc-port", grpc),
            *("--allow-metrics", "false", "--model-control-mode", "explicit"),
            *[word for model in self._models for word in ("--load-model", model)],
        ]

    def _ready_or_gone(self) -> bool:
        if self.process.poll() is not None:
            return True
        try:
            return get(self.http, "/v2/health/ready").status == 200
        except OSError:
            return False


def _environment() -> dict[str, str]:
    """What lets the stub find its libraries, and by the first `python3` of the path its packages."""
    libraries = [str(_LIBPYTHON.parent), str(_PACKAGES / "nvidia_pytriton.libs")]
    path = [str(ENVIRONMENT / "bin"), os.environ["PATH"]]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries), "PATH": os.pathsep.join(path)}
