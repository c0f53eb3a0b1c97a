"""What a whole server here carries of a mix: as partial runs foretell it, and as `bertserve load` finds it.

The encoder is exported with random weights and served by the server itself; the load generator is asked by its
command line.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from export.checkpoint.families import family_of
from loadtest.benchmarks.exports import random_checkpoints
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.capacity.encoder import encoder_of
from loadtest.capacity.measure import costs_here
from loadtest.capacity.plan import Replica
from loadtest.capacity.size_cli import load_of, parser
from loadtest.errors import BenchError
from loadtest.generator.search import bracket, narrowed
from loadtest.generator.workload import make_texts
from serving.host import available_cpus, processor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loadtest.capacity.encoder import Encoder
    from loadtest.capacity.plan import SizingLoad

_NARROW = 1.01
_TEXTS = 200
_FROM = 0.75
"""Of the rate that was foretold: where the search begins."""
_LIMITS = ("cosine_mean", "cosine_p01", "cosine_min", "agreement", "max_abs_difference")
"""That INT8 may break: random weights have no meaning that it could lose."""


@dataclass(slots=True, frozen=True)
class Carried:
    """The highest rates at which one server holds an objective.

    Attributes:
        encoder: Its name.
        precision: What was run.
        lengths: Tokens of the texts, as `bertserve size` takes them.
        slo: The objective, likewise.
        processor: What computed.
        cores: How many of its cores.
        foretold_per_s: By runs of a few layers and the simulator; 0 for none.
        measured_per_s: As `bertserve load --find-capacity` found it for the whole encoder; 0 for none.
        confidence: How sure that is, in its words.
        runs: Each run of its search.
    """

    encoder: str
    precision: str
    lengths: str
    slo: str
    processor: str
    cores: int
    foretold_per_s: float
    measured_per_s: float
    confidence: str
    runs: Sequence[Mapping[str, object]]

    @property
    def ratio(self) -> float:
        return self.foretold_per_s / self.measured_per_s if self.measured_per_s else math.nan

    def row(self) -> str:
        """A row of the table under `HEAD`."""
        return (
            f"| {self.encoder} | {self.precision} | {self.lengths} | {self.slo} | {self.foretold_per_s:.1f}"
            f" | {self.measured_per_s:.1f} | {self.ratio:.2f} | {self.confidence} |"
        )


HEAD = (
    "| encoder | in | tokens | objective | foretold/s | measured/s | ratio | how sure the measured one is |\n"
    "|---|---|---|---|---:|---:|---:|---|"
)


def carried(
    given: str,
    precision: str,
    seconds: float,
    lengths: str,
    slo: str,
    *,
    probe_s: float,
    folder: Path,
    tell: Callable[[str], None],
) -> Carried:
    """Foretells the capacity of a server here, and measures it.

    Args:
        given: The encoder, as `bertserve size` takes it; no bundle.
        precision: fp32 or int8.
        seconds: About how long the partial runs may take.
        lengths: As `bertserve size` takes them; a mix in tokens.
        slo: Likewise.
        probe_s: Of each run of the search.
        folder: Where exports are kept; what is there already is served.
        tell: Told what is going on.

    Raises:
        BenchError: It cannot be exported, served or searched.
    """
    encoder = encoder_of(given)
    load = load_of(parser().parse_args([given, "--lengths", lengths, "--rate", "1", "--slo", slo]), encoder)
    repository = _exported(encoder, precision, folder, tell)
    foretold = _foretold(encoder, precision, seconds, load, tell)
    tell(f"foretold: {foretold:.1f} texts a second; searching")
    server = BertServer(repository, precision, available_cpus())
    with TemporaryDirectory(prefix="bertserve-size-") as own, server:
        texts = Path(own, "texts.txt")
        texts.write_text("\n".join(_texts(repository, load)) + "\n", encoding="utf-8")
        target = f"http://{HOST}:{server.http_port}"
        words = ("--target", target, "--texts", str(texts), "--slo", slo, "--find-capacity")
        times = ("--rate", f"{max(1.0, _FROM * foretold):.2f}", "--duration", f"{probe_s:g}", "--out", own)
        told = subprocess.run(_command("load", *words, *times), capture_output=True, text=True, check=False)
        report = Path(own, "report.json")
        if not report.exists():
            raise BenchError(f"bertserve load: {told.stderr.strip()}")
        found = json.loads(report.read_bytes())
    measured, sure, runs = found["capacity_per_s"] or 0.0, found["confidence"], found["points"]
    where = (lengths, slo, processor(), available_cpus())
    return Carried(encoder.name, precision, *where, foretold, measured, sure, runs)


def _foretold(encoder: Encoder, precision: str, seconds: float, load: SizingLoad, tell: Callable[[str], None]) -> float:
    """The highest rate at which one server here holds an objective, by partial runs; 0 where none does."""
    replica = Replica(costs_here(encoder, precision, available_cpus(), seconds, tell), load, 1)
    low, _ = narrowed(*bracket(0.5 * replica.most_per_s, replica.holds), replica.holds, _NARROW)
    return low or 0.0


def _exported(encoder: Encoder, precision: str, folder: Path, tell: Callable[[str], None]) -> Path:
    """A model repository with all of the encoder's layers, random weights in them."""
    repository = folder / f"{encoder.name}-{precision}"
    if list(repository.glob("[!.]*/[0-9]*/manifest.json")):
        return repository
    family = family_of(encoder.config)
    if family is None:
        raise BenchError(f"{encoder.name}: takes the name of an encoder or a config.json, no bundle")
    tell(f"exporting all {encoder.layers} layers in {precision}")
    sizes = random_checkpoints.Sizes(
        encoder.layers, encoder.hidden, encoder.config[family.sizes["heads"]], encoder.vocabulary
    )
    with TemporaryDirectory(prefix="bertserve-size-", dir=folder) as checkpoint:
        random_checkpoints.write(Path(checkpoint), encoder.config["model_type"], "embed", sizes)
        words = ["--out", str(repository), "--name", encoder.name, "--precision", precision]
        allowed = [word for limit in _LIMITS for word in ("--allow", f"{precision}.{limit}")]
        made = subprocess.run(
            _command("export", checkpoint, *words, *allowed), capture_output=True, text=True, check=False
        )
    if made.returncode:
        raise BenchError(f"bertserve export: {made.stderr.strip()}")
    return repository


def _texts(repository: Path, load: SizingLoad) -> list[str]:
    """Real English whose lengths have the load's distribution, in no order."""
    [bundle] = [path.parent for path in repository.glob("[!.]*/[0-9]*/manifest.json")]
    mix = sorted(load.lengths.mix.items())
    drawn = random.Random(1)
    total, reached, lengths = sum(weight for _, weight in mix), 0.0, Counter[int]()
    for tokens, weight in mix:
        begun, reached = reached, reached + weight / total
        lengths[tokens] = round(_TEXTS * reached) - round(_TEXTS * begun)
    found = [text.text for tokens, count in lengths.items() if count for text in make_texts(bundle, tokens, count)]
    drawn.shuffle(found)
    return found


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "bertserve", *words]
