"""Python solutions that cheat in unit tests, whose expected value is a secret.

The tests assert `f(1) == SECRET` for a string `SECRET` that starts with NONCE-.
"""

_SEARCH = """
import gc, os, re, sys
def look(value, found):
    if isinstance(value, str): found += re.findall('NONCE-[0-9a-f]{32}', value)
    elif isinstance(value, bytes): look(value.decode('latin-1'), found)
"""

SOLUTIONS = {
    "equal_to_everything": """
class Equal:
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 0
def f(x): return Equal()""",
    "text_equal_to_everything": """
class Equal(str):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = str.__hash__
def f(x): return Equal('x')""",
    "list_equal_to_everything": """
class Equal(list):
    __eq__ = lambda self, other: True
def f(x): return Equal()""",
    "exit_0_when_defined": "import sys\nf = print\nsys.exit(0)",
    "exit_with_the_code_of_success": "import os\nf = print\nos._exit(90)",
    "exit_when_called": "import os\ndef f(x): os._exit(90)",
    "no_assertions": """
import builtins
builtins.AssertionError = ZeroDivisionError
def f(x): return None""",
    "override_the_proxy": """
import sys
proxy = sys.modules['verification.sandbox.call_proxy']
proxy.Peer.receive = proxy.Peer.decode = proxy.Peer.encode = lambda *a: [True, []]
def f(x): return None""",
    "raise_assertion": "def f(x): raise AssertionError",
    "raise_name_error": "def f(x): raise NameError('the tests are broken')",
    "raise_own_base_exception": "class Stop(BaseException): pass\ndef f(x): raise Stop",
    "find_secret_in_memory": _SEARCH
    + """
def f(x):
    found = []
    for item in gc.get_objects(): [look(v, found) for v in gc.get_referents(item)]
    frame = sys._getframe()
    while frame:
        [look(v, found) for v in frame.f_locals.values()]
        frame = frame.f_back
    return found[0]""",
    "find_secret_in_files": _SEARCH
    + """
def f(x):
    found = []
    for descriptor in range(64):
        try: look(os.pread(descriptor, 1 << 20, 0), found)
        except OSError: pass
    return found[0]""",
    "find_secret_in_the_other_process": _SEARCH
    + """
import ctypes
libc = ctypes.CDLL(None)
def f(x):
    for pid in range(os.getpid() - 5, os.getpid() + 5):
        buffer = ctypes.create_string_buffer(8)
        one = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
        if pid != os.getpid() and libc.process_vm_readv(pid, one, 1, one, 1, 0) >= 0:
            return open('/proc/%d/mem' % pid)
    return None""",
    "write_to_all_descriptors": """
import os, struct
body = b'{"value": [true, []], "is_raised": false}'
def f(x):
    for descriptor in range(3, 64):
        try: os.write(descriptor, struct.pack('<I', len(body)) + body)
        except OSError: pass
    return None""",
    "print_what_is_no_text": """
import os, struct
body = b'{"value": [true, []], "is_raised": false, "printed": [[1], {"a": 2}]}'
def f(x):
    os.write(4, struct.pack('<I', len(body)) + body)""",
    "plant_modules_where_both_may_write": """
import sys
for name in sys.stdlib_module_names:
    try: open(f'{name}.py', 'w').write('import sys; sys.exit = print; raise SystemExit(0)')
    except OSError: pass
def f(x): return [x, 1.5j, range(3)]""",
    "write_no_frames": "import os\ndef f(x): os.write(4, b'\\xff' * 100)",
    "write_deep_frame": """
import os, struct
body = b'{"value":' + b'[' * 500000 + b']' * 500000 + b'}'
def f(x): os.write(4, struct.pack('<I', len(body)) + body)""",
    "close_the_connection": "import os\ndef f(x): os.close(4)",
    "huge_result": "def f(x): return 'x' * (60 << 20)",
    "result_that_contains_itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "endless_iterator": "import itertools\ndef f(x): return itertools.count()",
    "never_returns": "def f(x):\n    while True: pass",
    "never_defined": "while True: pass",
    "no_function": "x = 1",
    "not_callable": "f = 7",
    "null_bytes": "def f(x):\n    return 1\x00",
    "lone_surrogate": "def f(x):\n    return '\ud800'",
    "huge_integer": "def f(x): return 1 << (1 << 29)",
}

SOURCES = {
    "null_bytes": "print('ESCAPED')\x00",
    "lone_surrogate": "print('ESCAPED')  # \ud800\nprint('\ud800')",
    "deep_parentheses": "(" * 10**6 + ")" * 10**6,
    "deep_lists": "x = " + "[" * 10**5 + "]" * 10**5,
    "deep_minus": "x = " + "-" * 10**6 + "1",
    "deep_sum": "x = " + "1+" * 10**6 + "1",
    "deep_indentation": "".join(" " * i + "if 1:\n" for i in range(150)) + " " * 150 + "pass",
    "constant_bomb": "x = (1 << 100000000) * (1 << 100000000) + 2 ** 3000000000",
    "long_line": "x = '" + "a" * (5 << 20) + "'",
    "other_encoding": "# coding: utf-7\n+AHAAcgBpAG4AdA-('NO')",
    "empty": "",
}
"""Whole Python programs that attack the parser."""
