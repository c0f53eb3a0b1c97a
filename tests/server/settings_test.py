"""Where settings come from and how slips are answered; beside tests/server/settings_sources_test.py."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from serving.settings import Settings
from tests.support import refused_settings

if TYPE_CHECKING:
    from pathlib import Path


def problems(*argv: str, **environment: str) -> list[str]:
    """Everything that loading complains of."""
    return refused_settings.problems(argv, environment).split("; ")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where to put a file of settings."""
    return tmp_path / "settings.toml"


@pytest.mark.parametrize("first", ["--http-port=1", "--config"])
def test_flags_win_over_the_file_wherever_they_stand(file: Path, first: str) -> None:
    """The order of words on the command line does not matter."""
    file.write_text("http_port = 2\n", encoding="utf-8")
    words = ["--http-port=1", f"--config={file}"]
    assert Settings.load(sorted(words, key=lambda word: not word.startswith(first)), {}).http_port == 1


def test_a_file_sets_every_kind_of_value(file: Path) -> None:
    """Numbers, words and switches as TOML writes them."""
    file.write_text('host = "::1"\nauto_truncate = false\nthreads = 3\ndrain_s = 0.5\n', encoding="utf-8")
    settings = Settings.load(["--config", str(file)], {})
    assert (settings.host, settings.auto_truncate, settings.threads, settings.drain_s) == ("::1", False, 3, 0.5)


def test_everything_wrong_in_every_source_is_told_at_once(file: Path) -> None:
    """One sentence each: nobody has to start four times."""
    file.write_text("htp_port = 1\nthreads = 0\n", encoding="utf-8")
    found = problems(
        "--config", str(file), "--engin", "x", "--drain-s", "soon", BERTSERVE_HOTS="h", BERTSERVE_HTTP_PORT="x"
    )
    assert len(found) == 6
    for part in (
        "unknown setting --engin (did you mean --engine?)",
        "unknown setting BERTSERVE_HOTS (did you mean BERTSERVE_HOST?)",
        "unknown setting htp_port (did you mean http_port?)",
        "--threads: input should be greater than or equal to 1",
        "--drain-s: must be a number",
        "--http-port: must be a whole number",
    ):
        assert any(part in problem for problem in found), part


def test_what_resembles_nothing_gets_no_suggestion() -> None:
    """A wild guess would mislead."""
    assert problems("--zzzz") == ["unknown setting --zzzz"]


def test_a_word_that_belongs_to_no_option_is_told() -> None:
    """As when a blank crept into a value."""
    assert problems("serve") == ["unknown setting serve"]


def test_an_option_without_its_value_is_told() -> None:
    """By the name of the option."""
    (problem,) = problems("--http-port")
    assert "--http-port" in problem


def test_options_are_not_abbreviated() -> None:
    """What is unambiguous today may not be tomorrow."""
    assert problems("--http-po", "1") == ["unknown setting --http-po (did you mean --http-port?)"]


def test_a_file_that_is_not_there_is_told(file: Path) -> None:
    """With its path."""
    assert problems("--config", str(file)) == [f"--config {file}: No such file or directory"]


@pytest.mark.parametrize("content", [b"http_port = ", b"\xff\xfe", b"= 1"])
def test_a_file_that_is_no_toml_is_told(file: Path, content: bytes) -> None:
    """With its path and the place."""
    file.write_bytes(content)
    (problem,) = problems("--config", str(file))
    assert problem.startswith(f"--config {file}: ")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """Reading it fails like any other reading."""
    assert "Is a directory" in problems("--config", str(tmp_path))[0]


@pytest.mark.parametrize("value", ["tcp://10.0.0.1:80", "udp://10.0.0.1:80", "sctp://10.0.0.1:80"])
def test_an_address_in_the_place_of_a_port_is_kubernetes(value: str) -> None:
    """A Service of that name puts it there; the default holds."""
    assert Settings.load([], {"BERTSERVE_HTTP_PORT": value}).http_port == 8000


@pytest.mark.parametrize(
    "name", ["BERTSERVE_PORTS", "BERTSERVE_SERVICE", "BERTSERVE_PORT_8000_ICMP", "BERTSERVE_XPORT"]
)
def test_what_only_resembles_a_service_link_is_a_slip(name: str) -> None:
    """Passing it over would hide a mistake."""
    assert problems(**{name: "1"})[0].startswith(f"unknown setting {name}")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--http-port", "65536"),
        ("--http-port", "-1"),
        ("--threads", "1.5"),
        ("--keep-alive-s", "0"),
        ("--drain-s", "nan"),
    ],
)
def test_values_out_of_range_are_told_with_their_option(option: str, value: str) -> None:
    """Before any port opens."""
    (problem,) = problems(f"{option}={value}")
    assert problem.startswith(f"{option}: ")


def help_text(option: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What an option prints of the settings; it ends with success, whatever else is wrong."""
    with pytest.raises(SystemExit) as ended:
        Settings.load([option, "--nonsense"], {})
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_whole_help(capsys: pytest.CaptureFixture[str]) -> None:
    """It lists every option that is not for tests alone in its group, with its bounds and default."""
    shown = help_text("--help-all", capsys)
    for name in Settings.model_fields:
        assert shown.count(f"\n  --{name.replace('_', '-')} ") == (not name.startswith("fake_")), name
    words = " ".join(shown.split())
    ports, engine = words.index("Ports: Addresses and ports. "), words.index("Engine: Engines, CPU cores")
    assert ports < words.index("--http-port N") < engine < words.index("--threads N")
    assert "--log-level {debug,info,warning,error}" in words
    assert "--engine-nice N " in words
    assert "(0 to 19; default: 10)" in words
    assert "--access-log [true|false]" in words
    assert "(above 0 to 60,000; default: 8)" in words
    assert "None" not in words


def test_the_help_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    """A dozen common options, and how to see the others."""
    shown = help_text("--help", capsys)
    listed = re.findall(r"^  (--[a-z-]+)", shown, re.MULTILINE)
    assert {"--help-all", "--config", "--models", "--http-port", "--engine"} <= set(listed)
    assert len(listed) <= 16
    assert "Common options:" in shown
    assert "`bertserve serve --help-all` lists all options" in " ".join(shown.split())
