"""Clients of gRPC that nobody here wrote: each asks the same, and tells what came."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events

from tests.support.http2 import prefixed
from tests.support.models import ROOT

_HERE = Path(__file__).parent
_LIMIT_S = 60
_UNPACKED = ROOT / "build"
_TOGETHER = 100

Job = dict[str, Any]
"""`address`; `unary` and `stream`, paths; `good`, `large` and `refused`, messages in hexadecimal digits."""

Told = dict[str, Any]
"""Replies in hexadecimal digits by what was asked, and the name of the refusal's status."""


def grpcio(job: Job) -> Told:
    good, large, refused = ([bytes.fromhex(one) for one in job[name]] for name in ("good", "large", "refused"))
    with grpc.insecure_channel(job["address"]) as channel:
        infer = channel.unary_unary(job["unary"])
        found = {"good": [infer(one).hex() for one in good], "large": [infer(one).hex() for one in large]}
        calls = [infer.future(good[0]) for _ in range(_TOGETHER)]
        found["together"] = [call.result().hex() for call in calls]
        call = infer.future(large[0])
        threading.Event().wait(0.01)
        call.cancel()
        found["after a cancel"] = [infer(good[0]).hex()]
        found["stream"] = [reply.hex() for reply in channel.stream_stream(job["stream"])(iter(good))]
        try:
            infer(refused[0])
        except grpc.RpcError as error:
            return {**found, "refused": error.code().name}
    return found


def grpclib(job: Job) -> Told:
    """A gRPC of its own over `h2`, on asyncio."""
    paths = os.pathsep.join([str(_UNPACKED / "grpclib"), *sys.path])
    return _run([sys.executable, str(_HERE / "grpclib_client.py")], job, {"PYTHONPATH": paths})


def grpc_js(job: Job) -> Told:
    """That of browsers' and Node's world, over Node's own HTTP/2."""
    modules = {"NODE_PATH": str(_UNPACKED / "grpc-js" / "node_modules")}
    return _run(["node", str(_HERE / "grpc_js_client.js")], job, modules)


def hyper_h2(job: Job) -> Told:
    """The library `h2`, which checks what it is told as its RFC has it."""
    good, large, refused = ([bytes.fromhex(one) for one in job[name]] for name in ("good", "large", "refused"))
    host, _, port = job["address"].rpartition(":")
    with socket.create_connection((host, int(port)), _LIMIT_S) as connection:
        client = _Hyper(connection)

        def ask(path: str, *calls: list[bytes]) -> list[dict[str, Any]]:
            return client.ask(path, list(calls))

        infer = job["unary"]
        told: Told = {
            "good": [_hex(ask(infer, [one])) for one in good],
            "together": [_hex([reply]) for reply in ask(infer, *([good[0]] for _ in range(_TOGETHER)))],
            "large": [_hex(ask(infer, [one])) for one in large],
            "refused": grpc_name(ask(infer, [refused[0]])[0]["fields"][b"grpc-status"]),
        }
        client.cancel(infer, large[0])
        told["after a cancel"] = [_hex(ask(infer, [good[0]]))]
        told["stream"] = [reply.hex() for reply in _messages(ask(job["stream"], good)[0]["data"])]
        return told


def grpc_name(number: bytes) -> str:
    return next(code.name for code in grpc.StatusCode if code.value[0] == int(number))


CLIENTS = {"grpcio": grpcio, "grpclib": grpclib, "hyper-h2": hyper_h2, "grpc-js": grpc_js}


def missing(client: str) -> str:
    """Why a client cannot run here; empty where it can."""
    if client == "grpclib" and not (_UNPACKED / "grpclib").exists():
        return "no grpclib here (see make foreign-clients)"
    if client == "grpc-js" and not (shutil.which("node") and (_UNPACKED / "grpc-js" / "node_modules").exists()):
        return "no grpc-js here (see make foreign-clients)"
    return ""


def h2load() -> list[str] | None:
    """The words that run nghttp2's load generator: the system's, or what was unpacked; None where there is none."""
    unpacked = _UNPACKED / "nghttp2" / "usr"
    if (installed := shutil.which("h2load")) is not None:
        return [installed]
    if not (unpacked / "bin" / "h2load").exists():
        return None
    libraries = os.pathsep.join(map(str, (unpacked / "lib").glob("*-linux-gnu")))
    return ["env", f"LD_LIBRARY_PATH={libraries}", str(unpacked / "bin" / "h2load")]


def _run(command: list[str], job: Job, more: dict[str, str]) -> Told:
    done = subprocess.run(
        command,
        input=json.dumps(job) + "\n",
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def _messages(data: bytes) -> list[bytes]:
    found = []
    while data:
        size = int.from_bytes(data[1:5], "big")
        found.append(data[5 : 5 + size])
        data = data[5 + size :]
    return found


def _hex(replies: list[dict[str, Any]]) -> str:
    [message] = _messages(replies[0]["data"])
    return message.hex()


class _Hyper:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
        self._h2.initiate_connection()
        self._replies: dict[int, dict[str, Any]] = defaultdict(lambda: {"fields": {}, "data": b"", "ended": False})
        self._flush()

    def ask(self, path: str, calls: list[list[bytes]]) -> list[dict[str, Any]]:
        """Calls side by side, each with its messages; their replies."""
        owed = {self._open(path): b"".join(map(prefixed, messages)) for messages in calls}
        numbers = list(owed)
        while owed or not all(self._replies[number]["ended"] for number in numbers):
            for number in list(owed):
                owed[number] = self._send(number, owed[number])
                if not owed[number]:
                    self._h2.end_stream(number)
                    del owed[number]
            self._flush()
            self._receive()
        return [self._replies[number] for number in numbers]

    def cancel(self, path: str, message: bytes) -> None:
        number = self._open(path)
        self._send(number, prefixed(message))
        self._h2.reset_stream(number, 8)
        self._flush()

    def _open(self, path: str) -> int:
        number = self._h2.get_next_available_stream_id()
        pseudo = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test")]
        self._h2.send_headers(number, [*pseudo, ("te", "trailers"), ("content-type", "application/grpc")])
        return int(number)

    def _send(self, number: int, data: bytes) -> bytes:
        """Sends as much as the windows take; the rest."""
        while data and (room := self._h2.local_flow_control_window(number)) > 0:
            size = min(room, self._h2.max_outbound_frame_size)
            self._h2.send_data(number, data[:size])
            data = data[size:]
        return data

    def _flush(self) -> None:
        self._socket.sendall(self._h2.data_to_send())

    def _receive(self) -> None:
        data = self._socket.recv(1 << 16)
        assert data, "the server closed"
        for event in self._h2.receive_data(data):
            reply = self._replies[getattr(event, "stream_id", 0)]
            if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                reply["fields"] |= dict(event.headers)
            elif isinstance(event, h2.events.DataReceived):
                reply["data"] += event.data
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                reply["ended"] = True
            assert not isinstance(event, (h2.events.StreamReset, h2.events.ConnectionTerminated)), event
        self._flush()
