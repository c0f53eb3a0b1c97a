"""The announcement that the server is ready: a line of the log, and on a terminal the addresses."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bertserve.serving.logs import fields, members

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.serving.engine.process.remote_engine import EngineLife
    from bertserve.serving.inference.served_models import Repository, ServedModel
    from bertserve.serving.lifecycle import Lifecycle
    from bertserve.serving.settings import Settings

log = logging.getLogger("bertserve")


class Addresses(NamedTuple):
    http: tuple[str, int]
    grpc: tuple[str, int]
    metrics: tuple[str, int]


@dataclass(slots=True)
class Announcement:
    """Logged whenever an engine becomes ready after there was none; shown on the terminal once."""

    settings: Settings
    repository: Repository
    lifecycle: Lifecycle
    addresses: Callable[[], Addresses]
    say: Callable[[str], None]
    said: bool = False

    def engine_up(self, engine: EngineLife) -> None:
        addresses, settings, models = self.addresses(), self.settings, self.repository.models
        secured = "s" if settings.tls_cert_file else ""
        http = f"http{secured}://{_joined(addresses.http)}"
        grpc = _joined(addresses.grpc)
        metrics = f"http://{_joined(addresses.metrics)}/metrics"
        names = ", ".join(f"{model.name} version {model.version} ({_form(model)})" for model in models)
        where = self.repository.engine.where(engine.ready.threads)
        state = self.lifecycle.state
        served = [_members(model) for model in models]
        told = members(state=state, models=served, engine=self.repository.engine.engine, hardware=where)
        log.info("%s: %s on %s", state, names, where, extra=told | fields(http=http, grpc=grpc, metrics=metrics))
        if settings.log_format == "text" and not self.said:
            self.said = True
            path, body = example(self.repository)
            key = "-H 'Authorization: Bearer KEY' " if settings.api_keys_file else ""
            self.say(
                f"bertserve is ready: {names}\n"
                f"  HTTP     {http}  (docs at {http}/docs)\n"
                f"  gRPC     {grpc}{'  (TLS)' if secured else ''}\n"
                f"  metrics  {metrics}\n"
                f"Try:\n"
                f"  curl {http}{path} {key}-H 'Content-Type: application/json' -d '{body}'\n"
            )


def example(repository: Repository) -> tuple[str, str]:
    """Path and body of a request that the first model answers."""
    model = repository.models[0]
    path, body = model.task.path, json.dumps(model.task.example)
    alone = len(repository.of_task(model.manifest.task)) == 1
    return (path if alone else f"/models/{model.name}{path}"), body


def _joined(address: tuple[str, int]) -> str:
    """A host in a URL: an IPv6 address in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _members(model: ServedModel) -> dict[str, object]:
    precision, proven = model.artifact.precision, model.proven
    return {"name": model.name, "version": model.version, "precision": precision, "proven": proven}


def _form(model: ServedModel) -> str:
    return model.artifact.precision if model.proven else f"{model.artifact.precision}, unproven"
