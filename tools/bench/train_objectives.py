"""Steps under objectives with more passes, for tools.bench.train. Runs in its trainer ranks."""

from collections.abc import Callable
from functools import partial

import msgspec

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.tree import Config
from megatron_rl.protocol.types import TrainSequence
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.sft import share_of
from megatron_rl.trainer.step import Trainer

PLAIN = "magistral"
MORE_PASSES = {
    "proximal": {"policy_loss": {"old_logprobs": "recompute"}},
    "reference": {"preset": "grpo"},
    "groups": {"preset": "agro"},
    "kl_exact": {
        "kl": {"placement": "loss", "estimator": "exact"},
        "reference": {"policy": "start"},
    },
}
"""Name -> what differs from Magistral: one pass of the policy, one of the reference, one
of each, and one of the reference with the output layer twice."""
MEMBERS = 4


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
        (known,) = trainer.prepare([share])
        trainer.update(share, version=0, known=known)

    loops: dict[str, Callable[[], object]] = {}
    for name, given in ({PLAIN: {}} | MORE_PASSES).items():
        objective = find_objective(AlgorithmConfig.model_validate(given))
        trainer = Trainer(policy, objective, cfg.optimizer, 1000, train=cfg.train)
        loops[name] = partial(step, trainer)
    return loops
