"""BFCL's multi-turn tasks: several requests of a user, tools with a state, and BFCL's own checker.

    python -m venv --without-pip bfcl && pip --python bfcl/bin/python install --no-deps \
        bfcl-eval==2026.3.23 mpmath
    bfcl/bin/python -m examples.agents.bfcl FOLDER [--category multi_turn_base]
    PYTHONPATH=examples/agents megatron-rl eval MODEL --config examples/agents/bfcl.toml \
        --config FOLDER/paths.toml --run-dir DIR

A user's request ends with the first reply that calls no tool. Reward 1 if the checker finds all
results and the same states as after the true calls. A malformed call is an error that the policy
reads, where BFCL ends the request. BFCL runs calls by `eval`: see `as_python`.
"""

import argparse
import ast
import json
import os
import resource
import sys
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

import bfcl_eval
from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

from verification.environments import Call, EpisodeInput, Outcome, Policy

CATEGORIES = [f"multi_turn_{name}" for name in ("base", "miss_func", "miss_param", "long_context")]
MAX_STEPS = 20
"""Replies with calls within one request, as in BFCL."""
CPU_S = 10
"""CPU seconds of all calls of a conversation: whole numbers may be raised to any power."""
MORE_TOOLS = "I have updated some more functions you can choose from. What about now?"
DATA = Path(bfcl_eval.__file__).parent / "data"


async def bfcl(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """One task. Reasons are "correct", errors of the checker, "force_terminated", "slow_calls"."""
    task: dict[str, Any] = prompt.entry
    missing = task.get("missed_function", {})
    hidden = {name for names in missing.values() for name in names}
    tools = [tool for tool in tools_of(task) if tool["function"]["name"] not in hidden]
    chat = policy.chat(tools=tools)
    history: list[dict[str, Any]] = []
    made: list[list[list[str]]] = []
    for number, request in enumerate(task["question"]):
        if str(number) in missing:
            # A chat keeps its tools: another one begins with all that was said.
            chat, request = (
                policy.chat(history, tools=tools_of(task)),
                [{"role": "user", "content": MORE_TOOLS}],
            )
        for message in request:
            chat.add(message["role"], message["content"])
        history += request
        made.append([])
        for _ in range(MAX_STEPS + 1):
            reply = await chat.say()
            history.append({"role": "assistant", "content": reply.text})
            if not reply.calls and not reply.faults:
                break
            written = [as_python(call) for call in reply.calls]
            steps = [text for text in written if text]
            if not ends_in_time(task, steps):
                return Outcome(0.0, "slow_calls")
            results = iter(run(task, steps))
            made[-1] += [steps] if steps else []
            given = [(next(results) if text else "Error: infinity") for text in written]
            given += [f"Error: {fault}" for fault in reply.faults]
            history += [{"role": "tool", "content": text} for text in given]
            for text, call in zip_longest(given, reply.calls, fillvalue=Call("", {})):
                chat.add("tool", text, name=call.name, call_id=call.id)
        else:
            return Outcome(0.0, "force_terminated")
    return verdict(task, made)


def verdict(task: dict[str, Any], made: list[list[list[str]]]) -> Outcome:
    """BFCL's own. made: of each request, of each reply with calls, its calls."""
    category = task["id"].rpartition("_")[0]
    found = multi_turn_checker(made, task["ground_truth"], task, category, "policy")
    if found["valid"]:
        return Outcome(1.0, "correct")
    return Outcome(0.0, found["error_type"].partition(":")[2])


def run(task: dict[str, Any], calls: list[str]) -> list[str]:
    """Results of calls, by BFCL, which keeps the state in this process."""
    classes, is_long = task["involved_classes"], "long_context" in task["id"]
    config = task["initial_config"]
    return execute_multi_turn_func_call(calls, config, classes, "policy", task["id"], is_long)[0]


def as_python(call: Call) -> str:
    """The call as BFCL evaluates it; "" for one with infinity, which is no literal.

    The parser of calls has checked that its function and the names of its arguments are offered.
    All functions are methods of BFCL's objects, so no other name reaches `eval`.
    """
    try:
        ast.literal_eval(repr(list(call.arguments.values())))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    return f"{call.name}({','.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def ends_in_time(task: dict[str, Any], calls: list[str]) -> bool:
    """Whether calls end within what is left of CPU_S, tried in a copy of this process."""
    left = max(1, CPU_S - int(time.process_time()))
    pid = os.fork()
    if not pid:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (left, left))
            run(task, calls)
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def tools_of(task: dict[str, Any]) -> list[dict[str, Any]]:
    """JSON schemas of all functions of a task, from BFCL's descriptions."""
    names = [MULTI_TURN_FUNC_DOC_FILE_MAPPING[name] for name in task["involved_classes"]]
    documented = [entry for name in names for entry in read_lines(f"multi_turn_func_doc/{name}")]
    parts = ("name", "description", "parameters")
    functions = [{key: as_schema(entry[key]) for key in parts} for entry in documented]
    return [{"type": "function", "function": function} for function in functions]


def as_schema(value: Any) -> Any:
    """A description with the types of JSON schemas in place of BFCL's."""
    if isinstance(value, list):
        return [as_schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    schema = {key: as_schema(one) for key, one in value.items()}
    if isinstance(value.get("type"), str):
        schema["type"] = GORILLA_TO_OPENAPI[value["type"]]
    return schema


def read_lines(name: str) -> list[dict[str, Any]]:
    """A file of BFCL's data: a JSON object a line."""
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def main() -> None:
    """Write the prompts of an evaluation into a folder."""
    parser = argparse.ArgumentParser(description="BFCL's multi-turn tasks as prompts.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--category", default=CATEGORIES[0], choices=CATEGORIES)
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "prompts.jsonl").open("w") as prompts:
        name = f"BFCL_v4_{options.category}.json"
        pairs = zip(read_lines(name), read_lines(f"possible_answer/{name}"))  # noqa: B905
        for task, truth in pairs:
            line = {"id": task["id"], "task": "bfcl", "messages": task["question"][0],
                    "answer": "", "entry": json.dumps({**task, **truth}),
                    "split": "held_out"}  # fmt: skip
            prompts.write(json.dumps(line) + "\n")
    (folder / "paths.toml").write_text(
        f'[expert.environments]\npython = "{sys.executable}"\n'
        f'[[prompts]]\nkind = "jsonl"\nrepeated = "keep"\npath = "{folder}/prompts.jsonl"\n'
    )


if __name__ == "__main__":
    main()
