"""A report as tables that a person reads, on a terminal and in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtest.benchmarks.server.subjects import CONNECTIONS, PROTOCOLS, is_raw, server_subject
from loadtest.report.sample import DISTURBED_PERCENT
from loadtest.report.tables import Table, as_markdown, as_text

if TYPE_CHECKING:
    from loadtest.benchmarks.server.report import Report, Samples
    from loadtest.report.sample import Spread

_MET = {True: "yes", False: "NO", None: "-"}


def text(report: Report) -> str:
    """The whole report for a terminal."""
    facts = [f"{name}: {value}" for name, value in _facts(report)]
    return "\n\n".join(["\n".join(facts), *map(as_text, tables(report))])


def markdown(report: Report) -> str:
    """The whole report as a page."""
    facts = "\n".join(f"- {name}: {value}" for name, value in _facts(report))
    parts = [
        "# The server against the raw engine",
        f"Made by `{report.command}`; the file of the same name with `.json` holds every measurement.",
        facts,
        *map(as_markdown, tables(report)),
    ]
    return "\n\n".join(parts) + "\n"


def tables(report: Report) -> list[Table]:
    """The tables of a report, in reading order."""
    return [
        _latency(report.samples),
        _throughput(report.samples),
        _raw(report.samples),
        _costs(report),
        _verdict(report),
    ]


def _facts(report: Report) -> list[tuple[str, str]]:
    settings, every = report.settings, report.samples.every()
    method = (
        f"{settings['rounds']:g} interleaved rounds of {settings['seconds']:g} s a measurement, each after"
        f" {settings['warm_up_s']:g} s of warm-up; medians of the rounds (least to greatest in brackets)"
    )
    alone, most = sum(sample.quiet for sample in every), max(sample.others_percent for sample in every)
    quiet = (
        f"{alone} of {len(every)} measurements had the machine to themselves (others took less than"
        f" {DISTURBED_PERCENT:g}% of it), after {report.repeats} repetitions; one that had not (others took up to"
        f" {most:.0f}%) counts only where its subject has no quiet one. The host took {report.steal_percent:.1f}%. The"
        f" idle server used {report.idle_percent:.1f}% of a core while the raw engine was measured"
    )
    return [
        ("Date", report.date),
        ("Model", "{model} version {version}, {precision}".format(**report.model)),
        *report.machine.items(),
        ("Method", method),
        ("Quiet", quiet),
    ]


def _latency(samples: Samples) -> Table:
    rows = []
    for tokens in samples.by_tokens:
        raw = samples.fastest_raw(tokens)
        row = [str(tokens), _ms(samples.spread(tokens, raw, "p50_ms")), _median(samples.spread(tokens, raw, "p99_ms"))]
        for protocol in PROTOCOLS:
            subject = server_subject(protocol, 1)
            row += [
                _median(samples.spread(tokens, subject, "p50_ms")),
                _median(samples.spread(tokens, subject, "p99_ms")),
                _ms(samples.over_raw_ms(tokens, subject), sign="+"),
            ]
        rows.append(row)
    return Table(
        "Latency at 1 connection, ms",
        "`over raw`: p50 above the raw engine's p50 of the same round.",
        ("tokens", "raw p50", "raw p99", *(f"{p} {what}" for p in PROTOCOLS for what in ("p50", "p99", "over raw"))),
        rows,
    )


def _throughput(samples: Samples) -> Table:
    rows = []
    for tokens in samples.by_tokens:
        best = _whole(samples.spread(tokens, samples.busiest_raw(tokens), "per_s"))
        for connections in CONNECTIONS[1:]:
            row = [str(tokens), str(connections), best]
            for protocol in PROTOCOLS:
                subject = server_subject(protocol, connections)
                row += [
                    f"{samples.spread(tokens, subject, 'per_s').median:.0f}",
                    _whole(samples.percent_of_raw(tokens, subject)),
                ]
            rows.append(row)
    return Table(
        "Throughput, texts a second",
        "`% of raw`: of the raw engine's best of the same round. Clients and server share the cores; the raw engine"
        " has them alone.",
        ("tokens", "connections", "raw best", *(f"{p}{what}" for p in PROTOCOLS for what in ("", " % of raw"))),
        rows,
    )


def _raw(samples: Samples) -> Table:
    rows = []
    for tokens, subjects in samples.by_tokens.items():
        fastest, busiest = samples.fastest_raw(tokens), samples.busiest_raw(tokens)
        for subject in [subject for subject in subjects if is_raw(subject)]:
            _, way, options = subject.split()
            marks = [name for name, chosen in (("latency", fastest), ("throughput", busiest)) if chosen == subject]
            rows.append(
                [
                    way,
                    options,
                    " and ".join(marks),
                    str(tokens),
                    _ms(samples.spread(tokens, subject, "p50_ms")),
                    _median(samples.spread(tokens, subject, "p99_ms")),
                    _whole(samples.spread(tokens, subject, "per_s")),
                ]
            )
    return Table(
        "The raw engine, and what of it is the baseline",
        "`wide`: one session on all cores; `narrow`: a single-threaded session a core, in parallel; `served`: session"
        " options as the server has them; `default`: ONNX Runtime's own. The better one is the baseline.",
        ("session", "options", "baseline of", "tokens", "p50 ms", "p99 ms", "texts/s"),
        rows,
        words=3,
    )


def _costs(report: Report) -> Table:
    samples = report.samples
    rows = []
    for tokens in samples.by_tokens:
        for protocol in PROTOCOLS:
            for connections in CONNECTIONS:
                subject = server_subject(protocol, connections)
                median = {
                    figure: samples.spread(tokens, subject, figure).median
                    for figure in ("p50_ms", "p99_ms", "per_s", "client_cpu_us", "server_cpu_us", "engine_cpu_us")
                }
                share = median["client_cpu_us"] * median["per_s"] / report.settings["cores"] / 1e4
                rows.append(
                    [
                        protocol,
                        str(tokens),
                        str(connections),
                        f"{median['p50_ms']:.2f}",
                        f"{median['p99_ms']:.2f}",
                        *(f"{median[name]:.0f}" for name in ("client_cpu_us", "server_cpu_us", "engine_cpu_us")),
                        f"{share:.0f}%",
                    ]
                )
    return Table(
        "What a request costs, CPU time in microseconds",
        "The client's cost is the benchmark's own; its share of all cores is what the server could not have.",
        ("protocol", "tokens", "connections", "p50 ms", "p99 ms", "client", "server", "engine", "client's share"),
        rows,
        words=1,
    )


def _verdict(report: Report) -> Table:
    rows = [(target.what, target.limit, target.found, _MET[target.met]) for target in report.targets()]
    return Table("Verdict", "", ("target", "asked", "found", "met"), rows, words=3)


def _median(spread: Spread) -> str:
    return f"{spread.median:.2f}"


def _ms(spread: Spread, sign: str = "") -> str:
    return f"{spread.median:{sign}.2f}{_range(spread, 2)}"


def _whole(spread: Spread) -> str:
    return f"{spread.median:.0f}{_range(spread, 0)}"


def _range(spread: Spread, decimals: int) -> str:
    if spread.low == spread.high:
        return ""
    return f" ({spread.low:.{decimals}f} to {spread.high:.{decimals}f})"
