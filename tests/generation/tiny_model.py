"""A random float32 Llama with a character tokenizer, and what transformers computes with it."""

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 +-=<>/{}\\?:."
SPECIAL = ["<bos>", "<eos>", "<pad>"]
EOS_ID = 1
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}=>{% endfor %}"


def make_model(folder: Path, seed: int, **changes: Any) -> LlamaForCausalLM:
    """Write a model folder; weights are drawn from the seed, wide enough to be far from uniform."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": EOS_ID,
        "pad_token_id": 2,
    }
    config = LlamaConfig(**(values | changes))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


@torch.no_grad()
def logprobs(model: LlamaForCausalLM, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """[completion tokens] logprob of each completion token under one model."""
    ids = torch.tensor([prompt + completion])
    table = torch.log_softmax(_in_float64(model)(ids).logits[0], -1)
    rows = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return table[rows, torch.tensor(completion)].float()


def _in_float64(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy that rounds less than what is compared with it.

    Models in bfloat16, and those whose experts are chosen by float32 scores, stay as they are.
    """
    if model.dtype != torch.float32 or not isinstance(model, LlamaForCausalLM):
        return model
    return copy.deepcopy(model).double()


@torch.no_grad()
def mixed_logprobs(
    old: LlamaForCausalLM,
    new: LlamaForCausalLM,
    prompt: list[int],
    completion: list[int],
    *,
    cut: int,
) -> torch.Tensor:
    """Logprobs when completion[cut:] is sampled by `new` on the KV cache that `old` left behind."""
    ids = prompt + completion
    kept = len(prompt) + cut - 1  # the last token before the cut is the first one `new` is fed
    cache = DynamicCache(config=old.config)
    _in_float64(old)(torch.tensor([ids[:kept]]), past_key_values=cache, use_cache=True)
    fed = torch.tensor([ids[kept:]])
    found = _in_float64(new)(fed, past_key_values=cache, use_cache=True)
    table = torch.log_softmax(found.logits[0], -1)
    after = table[torch.arange(len(completion) - cut), torch.tensor(completion[cut:])].float()
    return torch.cat([logprobs(old, prompt, completion[:cut]), after])
