"""What a check of an environment finds before a run, and what is loaded before conversations."""

import os
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from tests.verification.environments.running import FOLDER, Running, settings
from verification.environments.episode import describe_end
from verification.environments.fork_client import check_target
from verification.environments.settings import EnvironmentFailed


@pytest.mark.parametrize(
    ("made", "module", "versions"),
    [
        ("mcp_episode(['x'])", "mcp.client.stdio", "mcp, 1.30"),
        (
            "open_env_episode('http://x', action='a')",
            "openenv.core.generic_client",
            "openenv, 0.10",
        ),
    ],
)
def test_clients_are_imported_once_for_all_conversations(
    tmp_path: Path, made: str, module: str, versions: str
) -> None:
    (tmp_path / "clients.py").write_text(
        f"from verification.environments import *\nepisode = {made}\n"
    )
    paths = (str(tmp_path),)
    with pytest.raises(InputError, match=f"No module named .*; expected the package {versions}"):
        check_target("clients:episode", settings(tmp_path, paths=paths))
    client = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    client.parent.mkdir(parents=True)
    client.write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('once')\n")
    with Running(tmp_path, paths=paths) as running:
        for _ in range(3):
            # The package of this test has no classes.
            with pytest.raises(EnvironmentFailed, match="cannot import name"):
                running.play("clients:episode")
    assert (tmp_path / "imports").read_text() == "once"


@pytest.mark.parametrize(
    ("target", "form"),
    [("guess", "function"), ("Countdown", "text_game"), ("calculator", "tools")],
)
def test_a_check_tells_the_form(tmp_path: Path, target: str, form: str) -> None:
    assert check_target(f"games:{target}", settings(tmp_path)) == form


@pytest.mark.parametrize(
    ("target", "changes", "says"),
    [
        ("games", {}, "no 'module:name'"),
        ("games:nothing", {}, "has no attribute 'nothing'"),
        ("games:add", {}, "games:add is a function: expected an async function"),
        ("no_such_module:x", {}, "No module named 'no_such_module'"),
        (
            "games:guess",
            {"python": "/no/python"},
            "No such file .*: set expert.env.*python",
        ),
        ("games:guess", {"python": "/bin/false"}, "exit code 1"),
        ("time:sleep", {"start_timeout_s": 0.001}, "the import took over 0.001 s"),
        ("undocumented:episode", {}, "the tool f has no docstring"),
    ],
)
def test_a_check_says_what_is_wrong(
    tmp_path: Path, target: str, changes: dict[str, str | float], says: str
) -> None:
    (tmp_path / "undocumented.py").write_text(
        "from verification.environments import tools_episode\n"
        "def f(): pass\nepisode = tools_episode([f], reward=len)\n"
    )
    limits = settings(tmp_path, paths=(FOLDER, str(tmp_path)), **changes)
    with pytest.raises(InputError, match=says):
        check_target(target, limits)


@pytest.mark.parametrize(
    ("said", "variables", "names"),
    [
        ("invalid peer certificate: UnknownIssuer", (), '["SSL_CERT_FILE"]'),
        ("tunnel to the proxy failed", ("MY_KEY",), '["MY_KEY", "SSL_CERT_FILE"]'),
        ("the index has no such package", (), ""),
    ],
)
def test_a_start_that_lacks_certificates_or_a_proxy_is_told_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, variables: tuple[str], names: str
) -> None:
    for name in list(os.environ):
        if "proxy" in name.lower() or name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_DIR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SSL_CERT_FILE", "/the/site.pem")
    (tmp_path / "downloads.py").write_text(f"print({said!r})\nraise RuntimeError('uv failed')\n")
    limits = settings(tmp_path, paths=(str(tmp_path),), variables=variables)
    with pytest.raises(InputError, match="RuntimeError: uv failed") as refused:
        check_target("downloads:it", limits)
    _, _, hint = str(refused.value).partition("expert.environments.variables=")
    assert hint == names


MISFITS = """
from functools import wraps
from verification.environments import *

async def no_policy(prompt): ...
async def asks_more(prompt, policy, *, model): ...
class Board:
    def __init__(self, size): ...
    def reset(self): ...
    def step(self, text): ...
class Deaf:
    def reset(self): ...
    def step(self): ...
class Tools:
    def __init__(self, size): ...
def tools(): return tools_episode(Tools)
def rewarded(): return tools_episode([], reward=lambda run: 1.0)
def served(): return mcp_episode(["server"], reward=lambda run: 1.0)
class Fits:
    def __init__(self, size=3): ...
    def reset(self): ...
    @staticmethod
    def step(text, *more): ...
def with_model(function):
    @wraps(function)
    async def call(prompt, policy): return await function(prompt, policy, model=1)
    return call
fits = with_model(asks_more)
"""


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("no_policy", r"misfits:it takes \(prompt\), and must take \(prompt, policy\): too many"),
        ("asks_more", r"it takes \(prompt, policy, \*, model\), and must take .*'model'"),
        ("Board", r"Board takes \(size\), and must take \(\): .*'size'"),
        ("Deaf", r"misfits:it.step takes \(self\), and must take \(self, text\): too many"),
        ("tools()", r"Tools takes \(size\), and must take \(\): .*'size'"),
        ("rewarded()", r"reward=<lambda> takes \(run\), and must take \(prompt, run\): too many"),
        ("served()", r"reward=<lambda> takes \(run\), and must take \(prompt, run\): too many"),
    ],
)
def test_a_check_refuses_what_a_run_could_not_call(tmp_path: Path, made: str, says: str) -> None:
    (tmp_path / "misfits.py").write_text(f"{MISFITS}it = {made}\n")
    with pytest.raises(InputError, match=says):
        check_target("misfits:it", settings(tmp_path, paths=(str(tmp_path),)))


def test_a_check_accepts_what_a_run_can_call(tmp_path: Path) -> None:
    (tmp_path / "misfits.py").write_text(MISFITS)
    limits = settings(tmp_path, paths=(str(tmp_path),))
    assert check_target("misfits:Fits", limits) == "text_game"
    assert check_target("misfits:fits", limits) == "function"


@pytest.mark.parametrize(
    ("report", "told"),
    [
        # The lowest 7 bits of a status are the signal; the exit code stands above 8 bits.
        (b'{"status": 9, "tail": "one\\ntwo\\n"}', "SIGKILL; its last words: two"),
        (b'{"status": 768, "tail": ""}', "exit code 3; its last words: nothing"),
        (b"", "unknown: its keeper ended without a report"),
        # No keeper was killed here.
        (b'{"status": 9, "ta', "unknown: its keeper's report is unreadable: b'{\"status"),
        (b'{"status": 9}', "unreadable"),
        (b"7", "unreadable"),
    ],
)
def test_an_end_is_told_as_far_as_it_is_known(report: bytes, told: str) -> None:
    found = describe_end(report)
    assert told in found and ("unknown" in found) == (told.startswith("un"))
