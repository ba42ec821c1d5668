import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_rl.config.errors import InputError
from megatron_rl.viewer.index import Place
from megatron_rl.viewer.tokens import load_decoder, pieces, read_record, view_tokens
from tests.viewer.made_up import record, write, write_words


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
    path.with_suffix(".int32").unlink()
    with pytest.raises(InputError, match="without token ids"):
        view_tokens(place, read_record(place), tokenizer)


def test_a_model_without_a_fast_tokenizer_has_no_decoder(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    assert load_decoder(tmp_path) is None
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    decoder = load_decoder(tmp_path)
    assert decoder is not None and decoder.decode([0], skip_special_tokens=False)
