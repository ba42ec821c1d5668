"""A run under virtual time: the real rollout queue, with models of its peers.

Run by `megatron-rl simulate` and `tools.bench.simulate`; no process, socket, device or clock. May
import config, protocol, the rollout queue, the layout of weights and the launcher's sizing.
"""
