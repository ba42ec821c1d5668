"""The end of the model: hidden states in place of logits, and the output layer that follows them.

Runs in trainer ranks of the last pipeline stage. Logits of all positions are never computed;
`logprobs.py` applies the output layer to the positions that predict a completion token.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor


@contextmanager
def without_output_layer(model: GPTModel) -> Iterator[None]:
    """Within the block a last stage returns hidden states: [1, positions of this rank, hidden].

    The layer is still called, as Megatron waits in its hooks for parameters under way.
    """
    layer = getattr(model, "output_layer", None)
    if layer is None:
        yield
        return
    layer.forward = lambda hidden, weight=None, runtime_gather_output=None: (hidden, None)
    try:
        yield
    finally:
        del layer.forward


def output_weight(model: GPTModel) -> Tensor:
    """[padded vocabulary / tensor ranks, hidden]: the embedding's parameter where it is tied."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def select_positions(hidden: Tensor, positions: Tensor, *, is_sequence_parallel: bool) -> Tensor:
    """[selected, hidden] on every tensor rank; parts of the gradient are summed on the way back.

    hidden: [positions, hidden], or this tensor rank's slice of the positions under sequence
    parallelism; positions: [selected] int64, index into all positions.
    """
    if is_sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(hidden)[positions]
    group = parallel_state.get_tensor_model_parallel_group()
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden[positions], group=group)
