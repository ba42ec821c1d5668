"""Takes a training step of every distinct trainer rank without its GPUs, and compares the ranks.

Run by `megatron-rl rehearse`. Tensors have sizes but no data (torch's "meta" device), and process
groups have no peers. What CUDA ranks would do is decided by the same code as on CUDA.
"""
