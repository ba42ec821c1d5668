"""Tasksets and environments of the package `verifiers`, as episodes.

Runs in the environment's process, whose interpreter needs the packages `verifiers` (0.4.0 or later)
and `uv`: `expert.environments.python`. An agent program of verifiers, its harness, holds the
conversation through the generator's proxy.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from verification.environments.policy import EpisodeInput, Outcome, Policy, PolicyLimit

_KEY = "POLICY_API_KEY"
"""Variable for the episode's key. verifiers passes no name with API_KEY in it to programs."""
_NOT_THE_POLICYS = ("setup_timeout", "finalize_timeout", "scoring_timeout")
"""Ends of a conversation that verifiers would give a reward nevertheless."""


class VerifiersEpisode:
    """Episode of a taskset or environment of verifiers; a prompt's `entry` is its task.

    env: verifiers' own configuration of an environment, such as {"taskset": {"id": "gsm8k-v1"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}. Exactly one agent has
    no `client`: the policy. correct_from: least reward that counts as "correct".
    """

    def __init__(self, env: Mapping[str, Any], *, correct_from: float = 1.0) -> None:
        self._env = json.dumps(env)
        self._correct_from = correct_from

    @functools.cached_property
    def environment(self) -> Any:
        """The environment of verifiers. Raises ValueError, and what verifiers raises."""
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        environment = load_environment(resolve_env_config(json.loads(self._env)))
        _policy_agent(environment.config)  # Refuses agents that nobody could tell apart.
        return environment

    def prepare(self) -> None:
        """Load the environment and install its programs, once for all forked episodes."""
        # pip puts uv into the interpreter's folder, which is usually not in PATH.
        folder = os.path.dirname(sys.executable)
        os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
        # This ends its threads: none may live when episodes are forked.
        asyncio.run(self._install())

    async def _install(self) -> None:
        """Have uv install what local programs need: verifiers remembers it in every fork."""
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.runtimes import SubprocessConfig, provision_runtime
        from verifiers.v1.utils.loaders import load_harness

        config = self.environment.config
        harnesses = config.agent_harnesses()
        for name, agent in agent_config_fields(config).items():
            if isinstance(agent.runtime, SubprocessConfig):
                async with provision_runtime(agent.runtime) as runtime:
                    await load_harness(harnesses[name]).setup(runtime)

    async def __call__(self, prompt: EpisodeInput, policy: Policy) -> Outcome:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        os.environ[_KEY] = policy.key
        environment = self.environment
        kind = environment.taskset.task_type()
        data = kind.data_type().model_validate(prompt.entry)
        client = EvalClientConfig(base_url=policy.url, api_key_var=_KEY)
        async with environment.serving():
            episode = await environment.run_episode(
                kind(data, environment.config.taskset.task),
                ModelContext(model="policy", client=client),
            )
        return self._outcome(episode)

    def _outcome(self, episode: Any) -> Outcome:
        """The outcome of verifiers' episode. Raises RuntimeError for one that has no reward."""
        errors = [*episode.errors, *(error for one in episode.traces for error in one.errors)]
        agent = _policy_agent(self.environment.config)
        traces = [one for one in episode.traces if one.agent.name == agent]
        if not self.environment.complete(episode) or not all(one.ok for one in traces):
            raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in errors))
        if [one.agent.trainable for one in traces] != [True]:
            raise RuntimeError(
                f"{len(traces)} conversations of the agent {agent!r}; expected one, "
                "and that the environment trains it: another reward could not be told apart"
            )
        trace = traces[0]
        last = trace.calls[-1].error if trace.calls else None
        if last is not None and "context_length_exceeded" in last.message:
            raise PolicyLimit("out_of_tokens")
        parts = {name: one and one.value for name, one in trace.rewards.items()}
        is_scored = None not in (*parts.values(), *trace.metrics.values())
        if trace.stop_condition in _NOT_THE_POLICYS or not is_scored:
            raise RuntimeError(f"no reward after {trace.stop_condition}: {parts}")
        is_correct = trace.reward >= self._correct_from
        reason = "correct" if is_correct else trace.stop_condition or "completed"
        return Outcome(trace.reward, reason, parts)

    def write_prompts(self, path: str, *, task: str, limit: int | None = None) -> None:
        """Write the taskset's prompts, one JSON object a line, for `prompts.path`.

        task: name of the task in `reward.tasks`. limit: number of prompts; None: all.
        """
        taskset = self.environment.taskset
        chosen = taskset if limit is None else taskset.take(limit)
        if not chosen.bounded:
            raise ValueError("the taskset never ends: give a limit")
        with open(path, "w", encoding="utf-8") as file:
            for one in chosen:
                # The harness says what the policy reads. These words tell prompts apart.
                data = one.data
                words = data.prompt_text or data.description or data.name or f"task {data.idx}"
                line = {
                    "id": f"{task}-{data.idx}",
                    "task": task,
                    "messages": [{"role": "user", "content": words}],
                    "entry": data.model_dump(mode="json", exclude_none=True),
                }
                file.write(json.dumps(line) + "\n")


def _policy_agent(config: Any) -> str:
    """Name of the agent of a configuration that is the policy. Raises ValueError."""
    from verifiers.v1.configs.agent import agent_config_fields

    agents = agent_config_fields(config)
    names = [name for name, agent in agents.items() if agent.client is None]
    if len(names) != 1:
        raise ValueError(
            f"agents without a client: {names}; expected one, which is the policy: give every "
            "other agent a client and a model, such as a judge or a user"
        )
    return names[0]
