"""The modules of the server as one text that its interpreter loads, without our package there.

Used by `sandbox.py`.
"""

import functools
import marshal
from pathlib import Path

# In the order of their imports.
_SERVER_MODULES = (
    "confinement", "package_values", "values", "call_proxy", "solution_process", "remote_objects",
    "link", "stand_ins", "tests_process", "server",
)  # fmt: skip
LOADER = """
import marshal, os, sys, types
for name in ("verification", "verification.sandbox"):
    sys.modules[name] = types.ModuleType(name)
with open(int(sys.argv[1]), "rb") as file:
    codes = marshal.load(file)
for name, code in codes:
    module = types.ModuleType("verification.sandbox." + name)
    sys.modules[module.__name__] = module
    setattr(sys.modules["verification.sandbox"], name, module)
    exec(code if isinstance(code, types.CodeType) else compile(code, name, "exec"), module.__dict__)
sys.modules["verification.sandbox.server"].main(int(sys.argv[2]))
"""
"""What the interpreter in the sandbox is told to run."""


@functools.cache
def server_code(is_same_python: bool) -> bytes:
    """Modules of the server in the form that the loader reads: compiled, if its Python is ours."""
    codes = []
    for name in _SERVER_MODULES:
        source = Path(__file__).with_name(f"{name}.py").read_text()
        codes.append((name, compile(source, name, "exec") if is_same_python else source))
    return marshal.dumps(codes)
