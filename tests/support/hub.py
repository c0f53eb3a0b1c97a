"""A Hugging Face hub of the test's own, with one model; the hub's real client asks it over HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "hf_of_its_owner"  # noqa: S105  nobody's
GATED = "somebody/gated"


class Hub:
    """Listens on a free port of this machine; use it in a `with` block.

    Attributes:
        environment: What leads the hub's client here.
        commit: What the main branch is.
        private: Whether the model needs the token.
        down: Whether every request fails.
        requests: Paths that were asked for.
    """

    def __init__(self, model: str, folder: Path, cache: Path) -> None:
        """Opens the port.

        Args:
            model: Its id, such as `somebody/small`.
            folder: Its files, whatever the commit.
            cache: The home of the hub's client.
        """
        self.commit, self.private, self.down = "a" * 40, False, False
        self.requests: list[str] = []
        self._model, self._folder = model, folder
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                hub.requests.append(path)
                status, headers, body = hub.answer(path, self.headers["Authorization"])
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815  the name is the library's

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.environment = {
            "HF_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def answer(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        if self.down:
            return 503, {}, b""
        if path.startswith(f"/api/models/{GATED}"):
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        own = path.startswith((f"/api/models/{self._model}", f"/{self._model}/resolve/"))
        if not own or (self.private and authorization != f"Bearer {TOKEN}"):
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

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
