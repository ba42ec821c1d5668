"""Hostile programs in a sandbox that must go on: after each, its server runs a right one."""

import os

import pytest

from tests.verification.sandbox.hostile_programs.launch import NOBODY, launch
from tests.verification.sandbox.hostile_programs.one_server import TABLES, Trial, Trials

pytestmark = [
    pytest.mark.slow(30),
    pytest.mark.skipif(
        os.uname().machine != "x86_64", reason="the attacks are written for x86_64 alone"
    ),
]
BAD_SYSTEM_CALL = -31
# Attacks by another architecture's calls, which end the program.
OTHER_ARCHITECTURES = ("_32", "_x32")


def _check(table: str, trials: Trials) -> None:
    assert trials.programs.keys() == TABLES[table].keys()
    assert {name: trial for name, trial in trials.programs.items() if _problem(trial)} == {}


def _problem(trial: Trial) -> bool:
    is_contained = not trial.failure and trial.is_next_right and "ESCAPED" not in trial.output
    return not is_contained or bool(trial.left or trial.changed)


@pytest.mark.parametrize(("table", "user"), [("signals", NOBODY), ("arguments", "self")])
def test_a_program_sends_no_signal_and_the_server_goes_on(table: str, user: str) -> None:
    # As an ordinary user everything in a sandbox is that user: nothing but the filter forbids.
    _check(table, launch("one_server", "bubblewrap", user, table, answer=Trials))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("user", ["self", NOBODY])
@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("table", TABLES)
def test_the_server_goes_on_after_each_program(table: str, kind: str, user: str) -> None:
    trials = launch("one_server", kind, user, table, answer=Trials)
    assert trials.isolation == kind
    _check(table, trials)


SABOTAGE = ("source_is_removed", "source_is_a_folder", "folder_without_rights")


def test_a_compiler_that_was_taken_over_is_no_failure_of_ours() -> None:
    # As an ordinary user it can change the folder that its server wrote the source to.
    trials = launch("one_server", "bubblewrap", NOBODY, "compilers", *SABOTAGE, answer=Trials)
    assert [name for name, trial in trials.programs.items() if _problem(trial)] == []


def test_a_compiler_that_was_taken_over_changes_no_mode_of_the_users_files() -> None:
    # Landlock knows no right to modes; the linker gives the program one with the same call.
    name = "mode_of_a_file_of_the_host"
    trials = launch("one_server", "landlock", NOBODY, "compilers", name, answer=Trials)
    assert trials.programs[name].changed == []


def test_there_are_enough_programs_for_one_server() -> None:
    assert sum(map(len, TABLES.values())) >= 400


def test_calls_of_another_architecture_end_the_program() -> None:
    names = [name for name in TABLES["native"] if name.endswith(OTHER_ARCHITECTURES)]
    trials = launch("one_server", "bubblewrap", "self", "native", *names, answer=Trials)
    assert len(names) > 20
    assert {trial.exit_code for trial in trials.programs.values()} == {BAD_SYSTEM_CALL}


ESCAPES = {
    "refused": ("memfd_create", "inotify_init1", "socket", "signalfd4", "kcmp", "pidfd_open"),
    "arguments": (
        "fcntl_owner", "fcntl_owner_high", "fcntl_owner_process", "fcntl_signal", "fcntl_async",
        "fcntl_async_high", "ioctl_FIOASYNC", "ioctl_FIOSETOWN", "prctl_PR_SET_PDEATHSIG_high",
        "futex_lock_of_parent", "socketpair_high", "prlimit_of_parent_high",
    ),
    "native": ("fcntl_64", "fcntl_64_async", "clone_with_parent"),
}  # fmt: skip
KILLS = ("signal_by_pipe_to_process", "signal_by_socket_to_extended_high", "signal_by_notification")


@pytest.mark.parametrize("table", ESCAPES)
def test_calls_get_through_where_nothing_isolates(table: str) -> None:
    # Otherwise their failure elsewhere would prove nothing.
    trials = launch("one_server", "rlimits", "self", table, *ESCAPES[table], answer=Trials)
    assert all("ESCAPED" in trial.output for trial in trials.programs.values())


def test_signals_kill_the_server_where_nothing_isolates() -> None:
    trials = launch("one_server", "rlimits", "self", "signals", *KILLS, answer=Trials)
    failures = {trial.failure for trial in trials.programs.values()}
    assert failures == {"a sandbox ended by itself: no message"}
