"""Which configuration of Triton's Python backend serves best here: `python -m loadtest.benchmarks.peers.tune`.

It has to be found once for a machine; `servers.triton_models` holds what was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.peers.servers import KINDS, TRITON_BATCH, kit_of, triton_model
from loadtest.benchmarks.peers.subjects import MANY, ONE
from loadtest.benchmarks.peers.triton import TritonServer
from loadtest.benchmarks.server.subjects import LENGTHS
from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.workload import make_texts
from loadtest.report.sample import Sample, Spread
from loadtest.report.tables import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadtest.benchmarks.peers.servers import Kit
    from loadtest.benchmarks.peers.triton import TritonModel

_TEXTS = 100
_WARM_UP_S = 0.5
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


def table(samples: Path) -> Table | None:
    """What was tried, from the file beside those samples; None where nothing was."""
    path = _beside(samples)
    if not path.exists():
        return None
    lengths = sorted({entry["tokens"] for entry in json.loads(path.read_bytes())})
    rows: dict[tuple[str, ...], dict[int, str]] = {}
    for entry in json.loads(path.read_bytes()):
        batching = "no" if entry["batch"] == 1 else f"up to {entry['batch']}"
        key = (entry["artifact"], f"{entry['instances']} of {entry['threads']} threads", batching)
        rows.setdefault(key, {})[entry["tokens"]] = f"{entry['p50_ms']:.2f} ms, {entry['per_s']:.0f}/s"
    return Table(
        "Configurations of Triton that were tried",
        f"p50 at 1 connection and texts a second at {MANY}, over gRPC; medians of a few short rounds.",
        ("artifact", "instances", "dynamic batching", *(f"{tokens} tokens" for tokens in lengths)),
        [[*key, *(cells.get(tokens, "") for tokens in lengths)] for key, cells in rows.items()],
        words=3,
    )


def _beside(samples: Path) -> Path:
    return samples.with_name(samples.stem + _RESULT)


def _tried(kit: Kit, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    models = candidates(kit)
    texts = {tokens: [text.text for text in make_texts(kit.ort.path, tokens, _TEXTS)] for tokens in LENGTHS}
    with contextlib.ExitStack() as stack:
        server = TritonServer(kit.environments / "triton", kit.environments / "work-tune", models)
        stack.enter_context(server)
        client = stack.enter_context(Child("loadtest.benchmarks.peers.client"))
        for model in models:
            client.ask(
                "open",
                way=model.name,
                form="grpc",
                port=server.grpc_port,
                place=model.name,
                hidden_size=model.hidden_size,
                texts=texts,
            )
        found: dict[tuple[int, str], list[tuple[Sample, Sample]]] = {}
        for number in range(1, rounds + 1):
            for tokens in LENGTHS:
                for model in models:
                    print(f"round {number} of {rounds}, {tokens} tokens, {model.name}", file=sys.stderr, flush=True)
                    asked: dict[str, Any] = {
                        "way": model.name,
                        "tokens": tokens,
                        "warm_up_s": _WARM_UP_S,
                        "seconds": seconds,
                    }
                    pair = [Sample(**client.ask("measure", connections=count, **asked)) for count in (ONE, MANY)]
                    found.setdefault((tokens, model.name), []).append((pair[0], pair[1]))
    for model in models:
        for tokens in LENGTHS:
            pairs = found[tokens, model.name]
            yield {
                "artifact": model.artifact.name,
                "instances": model.instances,
                "threads": model.threads,
                "batch": model.batch,
                "tokens": tokens,
                "p50_ms": Spread.of([one.p50_ms for one, _ in pairs]).median,
                "per_s": Spread.of([many.per_s for _, many in pairs]).median,
            }


def main(argv: Sequence[str] | None = None) -> int:
    """Tries every candidate and writes the figures beside those of the comparison."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.benchmarks.peers.tune", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--models", type=Path, default=Path("build/peers/models"), help="model repository")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"), help="the peers' environments")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a measurement (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/peers.json"), help="file of the comparison")
    given = parser.parse_args(argv)
    try:
        tried = list(_tried(kit_of(given.models, given.environments), given.rounds, given.seconds))
    except BenchError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1
    out = _beside(given.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(tried, indent=1) + "\n", encoding="utf-8")
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
