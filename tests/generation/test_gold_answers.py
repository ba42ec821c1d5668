"""Where the reference answer goes in a completion, through a tokenizer that merges `{4`."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from generation.gold_answers import NO_ANSWER, NO_PLACE, RETOKENIZED, TOO_LONG, find_gold
from megatron_rl.config.algorithm import GoldConfig
from megatron_rl.config.prompts import RenderConfig
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import GoldAnswer

TEXT = "so it is \\boxed{12} then"
CHARACTERS = sorted(set("abcdefghijklmnopqrstuvwxyz0123456789 \\{}<>/."))
MERGED = ["{4", "12"]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {token: number for number, token in enumerate(["<eos>", *CHARACTERS, *MERGED])}
    inner = Tokenizer(models.BPE(vocab, [(token[0], token[1]) for token in MERGED]))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    tokenizer.save_pretrained(folder)
    return Renderer(RenderConfig(system_prompt=""), folder, 1000, format_checks={"math": "box"})


def find(
    renderer: Renderer, ids: list[int], answer: str, *, room_tokens: int = 1000, **gold: str
) -> GoldAnswer:
    return find_gold(
        ids,
        renderer.decode(ids),
        answer=answer,
        cfg=GoldConfig(**gold),
        renderer=renderer,
        room_tokens=room_tokens,
    )


def test_the_reference_answer_follows_the_last_opening(renderer: Renderer) -> None:
    ids = renderer.render_response("first \\boxed{3}. " + TEXT)
    found = find(renderer, ids, "7")
    thoughts = ids[: found.thought_tokens]
    assert renderer.decode(thoughts) == "first \\boxed{3}. so it is \\boxed{"
    assert renderer.decode(found.token_ids.tolist()) == "7}"
    assert found.fault == ""


def test_thoughts_and_answer_are_the_tokens_of_their_text(renderer: Renderer) -> None:
    ids = renderer.render_response(TEXT)
    found = find(renderer, ids, "123")
    kept = renderer.decode(ids[: found.thought_tokens])
    joined = [*ids[: found.thought_tokens], *found.token_ids.tolist()]
    assert joined == renderer.encode(kept + "123}")


def test_an_answer_that_would_change_the_thoughts_tokens_has_no_place(renderer: Renderer) -> None:
    assert find(renderer, renderer.render_response(TEXT), "45").fault == RETOKENIZED
    # Here the sampled answer is in one token with the brace before it.
    assert find(renderer, renderer.render_response("\\boxed{45}"), "7").fault == RETOKENIZED


def test_a_rare_spelling_far_before_the_answer_does_not_matter(renderer: Renderer) -> None:
    one, two = renderer.encode("1") + renderer.encode("2"), renderer.encode("12")
    assert one != two
    ids = one + renderer.render_response("a" * 40 + TEXT)
    found = find(renderer, ids, "7")
    assert ids[: found.thought_tokens][:2] == one
    assert renderer.decode(found.token_ids.tolist()) == "7}"


def test_without_a_closing_the_sequence_ends(renderer: Renderer) -> None:
    ids = renderer.render_response("<think>long</think>because of it")
    found = find(renderer, ids, "a proof.", opening="</think>", closing="")
    assert renderer.decode(ids[: found.thought_tokens]) == "<think>long</think>"
    assert found.token_ids.tolist() == renderer.render_response("a proof.")


def test_what_has_no_place_says_why(renderer: Renderer) -> None:
    ids = renderer.render_response(TEXT)
    assert find(renderer, ids, "").fault == NO_ANSWER
    assert find(renderer, renderer.render_response("no box"), "7").fault == NO_PLACE
    found = find(renderer, ids, "7")
    whole = found.thought_tokens + len(found.token_ids)
    assert find(renderer, ids, "7", room_tokens=whole).fault == ""
    tight = find(renderer, ids, "7", room_tokens=whole - 1)
    assert (tight.fault, len(tight.token_ids)) == (TOO_LONG, 0)
