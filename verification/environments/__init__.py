"""Environments: conversations of many turns with the policy, written by users.

An environment is an async function of prompt and policy that returns an `Outcome`, or a text for
the verifier (`ToGrade`); a class with `reset` and `step`; or documented functions as tools
(`tools_episode`). `host.py` runs environments in processes of their own, `child.py` is what these
processes run.

This file and all that it imports need only the standard library of Python 3.9: environments may run
under an interpreter without our packages (`EnvironmentSettings.python`). `programs.py` needs them.
"""

from verification.environments.mcp_server import mcp_episode
from verification.environments.open_env import open_env_episode
from verification.environments.policy import (
    Call,
    Chat,
    EpisodeInput,
    JudgeRefused,
    Outcome,
    Policy,
    PolicyLimit,
    Reply,
    ToGrade,
    Unavailable,
)
from verification.environments.text_game import text_game_episode
from verification.environments.tools import ToolRun, tools_episode
from verification.environments.verifiers_tasks import VerifiersEpisode

__all__ = [
    "Call", "Chat", "EpisodeInput", "JudgeRefused", "Outcome", "Policy", "PolicyLimit", "Reply",
    "ToGrade", "ToolRun", "Unavailable", "VerifiersEpisode", "mcp_episode", "open_env_episode",
    "text_game_episode", "tools_episode",
]  # fmt: skip
