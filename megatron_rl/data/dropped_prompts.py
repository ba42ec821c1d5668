"""Prompts that cannot be rendered: too long for the context, or refused by the chat template.

The launcher finds them before a run and writes RUN/prompts_dropped.jsonl. The rollout queue, and
tools that repeat an evaluation, leave out the prompts in this file.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.staging import longest_stage
from megatron_rl.config.tree import Config
from megatron_rl.protocol.render import Conversation, Renderer, open_renderer
from megatron_rl.protocol.render_probe import TaughtAnswer, probe_renderer
from megatron_rl.protocol.tokenizer_child import call_in_child
from megatron_rl.protocol.tool_calls import ToolCallParser
from megatron_rl.protocol.turns import Turns
from megatron_rl.protocol.types import Prompt
from megatron_rl.protocol.whole_file import write_whole

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
        """Place for messages."""
        return self.place or f"prompt {self.id!r}"


class Rendering(NamedTuple):
    """How prompts are rendered."""

    dropped: list[DroppedPrompt]
    """Prompts that generators could not render."""
    notes: list[str]
    """Lines to show about the chat template and the tokenizer."""


def try_rendering(
    prompts: Sequence[Prompt],
    config: Config,
    limits: Mapping[str, int] | None = None,
    *,
    taught: Sequence[TaughtAnswer] = (),
    trials: Sequence[Callable[[Renderer], object]] = (),
) -> Rendering:
    """Render all prompts, and probe the chat template. Raises InputError for a bad tokenizer.

    limits: maximum tokens of a completion, by prompt id; default: the largest
    sampling.max_new_tokens of the stages. taught: some SFT examples. trials: called with the
    renderer, where they may raise InputError.
    """
    conversations = [Conversation(p.task, p.messages, p.is_program) for p in prompts]
    # Any stage may draw a prompt, so it must leave room for the longest completions.
    default = longest_stage(config).sampling.max_new_tokens
    room = [(limits or {}).get(prompt.id, default) for prompt in prompts]
    refusals, notes = call_in_child(
        render_in_child, config, conversations, room, taught, trials,
        default if config.train.steps else None,
        what="rendering the prompts", limit_s=_RENDER_S,
    )  # fmt: skip
    dropped = [
        DroppedPrompt(prompts[index].id, prompts[index].place, reason)
        for index, reason in sorted(refusals.items())
    ]
    return Rendering(dropped, notes)


def render_in_child(
    config: Config,
    conversations: Sequence[Conversation],
    limits: Sequence[int],
    taught: Sequence[TaughtAnswer],
    trials: Sequence[Callable[[Renderer], object]] = (),
    max_new_tokens: int | None = None,
) -> tuple[dict[int, str], list[str]]:
    """Why the run's renderer refuses conversations, by index, and notes; imports transformers.

    limits: tokens of each one's completion. max_new_tokens: of one in training.
    """
    renderer = open_renderer(config)
    for trial in trials:
        trial(renderer)
    refusals: dict[int, str] = {}
    for limit in set(limits):
        places = [place for place, mine in enumerate(limits) if mine == limit]
        found = renderer.find_refusals([conversations[place] for place in places], limit)
        refusals.update({places[index]: reason for index, reason in found.items()})
    notes = probe_renderer(renderer, conversations, taught, max_new_tokens)
    if config.reward.environments:
        turns = Turns(renderer, is_continued=config.render.history == "keep")
        notes += [*turns.notes, ToolCallParser(renderer).note]
    return refusals, [note for note in notes if note]


def write_dropped(run_dir: Path, dropped: Sequence[DroppedPrompt]) -> None:
    """Write the file, or remove it without dropped prompts."""
    path = run_dir / DROPPED
    if dropped:
        write_whole(path, msgspec.json.Encoder().encode_lines(dropped))
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
