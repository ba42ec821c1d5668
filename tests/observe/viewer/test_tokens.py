import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_rl.config.errors import InputError
from megatron_rl.observe.viewer.index import Place
from megatron_rl.observe.viewer.tokens import GIVEN, load_decoder, pieces, read_record, view_tokens
from megatron_rl.protocol.trained_tokens import TrainedTokens, trained_path, write_trained
from tests.observe.viewer.made_up import record, write, write_words


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    made.train_from_iterator(["the sum of one and two is three. " * 20], trainer)
    return made


def test_pieces_together_are_the_text(tokenizer: Tokenizer) -> None:
    draw = random.Random(1)
    letters = "the sum of é 漢字 🙂👩\u200d🔬 \u202e <script>\n"
    for _ in range(200):
        text = "".join(draw.choice(letters) for _ in range(draw.randrange(1, 60)))
        ids = tokenizer.encode(text).ids
        found = pieces(ids, tokenizer)
        assert len(found) == len(ids)
        assert "".join(found) == text


def test_bytes_that_are_no_text_lose_no_token(tokenizer: Tokenizer) -> None:
    draw = random.Random(2)
    ids = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(300)]
    assert len(pieces(ids, tokenizer)) == 300


def test_each_token_has_its_logprob_and_version(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "step_000002.jsonl"
    ids = tokenizer.encode("the sum").ids
    assert len(ids) >= 2
    count = len(ids)
    logprobs = [-0.5 * i for i in range(count)]
    spans = [[1, 0, 1], [2, 1, count]]
    write(path, [record(0, 0, tokens=count, spans=spans, words=[0, 2], versions=[1, 2])])
    write_words(path.with_suffix(".int32"), [7, 8], ids, logprobs)
    place = Place(path, 0, len(path.read_bytes()) - 1)
    seen = view_tokens(place, read_record(place), tokenizer)
    assert "".join(seen.texts) == "the sum"
    assert seen.logprobs == pytest.approx(logprobs)
    assert seen.versions == [1] + [2] * (count - 1)
    assert seen.trained is None
    path.with_suffix(".int32").unlink()
    with pytest.raises(InputError, match="which does not exist"):
        view_tokens(place, read_record(place), tokenizer)


def test_given_tokens_are_marked_and_the_trainers_values_stand_at_sampled_ones(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "rollouts" / "step_000002.jsonl"
    ids = tokenizer.encode("the sum of one and two").ids
    count = len(ids)
    assert count >= 6
    spans = [[1, 0, 2], [2, 4, count]]
    write(path, [record(7, 0, tokens=count, spans=spans, words=[0, 2], versions=[1, 2])])
    write_words(path.with_suffix(".int32"), [7, 8], ids, [-0.5, -0.5, 0, 0] + [-0.5] * (count - 4))
    values = np.arange(3 * (count - 2), dtype=np.float32).reshape(3, count - 2)
    written = TrainedTokens(*values)
    ends = np.array([count - 2])
    write_trained(trained_path(tmp_path, 2, 0), np.array([[7, 0]]), ends, written)
    place = Place(path, 0, len(path.read_bytes()) - 1)
    seen = view_tokens(place, read_record(place), tokenizer)
    assert seen.versions == [1, 1, GIVEN, GIVEN] + [2] * (count - 4)
    assert seen.trained is not None
    assert seen.trained.gaps[:5] == [0.5, 1.5, 0.0, 0.0, 2.5]
    assert seen.trained.advantages == [*values[2][:2], 0, 0, *values[2][2:]]


def test_what_the_trainer_found_is_shown_beside(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "rollouts" / "step_000002.jsonl"
    ids = tokenizer.encode("the sum").ids
    count = len(ids)
    write(path, [record(7, index, tokens=count, words=[0, 2]) for index in range(2)])
    write_words(path.with_suffix(".int32"), [7, 8], ids, [-0.5] * count)
    values = np.arange(3 * (count + 1), dtype=np.float32).reshape(3, count + 1)
    found = TrainedTokens(*values)
    # Of another replica; the second rollout of it is too short to be that of the line.
    write_trained(
        trained_path(tmp_path, 2, 1),
        np.array([[7, 0], [7, 1]]),
        np.array([count, count + 1]),
        found,
    )
    write_trained(trained_path(tmp_path, 2, 0), np.array([[8, 0]]), np.array([count + 1]), found)
    lines = path.read_bytes().splitlines(keepends=True)
    first = Place(path, 0, len(lines[0]) - 1)
    seen = view_tokens(first, read_record(first), tokenizer).trained
    assert seen is not None
    assert seen.gaps == pytest.approx([i + 0.5 for i in range(count)])
    assert seen.entropies == pytest.approx([count + 1 + i for i in range(count)])
    assert seen.advantages == pytest.approx([2 * (count + 1) + i for i in range(count)])
    second = Place(path, len(lines[0]), len(lines[1]) - 1)
    assert view_tokens(second, read_record(second), tokenizer).trained is None
    # What was dropped before the batch of that step has the same number, and was not trained on.
    dropped = path.with_name("dropped_000002.jsonl")
    path.with_suffix(".int32").rename(dropped.with_suffix(".int32"))
    path.rename(dropped)
    again = first._replace(path=dropped)
    assert view_tokens(again, read_record(again), tokenizer).trained is None


def test_a_model_without_a_fast_tokenizer_has_no_decoder(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    assert load_decoder(tmp_path) is None
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    decoder = load_decoder(tmp_path)
    assert decoder is not None and decoder.decode([0], skip_special_tokens=False)
