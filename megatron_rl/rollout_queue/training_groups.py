"""Opens the groups that are trained on, and remembers where that stands for a checkpoint.

Used by the rollout queue.
"""

import collections
import logging

from megatron_rl.algorithms.minibatch import find_crediting
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.queue_state import QueueState, UnfinishedGroup
from megatron_rl.protocol.types import Prompt, Sampling
from megatron_rl.rollout_queue import admission
from megatron_rl.rollout_queue.groups import Group, GroupBook
from megatron_rl.rollout_queue.prompts import PromptSets, PromptStream

log = logging.getLogger(__name__)


class TrainingGroups:
    """Training groups in order: first those that a resumed run generates again, then new ones."""

    def __init__(self, prompts: PromptSets, config: Config) -> None:
        self._config = config
        self._prompts = prompts
        self._stream = PromptStream(prompts, config.run.seed)
        self._crediting = find_crediting(config.algorithm)
        self._again: collections.deque[tuple[int, Prompt]] = collections.deque()

    def open(self, number: int, version: int) -> Group:
        """The next group, opened under the published `version`; `number` is for a new one.

        With queue.strict_staleness no token of the group is older; without it a generator that
        lags may sample it (`admission.py` says how far).
        """
        if self._again:
            number, prompt = self._again.popleft()
        else:
            prompt = self._stream.next()
        sampling = self._config.sampling
        return Group(
            number,
            prompt,
            Sampling(
                sampling.max_new_tokens,
                sampling.temperature,
                sampling.top_p,
                seed=_group_seed(self._config.run.seed, number),
            ),
            self._config.train.group_size,
            version,
            needs_classes=self._crediting.needs_classes,
            flat_on=self._crediting.flat_on,
        )

    def is_due(self, book: GroupBook, next_step: int) -> bool:
        """Whether one more group keeps the bound of staleness and is needed from next_step on."""
        train = self._config.train
        return admission.may_open_group(
            book.untrained,
            max_staleness=self._config.queue.max_staleness,
            groups_per_batch=self._config.sampled_groups,
        ) and admission.is_group_needed(
            book.untaken,
            next_step=next_step,
            steps=train.steps,
            groups_per_batch=self._config.sampled_groups,
        )

    def choose_batch(self, book: GroupBook, step: int) -> list[int] | None:
        """Numbers of the groups of batch `step`; None to wait."""
        return admission.choose_batch(
            book.candidates(),
            step=step,
            groups_per_batch=self._config.sampled_groups,
            max_staleness=self._config.queue.max_staleness,
            is_strict=self._config.queue.strict_staleness,
        )

    def state(
        self, step: int, book: GroupBook, *, groups_opened: int, evaluated: list[str]
    ) -> QueueState:
        """The state of the queue when batch number `step` is trained on and no later one formed."""
        again = [UnfinishedGroup(number, prompt.id) for number, prompt in self._again]
        return QueueState(
            step=step,
            cursor=self._stream.state(),
            groups_opened=groups_opened,
            unfinished=sorted(book.unfinished() + again, key=lambda group: group.number),
            evaluated=evaluated,
        )

    def restore(self, state: QueueState) -> None:
        """Go on where the state was taken. Raises InputError when the prompts are others."""
        self._stream.restore(state.cursor)
        by_id = {prompt.id: prompt for prompts in self._prompts.train for prompt in prompts}
        for group in state.unfinished:
            if group.prompt_id not in by_id:
                raise InputError(
                    f"the saved state of the queue names the prompt {group.prompt_id!r}, which the "
                    "prompt sources lack: resume with the prompts of the saved run"
                )
            self._again.append((group.number, by_id[group.prompt_id]))
        log.info(
            "resumed after step %d: %d groups are generated again", state.step, len(self._again)
        )


def _group_seed(run_seed: int, number: int) -> int:
    """Sampling seed of a group: below 2**31, different for neighbouring runs and groups."""
    return (run_seed * 1_000_003 + number * 9_973) % 2**31
