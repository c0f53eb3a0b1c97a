"""Rows 44, 46 to 51 and 66 of the failure modes on a GPU: real servers, whose driver is a simulated one."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bertserve.serving.engine.kinds import ENGINES
from tests.support.clients import get, metric, post_json
from tests.support.engines import engine_of, kill_engine
from tests.support.gpus import without_gpu
from tests.support.server import Server, is_running, measured, refused_start
from tests.support.simulated_gpus import environment, write_gpu_bundle
from tests.support.tasks import MAX_LENGTH, vocabulary
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.clients import HttpReply

T4 = {"name": "Tesla T4", "capability": [7, 5], "memory": 16 << 30}
TEXTS = ["What is a T4?", "the server answers", "a " * 40]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_gpu_bundle(root, tmp_path_factory.mktemp("base"))
    return root


@pytest.fixture(scope="module")
def expected(models: Path) -> np.ndarray[Any, Any]:
    with Server(models, *measured(models, "--engine", "ort-cpu")) as server:
        return vectors(server)


def vectors(server: Server) -> np.ndarray[Any, Any]:
    """The texts' vectors, asked for alone and together."""
    alone = [embed(server, text).json()[0] for text in TEXTS]
    together = embed(server, TEXTS).json()
    assert np.allclose(alone, together, atol=1e-5)
    return np.array(together)


def embed(server: Server, inputs: str | list[str]) -> HttpReply:
    return post_json(server.http, "/embed", json.dumps({"inputs": inputs}).encode())


def machine(**said: Any) -> dict[str, str]:
    """The environment of a server with a simulated T4; `said` changes the machine."""
    return environment({"gpus": [T4], **said})


def choice(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = get(server.http, "/status").json()["choice"]
    return found


def reasons(server: Server) -> dict[str, str]:
    return {entry["engine"]: entry["reason"] for entry in choice(server)["rejected"]}


@pytest.fixture(scope="module")
def on_a_t4(models: Path) -> Iterator[Server]:
    with Server(models, *measured(models), env=machine()) as server:
        yield server


def test_a_t4_runs_tensorrt_and_answers_as_the_cpu(on_a_t4: Server, expected: np.ndarray[Any, Any]) -> None:
    """`auto` takes the best there is, and the very same numbers come out."""
    assert np.allclose(vectors(on_a_t4), expected, atol=1e-5)
    assert get(on_a_t4.metrics, "/readyz").status == 200
    assert get(on_a_t4.http, "/status").json()["state"] == "ready"


def test_the_engine_and_its_card_are_shown_everywhere(on_a_t4: Server) -> None:
    """In `/status`, `/info`, v2's configuration, the log and the metrics."""
    found = choice(on_a_t4)
    assert (found["engine"], found["degraded"], found["rejected"]) == ("tensorrt", False, [])
    (gpu,) = found["cards"]
    assert (gpu["name"], gpu["compute_capability"], gpu["memory_bytes"]) == ("Tesla T4", "7.5", 16 << 30)
    assert get(on_a_t4.http, "/info").json()["engine"] == found
    config = get(on_a_t4.http, "/v2/models/embed/config").json()
    assert (config["platform"], config["backend"]) == ("tensorrt_plan", "tensorrt")
    parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
    assert parameters == {"engine": "tensorrt", "degraded": "false", "gpu": "Tesla T4"}
    assert "engine: tensorrt on 1 x Tesla T4" in on_a_t4.log
    assert "ready: embed version 1 (fp16) on 1 x Tesla T4" in on_a_t4.log
    assert metric(on_a_t4, "bertserve_gpus", state="working") == 1
    assert metric(on_a_t4, "bertserve_gpus", state="missing") == 0
    status = get(on_a_t4.http, "/status").json()
    assert status["engine"]["lanes"] == ["wide"]
    assert "tensorrt-rtx-cu13 1.7.1.116" in status["engine"]["version"]


@pytest.mark.parametrize(
    ("said", "engine", "state", "words"),
    [
        pytest.param(
            {"driver": 12040}, "ort-cpu", "degraded",
            {"tensorrt": "the NVIDIA driver is too old: it supports CUDA up to 12.4, TensorRT 1.7.1.116 needs 13.0",
             "ort-cuda": "the NVIDIA driver is too old: it supports CUDA up to 12.4, ONNX Runtime"},
            id="old driver",
        ),
        pytest.param(
            {"gpus": [{**T4, "name": "H200", "capability": [9, 0]}]}, "ort-cuda", "ready",
            {"tensorrt": "has no artifact for the engine tensorrt on sm90 (it has: cpu, cuda, sm75)"},
            id="another compute capability", marks=pytest.mark.slow,
        ),
        pytest.param(
            {"gpus": [{**T4, "memory": 200 << 20}]}, "ort-cpu", "degraded",
            {"tensorrt": "GPU 0 (Tesla T4) has 200 MiB of 200 free", "ort-cuda": "200 MiB of 200 free"},
            id="too little memory", marks=pytest.mark.slow,
        ),
        pytest.param(
            {"init": 803}, "ort-cpu", "degraded",
            {"tensorrt": "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "ort-cuda": "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
            id="a broken driver", marks=pytest.mark.slow,
        ),
        pytest.param(
            {"init": 100}, "ort-cpu", "ready",
            {"tensorrt": "the NVIDIA driver finds no GPU", "ort-cuda": "the NVIDIA driver finds no GPU"},
            id="no GPU", marks=pytest.mark.slow,
        ),
        pytest.param(
            {"ort_falls_back": True, "gpus": [{**T4, "capability": [8, 6]}]}, "ort-cpu", "degraded",
            {"ort-cuda": "ONNX Runtime runs it on CPUExecutionProvider instead of the GPU"},
            id="a library that falls back in silence", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_auto_goes_on_to_what_can_run_and_says_why(
    models: Path, said: dict[str, Any], engine: str, state: str, words: dict[str, str]
) -> None:
    """Each engine that was not taken has its reason; a CPU although there is a GPU is a degraded server."""
    with Server(models, *measured(models), env=machine(**said)) as server:
        assert choice(server)["engine"] == engine
        assert get(server.http, "/status").json()["state"] == state
        assert get(server.metrics, "/readyz").status == 200
        found = reasons(server)
        assert all(part in found[name] for name, part in words.items()), found
        parameters = get(server.http, "/v2/models/embed/config").json()["parameters"]
        assert {name for name in parameters if name.startswith("not_")} == {f"not_{name}" for name in found}
        assert all(metric(server, "bertserve_engine_rejected", engine=name) == 1 for name in found)
        assert embed(server, "a text").status == 200
        if state == "degraded":
            # A CPU without OpenVINO lacks nothing that an operator should look into.
            warnings = "".join(line for line in server.log.splitlines() if " WARNING " in line)
            on_gpus = {name for name in found if ENGINES[name].on_gpu}
            assert {name for name in found if f"engine {name} not used: " in warnings} == on_gpus


@pytest.mark.slow
def test_an_engine_without_proof_is_not_taken(tmp_path: Path) -> None:
    """Nobody compared the TensorRT engine with PyTorch: the next one serves, and the reason says what to do."""
    write_gpu_bundle(tmp_path / "models", tmp_path / "base", unproven=["sm75"])
    with Server(tmp_path / "models", *measured(tmp_path / "models"), env=machine()) as server:
        assert choice(server)["engine"] == "ort-cuda"
        assert "model.sm75.fp16.engine is not proven (not compared with PyTorch)" in reasons(server)["tensorrt"]


def test_an_engine_that_does_not_load_makes_room_for_the_next(tmp_path: Path) -> None:
    """Row 66: the manifest says this GPU, the library says no; what could not be seen before shows when it loads."""
    write_gpu_bundle(tmp_path / "models", tmp_path / "base", inside="8.9")
    with Server(tmp_path / "models", *measured(tmp_path / "models"), env=machine()) as server:
        assert choice(server)["engine"] == "ort-cuda"
        assert "does not fit this GPU or version of TensorRT; rebuild it" in reasons(server)["tensorrt"]
        assert get(server.http, "/status").json()["state"] == "ready"
        assert embed(server, "a text").status == 200


@without_gpu
@pytest.mark.parametrize("engine", ["tensorrt", pytest.param("ort-cuda", marks=pytest.mark.slow)])
def test_an_engine_that_is_named_and_cannot_run_is_an_error(models: Path, engine: str) -> None:
    """Row 50, on this very machine with its real libraries: no fallback, one line, exit code 1."""
    done = refused_start("--models", str(models), "--engine", engine)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"the engine {engine} cannot run here: no NVIDIA driver found" in last
    assert "run this on the machine with the GPU" in last
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_named_engine_that_does_not_load_is_an_error(tmp_path: Path) -> None:
    """Row 66, where the operator wants this engine and no other."""
    write_gpu_bundle(tmp_path / "models", tmp_path / "base", inside="8.9")
    done = refused_start("--models", str(tmp_path / "models"), "--engine", "tensorrt", env=machine())
    assert done.returncode == 1
    assert "does not fit this GPU" in done.stderr


@pytest.mark.slow
def test_compiled_kernels_are_kept_for_the_next_start(models: Path, tmp_path: Path) -> None:
    """In the node's cache, under its rules; the second start finds them, and leaves nothing beside them."""
    for _ in range(2):
        with Server(models, "--cache-dir", str(tmp_path), env=machine()) as server:
            assert choice(server)["engine"] == "tensorrt"
            found = wait_for(lambda: list(tmp_path.glob("embed/1/[0-9]*/kernels.*.bin")), "the kernels")
            wait_for(lambda: not list(tmp_path.glob(".kernels-*")), "nothing left beside them")
            assert found[-1].read_bytes() == b"kernels for driver 13000"
            assert "recompiling" not in server.log
            assert "cannot be read" not in server.log


class Faulty:
    """A server on a GPU that can be broken.

    Attributes:
        server: The server.
    """

    def __init__(self, server: Server, file: Path) -> None:
        self.server = server
        self._file = file

    def provoke(self, fault: str) -> int:
        """Lets the GPU fail until a request is answered or an engine has ended of it; returns the request's status."""
        before = self.server.engine_pid()
        self._file.write_text(fault)
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(embed, self.server, "a text")
            wait_for(lambda: sent.done() or self.server.engine_pid() != before, "an answer, or the engine's end", 30)
            self._file.unlink(missing_ok=True)
            return sent.result().status

    def wait_again(self, before: int | None) -> None:
        """Waits for another engine process than the one before, and for its answer."""
        wait_for(lambda: self.server.engine_pid() not in {None, before}, "another engine process", 30)
        wait_for(lambda: embed(self.server, "b").status == 200, "an answer", 30)


@pytest.fixture
def faulty(models: Path, tmp_path: Path) -> Iterator[Faulty]:
    """One that soon takes a batch for a hang."""
    file = tmp_path / "fault"
    with Server(models, *measured(models), "--engine-hang-s", "1", env=machine(fault=str(file))) as server:
        yield Faulty(server, file)


def test_an_error_that_passes_costs_one_batch(faulty: Faulty) -> None:
    """Row 44: 500, the engine lives on and the server stays ready."""
    before = faulty.server.engine_pid()
    assert faulty.provoke("1") == 500
    assert embed(faulty.server, "b").status == 200
    assert faulty.server.engine_pid() == before
    assert get(faulty.server.metrics, "/readyz").status == 200


LOST = ("the device is lost: cuStreamSynchronize: CUDA_ERROR_", "exited with status 70")


@pytest.mark.parametrize(
    ("fault", "words"),
    [pytest.param("700", LOST, marks=pytest.mark.slow), ("2", LOST), ("hang", ("it hangs",))],
    ids=["row 47: an error that stays", "row 48: full memory", "row 46: a card that hangs"],
)
def test_a_card_that_is_lost_costs_its_engine_process(faulty: Faulty, fault: str, words: tuple[str, ...]) -> None:
    """A process that has forgotten what happened takes over, and answers the request."""
    before = engine_of(faulty.server)
    assert faulty.provoke(fault) == 200
    wait_for(lambda: not is_running(before), "the process to end")
    faulty.wait_again(before)
    assert [word for word in words if word not in faulty.server.log] == []


@pytest.mark.parametrize("engine", ["tensorrt", pytest.param("ort-cuda", marks=pytest.mark.slow)])
def test_row_51_non_finite_output_on_a_card(tmp_path: Path, engine: str) -> None:
    """The text that the model answers NaN to gets 500, alone and beside others; those are answered, and nobody dies."""
    words = vocabulary()
    warmed = {7919 * place % len(words) for place in range(MAX_LENGTH)}
    word, token = next((word, token) for word, token in words.items() if word.isalpha() and token not in warmed)
    write_gpu_bundle(tmp_path / "models", tmp_path / "base", nan=token)
    with Server(tmp_path / "models", *measured(tmp_path / "models"), "--engine", engine, env=machine()) as server:
        before = server.engine_pid()
        with ThreadPoolExecutor() as pool:
            texts = [word if at % 4 == 0 else f"{at % 10}" for at in range(24)]
            statuses = list(pool.map(lambda text: embed(server, text).status, texts))
        assert statuses == [500 if text == word else 200 for text in texts]
        assert embed(server, [word, "1"]).status == 500
        assert metric(server, "bertserve_requests_total", reason="non_finite_output") == 7
        assert server.engine_pid() == before
        assert get(server.http, "/status").json()["state"] == "ready"


def kill_engines(server: Server, times: int) -> None:
    """Kills the engine process as soon as there is one, again and again."""
    killed: set[int] = set()
    for _ in range(times):
        pid = wait_for(lambda: server.engine_pid() if server.engine_pid() not in killed else None, "an engine", 30)
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)


def test_a_crash_loop_falls_back_to_the_cpu_where_that_is_allowed(models: Path, expected: np.ndarray[Any, Any]) -> None:
    """Row 49: after three deaths it serves on, says so everywhere, and answers the same."""
    with Server(models, *measured(models), "--cpu-fallback", "true", env=machine()) as server:
        kill_engines(server, 3)
        server.wait_state("degraded")
        assert np.allclose(vectors(server), expected, atol=1e-5)
        assert choice(server)["engine"] == "ort-cpu"
        assert "the engine process died 3 times in 60 s" in reasons(server)["tensorrt"]
        assert get(server.http, "/status").json()["models"][0]["precision"] == "fp32"
        assert metric(server, "bertserve_state", state="degraded") == 1
        assert get(server.metrics, "/livez").status == 200


def test_two_gpus_have_an_engine_each_and_one_queue(models: Path, expected: np.ndarray[Any, Any]) -> None:
    """Both work; while one's engine is being started the other answers everything, and the metric tells."""
    with Server(models, *measured(models), env=machine(gpus=[T4, T4])) as server:
        wait_for(lambda: metric(server, "bertserve_gpus", state="working") == 2, "both GPUs")
        assert np.allclose(vectors(server), expected, atol=1e-5)
        status = get(server.http, "/status").json()
        assert status["engine"]["lanes"] == ["wide", "narrow", "narrow"]
        assert [gpu["name"] for gpu in status["choice"]["cards"]] == ["Tesla T4", "Tesla T4"]
        kill_engine(server)
        server.wait_logged("is down: 1 of 2 are up")
        assert np.allclose(vectors(server), expected, atol=1e-5)
        assert get(server.metrics, "/readyz").status == 200
        wait_for(lambda: metric(server, "bertserve_gpus", state="working") == 2, "both GPUs again", 30)


@pytest.mark.slow
def test_cards_that_cannot_work_leave_a_degraded_server(models: Path, expected: np.ndarray[Any, Any]) -> None:
    """One without memory, and one that dies three times: the last one serves."""
    gpus = [{**T4, "memory": 200 << 20}, T4, T4]
    with Server(models, *measured(models), env=machine(gpus=gpus)) as server:
        wait_for(lambda: metric(server, "bertserve_gpus", state="working") == 2, "both GPUs")
        found = choice(server)
        assert (found["engine"], found["degraded"], len(found["cards"])) == ("tensorrt", True, 2)
        (reason,) = found["left_out"]
        assert reason.startswith("GPU 0 (Tesla T4) has 200 MiB of 200 free, but the models need about ")
        running = set(server.engine_pids())
        dying = min(running)
        for _ in range(2):
            os.kill(dying, signal.SIGKILL)
            (dying,) = wait_for(lambda: set(server.engine_pids()) - running, "the next process")
            running.add(dying)
        os.kill(dying, signal.SIGKILL)
        wait_for(lambda: choice(server)["lost"], "the reason")
        (lost,) = choice(server)["lost"]
        assert lost.endswith(": the engine process died 3 times in 60 s")
        assert get(server.http, "/status").json()["state"] == "degraded"
        assert np.allclose(vectors(server), expected, atol=1e-5)
        assert metric(server, "bertserve_gpus", state="missing") == 2
        config = get(server.http, "/v2/models/embed/config").json()["parameters"]["gpus_missing"]["string_value"]
        assert config == f"{reason}; {lost}"


@pytest.mark.slow
def test_a_second_engine_needs_room_on_the_card(tmp_path: Path) -> None:
    """Before it loads anything: else the one that serves would be the one that runs out of memory."""
    write_gpu_bundle(tmp_path / "models", tmp_path / "base")
    options, free = (*measured(tmp_path / "models"), "--model-control", "true"), tmp_path / "free"
    with Server(tmp_path / "models", *options, env=machine(free=str(free))) as server:
        before = server.engine_pids()
        free.write_text(str(300 << 20))
        write_gpu_bundle(tmp_path / "models", tmp_path / "base")
        reply = post_json(server.http, "/v2/repository/models/embed/load", b"{}")
        assert "300 MiB of 16,384 free, but the models need about " in reply.body.decode()
        assert "beside the serving engine; free GPU memory" in reply.body.decode()
        assert embed(server, "a text").status == 200
        wait_for(lambda: server.engine_pids() == before, "the one engine process")
        assert get(server.http, "/status").json()["models"][0]["version"] == "1"
