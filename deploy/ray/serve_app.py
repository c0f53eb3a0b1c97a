"""Replicas of `bertserve serve` on a Ray cluster, as many as keep the predicted wait of a new request short.

    serve run deploy.ray.serve_app:application models=/shared/models threads=2

Each replica is a server process; this module passes requests on to it. See docs/guides/deploy.md.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys

import aiohttp
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from starlette.requests import Request  # noqa: TC002  Ray Serve reads the annotation
from starlette.responses import Response

WAIT_S = 0.1
"""Replicas are added where a new request would wait for longer, and removed where it would wait for much less."""

_METRIC = "bertserve_predicted_wait_seconds"
_OF_ONE_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


def by_predicted_wait(context: serve.config.AutoscalingContext) -> tuple[int, dict[str, float]]:
    """As many replicas as would bring the mean wait to `WAIT_S`, and one less at most at a time."""
    waits = list(context.aggregated_metrics.get(_METRIC, {}).values())
    current = context.current_num_replicas
    wanted = math.ceil(current * sum(waits) / len(waits) / WAIT_S) if waits else current
    wanted = max(wanted, current - 1, context.capacity_adjusted_min_replicas)
    return min(wanted, context.capacity_adjusted_max_replicas), {}


@serve.deployment(
    max_ongoing_requests=1000,  # the server's own admission refuses what would come too late
    autoscaling_config=AutoscalingConfig(
        min_replicas=1,
        max_replicas=8,
        look_back_period_s=10.0,
        upscale_delay_s=10.0,
        policy=AutoscalingPolicy(policy_function=by_predicted_wait),
    ),
)
class Bertserve:
    """A server process on free ports, and the way to it."""

    def __init__(self, models: str, *options: str) -> None:
        command = [sys.executable, "-m", "bertserve", "serve", "--models", models, "--lame-duck-s", "0"]
        command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", *options]
        self._session: aiohttp.ClientSession | None = None
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = ""
        for line in self._process.stdout or ():
            said += line
            if found := re.search(r"HTTP +(\S+).*?metrics +(\S+)/metrics", said, re.DOTALL):
                self._server, self._metrics = found.groups()
                return
        raise RuntimeError(f"bertserve serve ended with {self._process.wait()}: its log has the reason")

    async def __call__(self, request: Request) -> Response:
        """The server's answer to a request."""
        url = f"{self._server}{request.url.path}?{request.url.query}".rstrip("?")
        headers = [(name, value) for name, value in request.headers.items() if name not in _OF_ONE_HOP]
        async with self._client().request(request.method, url, headers=headers, data=await request.body()) as reply:
            kept = {name: value for name, value in reply.headers.items() if name.lower() not in _OF_ONE_HOP}
            return Response(await reply.read(), reply.status, kept)

    def _client(self) -> aiohttp.ClientSession:
        """Made where the loop runs that uses it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        return self._session

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The wait that the server predicts for a new request, in seconds."""
        async with self._client().get(f"{self._metrics}/metrics") as reply:
            found = re.search(rf"^{_METRIC} (\S+)$", await reply.text(), re.MULTILINE)
        return {_METRIC: float(found[1]) if found else 0.0}

    async def check_health(self) -> None:
        """Raises where the server process has ended: Ray then replaces the replica."""
        if self._process.poll() is not None:
            raise RuntimeError(f"bertserve serve ended with {self._process.returncode}")

    def __del__(self) -> None:
        """Ends the server with its replica."""
        if hasattr(self, "_process"):
            self._process.terminate()
            self._process.wait()


def application(arguments: dict[str, str]) -> serve.Application:
    """What `serve run` starts.

    Args:
        arguments: `models`, the model repository; `threads`, the CPUs of each replica; `options`, more words for
            `bertserve serve`.
    """
    threads = arguments.get("threads", "1")
    words = ("--threads", threads, *arguments.get("options", "").split())
    replica = Bertserve.options(ray_actor_options={"num_cpus": int(threads)})
    return replica.bind(arguments["models"], *words)
