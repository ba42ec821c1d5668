"""A port for a test's sockets."""

from megatron_rl.launcher.ports import find_free


def free_port() -> int:
    """One of this host's that nothing listens on and no connection takes."""
    return find_free("127.0.0.1")
