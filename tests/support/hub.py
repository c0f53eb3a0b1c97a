"""A Hugging Face hub of the test's own, with one model; the hub's real client asks it over HTTP."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlsplit

from tests.support.external_servers import http_server

if TYPE_CHECKING:
    from email.message import Message
    from pathlib import Path

TOKEN = "hf_of_its_owner"  # noqa: S105  nobody's
GATED = "somebody/gated"


class Hub:
    """Listens on a free port of this machine; use it in a `with` block."""

    def __init__(self, model: str, folder: Path, cache: Path) -> None:
        self.commit, self.private, self.down = "a" * 40, False, False
        self.requests: list[str] = []
        self._model, self._folder = model, folder
        self._cache = cache
        self._server = http_server(self._answer)

    def __enter__(self) -> Self:
        self.environment = {
            "HF_ENDPOINT": self._server.__enter__(),
            "HF_HOME": str(self._cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)

    def _answer(self, target: str, headers: Message, _: bytes) -> tuple[int, dict[str, str], bytes]:
        path = unquote(urlsplit(target).path)
        self.requests.append(path)
        if self.down:
            return 503, {}, b""
        if path.startswith(f"/api/models/{GATED}"):
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        own = path.startswith((f"/api/models/{self._model}", f"/{self._model}/resolve/"))
        if not own or (self.private and headers["Authorization"] != f"Bearer {TOKEN}"):
            # Without a token it does not tell which of the two it is.
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        return self._told(path) if path.startswith("/api/") else self._file(path)

    def _told(self, path: str) -> tuple[int, dict[str, str], bytes]:
        verb, _, revision = path.removeprefix(f"/api/models/{self._model}").strip("/").partition("/")
        if revision not in {"", "main", self.commit}:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        told: Any = {"id": self._model, "modelId": self._model, "sha": self.commit, "siblings": []}
        if verb == "tree":
            files = {str(file.relative_to(self._folder)): file for file in self._folder.rglob("*") if file.is_file()}
            told = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40}
                for name, file in files.items()
            ]
        return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()

    def _file(self, path: str) -> tuple[int, dict[str, str], bytes]:
        _, _, named = path.partition("/resolve/")
        file = self._folder / named.partition("/")[2]
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = file.read_bytes()
        return 200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": self.commit}, content
