"""Clients of gRPC that nobody here wrote: each asks the same, and tells what came."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc

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


CLIENTS = {"grpcio": grpcio, "grpclib": grpclib, "grpc-js": grpc_js}


def missing(client: str) -> str:
    """Why a client cannot run here; empty where it can."""
    if client == "grpclib" and not (_UNPACKED / "grpclib").exists():
        return "no grpclib here (see make programs)"
    if client == "grpc-js" and not (shutil.which("node") and (_UNPACKED / "grpc-js" / "node_modules").exists()):
        return "no grpc-js here (see make programs)"
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
