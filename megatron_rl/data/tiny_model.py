"""Makes a random Llama of 1.3M parameters with a character tokenizer, for quick runs and tests.

Used by `python -m megatron_rl.data.tiny`, tools/make_tiny_model.py and tests; runs in no process of
a run. Each tag, the box and (with `programs`) each fence is one token, so a short answer has about
ten. Heads, key-value heads, feed-forward width and vocabulary are even, for tensor parallelism.
"""

import json
import shutil
import tempfile
from pathlib import Path

VOCAB_SIZE = 64
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>"]
TAGS = ["<think>", "</think>", "\\boxed{", "}"]
CHARACTERS = "0123456789+-*=,;:()<> abcdefghijklmnopqrstuvwxyz"
# An untrained model samples unused ids too, so each decodes to a different text.
FILLERS = [chr(ord("α") + i) for i in range(VOCAB_SIZE)]
VOCABULARY = [*SPECIAL_TOKENS, *TAGS, *CHARACTERS, *FILLERS][:VOCAB_SIZE]
FENCES = ["```python\n", "\n```"]
"""With `programs`: tokens in place of the last fillers."""
# The system message, if any, goes before the question; the model answers right after it.
CHAT_TEMPLATE = "<bos>{% for message in messages %}{{ message['content'] }}{% endfor %}"
CONTEXT_TOKENS = 256
# A dict: transformers would take longer to load than everything else.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": True,
    "pad_token_id": VOCABULARY.index("<pad>"),
    "bos_token_id": VOCABULARY.index("<bos>"),
    "eos_token_id": VOCABULARY.index("<eos>"),
}
INITIAL_STD = 0.02


def write_tokenizer(out: Path, *, programs: bool = False) -> None:
    """Write tokenizer.json and tokenizer_config.json into the folder `out`.

    programs: with a token for each fence of a program.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    fences = FENCES if programs else []
    vocabulary = [*VOCABULARY[: VOCAB_SIZE - len(fences)], *fences]
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token="<unk>"))
    tags = "|".join(tag.replace("\\", "\\\\").replace("{", "\\{") for tag in [*TAGS, *fences])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{tags}|[\\s\\S]"), "isolated")
    # Without a decoder WordLevel puts spaces between the tokens.
    tokenizer.decoder = decoders.Fuse()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_model(out: Path, seed: int) -> int:
    """Write config and random float32 weights into `out`; returns the parameter count."""
    import numpy as np
    from safetensors.numpy import save_file

    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    ids = {key: CONFIG[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    (out / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    rng = np.random.default_rng(seed)
    weights = {}
    for name, size in tensor_sizes().items():
        normal = INITIAL_STD * rng.standard_normal(size, dtype=np.float32)
        weights[name] = np.ones(size, dtype=np.float32) if len(size) == 1 else normal
    # transformers refuses a file without this entry.
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    # safetensors 0.8.0 lets only the owner read the file.
    (out / "model.safetensors").chmod(0o644)
    return sum(tensor.size for tensor in weights.values())


def tensor_sizes() -> dict[str, tuple[int, ...]]:
    """Shape of every tensor; vectors are weights of norms."""
    width, units = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    queries, keys = (
        CONFIG["head_dim"] * CONFIG[f"num_{kind}_heads"] for kind in ("attention", "key_value")
    )
    layer = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (units, width),
        "mlp.up_proj": (units, width),
        "mlp.down_proj": (width, units),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, width)}
    for i in range(CONFIG["num_hidden_layers"]):
        sizes |= {f"model.layers.{i}.{name}.weight": size for name, size in layer.items()}
    return sizes | {"model.norm.weight": (width,)}


def make_folder(out: Path, seed: int, *, programs: bool = False) -> int:
    """Make the HF folder `out`, complete or not at all; returns the parameter count.

    programs: the tokenizer has the fences of programs. Raises FileExistsError unless `out` is
    empty.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} exists: name another folder or delete this one")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        count = write_model(folder, seed)
        write_tokenizer(folder, programs=programs)
        shutil.rmtree(out, ignore_errors=True)
        folder.rename(out)
    return count
