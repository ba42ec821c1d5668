"""Our engine, or transformers' generate, under tools.bench.generate.

`python -m tools.bench.generate_worker JOB.json`, a process of its own: as a generator does, it
holds the engine's client, whose server is its child.
"""

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path

from generation.engine import EngineSetup, load_engine
from megatron_rl.protocol.types import Sampling
from tools.bench.generate_job import Job, measure, read_job

START_S = 300.0
REQUEST_S = 600.0
MAX_RUNNING = 64


def main() -> None:
    """Command line."""
    job = read_job(sys.argv[1])
    if job.engine == "transformers":
        measure_transformers(job)
    else:
        measure_ours(job)


def setup(job: Job) -> EngineSetup:
    """As a run of the same model would start it; two threads are two tensor-parallel ranks."""
    context = job.prompt_tokens + job.new_tokens + 8
    return EngineSetup(
        model=Path(job.model),
        dtype="bfloat16",
        stop_ids=(),
        tensor_parallel=job.threads,
        max_running=MAX_RUNNING,
        kv_tokens=(MAX_RUNNING + 4) * context,
        context_tokens=context,
        nice=0,
        start_timeout_s=START_S,
        request_timeout_s=REQUEST_S,
        weights_timeout_s=60.0,
        host="127.0.0.1",
        port=job.port,
        seed=0,
        version=0,
        log_path=Path(job.rows).with_suffix(".engine.log"),
    )


def measure_ours(job: Job) -> None:
    """Through the engine's contract: what a generator calls, its socket and logprobs included."""
    loop = asyncio.new_event_loop()
    engine = load_engine(job.engine)(setup(job))

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
    """One `generate` of equally long prompts, sampled at temperature 1 from all tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job.threads)
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


if __name__ == "__main__":
    main()
