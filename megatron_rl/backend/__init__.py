"""The only place that knows CPU and gloo from CUDA and NCCL; trainer ranks and the launcher use it.

May import config and protocol. `cpu/` holds what runs on the CPU alone. The launcher takes
`environment.py`, which loads no torch.
"""
