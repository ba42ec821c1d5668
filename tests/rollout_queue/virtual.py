"""A coordinator without sockets or processes, moved by a clock that the test sets."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.rollout_queue.coordinator import Coordinator
from megatron_rl.rollout_queue.record import Recorder
from tests.rollout_queue.makers import make_prompt

VERIFIER_ROOM = {"answers": 1024, "code": 256, "custom": 256}


@contextmanager
def open_coordinator(
    run_dir: Path,
    *,
    held_out: int = 0,
    evaluate_only: str = "",
    sets: tuple[str, ...] = (),
    **sections: dict,
) -> Iterator[Coordinator]:
    """A coordinator at time 0 over 100 train prompts; `sections` of the configuration.

    sets: names of evaluation sets of one prompt each.
    """
    named = [{"name": name, "prompts": {"path": f"{name}.jsonl"}} for name in sets]
    config = Config.model_validate({"eval": {"prompts": held_out, "sets": named}, **sections})
    prompts = PromptSets(
        train=[[make_prompt(f"t{n}") for n in range(100)]],
        weights=[1.0],
        held_out=[make_prompt(f"h{n}", split="held_out") for n in range(held_out)],
        duplicates_removed=0,
        eval_sets={name: [make_prompt(f"{name}0", split="held_out")] for name in sets},
    )
    with closing(JsonlWriter(run_dir / "metrics.jsonl", "queue")) as metrics:
        yield Coordinator(
            config,
            prompts,
            recorder=Recorder(run_dir),
            metrics=metrics,
            evaluate_only=evaluate_only,
            now=0.0,
        )
