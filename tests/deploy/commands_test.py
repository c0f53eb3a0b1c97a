"""The commands of README.md and of the guides, as they are printed and in their order, from a clone of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import urllib.request
import venv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.checkpoints import write_task_checkpoint
from tests.support.models import ROOT, demo_repository
from tests.support.server import environment, free_port
from tests.support.tasks import tiny_model, write_bundle
from tests.support.waiting import wait_for

README = "README"
PAGES = {
    page.stem: page.read_text(encoding="utf-8")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs/guides").glob("*.md")))
}
NO_COMMANDS = ("bertserve is ready: ", "models/\n", "# the search service\n", '{"mappings": ', '{"query": ')
"""How indented blocks begin that are a printed line, a listing, a file of keys, a request to a search engine."""
EXCUSED = {
    "--model-id sentence-transformers/all-mpnet-base-v2": "loads a model of 400 MB",
    "kubectl ": "needs a cluster; guide_test.py renders and validates what is applied",
    "pip install ": "the packages of the tests are all of them; wheel_test.py has an environment without",
    "docker ": "needs a container engine; containers_test.py reads what is built",
    "--address 10.0.0.5:6379": "a cluster of other machines; tests/bulk/ray_job_test.py has one of its own",
    "grpcs://bert.example:8001": "another machine's address; tests/loadtest/secured_test.py has one of its own",
    "/embed_sparse": "needs a sparse model; tests/contract/sparse_test.py sends the same requests",
    '"outputs": ["dense"': "needs a model with three outputs; tests/contract/bge_m3_test.py sends the same requests",
    **dict.fromkeys(
        ("qdrant_client", "weaviate.classes", "pymilvus", "dict(enumerate(multi("),
        "needs a database; tests/contract/sparse_test.py fills Qdrant's structures",
    ),
    "serve run ": "takes Ray's fixed port; ray_serve_test.py runs the same application",
}
"""Parts of commands that are not run here, and why."""
TENSORRT = ("--tensorrt t4", "bertserve build ")
"""Parts of those that need TensorRT for RTX."""
SUBSTITUTED = {
    "/var/cache/bertserve": "cache",
    "models/NAME/": "models/checkpoint/",
    "after/report.json": "load-report/report.json",
    "-t 30s": "-t 2s",
}
ADDED = {
    "bertserve load --target": " --duration 2",
    "bertserve.loadtest.mlperf": " --seconds 4",
    "--protocol both": " --grpc-target 127.0.0.1:8001",
    "# with its web page": " --web-host 127.0.0.1 --web-port 8089",
}
"""A time in place of minutes, and ports that are not the usual ones here."""
USUAL = "bertserve serve --models models"
PRESUPPOSED = {
    "curl --retry 20": (USUAL,),  # for the container
    "curl --resolve": (f"{USUAL} --api-keys-file keys --tls-cert-file tls.crt --tls-key-file tls.key",),
    "# `steady` for a minute": (USUAL,),
    "--model ms-marco": ("bertserve serve --models rerankers",),
    "-u 1 -t 30s": (USUAL,),
    "bertserve.loadtest.mlperf": (USUAL,),
    "--replay requests.json": (USUAL, "curl http://127.0.0.1:8002/status > status.json"),
    "minilm/load": (f"{USUAL} --model-control true",),
    "verify models/NAME/1": ("bertserve export path/to/checkpoint --out models --precision fp32 --tensorrt graph",),
    "--tls-cert-file cert.pem": (
        "openssl rand -base64 32 > keys",
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -subj /CN=localhost",
    ),
}
"""What a guide expects to be done before a command."""
WITH_MODELS = ("load-testing", "models", "security")
"""Guides that presuppose the demo model's export."""
FILES: dict[str, Any] = {
    "texts.txt": "\n".join(f"What is text {number}?" for number in range(24)),  # whole requests of eight
    "queries.jsonl": {"query": "what ran", "texts": ["the cat", "a dog"]},
    "requests.json": [[0.0, 8], [0.01, 32]],
    "docs/a.txt": "A text in a file of its own.",
}
T4 = {"gpus": [{"name": "Tesla T4", "capability": [7, 5], "memory": 16 << 30}], "missing": ["tensorrt"]}
JUDGES = ("--slo", "locust ", "bertserve.loadtest.mlperf")
"""Commands that may end with 1 on a busy machine: an objective is missed."""
PROGRAMS = ("bertserve", "locust")
"""Those of packages that the commands start."""
LIMIT_S, START_LIMIT_S = 900, 1200


def commands(page: str) -> list[tuple[str, str]]:
    """Kind and text of each command: of indented blocks, of `sh` and Python, and `(pip install ...)`."""
    shapes = (r"^```(\w*)\n(.*?)^```", r"(?<=\n\n)((?: {4,}[^\n]+\n)+)", r"\(`(pip install [^`]+)`\)")
    found: list[tuple[str, str]] = []
    for language, fenced, indented, pip in re.findall("|".join(shapes), PAGES[page], re.MULTILINE | re.DOTALL):
        block = textwrap.dedent(indented) or pip or (fenced if language == "sh" else "")
        if language == "python":
            found.append((language, fenced))
        elif not block.startswith(NO_COMMANDS):
            found += [("shell", command) for command in whole(block)]
    return found


def whole(block: str) -> list[str]:
    """Commands of a block, some of which have several lines."""
    found = [""]
    for line in block.splitlines():
        found[-1] += line
        try:
            shlex.split(found[-1], comments=True)
        except ValueError:  # a quote or a backslash is open
            found[-1] += "\n"
        else:
            found.append("")
    return found[:-1]


def excused(command: str) -> bool:
    lacking = TENSORRT if find_spec("tensorrt_rtx") is None else ()
    return any(word in command for word in (*EXCUSED, *lacking))


def test_excuses_and_substitutions_are_of_commands() -> None:
    """Of those that the pages have today."""
    shown = [command for page in PAGES for _, command in commands(page)]
    words = (*EXCUSED, *TENSORRT, *SUBSTITUTED, *ADDED, *PRESUPPOSED, *JUDGES)
    assert [word for word in words if not any(word in command for command in shown)] == []
    assert [start for start in NO_COMMANDS if not any(f"\n\n    {start}" in text for text in PAGES.values())] == []
    assert commands(README)[0] == ("shell", "make run")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of this working tree, with an environment that borrows what is installed here and finds it complete."""
    folder = tmp_path / "clone"
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    own = folder / ".venv"
    venv.create(own, with_pip=False)
    packages = sysconfig.get_path("purelib", vars={"base": str(own), "platbase": str(own)})
    Path(packages, "borrowed.pth").write_text(
        "\n".join([str(folder), *filter(lambda path: path.endswith("site-packages"), sys.path)])
    )
    for name in PROGRAMS:
        text = (Path(sys.executable).parent / name).read_text().partition("\n")[2]
        (own / "bin" / name).write_text(f"#!{own / 'bin' / 'python'}\n{text}")
        (own / "bin" / name).chmod(0o755)
    for stamp in ("run", "dev"):
        (own / f".installed-{stamp}").touch()
    (folder / ".curlrc").write_text("fail-with-body\n")  # an error of the server is one of the command
    return folder


def prepare(page: str, clone: Path) -> None:
    """What a guide presupposes: an installation, checkpoints, models and files."""
    for name, content in FILES.items():
        (clone / name).write_text(content if isinstance(content, str) else json.dumps(content))
    parquet.write_table(pa.table({"id": [1, 2], "text": ["a text", "another"]}), clone / "docs.parquet")
    write_task_checkpoint(clone / "path/to/checkpoint", "bert", "embed", num_hidden_layers=4, vocab_size=1_000)
    write_task_checkpoint(clone / "path/to/sentiment", "bert", "classify")
    write_bundle(clone / "rerankers", tiny_model("rerank"), "ms-marco")
    if page in WITH_MODELS:
        shutil.copytree(demo_repository(), clone / "models")


class Reader:
    """Somebody who types what a page shows. Its ports are not the usual ones, and its home is the clone."""

    def __init__(self, clone: Path, extra: dict[str, str]) -> None:
        self.log = clone.parent / "server.log"
        self.ports = {port: str(free_port()) for port in ("8000", "8001", "8002", "8089")}
        names = zip(("HTTP_PORT", "GRPC_PORT", "METRICS_PORT"), self.ports.values(), strict=False)
        env = environment({f"BERTSERVE_{name}": port for name, port in names} | {"BERTSERVE_LAME_DUCK_S": "0"})
        env |= {"PATH": f"{clone / '.venv/bin'}:{env['PATH']}", "HOME": str(clone), "HF_HUB_OFFLINE": "1"}
        env.pop("PYTHONPATH", None)
        self.how: dict[str, Any] = {"cwd": clone, "env": env | extra, "stdin": subprocess.DEVNULL}
        self.began = ""
        self.server: subprocess.Popen[bytes] | None = None

    def type(self, kind: str, command: str) -> None:
        """Runs a command, and before it what is presupposed."""
        for before in next((done for word, done in PRESUPPOSED.items() if word in command), ()):
            self.type("shell", before)
        here = command if kind == "python" else re.sub(r"\s+# .*", "", command)
        here += "".join(more for word, more in ADDED.items() if word in command)
        for word, other in SUBSTITUTED.items():
            here = here.replace(word, other)
        here = re.sub(r"(?<=[: ])(800[0-2]|8089)\b", lambda port: self.ports[port[1]], here)
        if re.match(r"make run|bertserve (serve|doctor)\b", command):
            self.end(self.server)
            self.server = None
        if re.match(r"make run|bertserve serve\b", command):
            self.server = self.start(here, f"{self.ports['8002']}/readyz")
        elif "# with its web page" in command:
            self.end(self.start(here, self.ports["8089"]))
        elif re.fullmatch(r"\w+=\S+|\. \S+", here):  # holds for the commands after it
            self.began += f"{here}\n"
        else:
            self.run([".venv/bin/python", "-c", here] if kind == "python" else ["bash", "-c", self.began + here])

    def run(self, words: list[str]) -> None:
        done = subprocess.run(words, **self.how, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        said = f"{words[-1]}\n{done.stdout}\n{done.stderr}"
        missed = done.returncode == 1 and any(word in words[-1] for word in JUDGES) and "Traceback" not in said
        missed = missed and not done.stderr.strip().startswith("bertserve ")
        assert done.returncode == 0 or missed, said + (self.log.read_text() if self.log.exists() else "")
        self.printed = done.stdout.strip()

    def start(self, command: str, place: str) -> subprocess.Popen[bytes]:
        """Starts what runs on, and waits until it answers."""
        with self.log.open("wb") as out:
            words = ["bash", "-c", f"exec {command}"]
            server = subprocess.Popen(words, **self.how, stdout=out, stderr=out, start_new_session=True)
        wait_for(lambda: answers(place) or server.poll() is not None, command, START_LIMIT_S)
        assert server.poll() is None, self.log.read_text()
        return server

    def end(self, server: subprocess.Popen[bytes] | None) -> None:
        if server is not None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def answers(place: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{place}", timeout=5):
        return True
    return False


@pytest.mark.slow
@pytest.mark.external
@pytest.mark.parametrize("page", [page for page in PAGES if not all(excused(command) for _, command in commands(page))])
def test_every_command_works(page: str, clone: Path) -> None:
    """A server runs until the next one or the end; the README's examples print what it says."""
    simulated = {"PYTHONPATH": str(clone / "tests/support/simulated"), "SIMULATED_GPU": json.dumps(T4)}
    reader = Reader(clone, simulated if page == "gpu" else {})
    if page != README:
        prepare(page, clone)
    try:
        for kind, command in commands(page):
            if excused(command):
                continue
            reader.type(kind, command)
            if (page, command) == (README, "make run"):
                (ready,) = re.findall(r"^ {4}(bertserve is ready.*)$", PAGES[page], re.MULTILINE)
                wait_for(lambda: ready in reader.log.read_text(), ready)  # noqa: B023
            assert page != README or kind == "shell" or f"`{reader.printed}`" in PAGES[page]
    finally:
        reader.end(reader.server)
