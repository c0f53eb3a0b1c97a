"""What a command says of a wrong command line: one line, with what was probably meant."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import bertserve
from bertserve.export.cli.inspect import main as inspect
from bertserve.export.engines.tensorrt import CAPABILITIES, GRAPH, NATIVE
from bertserve.loadtest.benchmarks.runner import main as benchmarks
from bertserve.loadtest.mlperf import main as mlperf
from bertserve.serving.host import command, installing

ROOT = Path(__file__).parents[2]


def exit_code(words: list[str]) -> object:
    """Of the command, which some verbs end by themselves."""
    try:
        return bertserve.main(words)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["serv"], "bertserve: unknown verb serv (did you mean serve?); `bertserve help` lists the verbs"),
        (["xyzzy"], "bertserve: unknown verb xyzzy; `bertserve help` lists the verbs"),
        (["size"], "bertserve: size left: use `load --find-capacity` on the machine at hand, or `simulate"),
        (
            ["simulate", "--cost", "x", "--stages=2"],
            "--stages left: models are not cut into parts; use a device with more memory",
        ),
        (["serve", "--htp-port", "1"], "bertserve serve: unknown setting --htp-port (did you mean --http-port?)"),
        (["load", "--rat=4"], "unknown option --rat (did you mean --rate?); `bertserve load --help` lists the options"),
        (["inspect", "a", "b"], "unexpected argument 'b'; `bertserve inspect --help` lists the options"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with exit code 2."""
    assert exit_code(words) == 2
    told = capsys.readouterr().err
    assert (told.count("\n"), line in told) == (1, True), told


@pytest.mark.parametrize("verb", bertserve.VERBS)
def test_a_wrong_option_is_one_line_for_every_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the list of all options."""
    assert exit_code([verb, "--nothing-such"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    assert re.match(rf"bertserve {verb}: ", told)


@pytest.mark.parametrize("main", [lambda words: benchmarks([], words), mlperf])
def test_modules_that_are_run_do_the_same(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of contributors."""
    assert callable(main)
    with pytest.raises(SystemExit, match="2"):
        main(["--nothing-such"])
    assert capsys.readouterr().err.count("\n") == 1


def test_help_is_a_verb_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Alone it lists the verbs; with one it explains that."""
    assert bertserve.main(["help"]) == 0
    assert all(f"\n  {verb} " in capsys.readouterr().out for verb in ["serve"])
    assert bertserve.main(["help", "inspect"]) == 0
    assert "usage: bertserve inspect" in capsys.readouterr().out


def test_a_repository_in_the_place_of_a_bundle_is_told(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the names of its models, of which one is meant."""
    (name,) = (path.name for path in models.iterdir() if path.is_dir())
    assert inspect([str(models)]) == 1
    assert f"is a repository; use its model, {models}/{name}\n" in capsys.readouterr().err
    assert inspect([str(models / name)]) == 0


def test_the_readme_names_what_tensorrt_engines_are_built_for() -> None:
    """Each target that the option takes, and no other."""
    (said,) = re.findall(r"`--tensorrt (\w+)` \(([^)]*)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert {said[0], *re.findall(r"`(\w+)`", said[1]), "sm75"} == {*CAPABILITIES, NATIVE, GRAPH}


def test_advice_to_install_works_where_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the `pip` of this environment: of a checkout what lies there, elsewhere the package."""
    monkeypatch.chdir(ROOT)
    assert installing("loadtest").endswith("pip install --constraint constraints.txt --editable '.[loadtest]'")
    assert installing("loadtest").partition(" ")[2] in (ROOT / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    pip, *words = shlex.split(installing("loadtest"))
    assert words == ["install", "--constraint", f"{ROOT}/constraints.txt", "--editable", f"{ROOT}[loadtest]"]
    assert pip == "pip" or Path(pip).is_absolute()
    assert installing(
        "loadtest", tmp_path / "lib" / "python3" / "site-packages" / "bertserve" / "serving" / "host.py"
    ).endswith("pip install 'bertserve[loadtest]'")


@pytest.mark.parametrize(
    ("called", "path", "expected"),
    [
        (".venv/bin/bertserve", "/usr/bin", ".venv/bin/bertserve serve"),
        ("{here}/.venv/bin/bertserve", "/usr/bin", ".venv/bin/bertserve serve"),
        ("/opt/my env/bin/bertserve", "/usr/bin", "'/opt/my env/bin/bertserve' serve"),
        ("{here}/.venv/bin/bertserve", "{here}/.venv/bin", "bertserve serve"),
        ("{here}/src/bertserve/__main__.py", "/usr/bin", "bertserve serve"),
    ],
)
def test_a_command_that_is_advised_begins_as_the_one_that_was_typed(
    called: str, path: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it can be copied where the environment is not activated; what the shell finds by itself is named alone."""
    program = tmp_path / ".venv" / "bin" / "bertserve"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [called.format(here=tmp_path), "export"])
    monkeypatch.setenv("PATH", path.format(here=tmp_path))
    assert command("serve") == expected


def test_advice_names_the_program_as_it_was_called(tmp_path: Path) -> None:
    """By a path that is no part of PATH: an empty repository, and an option that does not exist."""
    program = Path(sys.executable).with_name("bertserve")
    for words, advised in (
        (["serve", "--models", str(tmp_path)], "export"),
        (["export", "--nothing"], "export --help"),
        (["serv"], "help"),
    ):
        run = subprocess.run(
            [program, *words], capture_output=True, text=True, check=False, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}
        )
        assert f"`{program} {advised}`" in run.stderr, run.stderr
