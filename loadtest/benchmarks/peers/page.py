"""The comparison as a page that a person reads, with its plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtest.benchmarks.peers import plot, tune, verdict
from loadtest.benchmarks.peers.subjects import MANY, ONE, RAW, subjects
from loadtest.report.tables import Table, as_markdown

if TYPE_CHECKING:
    from pathlib import Path

    from loadtest.benchmarks.peers.store import Store
    from loadtest.benchmarks.peers.subjects import Subject
    from loadtest.report.sample import Spread

_CONFIGURATIONS = """\
## Who is who

- **raw engine**: the INT8 file in a bare loop around ONNX Runtime, inputs made beforehand: one session on all cores
  at 1 connection, a single-threaded session a core at 32.
- **bertserve**: its defaults, `--engine ort-cpu` and `--engine openvino`, over `POST /embed`, over the very requests
  that Triton gets (`HTTP v2`), and over gRPC.
- **Triton**: a `tritonserver` with its Python backend. The text model is as lean as it goes: tokenizer, engine,
  length 1, without the checks of the one that `bertserve export --triton` writes. Artifacts, engines and their
  versions are ours, and so are OpenVINO's options; ONNX Runtime's are its own defaults. `ORT dynamic INT8` is what one
  has without our export: the same fused graph, quantised by ONNX Runtime's own `quantize_dynamic` (INT8, per channel).
  Of the configurations in the last table it has the fastest: at 1 connection one instance on all cores, at 32 a
  single-threaded instance a core, which computes what the dynamic batcher puts together as one batch. That recipe's
  answers change with the company ([int8.md](../int8.md)), so it is computed text by text; `batched` is what it does
  where nobody asks for the same answer. `Triton, no batcher` is the same without dynamic batching, as one has it
  before one tunes it. Over HTTP Triton is asked with binary tensors, its client's default.
- **infinity**: PyTorch, and its ONNX engine with an INT8 model that its own `optimum` exported and quantised for
  AVX-512 VNNI; over its OpenAI route.
- **FastAPI**: a tokenizer and ONNX Runtime with our INT8 file in an application of 60 lines on uvicorn with uvloop and
  httptools. At 1 connection it computes on all cores where it stands, at 32 in threads on a session a core, which
  carry twice as much.

All run at once on the machine, one is asked at a time; what an idle one would cost the others is left out: servers
that use 1% of a core or more while nobody asks are stopped (SIGSTOP) meanwhile. Every reply is looked at for its form,
and the first texts of each length for their vectors. The client is one process on the same cores."""


def write(found: Store, samples: Path, command: str) -> None:
    """Writes the page and its plot beside the file of the samples.

    Args:
        found: What was measured.
        samples: The file of the samples.
        command: What was typed.
    """
    picture = samples.with_suffix(".svg")
    picture.write_text(plot.svg(found), encoding="utf-8")
    page = samples.with_suffix(".md")
    page.write_text(markdown(found, command, samples.name, picture.name, tune.table(samples)), encoding="utf-8")


def markdown(found: Store, command: str, samples: str, picture: str, tried: Table | None) -> str:
    """The page.

    Args:
        found: What was measured.
        command: What was typed.
        samples: The name of the file of the samples.
        picture: The name of the plot's file.
        tried: What was tried of Triton's configuration, if anything.
    """
    facts = {**found.facts.machine, **{name: _joined(versions) for name, versions in found.versions.items()}}
    rounds = ", ".join(f"{len(done)} at {tokens} tokens" for tokens, done in sorted(found.lengths.items()))
    every = [sample for done in found.lengths.values() for samples in done for sample in samples.values()]
    quiet = sum(sample.quiet for sample in every)
    method = (
        f"- Method: interleaved rounds ({rounds}), {found.facts.seconds:g} s a measurement after its warm-up; medians"
        f" of the rounds, least to greatest in brackets; ratios are taken within a round. {quiet} of {len(every)}"
        " measurements had the machine to themselves; one that had not counts only where there is no other"
    )
    idle = ", ".join(f"{name} {percent:.1f}%" for name, percent in found.idle_percent.items())
    parts = [
        "# Beside the servers that one would pick instead",
        f"Made by `{command}`, as `make bench-peers` does; `{samples}` holds every measurement.",
        f"![p50 and throughput of every server]({picture})",
        "\n".join([*(f"- {name}: {value}" for name, value in facts.items()), method, f"- Idle, of one core: {idle}"]),
        *map(as_markdown, _figures(found)),
        as_markdown(_verdict(found)),
        _CONFIGURATIONS,
        *([as_markdown(tried)] if tried else []),
    ]
    return "\n\n".join(parts) + "\n"


def _joined(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _figures(found: Store) -> list[Table]:
    tables: list[Table] = []
    for tokens in sorted(found.lengths):
        rows = []
        for subject in subjects(found.facts.model["model"]):
            one = {name: found.figure(tokens, subject, ONE, name) for name in ("p50_ms", "p99_ms", "client_cpu_us")}
            rows.append(
                [
                    subject.system,
                    subject.engine,
                    subject.protocol,
                    _ranged(one["p50_ms"], 2),
                    _ranged(one["p99_ms"], 2),
                    _ranged(found.figure(tokens, subject, MANY, "per_s"), 0),
                    "-" if subject is RAW else f"{_cpu_us(found, tokens, subject):.0f}",
                    "-" if subject is RAW else f"{one['client_cpu_us'].median:.0f}",
                    f"{found.likeness[subject.name]:.4f}",
                ]
            )
        tables.append(
            Table(
                f"{tokens} tokens",
                f"`CPU`: time that all of the server's processes spent on a text at {MANY} connections, in"
                " microseconds; `client`: that of the client for a request at 1. `cosine`: the least to the fp32"
                " model's."
                if not tables
                else "",
                ("system", "engine", "protocol", "p50 ms", "p99 ms", f"texts/s at {MANY}", "CPU", "client", "cosine"),
                rows,
                words=3,
            )
        )
    return tables


def _cpu_us(found: Store, tokens: int, subject: Subject) -> float:
    return sum(found.figure(tokens, subject, MANY, name).median for name in ("server_cpu_us", "engine_cpu_us"))


def _verdict(found: Store) -> Table:
    rows = []
    for aim in verdict.AIMS:
        judged = verdict.judge(found, found.facts.model["model"], aim)
        cells = [_judged(judged[tokens]) if tokens in judged else "" for tokens in verdict.LENGTHS]
        rows.append([aim.what, aim.protocol, aim.figure.name, *cells])
    return Table(
        "Verdict",
        "Ratios are ours divided by theirs.",
        ("ours", "protocol", "figure", *(f"{tokens} tokens" for tokens in verdict.LENGTHS)),
        rows,
        words=3,
    )


def _judged(one: verdict.Verdict) -> str:
    asked = f"{'at least' if one.more else 'at most'} {one.asked:.2f}"
    if one.found is None:
        return f"{asked}: not measured"
    return f"{asked}: {'yes' if one.met else 'NO'}, {_ranged(one.found, 2)}"


def _ranged(spread: Spread, decimals: int) -> str:
    median = f"{spread.median:.{decimals}f}"
    if spread.low == spread.high:
        return median
    return f"{median} ({spread.low:.{decimals}f} to {spread.high:.{decimals}f})"
