"""Code for hosts without CUDA; the backend hands no other device to it.

Trainer ranks use patches of Megatron (`patches.py`), layers, AdamW and loops in C++ (`kernels/`).
SGLang's processes use `sglang/`. May import config, protocol and the rest of the backend;
`kernels/` imports nothing of ours, `sglang/` protocol and `kernels/`.
"""
