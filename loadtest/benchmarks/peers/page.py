"""The tables of the comparison, and who is who in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtest.benchmarks.peers import verdict
from loadtest.benchmarks.peers.subjects import MANY, ONE, RAW, subjects
from loadtest.report.tables import Table

if TYPE_CHECKING:
    from loadtest.benchmarks.peers.subjects import Subject
    from loadtest.benchmarks.turns import Samples

CONFIGURATIONS = """\
## Who is who

- **raw engine**: the INT8 file in a bare loop around ONNX Runtime, inputs made beforehand: one session on all cores
  at 1 connection, a single-threaded session a core at 32.
- **bertserve**: its defaults, `--engine ort-cpu`, `--engine openvino` and `--engine cpu` (best of both, what `make run`
  serves), over `POST /embed`, over the very requests that Triton gets (`HTTP v2`), and over gRPC.
- **Triton**: a `tritonserver` with its Python backend. The text model is as lean as it goes: tokenizer, engine,
  length 1, without the checks of the one that `bertserve export --triton` writes. Artifacts, engines and their
  versions are ours, and so are OpenVINO's options; ONNX Runtime's are its own defaults. `ORT dynamic INT8` is what one
  has without our export: the same fused graph, quantised by ONNX Runtime's own `quantize_dynamic` (INT8, per channel).
  Of the configurations that were tried ([decisions.md](decisions.md#triton)) it has the fastest: at 1 connection one
  instance on all cores, at 32 a single-threaded instance a core, which computes what the dynamic batcher puts together
  as one batch. That recipe's answers change with the company ([int8.md](../int8.md)), so it is computed text by text;
  `batched` is what it does where nobody asks for the same answer. `Triton, no batcher` is the same without dynamic
  batching, as one has it before one tunes it. Over HTTP Triton is asked with binary tensors, its client's default.
- **infinity**: PyTorch, and its ONNX engine with an INT8 model that its own `optimum` exported and quantised for
  AVX-512 VNNI; over its OpenAI route.
- **FastAPI**: a tokenizer and ONNX Runtime with our INT8 file in an application of 60 lines on uvicorn with uvloop and
  httptools. At 1 connection it computes on all cores where it stands, at 32 in threads on a session a core, which
  carry twice as much.

All run at once on the machine, one is asked at a time; what an idle one would cost the others is left out: servers
that use 1% of a core or more while nobody asks are stopped (SIGSTOP) meanwhile. Every reply is looked at for its form,
and the first texts of each length for their vectors. The client is one process on the same cores."""


def tables(samples: Samples, model: str, least_cosine: dict[str, float]) -> list[Table]:
    """A table for each length."""
    made: list[Table] = []
    for tokens in samples.rounds:
        rows = []
        for subject in subjects(model):
            one = {
                name: samples.spread(tokens, subject.key(ONE), name) for name in ("p50_ms", "p99_ms", "client_cpu_us")
            }
            rows.append(
                [
                    subject.system,
                    subject.engine,
                    subject.protocol,
                    one["p50_ms"].text(2),
                    one["p99_ms"].text(2),
                    samples.spread(tokens, subject.key(MANY), "per_s").text(0),
                    "-" if subject is RAW else f"{_cpu_us(samples, tokens, subject):.0f}",
                    "-" if subject is RAW else f"{one['client_cpu_us'].median:.0f}",
                    f"{least_cosine[subject.name]:.4f}",
                ]
            )
        made.append(
            Table(
                f"{tokens} tokens",
                f"`CPU`: time that all of the server's processes spent on a text at {MANY} connections, in"
                " microseconds; `client`: that of the client for a request at 1. `cosine`: the least to the fp32"
                " model's."
                if not made
                else "",
                ("system", "engine", "protocol", "p50 ms", "p99 ms", f"texts/s at {MANY}", "CPU", "client", "cosine"),
                rows,
                words=3,
            )
        )
    return made


def _cpu_us(samples: Samples, tokens: int, subject: Subject) -> float:
    return sum(samples.spread(tokens, subject.key(MANY), name).median for name in ("server_cpu_us", "engine_cpu_us"))


def verdict_table(samples: Samples, model: str) -> Table:
    """What was aimed at, and whether it is so."""
    rows = []
    for aim in verdict.AIMS:
        judged = verdict.judge(samples, model, aim)
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
    return f"{asked}: {'yes' if one.met else 'NO'}, {one.found.text(2)}"
