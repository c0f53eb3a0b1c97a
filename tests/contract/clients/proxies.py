"""nginx and Envoy before a server, with the lines that docs/reference/clients.md has and little else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BUILD = Path(__file__).parents[3] / "build"


class Ports(NamedTuple):
    """Where a proxy listens, and the server behind it."""

    http: int
    grpc: int
    server_http: int
    server_grpc: int


@dataclass(frozen=True)
class Proxy:
    """A program that passes requests on."""

    name: str
    version: str
    written: tuple[str, ...]
    program: str
    options: Sequence[str]
    configuration: Callable[[Path, Ports], str]

    @property
    def is_here(self) -> bool:
        return (_BUILD / self.program).exists()

    def command(self, folder: Path, ports: Ports) -> list[str]:
        """What runs it in a folder, with its configuration there."""
        file = folder / "configuration.json"
        file.write_text(self.configuration(folder, ports), encoding="utf-8")
        return [str(_BUILD / self.program), "-c", str(file), *self.options]


NGINX_LINES = (
    "upstream http { server 127.0.0.1:8000; keepalive 16; }",
    'proxy_pass http://http; proxy_http_version 1.1; proxy_set_header Connection "";',
    "upstream grpc { server 127.0.0.1:8001; keepalive 16; }",
    "grpc_pass grpc://grpc;",
    "client_max_body_size 64m;",
)


def _nginx(folder: Path, ports: Ports) -> str:
    http, passed_http, grpc, passed_grpc, size = NGINX_LINES
    paths = "".join(f"{name}_temp_path {folder}; " for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    return f"""
daemon off; master_process off; pid {folder}/pid; error_log stderr error;
events {{}}
http {{
  access_log off; {paths} {size}
  {http.replace("8000", str(ports.server_http))}
  {grpc.replace("8001", str(ports.server_grpc))}
  server {{
    listen 127.0.0.1:{ports.http};
    location / {{ {passed_http} }}
    location /models/ {{ proxy_pass http://http; }}
    location /bert/ {{ proxy_pass http://http/; }}
    location = /slashless {{ proxy_pass http://http/; }}
    location /slashless/ {{ proxy_pass http://http/; }}
  }}
  server {{ listen 127.0.0.1:{ports.grpc} http2; location / {{ {passed_grpc} }} }}
}}"""


def _typed(name: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"type.googleapis.com/envoy.extensions.{name}", **fields}


def _listener(name: str, port: int, retry: dict[str, Any]) -> dict[str, Any]:
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": name, **retry}}]
    router = {"name": "router", "typed_config": _typed("filters.http.router.v3.Router")}
    manager = _typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        route_config={"virtual_hosts": [{"name": name, "domains": ["*"], "routes": routes}]},
        http_filters=[router],
    )
    return {
        "name": name,
        "address": _address(port),
        "filter_chains": [{"filters": [{"name": "manager", "typed_config": manager}]}],
    }


def _cluster(name: str, port: int, **fields: Any) -> dict[str, Any]:
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": _address(port)}}]}]
    check = {"timeout": "1s", "interval": "1s", "unhealthy_threshold": 1, "healthy_threshold": 1}
    assigned = {"cluster_name": name, "endpoints": endpoints}
    health = {"health_checks": [{**check, **fields.pop("health_check")}]}
    return {"name": name, "type": "STATIC", "load_assignment": assigned, **health, **fields}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


ENVOY_LINES = (
    '"health_checks": [{"http_health_check": {"path": "/readyz"}, ...}]',
    '"explicit_http_config": {"http2_protocol_options": {}}',
    '"health_checks": [{"grpc_health_check": {}, ...}]',
    (
        '"retry_policy": {"retry_on": "connect-failure,retriable-headers", "num_retries": 2,'
        ' "retriable_headers": [{"name": "x-computed"}, {"name": "bertserve-computed"}]}'
    ),
)


def _envoy(_: Path, ports: Ports) -> str:
    by_http, spoken, by_grpc, retry = (json.loads(f"{{{line.replace(', ...', '')}}}") for line in ENVOY_LINES)
    options = _typed("upstreams.http.v3.HttpProtocolOptions", **spoken)
    clusters = [
        _cluster("http", ports.server_http, health_check=by_http["health_checks"][0]),
        _cluster(
            "grpc",
            ports.server_grpc,
            health_check=by_grpc["health_checks"][0],
            typed_extension_protocol_options={"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        ),
    ]
    listeners = [_listener("http", ports.http, retry), _listener("grpc", ports.grpc, retry)]
    return json.dumps({"static_resources": {"listeners": listeners, "clusters": clusters}})


PROXIES = (
    Proxy("nginx", "1.22 (Debian)", NGINX_LINES, "nginx/usr/sbin/nginx", ("-e", "stderr"), _nginx),
    Proxy(
        "Envoy",
        "1.40.0",
        ENVOY_LINES,
        "envoy/envoy/_bin/envoy",
        ("--concurrency", "1", "--disable-hot-restart", "-l", "error"),
        _envoy,
    ),
)
