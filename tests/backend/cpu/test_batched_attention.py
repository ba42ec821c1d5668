"""Which attention calls of SGLang's torch_native backend go to the loop in C++."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.backend.cpu.kernels import engine_loops
from tests.backend.cpu.site_modules import import_shim


class Backend:
    """The methods of SGLang's backend that are replaced."""

    def init_forward_metadata(self, forward_batch: Any) -> None: ...

    def _run_sdpa_forward_decode(self, *args: Any, **options: Any) -> str:
        return "SGLang's own"

    _run_sdpa_forward_extend = _run_sdpa_forward_decode


import_shim("batched_attention").install(SimpleNamespace(TorchNativeAttnBackend=Backend))


@pytest.mark.parametrize(
    ("size", "options", "is_ours"),
    [(16, {}, True), (20, {}, False), (16, {"sliding_window_size": 8}, False)],
)
def test_heads_that_the_loop_knows_attend_in_one_call(
    size: int, options: dict[str, Any], is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[engine_loops.Requests] = []
    monkeypatch.setattr(engine_loops, "attend", lambda *args: calls.append(args[4]))
    backend = Backend()
    backend.init_forward_metadata(None)
    pools = torch.zeros(2, 30, 1, size)
    table, rows, lens = torch.zeros(4, 10), torch.tensor([3, 1]), torch.tensor([4, 5])
    query = torch.zeros(2, 2, size)
    output = torch.zeros_like(query)
    for _ in range(2):
        found = backend._run_sdpa_forward_decode(
            query, output, *pools, table, rows, lens, None, causal=False, **options
        )
        assert (found is output) is is_ours
    backend._run_sdpa_forward_extend(
        query, output, *pools, table, rows, lens, lens - 1, rows, None, causal=False, **options
    )
    # Requests are located once for all layers; attention that is not causal stays SGLang's.
    assert len(calls) == 2 * is_ours and len(set(map(id, calls))) == is_ours
