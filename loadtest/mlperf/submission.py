"""Results in the folders and files of a submission to MLPerf Inference.

The layout is that which MLCommons' checker of submissions looks for since v6.0:
https://github.com/mlcommons/inference, tools/submission/submission_checker/constants.py (`PERFORMANCE_LOG_PATH`,
`ACCURACY_RESULT_PATH`, `TEST01_PERF_PATH`, `MEASUREMENTS_PATH`, `SYSTEM_PATH`). The division is open: neither the
models nor the data are those of the closed one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadtest.errors import BenchError
from loadtest.mlperf.compliance import AUDIT, TEST
from loadtest.mlperf.scenarios import BENCHMARK, FULL_S, SCENARIOS, least_samples
from loadtest.mlperf.verdict import METRICS
from loadtest.report.machine import cpu_model, facts
from serving.host import available_cpus

if TYPE_CHECKING:
    from pathlib import Path

    from loadtest.mlperf.accuracy import Accuracy
    from loadtest.mlperf.compliance import Compliance
    from loadtest.mlperf.library import Library
    from loadtest.mlperf.verdict import Log, Verdict

SUBMITTER = "bertserve"
_LOGS = {"performance": "performance/run_1", TEST: f"{TEST}/performance/run_1"}
_UNKNOWN = "N/A"
_UNKNOWN_FIELDS = (
    "host_storage_capacity host_storage_type host_processor_frequency host_processor_caches host_memory_configuration"
    " host_processor_interconnect host_networking host_networking_topology accelerator_frequency"
    " accelerator_host_interconnect accelerator_interconnect accelerator_interconnect_topology"
    " accelerator_memory_configuration accelerator_on-chip_memories accelerator_memory_capacity accelerator_model_name"
    " cooling"
)


@dataclass(frozen=True)
class Submission:
    """The folders of one model on one system.

    Attributes:
        root: What all of it lies below.
        model: The model's name.
        precision: What its artifact computes in, as the server says.
    """

    root: Path
    model: str
    precision: str

    @property
    def system(self) -> str:
        """An id of the machine."""
        return f"{platform.machine()}-{available_cpus()}-cores"

    def folder(self, scenario: str) -> Path:
        """A scenario's."""
        return self._submitter / "results" / self.system / self.model / SCENARIOS[scenario].name

    def logs(self, scenario: str, mode: str) -> Path:
        """Where LoadGen leaves its logs of a mode, or of the compliance test."""
        return self.folder(scenario) / _LOGS.get(mode, mode)

    def sampled(self, scenario: str) -> Path:
        """Where the answers lie that LoadGen logged of the compliance test."""
        return self.folder(scenario) / TEST / "accuracy" / "mlperf_log_accuracy.json"

    def begin(self, scenario: str, mode: str, user_conf: str) -> Path:
        """Makes the folders of a run, without what a compliance test of other runs left; returns its settings' file.

        Raises:
            BenchError: They cannot be made.
        """
        file = self.folder(scenario) / "user.conf"
        try:
            logs = self.logs(scenario, mode)
            if mode != TEST:
                shutil.rmtree(self.folder(scenario) / TEST, ignore_errors=True)
            logs.mkdir(parents=True, exist_ok=True)
            for old in logs.glob("*"):
                old.unlink()
            file.write_text(user_conf, encoding="utf-8")
        except OSError as error:
            raise BenchError(f"--out {self.root}: {error}") from error
        return file

    def audit(self, scenario: str) -> Path:
        """Writes the settings of the compliance test, beside its logs.

        Raises:
            BenchError: They cannot be written.
        """
        file = self.folder(scenario) / TEST / "audit.config"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(AUDIT, encoding="utf-8")
        except OSError as error:
            raise BenchError(f"--out {self.root}: {error}") from error
        return file

    def move_sampled(self, scenario: str) -> Path:
        """Moves the answers that LoadGen logged of the compliance test to where the checker looks for them."""
        file = self.sampled(scenario)
        file.parent.mkdir(exist_ok=True)
        for old in file.parent.glob("*"):
            old.unlink()
        return (self.logs(scenario, TEST) / file.name).replace(file)

    def describe(self, library: Library) -> None:
        """Writes what the system and the model are, and which official benchmark the model stands beside."""
        _write(self._submitter / "systems" / f"{self.system}.json", _system(self.system))
        if library.task == "answer":
            _write(self._submitter / "model_mapping.json", {self.model: f"{BENCHMARK}-99"})

    def conclude(self, scenario: str, rules: Rules) -> None:
        """Writes a scenario's measurements.json and README.md, and what was found of accuracy and compliance."""
        folder = self.folder(scenario)
        _write(
            folder / "measurements.json",
            {
                "starting_weights_filename": self.model,
                "weight_data_types": self.precision,
                "input_data_types": "text",
                "weight_transformations": "none"
                if self.precision == "float32"
                else "quantization, by bertserve export",
                "retraining": "no",
            },
        )
        if rules.accuracy is not None:
            _write_accuracy(self.logs(scenario, "accuracy"), "accuracy.txt", rules.accuracy)
        if rules.compliance is not None:
            self._conclude_test(folder / TEST, rules.compliance)
        lines = [
            f"# {self.model}, {SCENARIOS[scenario].name}",
            "",
            f"{rules.library.source}; precision {self.precision}.",
            "",
        ]
        if rules.verdict is not None:
            name, value = METRICS[rules.verdict.scenario], rules.verdict.metric
            lines += [f"LoadGen's verdict: {'VALID' if rules.verdict.valid else 'INVALID'}; {name}: {value:.2f}.", ""]
        if rules.accuracy is not None:
            lines += [f"Accuracy: {rules.accuracy.text()}.", ""]
        if rules.compliance is not None:
            lines += [f"{TEST}: {rules.compliance.text()}.", ""]
        if rules.log is not None:
            seeds = ", ".join(f"{name} {seed}" for name, seed in rules.log.seeds.items())
            lines += [f"LoadGen {rules.log.version}; its seeds: {seeds}.", ""]
        lines += ["| rule | kept |", "|---|---|", *(f"| {rule} | {word} |" for rule, word in rules.kept().items()), ""]
        (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")

    def _conclude_test(self, folder: Path, found: Compliance) -> None:
        """Writes what the checker wants of the compliance test; of answers that differ, how both are judged."""
        (folder / "verify_accuracy.txt").write_text(found.verify_accuracy(), encoding="utf-8")
        (folder / "verify_performance.txt").write_text(found.verify_performance(), encoding="utf-8")
        if found.different:
            _write_accuracy(folder / "accuracy", "accuracy.txt", found.judged)
            _write_accuracy(folder / "accuracy", "compliance_accuracy.txt", found.judged)
            _write_accuracy(folder / "accuracy", "baseline_accuracy.txt", found.baseline)

    @property
    def _submitter(self) -> Path:
        return self.root / "open" / SUBMITTER


@dataclass(frozen=True)
class Rules:
    """What the rules of MLPerf Inference say of a scenario's runs.

    https://github.com/mlcommons/inference_policies, inference_rules.adoc.

    Attributes:
        library: What was asked.
        verdict: Of the performance run; None: there was none.
        log: Its details.
        accuracy: Of the accuracy run; None: there was none.
        compliance: Of the compliance test; None: it was not run.
        caches: Whether the server took answers from a cache, or kept them in one; None: it does not tell.
    """

    library: Library
    verdict: Verdict | None = None
    log: Log | None = None
    accuracy: Accuracy | None = None
    compliance: Compliance | None = None
    caches: bool | None = None

    @property
    def passed(self) -> bool:
        """Whether LoadGen, the gate and the compliance test are content with what was run."""
        valid = self.verdict is None or (self.verdict.valid and not self.verdict.errors)
        tested = self.compliance is None or (self.compliance.held and not self.caches)
        return valid and tested and (self.accuracy is None or self.accuracy.held)

    @property
    def breaches(self) -> list[str]:
        """Why the performance run is not compliant, whatever its figures."""
        found = []
        if self.log is not None and self.log.least_s < FULL_S:
            found.append(f"the rules ask for {FULL_S:g} s")
        if self.caches:
            found.append("the server keeps answers, and the rules forbid it: start it without --response-cache-mb")
        return found

    def kept(self) -> dict[str, str]:
        """Each rule, and whether it is kept."""
        verdict, log, accuracy, compliance = self.verdict, self.log, self.accuracy, self.compliance
        return {
            f"runs last at least {FULL_S:g} s": _word(None if log is None else log.least_s >= FULL_S),
            **self._counts(),
            "LoadGen's own verdict is VALID": _word(None if verdict is None else verdict.valid),
            "LoadGen logged no error": _word(None if verdict is None else not verdict.errors),
            "the accuracy run answers every sample": _word(None if accuracy is None else True),
            "accuracy is at least 99% of fp32's": _word(None if accuracy is None else accuracy.held),
            f"answers of performance mode are accuracy mode's ({TEST})": _word(
                None if compliance is None else compliance.is_same
            ),
            f"logging them changes the figure by at most a tenth ({TEST})": _word(
                None if compliance is None else compliance.is_as_fast
            ),
            "no answer is kept for later queries": "unknown" if self.caches is None else _word(not self.caches),
            "seeds and percentiles are LoadGen's own": "yes",
            "every reply is decoded, in both modes": "yes",
            "the model and the data are the closed division's": "no: the open division",
        }

    def _counts(self) -> dict[str, str]:
        """The rules on how much is asked: samples of Offline, queries of the others."""
        log = self.log
        if log is None:
            return {}
        if log.scenario == "Offline":
            least = least_samples(self.library)
            return {f"at least {least:,} samples are asked about ({log.samples:,} were)": _word(log.samples >= least)}
        return {
            f"at least {log.least_queries:,} queries are answered ({log.queries:,} were)": _word(
                log.queries >= log.least_queries
            ),
            "early stopping: the queries are enough for the percentile": _word(log.stopped_early),
        }


def _word(is_kept: bool | None) -> str:  # noqa: FBT001  what a table shows of it
    return "not run" if is_kept is None else "yes" if is_kept else "no"


def _write_accuracy(folder: Path, name: str, accuracy: Accuracy) -> None:
    """Writes what the reference's script of the task prints, and the digest of the log beside it.

    Of embeddings, for which there is no such script, a line alike.
    """
    digest = hashlib.sha256((folder / "mlperf_log_accuracy.json").read_bytes()).hexdigest()
    others = accuracy.others if accuracy.name != "f1" else {"exact_match": accuracy.others["exact_match"]}
    line = json.dumps({**others, accuracy.name: accuracy.found})
    (folder / name).write_text(f"{line}\nhash={digest}\n", encoding="utf-8")


def _system(name: str) -> dict[str, str]:
    """A description with the fields that the checker asks for; what cannot be known here says so."""
    found = facts()
    packages = {key: value for key, value in found.items() if key in {"onnxruntime", "onnxruntime-gpu"}}
    return {
        "division": "open",
        "submitter": SUBMITTER,
        "status": "available",
        "system_name": name,
        "system_type": "datacenter",
        "number_of_nodes": "1",
        "host_processor_model_name": cpu_model(),
        "host_processors_per_node": "1",
        "host_processor_core_count": str(os.cpu_count()),
        "host_memory_capacity": found["memory"],
        "accelerators_per_node": "0",
        "framework": ", ".join(f"{key} {value}" for key, value in packages.items()) or _UNKNOWN,
        "operating_system": found["system"],
        "other_software_stack": f"bertserve {found.get('bertserve', '')}, Python {found['Python']}",
        "hw_notes": found["cores"],
        "sw_notes": "LoadGen runs on the same machine and asks over HTTP",
        **dict.fromkeys(_UNKNOWN_FIELDS.split(), _UNKNOWN),
    }


def _write(file: Path, values: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
