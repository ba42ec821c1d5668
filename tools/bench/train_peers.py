"""Steps that our optimizer step is compared to, in the trainer ranks of tools.bench.train.

`PlainLoop` is transformers and torch's AdamW, as written by hand. `objective_loops` are our own
steps under objectives that need more passes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.tree import Config, OptimizerConfig
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.types import TrainSequence
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.sft import share_of
from megatron_rl.trainer.step import Trainer
from tools.bench import train_figures

IGNORED = -100
ROWS = 8
"""Of a padded microbatch: what transformers' Trainer takes where no size is set."""

MEMBERS = 4
"""Of a group of the objectives."""


class PlainLoop:
    """One model and optimizer, whichever way its microbatches are made."""

    def __init__(
        self, folder: Path, device: torch.device, cfg: OptimizerConfig, budget_tokens: int
    ) -> None:
        # SDPA, since the flash-attention package is not there on CPU.
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model = model.to(device).train()
        self._device = device
        self._cfg = cfg
        self._budget_tokens = budget_tokens
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=cfg.lr,
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
        )

    def step(self, sequences: Sequence[TrainSequence], batching: str) -> float:
        """One optimizer step; returns the loss before it."""
        loss = self.accumulate(sequences, batching)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._cfg.clip_grad_norm)
        self._optimizer.step()
        return loss

    def accumulate(self, sequences: Sequence[TrainSequence], batching: str) -> float:
        """Gradient of the mean cross-entropy of completion tokens; batching: one of PEERS."""
        self._optimizer.zero_grad()
        total = 0.0
        for rows in self._microbatches(sequences, batching):
            inputs, labels = pack(rows) if batching == train_figures.PACKED else pad(rows)
            inputs = {name: tensor.to(self._device) for name, tensor in inputs.items()}
            logits = self._model(**inputs, use_cache=False).logits
            loss = sequences[0].weight * F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(),
                labels[:, 1:].flatten().to(self._device),
                ignore_index=IGNORED,
                reduction="sum",
            )
            loss.backward()
            total += loss.item()
        return total

    def _microbatches(
        self, sequences: Sequence[TrainSequence], batching: str
    ) -> Iterator[list[TrainSequence]]:
        lengths = [len(s.token_ids) for s in sequences]
        if batching == train_figures.PACKED:
            (chosen,) = deal(lengths, budget_tokens=self._budget_tokens, dp_size=1)
        else:
            order = list(range(len(lengths)))
            chosen = [order[at : at + ROWS] for at in order[::ROWS]]
        return ([sequences[i] for i in microbatch] for microbatch in chosen)


def pad(sequences: Sequence[TrainSequence]) -> tuple[dict[str, Tensor], Tensor]:
    """(inputs, labels), rows as long as the longest; for labels IGNORED marks what is no target."""
    rows = [_row(sequence) for sequence in sequences]
    ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
    labels = pad_sequence([x for _, x in rows], batch_first=True, padding_value=IGNORED)
    mask = pad_sequence([torch.ones_like(ids) for ids, _ in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}, labels


def pack(sequences: Sequence[TrainSequence]) -> tuple[dict[str, Tensor], Tensor]:
    """(inputs, labels) in one row.

    Transformers makes a block-diagonal mask of positions that restart, where it is given no mask.
    """
    rows = [_row(sequence) for sequence in sequences]
    inputs = {
        "input_ids": torch.cat([ids for ids, _ in rows])[None],
        "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in rows])[None],
    }
    return inputs, torch.cat([labels for _, labels in rows])[None]


def _row(sequence: TrainSequence) -> tuple[Tensor, Tensor]:
    """(token ids, labels), both [tokens] int64."""
    ids = torch.from_numpy(sequence.token_ids).long()
    labels = ids.clone()
    labels[: sequence.prompt_length] = IGNORED
    return ids, labels


def objective_loops(
    policy: Policy, cfg: Config, sequences: list[TrainSequence]
) -> dict[str, Callable[[], object]]:
    """A step under each, with the passes before it; groups of MEMBERS."""
    grouped = [
        msgspec.structs.replace(
            sequence, group=n // MEMBERS, member=n % MEMBERS, advantage=(-1.0) ** n
        )
        for n, sequence in enumerate(sequences)
    ]
    share = msgspec.structs.replace(
        share_of(grouped, cfg.train.microbatch_tokens),
        groups=-(-len(grouped) // MEMBERS),
        members=MEMBERS,
    )

    def step(trainer: Trainer) -> None:
        (prepared,) = trainer.prepare([share])
        trainer.update(share, version=0, prepared=prepared)

    loops: dict[str, Callable[[], object]] = {}
    for name, given in ({train_figures.PLAIN: {}} | train_figures.MORE_PASSES).items():
        objective = find_objective(AlgorithmConfig.model_validate(given))
        trainer = Trainer(policy, objective, cfg.optimizer, 1000, train=cfg.train)
        loops[name] = partial(step, trainer)
    return loops
