"""Which configuration of Triton's Python backend serves best here.

It has to be found once for a machine; `servers.triton_models` holds what was found.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.peers.kit import PeerBenchmark
from loadtest.benchmarks.peers.servers import KINDS, TRITON_BATCH, triton_model
from loadtest.benchmarks.peers.subjects import MANY, ONE
from loadtest.benchmarks.peers.triton import TritonServer
from loadtest.benchmarks.runner import Page
from loadtest.benchmarks.store import Store
from loadtest.benchmarks.turns import Samples, Turn, measure_round
from loadtest.generator.child import Child
from loadtest.generator.client import GRPC
from loadtest.generator.workload import make_texts
from loadtest.report.tables import Table

if TYPE_CHECKING:
    from pathlib import Path

    from loadtest.benchmarks.peers.servers import Kit
    from loadtest.benchmarks.peers.triton import TritonModel

_TEXTS = 100
_RESULT = "-triton.json"


def candidates(kit: Kit) -> list[TritonModel]:
    """What is tried: instances against threads, and Triton's dynamic batching.

    What Triton puts together is computed as one batch, of ONNX Runtime's own recipe too, although that changes its
    answers: Triton's users are not told.
    """
    cores = kit.threads
    found = []
    for kind in KINDS:
        for instances, threads in ((1, cores), (cores, 1), (cores, cores)):
            for batch in (1, TRITON_BATCH):
                name = f"{kind}-{instances}x{threads}-{batch}"
                found.append(
                    triton_model(kit, name, kind, instances=instances, threads=threads, batch=batch, together=batch > 1)
                )
    return found


class TuneBenchmark(PeerBenchmark):
    """Every candidate over gRPC in turns."""

    name = "peers-tune"
    purpose = "configurations of Triton's Python backend beside one another"
    out = "peers-triton"
    rounds = 3
    seconds = 1.0

    @cached_property
    def _client(self) -> tuple[TritonServer, Child, list[TritonModel]]:
        kit = self.kit
        models = candidates(kit)
        texts = {
            tokens: [text.text for text in make_texts(kit.ort.path, tokens, _TEXTS)] for tokens in self.options.tokens
        }
        server = TritonServer(kit.environments / "triton", kit.environments / "work-tune", models)
        self.stack.enter_context(server)
        client = self.stack.enter_context(Child("loadtest.generator.client"))
        for model in models:
            way: dict[str, Any] = {"way": subject(model), "form": GRPC, "port": server.grpc_port}
            client.ask("open", endpoint=model.name, hidden_size=model.hidden_size, texts=texts, **way)
        return server, client, models

    def measure(self, number: int, tokens: int) -> dict[str, Any]:  # noqa: ARG002  every round is the same
        server, client, models = self._client
        turns = []
        for model in models:
            for connections in (ONE, MANY):
                arguments = {"way": subject(model), "tokens": tokens, "connections": connections}
                name = f"{subject(model)}; {connections}"
                turns.append(Turn(name, client, arguments, self.options.seconds, server))
        return measure_round(turns, self.say)

    def page(self, store: Store) -> Page:
        return Page("Configurations of Triton", "Over gRPC, in turns.", [_table(store)])


def subject(model: TritonModel) -> str:
    """A configuration, cell by cell of its row in the table."""
    batching = "no" if model.batch == 1 else f"up to {model.batch}"
    return f"{model.artifact.name}; {model.instances} of {model.threads} threads; {batching}"


def table(comparison: Path) -> Table | None:
    """What was tried, from the file beside that of the comparison; None where nothing was."""
    path = comparison.with_name(comparison.stem + _RESULT)
    return _table(Store.read(path)) if path.exists() else None


def _table(store: Store) -> Table:
    samples = Samples.of(store)
    lengths = list(samples.rounds)
    rows = []
    for name in dict.fromkeys(key.rpartition("; ")[0] for key in samples.subjects(lengths[0])):
        row = name.split("; ")
        for tokens in lengths:
            p50, per_s = (
                samples.spread(tokens, f"{name}; {count}", figure).median
                for count, figure in ((ONE, "p50_ms"), (MANY, "per_s"))
            )
            row.append(f"{p50:.2f} ms, {per_s:.0f}/s")
        rows.append(row)
    note = f"p50 at 1 connection and texts a second at {MANY}, over gRPC; medians of a few short rounds."
    head = ("artifact", "instances", "dynamic batching", *(f"{tokens} tokens" for tokens in lengths))
    return Table("Configurations of Triton that were tried", note, head, rows, words=3)
