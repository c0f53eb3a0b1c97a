"""Settings from flags, environment and file, without starting anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest

from export.cli import export as export_cli
from serving.operations.generated_pages import settings_page
from serving.settings import Settings, flag_of
from tests.support.refused_settings import problems

if TYPE_CHECKING:
    from pathlib import Path


def test_order_of_sources(tmp_path: Path) -> None:
    """Default, file, environment, command line: the last one that speaks wins."""
    file = tmp_path / "settings.toml"
    file.write_text("http_port = 1\ngrpc_port = 1\nmetrics_port = 1\n", encoding="utf-8")
    environment = {"BERTSERVE_GRPC_PORT": "2", "BERTSERVE_METRICS_PORT": "2"}
    settings = Settings.load(["--config", str(file), "--metrics-port", "3"], environment)
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == (1, 2, 3)


@pytest.mark.parametrize("words", [["--auto-truncate", "false"], ["--auto-truncate=0"], ["--auto-truncate", "off"]])
def test_switches(words: list[str]) -> None:
    """A switch may take a word."""
    assert Settings.load(words, {}).auto_truncate is False


def test_a_switch_needs_no_word() -> None:
    """What follows it is the next option's."""
    settings = Settings.load(["--access-log", "--model-control", "--http-port", "1"], {})
    assert (settings.access_log, settings.model_control, settings.http_port) == (True, True, 1)
    assert "--access-log: must be true or false" in problems(["--access-log", "models"])


def test_the_file_of_another_tokenizer(tmp_path: Path) -> None:
    """Named by its path, or found where tiktoken keeps it; without either, or beside bare ids, it is refused."""
    path, here = f"cl100k_base={tmp_path}/x", {"TIKTOKEN_CACHE_DIR": "/cache"}
    assert Settings.load(["--accept-token-ids", path], here).accept_token_ids == path
    cached = "cl100k_base=/cache/9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
    assert Settings.load(["--accept-token-ids", "cl100k_base"], here).accept_token_ids == cached
    assert "set TIKTOKEN_CACHE_DIR" in problems(["--accept-token-ids", "cl100k_base"])
    assert "must look like" in problems(["--accept-token-ids", "o200k_base=x"])
    assert "leave out --accept-bare-ids" in problems(["--accept-token-ids", path, "--accept-bare-ids"])


def test_the_environment_of_others() -> None:
    """Variables of other programs, and our own without a value, mean nothing."""
    assert Settings.load([], {"PATH": "/bin", "BERTSERVER_HTTP_PORT": "1", "BERTSERVE_HTTP_PORT": ""}).http_port == 8000


def test_the_config_file_by_environment(tmp_path: Path) -> None:
    """`BERTSERVE_CONFIG` names the file, as `--help` promises for every option, unless `--config` names another."""
    file, other = tmp_path / "settings.toml", tmp_path / "other.toml"
    file.write_text("http_port = 1\n", encoding="utf-8")
    other.write_text("http_port = 2\n", encoding="utf-8")
    assert Settings.load([], {"BERTSERVE_CONFIG": str(file)}).http_port == 1
    assert Settings.load(["--config", str(other)], {"BERTSERVE_CONFIG": str(file)}).http_port == 2


def test_the_cache_of_a_model_to_export() -> None:
    """In the home directory unless told otherwise; without such a model there is none."""
    named, home = {"BERTSERVE_MODEL_ID": "demo"}, {"HOME": "/home/me"}
    assert Settings.load([], home).cache_dir is None
    assert str(Settings.load([], named | home).cache_dir) == "/home/me/.cache/bertserve"
    assert str(Settings.load([], named | home | {"XDG_CACHE_HOME": "/c"}).cache_dir) == "/c/bertserve"
    assert str(Settings.load(["--cache-dir", "/mine"], named | home).cache_dir) == "/mine"


def test_tasks_are_those_of_the_export() -> None:
    """The settings know nothing of bundles, so they name them themselves."""
    parser = export_cli.parser()
    (choices,) = [action.choices for action in parser._actions if action.dest == "task"]
    (literal, _) = get_args(Settings.model_fields["task"].annotation)
    assert get_args(literal) == choices


LINKS = {
    "BERTSERVE_PORT": "tcp://10.0.0.1:8000",
    "BERTSERVE_SERVICE_HOST": "10.0.0.1",
    "BERTSERVE_SERVICE_PORT": "8000",
    "BERTSERVE_SERVICE_PORT_GRPC": "8001",
    "BERTSERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "BERTSERVE_PORT_8000_TCP_PROTO": "tcp",
    "BERTSERVE_PORT_8000_TCP_PORT": "8000",
    "BERTSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
    "BERTSERVE_HTTP_PORT": "tcp://10.0.0.1:8000",
    "BERTSERVE_HTTP_SERVICE_HOST": "10.0.0.1",
}


@pytest.mark.parametrize("name", LINKS)
def test_service_links(name: str) -> None:
    """What Kubernetes makes of a Service's name is passed over."""
    assert Settings.load([], {name: LINKS[name]}) == Settings.load([], {})


def test_everything_wrong_is_listed() -> None:
    """All problems of all sources come at once."""
    text = problems(["--engine", "abacus", "--threads", "0", "--nonsense", "1"], {"BERTSERVE_OTHER": "1"})
    assert all(word in text for word in ("--engine", "--threads", "--nonsense", "BERTSERVE_OTHER"))


@pytest.mark.parametrize(("given", "meant"), [("--http-prot", "--http-port"), ("--thread", "--threads")])
def test_slips_are_recognised(given: str, meant: str) -> None:
    """A misspelt option is answered with the one that was meant."""
    assert f"did you mean {meant}?" in problems([given, "1"])


def test_an_engine_is_given_its_own_settings() -> None:
    """And no other engine is."""
    settings = Settings.load(["--fake-faults", "7:nan,9:exit"], {})
    others = {"fake_ms": 0.0, "fake_batch_ms": "", "fake_token_us": 0.0}
    assert settings.of_engine("fake") == {**others, "fake_faults": "7:nan,9:exit"}
    assert settings.of_engine("ort-cpu") == {}


@pytest.mark.parametrize("value", ["7", "7:", ":nan", "7:nan,", "x:nan", "7:NAN", "-1:nan"])
def test_bad_faults(value: str) -> None:
    """Anything else is refused."""
    assert "--fake-faults" in problems(["--fake-faults", value])


@pytest.mark.parametrize("name", Settings.model_fields)
def test_the_page_has_every_setting(name: str) -> None:
    """That is not for tests alone."""
    assert (f"`{flag_of(name)}`" in settings_page()) == (not name.startswith("fake_"))


def test_settings_do_not_change() -> None:
    """The object is frozen."""
    settings = Settings.load([], {})
    with pytest.raises(ValueError, match="frozen"):
        settings.http_port = 1  # type: ignore[misc]
