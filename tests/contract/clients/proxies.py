"""nginx and Envoy before a server, each with the lines that docs/clients.md has, and no others that a request sees."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BUILD = Path(__file__).parents[3] / "build"


@dataclass(frozen=True)
class Proxy:
    """A program that passes requests on.

    Attributes:
        name: Of the product.
        version: The one that is run.
        http: What its user writes for HTTP.
        grpc: And for gRPC.
        program: Where it lies once it is unpacked, below `build`.
        words: Its command line behind the program, of the folder that is its own.
        files: What it reads from there, by name, of the four ports: its own for HTTP and gRPC, the server's likewise.
    """

    name: str
    version: str
    http: str
    grpc: str
    program: str
    words: Callable[[Path], list[str]]
    files: Callable[[Path, int, int, int, int], dict[str, str]]

    @property
    def is_here(self) -> bool:
        return (_BUILD / self.program).exists()

    @contextmanager
    def running(self, folder: Path, *ports: int) -> Iterator[subprocess.Popen[bytes]]:
        """Runs it; what it says of errors is in `folder / "log"`."""
        for name, content in self.files(folder, *ports).items():  # type: ignore[call-arg]  four
            (folder / name).write_text(content, encoding="utf-8")
        with (folder / "log").open("wb") as log, subprocess.Popen(
            [str(_BUILD / self.program), *self.words(folder)], stdout=log, stderr=log, cwd=folder
        ) as process:
            try:
                yield process
            finally:
                process.terminate()
