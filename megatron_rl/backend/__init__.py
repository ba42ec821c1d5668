"""The only place that knows CPU and gloo from CUDA and NCCL; trainer ranks and the launcher use it.

Imports `protocol` alone. The launcher takes `environment.py`, which loads no torch.
"""
