from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.scenario import SCENARIOS, Phase, find_scenario

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = """
purpose = "A quiet morning, then the newsletter goes out."
rate = 200
users = 20
arrivals = "constant"
protocol = "grpc"
lengths = { 8 = 70, 32 = 30 }
tasks = { embed = 1 }

[[phases]]
seconds = 60
from = 0.2
to = 0.2

[[phases]]
seconds = 120
from = 1
to = 0.5
"""


def written(folder: Path, text: str) -> str:
    file = folder / "morning.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("name", ["steady", "ramp", "spike", "overload", "mixed-lengths", "soak"])
def test_the_named_scenarios_are_there(name: str) -> None:
    """Each has a purpose, a load and texts."""
    scenario = find_scenario(name)
    assert scenario is SCENARIOS[name]
    assert scenario.purpose
    assert scenario.seconds > 0
    assert sum(scenario.lengths.values()) > 0
    assert max(max(phase.begin, phase.end) for phase in scenario.phases) == 1


def test_a_file_describes_a_scenario(tmp_path: Path) -> None:
    """Everything that a file says is taken; its name is the file's."""
    scenario = find_scenario(written(tmp_path, WHOLE))
    assert (scenario.name, scenario.rate, scenario.users) == ("morning", 200, 20)
    assert (scenario.arrivals, scenario.protocol) == ("constant", "grpc")
    assert scenario.lengths == {8: 70, 32: 30}
    assert scenario.phases == (Phase(60, 0.2, 0.2), Phase(120, 1, 0.5))


def test_the_share_follows_the_phases(tmp_path: Path) -> None:
    """Within a phase the load changes evenly, and after the last one there is none."""
    scenario = find_scenario(written(tmp_path, WHOLE))
    assert [scenario.share(at) for at in (0, 59, 60, 120, 180)] == [0.2, 0.2, 1, 0.75, None]


def test_a_scenario_keeps_its_shape_in_another_time(tmp_path: Path) -> None:
    """A shorter run has the same phases, each shorter."""
    scenario = find_scenario(written(tmp_path, WHOLE)).lasting(18)
    assert scenario.phases == (Phase(6, 0.2, 0.2), Phase(12, 1, 0.5))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("rate = 200", "rate = 0", "rate must be above 0, not 0"),
        ("rate = 200", "rate = true", "rate must be above 0, not True"),
        ("rate = 200", "rate = nan", "rate must be above 0, not nan"),
        ("rate = 200", "rat = 200", "rat is unknown (did you mean rate?)"),
        ("users = 20", "users = 'many'", "users must be above 0, not 'many'"),
        ('"constant"', '"random"', "arrivals must be one of poisson, constant, not 'random'"),
        ("embed = 1", "embedd = 1", "tasks must be one of embed, embed_tokens, "),
        ('"grpc"', '"cohere-v2"', "tasks must be one of rerank, not 'embed'"),
        ("8 = 70", "eight = 70", "lengths.eight: 'eight' is not a number of tokens"),
        ("8 = 70", "8 = -1", "lengths.8 must be above 0, not -1"),
        ("lengths = {", "tasks_ = {", "tasks_ is unknown (did you mean tasks?)"),
        ("lengths = { 8 = 70, 32 = 30 }", "", "lengths is missing"),
        ("seconds = 120", "second = 120", "phases[1].second is unknown (did you mean seconds?)"),
        ("seconds = 120\n", "", "phases[1].seconds is missing"),
        ("from = 1", "from = -1", "phases[1].from must be 0 or more, not -1"),
        ("[[phases]]", "[phases]", "not TOML"),
        ("rate = 200", "rate = ", "not TOML"),
    ],
)
def test_a_mistake_is_named_in_one_line(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    """What is wrong in a file is said in one line, with the place where it stands."""
    assert old in WHOLE
    with pytest.raises(BenchError) as caught:
        find_scenario(written(tmp_path, WHOLE.replace(old, new)))
    assert "morning.toml: " in str(caught.value)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_load_without_load_is_refused(tmp_path: Path) -> None:
    """A scenario in which nothing is ever sent is a mistake."""
    text = "lengths = { 8 = 1 }\n[[phases]]\nseconds = 1\nfrom = 0\nto = 0\n"
    with pytest.raises(BenchError, match="at least one phase must have a load above 0"):
        find_scenario(written(tmp_path, text))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("stedy", "unknown scenario 'stedy' (did you mean steady?)"),
        ("x", "(one of steady, ramp, spike, overload, mixed-lengths, soak, or a .toml file)"),
        ("missing.toml", "scenario missing.toml: No such file or directory"),
    ],
)
def test_a_scenario_that_is_not_there_is_a_sentence(given: str, sentence: str) -> None:
    """A wrong name gets the nearest right one."""
    with pytest.raises(BenchError) as caught:
        find_scenario(given)
    assert sentence in str(caught.value)
