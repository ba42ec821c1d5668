"""Cases are drawn by a seed: the same again, others under another, each at some time."""

import subprocess
from pathlib import Path

import pytest

from tests.sampling import NO_COMMIT, commit_seed, draw, draw_share

pytest_plugins = ["pytester"]

NAMES = [f"test_a.py::test_b[{number}]" for number in range(20)]
CONFTEST = (Path(__file__).parent / "conftest.py").read_text()
TESTS = """
import pytest

@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [*range(6), pytest.param(6, marks=pytest.mark.exhaustive)])
def test_matrix(number):
    pass

@pytest.mark.slow(30)
@pytest.mark.parametrize("number", range(2))
def test_plain(number):
    pass
"""


def test_a_seed_draws_the_same_cases_whatever_their_order() -> None:
    drawn = draw(NAMES, 5, "abc")
    assert len(drawn) == 5 and drawn < set(NAMES)
    assert draw(reversed(NAMES), 5, "abc") == drawn
    # A case that is added takes the place of one at most.
    assert len(draw([*NAMES, "new"], 5, "abc") & drawn) >= 4


def test_every_case_is_drawn_under_some_seed_and_none_more_often_than_others() -> None:
    seeds = [f"{number:x}" for number in range(2000)]
    times = dict.fromkeys(NAMES, 0)
    for seed in seeds:
        for name in draw(NAMES, 5, seed):
            times[name] += 1
    # Binomial: 500 expected, with a standard deviation of 19.
    assert all(400 < count < 600 for count in times.values())


def test_a_share_is_that_part_of_the_cases() -> None:
    cases = {f"case {number}": 1.0 for number in range(2000)}
    assert len(draw_share(cases, 0.25, "abc")) == 500
    assert draw_share(cases, 1.0, "abc") == set(cases)
    assert draw_share(cases, 0.0, "abc") == set()
    assert len(draw_share(dict.fromkeys(NAMES[:3], 1.0), 0.1, "abc")) == 1


def test_a_share_is_that_part_of_the_seconds_whichever_cases_are_drawn() -> None:
    """Cases of 1 to 40 s: what is left of the share is less than the shortest case left out."""
    cases = {f"case {number}": 1.0 + number % 40 for number in range(200)}
    for seed in map(str, range(50)):
        taken = draw_share(cases, 0.1, seed)
        left = 0.1 * sum(cases.values()) - sum(cases[name] for name in taken)
        assert 0 <= left < min(cases[name] for name in cases.keys() - taken)
    # A case beyond the share is drawn at some time too.
    assert {
        name for seed in map(str, range(50)) for name in draw_share({"a": 9, "b": 1}, 0.1, seed)
    } == {"a", "b"}
    assert draw_share({name: 0.1 * place for place, name in enumerate(NAMES, 1)}, 1.0, "x") == set(
        NAMES
    )


def test_a_share_is_drawn_from_what_a_sample_left() -> None:
    cases = {f"case {number}": 1.0 for number in range(2000)}
    sample = draw(cases, 1000, "abc")
    taken = draw_share(cases, 0.25, "abc")
    assert 190 < len(taken - sample) < 310  # 250 expected, standard deviation below 14


def test_few_cases_are_all_drawn() -> None:
    assert draw(NAMES, 20, "x") == draw(NAMES, 50, "x") == set(NAMES)


def test_the_seed_is_the_commit(tmp_path: Path) -> None:
    assert commit_seed(tmp_path) == NO_COMMIT
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True, timeout=60).strip()
    assert head.startswith(commit_seed(tmp_path)) and len(commit_seed(tmp_path)) == 12


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with our conftest.py and one matrix."""
    # Loading hypothesis and others takes each run a second.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    markers = "\n ".join(["exhaustive", "gpu", "sampled(count)", "slow(seconds)"])
    pytester.makeini(f"[pytest]\naddopts = --strict-markers\nmarkers =\n {markers}\n")
    return pytester


def taken(project: pytest.Pytester, *arguments: str) -> list[str]:
    """Names of the tests that a run with these arguments would take."""
    result = project.runpytest_inprocess("--collect-only", "-q", *arguments)
    return [line.partition("::")[2] for line in result.outlines if "::" in line]


def test_a_run_takes_the_sample_and_the_exhaustive_run_the_others(
    project: pytest.Pytester,
) -> None:
    seed = "--matrix-seed=abc"
    sample = taken(project, "-m", "not exhaustive", seed)
    others = taken(project, "-m", "exhaustive", seed)
    # The slow test's file goes first, but order within a file stays.
    assert sample[2:] == ["test_plain[0]", "test_plain[1]"] and len(sample) == 4
    assert len(others) == 5 and "test_matrix[6]" in others
    assert {*sample[:2], *others} == {f"test_matrix[{number}]" for number in range(7)}
    assert taken(project, "-m", "not exhaustive", seed) == sample
    assert len(taken(project)) == 9


def test_every_case_is_in_the_sample_of_some_seed(project: pytest.Pytester) -> None:
    seen = set()
    for number in range(20):
        seen.update(taken(project, "-m", "not exhaustive", f"--matrix-seed={number}"))
    assert {f"test_matrix[{number}]" for number in range(6)} <= seen
    assert "test_matrix[6]" not in seen


def test_a_share_of_the_exhaustive_ones_is_drawn_and_the_others_are_left(
    project: pytest.Pytester,
) -> None:
    seen = set()
    for number in range(20):
        drawn = taken(project, "-m", "exhaustive", f"--matrix-seed={number}", "--share=0.5")
        assert len(drawn) == 2
        seen.update(drawn)
    # What .ci/run takes: the default tests and those, in one run.
    both = taken(project, "--matrix-seed=19", "--share=0.5")
    assert sorted(both) == sorted([*taken(project, "--matrix-seed=19", "--share=0"), *drawn])
    assert {f"test_matrix[{number}]" for number in range(7)} <= seen
    assert len(taken(project, "--share=0")) == 4


def test_slow_files_start_first_and_the_seed_is_printed(project: pytest.Pytester) -> None:
    project.makepyfile(test_zzz="import pytest\n@pytest.mark.slow(40)\ndef test_z(): pass")
    assert taken(project)[0] == "test_z"
    result = project.runpytest_inprocess("--matrix-seed=abc", "--share=0.5", "--collect-only")
    assert "matrices: --matrix-seed=abc --share=0.5" in result.outlines
