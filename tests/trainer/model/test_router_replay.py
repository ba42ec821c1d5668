"""Recorded expert choices are taken again, on every split; gradients still reach the routers."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError, load_config
from megatron_rl.config.tree import Config, TrainConfig
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.model.build import packed
from megatron_rl.trainer.model.collate import collate
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.model.router_replay import UNKNOWN, replayed, routers_of
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.layout.slices import Share
from tests.distributed import run_ranks
from tests.tiny_models import PLAIN, QWEN3_MOE, write_model

VOCAB, LAYERS, EXPERTS, TOPK = 200, 4, 4, 2
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_model(folder, family="Qwen3Moe", vocab_size=VOCAB, num_hidden_layers=LAYERS, **QWEN3_MOE)
    return folder


def make_config(folder: Path, *overrides: str) -> Config:
    return load_config(
        None,
        [
            *PLAIN,
            f"model.path={folder}",
            "model.dtype=float32",
            "train.router_replay=true",
            *overrides,
        ],
    )


def make_sequences() -> list[TrainSequence]:
    """Random tokens and random choices, of two different experts each.

    The last one is a conversation of two rows, the second of which begins with two given tokens.
    """
    rng = np.random.default_rng(5)
    sequences = []
    for prompt, completion, second in ((5, 9, 0), (3, 4, 0), (7, 2, 0), (4, 12, 0), (4, 10, 8)):
        count = prompt + completion - 1
        chosen = [rng.permutation(EXPERTS)[:TOPK] for _ in range(count * LAYERS)]
        if second:
            chosen[(second - 1) * LAYERS : second * LAYERS] = [np.full(TOPK, UNKNOWN)] * LAYERS
        learnt = completion - 2 * bool(second)
        sequences.append(
            TrainSequence(
                token_ids=rng.integers(0, VOCAB, prompt + completion).astype(np.int32),
                prompt_length=prompt,
                generator_logprobs=rng.normal(-5, 0.3, learnt).astype(np.float32),
                version_runs=[(0, learnt)],
                advantage=float(rng.normal()),
                weight=1 / 35,
                expert_choices=np.concatenate(chosen).astype(np.int32),
                given=[(second - prompt, second - prompt + 2)] if second else [],
                row_starts=[second] if second else [],
            )
        )
    return sequences


def own_experts(chunk: torch.nn.Module) -> list[torch.Tensor]:
    """[positions, experts] bool of each layer, filled by the next forward passes."""
    maps: list[torch.Tensor] = []
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda _, args, output: maps.append(output[1].bool()))
    return maps


def record_perturb_replay(cfg: Config) -> dict[str, bool]:
    """What holds of a replay after the routers' weights were changed."""
    with open_policy(cfg) as policy:
        chunk, routers = policy.chunks[0], routers_of(policy.chunks[0])
        ids = (torch.arange(TOKENS)[None] * 7) % VOCAB
        inputs = (ids, torch.arange(TOKENS)[None], None)
        maps = own_experts(chunk)
        for _, replay in routers:
            replay.set_router_replay_action(RouterReplayAction.RECORD)
        before = chunk(*inputs, packed_seq_params=packed([TOKENS])).detach()
        choices = torch.cat([replay.get_recorded_indices() for _, replay in routers], dim=1)
        for _, replay in routers:
            replay.clear_router_replay_action()
        with replayed(chunk, choices, topk=TOPK, share=Share(), pin=policy.backend.pin):
            again = chunk(*inputs, packed_seq_params=packed([TOKENS])).detach()
        weights = [p for name, p in chunk.named_parameters() if "router" in name]
        with torch.no_grad():
            for weight in weights:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
        for _, replay in routers:
            replay.clear_router_replay_action()
        chunk(*inputs, packed_seq_params=packed([TOKENS]))
        with replayed(chunk, choices, topk=TOPK, share=Share(), pin=policy.backend.pin):
            output = chunk(*inputs, packed_seq_params=packed([TOKENS]))
        chunk.zero_grad_buffer()
        output.square().mean().backward()
        recorded, same, other, forced = (maps[i : i + LAYERS] for i in range(0, 4 * LAYERS, LAYERS))
        return {
            "a replay of the same weights changes nothing": torch.equal(before, again),
            "the same experts": all(map(torch.equal, recorded, same)),
            "other weights choose others": not all(map(torch.equal, recorded, other)),
            "replayed experts": all(map(torch.equal, recorded, forced)),
            "gradients": all(weight.main_grad.norm() > 0 for weight in weights),
            "other logits": not torch.allclose(output, before),
        }


def test_recorded_choices_are_taken_again_under_other_weights(folder: Path) -> None:
    [found] = run_ranks(record_perturb_replay, 1, make_config(folder))
    assert len(found) == 6 and {claim for claim, holds in found.items() if not holds} == set()


def totals(cfg: Config, replays: bool) -> tuple[float, float]:
    """Loss and norm of the gradient of the same minibatch."""
    with open_policy(cfg) as policy:
        train = TrainConfig(router_replay=replays, max_mismatch=0)
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 1, train=train)
        sequences = make_sequences()
        dealt = deal(
            [len(sequence.token_ids) for sequence in sequences],
            budget_tokens=20,
            dp_size=cfg.parallel.data,
        )
        mine = dealt[parallel_state.get_data_parallel_rank()]
        share = MinibatchShare([[sequences[i] for i in microbatch] for microbatch in mine])
        # What is replayed in one step must be gone in the next.
        metrics = {}
        for _ in range(2):
            trainer.update(share, version=0)
        metrics = {metric.name: metric.value for metric in trainer.update(share, version=0)}
        return metrics["train/loss"], metrics["train/grad_norm"]


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[float, float]:
    return run_ranks(totals, 1, make_config(folder), True)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.pipeline=2", "model.recompute=full"],
        ["model.recompute=full"],
        ["parallel.tensor=2", "parallel.sequence=true"],
        ["parallel.data=2", "parallel.expert=2"],
        ["parallel.context=2"],
        ["parallel.pipeline=2", "parallel.virtual_stages=2", "model.recompute=full"],
    ],
    ids=",".join,
)
def test_a_replay_is_the_same_on_every_split(
    folder: Path, expected: tuple[float, float], overrides: list[str]
) -> None:
    cfg = make_config(folder, *overrides)
    for found in run_ranks(totals, cfg.parallel.world_size, cfg, True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_without_replay_the_routers_choose(folder: Path, expected: tuple[float, float]) -> None:
    [found] = run_ranks(totals, 1, make_config(folder), False)
    assert found[1] != pytest.approx(expected[1], rel=1e-3)


def test_choices_stand_at_their_positions() -> None:
    first, second, *_ = make_sequences()
    width = LAYERS * TOPK
    batch = collate([first, second], multiple=8, choice_width=width, experts=EXPERTS)
    choices = batch.expert_choices
    assert choices is not None and choices.shape == (24, width)
    assert choices[:13].flatten().tolist() == first.expert_choices.tolist()
    assert choices[14:20].flatten().tolist() == second.expert_choices.tolist()
    # Last positions and padding predict nothing.
    assert (choices[[13, 20, 21, 22, 23]] == UNKNOWN).all()
    # A conversation before another sequence: its rows have 8 and 6 tokens.
    rows = make_sequences()[-1]
    found = collate([rows, first], choice_width=width, experts=EXPERTS).expert_choices
    assert found is not None and found.shape == (14 + 14, width)
    recorded = rows.expert_choices.reshape(13, width).tolist()
    assert found[:7].tolist() == recorded[:7] and found[8:13].tolist() == recorded[8:]
    assert (found[[7, 13, 27]] == UNKNOWN).all()
    assert found[14:27].flatten().tolist() == first.expert_choices.tolist()
    assert (collate([], choice_width=width, experts=EXPERTS).expert_choices == UNKNOWN).all()
    assert collate([first]).expert_choices is None


def test_choices_stay_narrow_and_on_the_host_until_a_forward_pass_takes_them() -> None:
    first, second, *_ = make_sequences()
    narrow = msgspec.structs.replace(first, expert_choices=first.expert_choices.astype(np.int16))
    width = LAYERS * TOPK
    batch = collate([narrow], choice_width=width, experts=EXPERTS).moved(
        lambda tensor: tensor.to("meta")
    )
    assert batch.tokens.device.type == "meta"
    choices = batch.expert_choices
    assert choices is not None and (choices.device.type, choices.dtype) == ("cpu", torch.int16)
    mixed = collate([narrow, second], choice_width=width, experts=EXPERTS).expert_choices
    assert mixed is not None and mixed.dtype == torch.int32
    assert mixed[:13].flatten().tolist() == first.expert_choices.tolist()


class OneRouter(torch.nn.Module):
    """A chunk with the routers of LAYERS layers, which nothing calls by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.replays = [RouterReplay() for _ in range(LAYERS)]


def test_what_megatron_keeps_of_a_microbatch_stays_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = OneRouter()
    monkeypatch.setattr(
        "megatron_rl.trainer.model.router_replay.routers_of",
        lambda chunk: list(enumerate(chunk.replays)),
    )
    sequences = make_sequences()[:2]
    batches = [
        collate([s], choice_width=LAYERS * TOPK, experts=EXPERTS).expert_choices for s in sequences
    ]
    counts = [len(choices) for choices in batches]
    scores = torch.rand(max(counts), EXPERTS)

    def experts(layer: int, count: int) -> torch.Tensor:
        return chunk.replays[layer].get_replay_topk(scores[:count], TOPK)[1]

    forward = []
    for choices, count in zip(batches, counts, strict=True):
        narrow = choices.to(torch.int16)
        with replayed(chunk, narrow, topk=TOPK, share=Share(), pin=lambda tensor: tensor):
            forward.append([experts(layer, count) for layer in range(LAYERS)])
        assert all(replay.target_topk_idx is None for replay in chunk.replays)
    kept = [entry for replay in chunk.replays for entry in replay.replay_backward_list]
    held = [value for entry in kept for value in vars(entry).values()]
    assert len(held) == 2 * LAYERS and {tensor.dtype for tensor in held} == {torch.int16}
    for count, mine in zip(counts, forward, strict=True):
        for layer in range(LAYERS):
            again = experts(layer, count)
            assert again.dtype == torch.int64 and torch.equal(again, mine[layer])
    assert forward[0][1][:-1].flatten().tolist() == [
        sequences[0].expert_choices.reshape(-1, LAYERS, TOPK)[t, 1, k]
        for t in range(13)
        for k in range(TOPK)
    ]
    assert not any(replay.replay_backward_list for replay in chunk.replays)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_choices_of_any_width_are_the_same_to_the_routers(dtype: type) -> None:
    width = LAYERS * TOPK
    wide = make_sequences()[:4]  # the others have choices of -1
    narrow = [
        msgspec.structs.replace(s, expert_choices=s.expert_choices.astype(dtype)) for s in wide
    ]
    found = collate(narrow, multiple=8, choice_width=width, experts=EXPERTS).expert_choices
    expected = collate(wide, multiple=8, choice_width=width, experts=EXPERTS).expert_choices
    assert found is not None and expected is not None
    assert found.tolist() == expected.tolist()
    # What is not recorded stays apart from every expert, also from number 255.
    assert (found == UNKNOWN).sum() == (4 + -(14 + 7 + 9 + 16) % 8) * width


@pytest.mark.parametrize(
    ("choice", "dtype"), [(EXPERTS, np.uint8), (255, np.uint8), (EXPERTS, np.int16), (-2, np.int32)]
)
def test_a_choice_of_an_expert_that_the_model_lacks_is_refused(choice: int, dtype: type) -> None:
    first = make_sequences()[0]
    choices = first.expert_choices.astype(dtype)
    choices[7] = choice
    wrong = msgspec.structs.replace(first, expert_choices=choices)
    with pytest.raises(InputError, match=rf"a choice of expert {choice}, but the model has expert"):
        collate([wrong], choice_width=LAYERS * TOPK, experts=EXPERTS)


def test_choices_that_are_no_integers_are_refused() -> None:
    first = make_sequences()[0]
    wrong = msgspec.structs.replace(first, expert_choices=first.expert_choices.astype(np.float32))
    with pytest.raises(InputError, match="expert choices of float32, not integers"):
        collate([wrong], choice_width=LAYERS * TOPK, experts=EXPERTS)


def test_a_sequence_without_choices_is_refused() -> None:
    bare = msgspec.structs.replace(make_sequences()[0], expert_choices=np.zeros(3, np.int32))
    with pytest.raises(InputError, match="a sequence of 14 tokens has 3 expert choices instead"):
        collate([bare], choice_width=LAYERS * TOPK, experts=EXPERTS)
    with pytest.raises(ConfigError, match="generator.engine='hf' does not"):
        load_config(None, ["train.router_replay=true", "generator.engine=hf"])
