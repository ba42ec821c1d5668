"""Prompts that cannot be rendered: too long for the context, or refused by the chat template.

The launcher finds them before a run and writes RUN/prompts_dropped.jsonl; the rollout queue leaves
out the prompts that this file names, and tools that repeat an evaluation do as well.
"""

import os
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.render import Conversation, Renderer
from megatron_rl.protocol.types import Prompt
from megatron_rl.protocol.wire import DeadlineExceeded

DROPPED = "prompts_dropped.jsonl"
_RENDER_S = 900.0
"""For all prompts; 100,000 of the longest take about a minute."""


class DroppedPrompt(msgspec.Struct, frozen=True):
    """One line of the file."""

    id: str
    place: str
    """file:line, where the source has lines."""
    reason: str

    @property
    def where(self) -> str:
        """What the user finds it by."""
        return self.place or f"prompt {self.id!r}"


def find_dropped(prompts: Sequence[Prompt], config: Config) -> list[DroppedPrompt]:
    """The prompts that generators could not render. Raises InputError for a bad tokenizer.

    They are rendered in a child, because transformers and the threads of its tokenizers have no
    place in a launcher, which lives as long as the run.
    """
    conversations = [Conversation(prompt.task, prompt.messages) for prompt in prompts]
    refusals = _in_child(config, conversations)
    return [
        DroppedPrompt(prompts[index].id, prompts[index].place, reason)
        for index, reason in sorted(refusals.items())
    ]


def _in_child(config: Config, conversations: Sequence[Conversation]) -> dict[int, str]:
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_refusals, args=(sender, config, conversations))
    child.start()
    # Only the child holds the sending end now, so that its death ends the wait.
    sender.close()
    try:
        if not receiver.poll(_RENDER_S):
            raise DeadlineExceeded(f"rendering the prompts took over {_RENDER_S:.0f} s")
        found = receiver.recv()
    except EOFError as error:
        child.join(_RENDER_S)
        raise RuntimeError(f"rendering the prompts: exit code {child.exitcode}") from error
    finally:
        child.kill()
        child.join()
        receiver.close()
    if isinstance(found, InputError):
        raise found
    return found


def _send_refusals(
    sender: Connection, config: Config, conversations: Sequence[Conversation]
) -> None:
    """In the child: send why conversations are refused, by index, or the InputError."""
    # A tokenizer needs no torch, which transformers 5 would load all the same, for seconds.
    sys.modules["torch"] = None
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        sender.send(find_refusals(config, conversations))
    except InputError as error:
        sender.send(error)


def find_refusals(config: Config, conversations: Sequence[Conversation]) -> dict[int, str]:
    """Why the run's renderer refuses conversations, by index; imports transformers."""
    context_tokens = config.generator.context_tokens
    renderer = Renderer(config.render, config.model.path, context_tokens, gates=config.reward.gates)
    return renderer.find_refusals(conversations, config.sampling.max_new_tokens)


def write_dropped(run_dir: Path, dropped: Sequence[DroppedPrompt]) -> None:
    """Write the file anew; without dropped prompts there is none."""
    path = run_dir / DROPPED
    if dropped:
        path.write_bytes(msgspec.json.Encoder().encode_lines(dropped))
    else:
        path.unlink(missing_ok=True)


def read_dropped(run_dir: Path) -> frozenset[str]:
    """Ids of the prompts that the run leaves out. Raises InputError for a damaged file."""
    path = run_dir / DROPPED
    if not path.exists():
        return frozenset()
    try:
        dropped = msgspec.json.Decoder(DroppedPrompt).decode_lines(path.read_bytes())
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: {error}; the launcher writes it: start the run anew") from error
    return frozenset(prompt.id for prompt in dropped)
