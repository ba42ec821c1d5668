"""SGLang's allocator of cache slots hands them out in order again once it runs short."""

import subprocess
import sys

from megatron_rl.backend.cpu import sglang as sglang_cpu

PROGRAM = """
import sys
sys.path.append(sys.argv[1])
import torch
from sglang.srt.mem_cache.allocator import token
import batched_attention
batched_attention.install_sorted(token)
slots = token.TokenToKVPoolAllocator(8, torch.float32, "cpu", None, need_sort=False)
taken = slots.alloc(8)
for one in (5, 2, 7, 1):
    slots.free(torch.tensor([one]))
print(slots.available_size(), slots.alloc(5), slots.alloc(3).tolist(), slots.alloc(1).tolist())
"""


def test_freed_slots_come_back_in_ascending_order() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(sglang_cpu.SITE_DIR)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "4 None [1, 2, 5] [7]"
