"""External servers: a program in a process of its own, or HTTP answers of a test in this one."""

from __future__ import annotations

import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from email.message import Message
    from pathlib import Path

    HttpAnswer = Callable[[str, Message, bytes], tuple[int, dict[str, str], bytes]]

START_LIMIT_S = 60.0
_STOP_LIMIT_S = 30.0


@contextmanager
def program(
    command: Sequence[str], log: Path, is_ready: Callable[[], bool], **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program that writes to `log` from when it is ready to the end of the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options)

    def is_up() -> bool:
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace")
            raise AssertionError(f"{command[0]} ended with {process.returncode}:\n{said}")
        try:
            return is_ready()
        except (OSError, ValueError):
            return False

    try:
        wait_for(is_up, f"{command[0]} to be ready", START_LIMIT_S)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def http_server(answer: HttpAnswer) -> Iterator[str]:
    """Serves what `answer` makes of path, headers and body: status, headers and body; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, body = answer(self.path, self.headers, sent)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_POST = do_GET  # noqa: N815  the names are the library's

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
