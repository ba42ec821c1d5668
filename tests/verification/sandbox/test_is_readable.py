"""A wait for a descriptor works in a process with very many of them."""

import os
import resource

import pytest

from verification.sandbox.time_limits import is_readable

MANY = 1_100
"""More than the 1,024 of select()."""


def test_a_descriptor_of_any_number_is_waited_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * MANY:
        pytest.skip(f"this host allows {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MANY), hard))
    reader, writer = os.pipe()
    held = [os.dup(reader) for _ in range(MANY)]
    try:
        assert held[-1] > 1_024 and not is_readable(held[-1], 0.0)
        os.write(writer, b"x")
        assert is_readable(held[-1], 10.0)
    finally:
        for descriptor in (*held, reader, writer):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
