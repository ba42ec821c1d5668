"""Whether the loops in C++ can be used in this process; asked by the patches beside it.

Imported by SGLang's scheduler processes on the CPU.
"""

import functools
import logging

from megatron_rl.kernels import build, engine_loops

log = logging.getLogger(__name__)


@functools.cache
def are_available() -> bool:
    """Whether they compile. If not, the log says so once."""
    try:
        engine_loops.compiled()
    except build.CompilerFailed as error:
        log.warning("SGLang decodes 2 to 3 times slower on this CPU: %s", error)
        return False
    return True
