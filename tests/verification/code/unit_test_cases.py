"""Unit tests of many shapes, with solutions that are right and solutions that are not.

A row is (name, unit tests, right solutions, wrong solutions); all solutions define `f`.
"""

from typing import NamedTuple

ADD = "def f(x, y=1): return x + y"
SUB = "def f(x, y=1): return x - y"
NONE = "def f(*a, **k): return None"
QUIT = "import sys\ndef f(*a): sys.exit(0)"
OS_EXIT = "import os\ndef f(*a): os._exit(0)"
STOP = "def f(*a): raise StopIteration"


PYTEST = "import pytest\n"
PRINT = "def f(x): print(x + 1)"
WRITE = "import sys\ndef f(x): sys.stdout.write(f'{x + 1}\\n')"
BYTES = "import sys\ndef f(x): sys.stdout.buffer.write(b'%d\\n' % (x + 1))"
SILENT = ["def f(x): print(x)", "def f(x): return f'{x + 1}\\n'", NONE, QUIT,
          "import sys\ndef f(x): print(x + 1, file=sys.stderr)", "print(2)\ndef f(x): pass",
          "def f(x): print(x + 1, flush=True); print('y' * (2 << 20))"]  # fmt: skip


class Row(NamedTuple):
    """Unit tests and solutions to them."""

    name: str
    unit_tests: str | list[str]
    right: list[str]
    wrong: list[str]
    entry_point: str = "f"


SHAPES = [
    Row("asserts", "assert f(1) == 2\nassert f(2, 3) == 5", [ADD], [SUB, QUIT, OS_EXIT, STOP]),
    Row("list of asserts", ["assert f(1) == 2", "assert f(2, 3) == 5"], [ADD], [SUB, QUIT]),
    Row("check", "def check(candidate):\n    assert candidate(1) == 2", [ADD], [SUB, STOP]),
    Row("check_add", "def check_add(solution):\n    assert solution(1) == 2", [ADD], [SUB]),
    Row("run_tests", "def run_tests():\n    assert f(1) == 2", [ADD], [SUB, QUIT]),
    Row("verify of any name", "def verify(g):\n    assert g(1) == 2", [ADD], [SUB]),
    Row("check that returns", "def check(c):\n    return c(1) == 2", [ADD], [SUB, NONE]),
    Row("async check", "async def check(c):\n    assert c(1) == 2", [ADD], [SUB]),
    Row("async solution", "import asyncio\nasync def test_a():\n    assert await f(1) == 2\n"
        "assert asyncio.run(f(2)) == 3", ["async def f(x): return x + 1"],
        ["async def f(x): return x"]),
    Row("pytest functions", "import pytest\ndef test_a():\n    assert f(1) == 2\n"
        "def test_b():\n    assert f(2, 3) == 5", [ADD], [SUB, "def f(x, y=1): return 2", QUIT]),
    Row("pytest parametrize", "import pytest\n@pytest.mark.parametrize('x,y', [(1, 2), "
        "pytest.param(3, 4, id='b')])\n@pytest.mark.parametrize('z', [0])\n"
        "def test_a(x, y, z):\n    assert f(x) == y + z", [ADD], [SUB, "def f(x): return 2"]),
    Row("skipped tests and rows", f"{PYTEST}def test_a():\n    assert f(1) == 2\n"
        "@pytest.mark.skip\ndef test_b():\n    assert f(1) == 0\n"
        "@pytest.mark.skip(reason='x')\nclass TestC:\n    def test_c(self):\n"
        "        assert f(1) == 0\nclass TestD:\n    @pytest.mark.skip('y')\n"
        "    def test_d(self):\n        assert f(1) == 0\n@pytest.mark.parametrize('x', "
        "[1, pytest.param(2, marks=pytest.mark.skip)])\ndef test_e(x):\n    assert f(x) == 2",
        [ADD, "def f(x): return 2"], [SUB]),
    Row("marks of a class", f"{PYTEST}S = []\n@pytest.fixture\ndef start():\n    S.append(1)\n"
        "@pytest.mark.usefixtures('start')\n@pytest.mark.parametrize('a, b', [(1, 2), (2, 3)])\n"
        "class TestF:\n    @pytest.mark.parametrize('c', [0, 1])\n"
        "    def test_f(self, a, b, c):\n        assert f(a, c + 1) == b + c and S\n"
        "@pytest.mark.usefixtures('start')\ndef test_g():\n    assert f(S[-1]) == 2",
        [ADD], [SUB, "def f(x, y=1): return 2"]),
    Row("functions that pytest calls", "S = []\ndef setup_module():\n    global n\n    n = f(1)\n"
        "def setup_function():\n    S.append(n)\ndef teardown_function(function):\n"
        "    S.clear()\ndef test_a():\n    assert S == [2]\ndef test_b():\n    assert S == [2]",
        [ADD], [SUB]),
    Row("fixtures of a scope", f"{PYTEST}@pytest.fixture(scope='module')\ndef m():\n"
        "    return []\n@pytest.fixture(scope='class')\ndef c(m):\n    m.append(f(len(m)))\n"
        "    yield m\n    assert m == [1, 2]\ndef test_a(m):\n    assert m == []\nclass TestB:\n"
        "    def test_b(self, c):\n        assert c == [1]\n    def test_c(self, c):\n"
        "        assert c == [1]\nclass TestD:\n    def test_d(self, c):\n"
        "        assert c == [1, 2]", [ADD], [SUB, "def f(x): return 1"]),
    Row("approx of NaN", f"{PYTEST}def test_a():\n"
        "    assert f(1) == pytest.approx(float('nan'), nan_ok=True)",
        ["def f(x): return float('nan')"], [ADD, NONE]),
    Row("output that is redirected", "import contextlib, io\ndef test_a():\n"
        "    out = io.StringIO()\n    with contextlib.redirect_stdout(out):\n        f(1)\n"
        "    assert out.getvalue() == '2\\n'", [PRINT, WRITE, BYTES], SILENT),
    Row("output of capsys", "def test_a(capsys):\n    f(1)\n    f(2)\n"
        "    assert capsys.readouterr().out == '2\\n3\\n'\n    f(3)\n"
        "    out, err = capsys.readouterr()\n    assert (out, err) == ('4\\n', '')",
        [PRINT, WRITE, BYTES], SILENT),
    Row("output of capsys in a class", "class TestF:\n    def test_a(self, capsys):\n"
        "        f(1)\n        assert capsys.readouterr().out.strip() == '2'", [PRINT], SILENT),
    Row("output that is patched", "import io\nfrom unittest.mock import patch\n"
        "with patch('sys.stdout', new_callable=io.StringIO) as out:\n    f(1)\n"
        "assert out.getvalue() == '2\\n'", [PRINT], SILENT),
    Row("output that is replaced", "import io, sys\n"
        "before, sys.stdout = sys.stdout, io.StringIO()\nf(1)\n"
        "out, sys.stdout = sys.stdout.getvalue(), before\nassert out == '2\\n'", [PRINT], SILENT),
    Row("output in the order of calls back", "import contextlib, io\nout = io.StringIO()\n"
        "with contextlib.redirect_stdout(out):\n    f(lambda: print('b'))\n"
        "assert out.getvalue() == 'a\\nb\\nc\\n'", ["def f(g): print('a'); g(); print('c')"],
        ["def f(g): g(); print('a'); print('c')", NONE]),
    Row("pytest fixture", "import pytest\n@pytest.fixture\ndef three():\n    yield 3\n"
        "def test_a(three):\n    assert f(three) == 4", [ADD], [SUB]),
    Row("fixtures of a class", "import pytest\nclass TestF:\n"
        "    @pytest.fixture(autouse=True)\n    def start(self):\n        self.x = 1\n"
        "        yield\n        assert f(self.x) == 4\n"
        "    @pytest.fixture\n    def two(self, one):\n        return one + 1\n"
        "    def test_a(self, two):\n        assert f(two) == 3\n        self.x = 3\n"
        "@pytest.fixture\ndef one():\n    return 1", [ADD], [SUB, "def f(x): return 3"]),
    Row("fixtures are made once a test", "import pytest\n@pytest.fixture\ndef xs():\n"
        "    return []\n@pytest.fixture\ndef full(xs):\n    xs.append(f(1))\n"
        "    return xs\n@pytest.fixture(autouse=True)\ndef before(xs):\n    xs.append(0)\n"
        "def test_a(full, xs):\n    assert xs is full and xs == [0, 2]", [ADD], [SUB, NONE]),
    Row("fixture with parameters", "import pytest\nseen = []\n"
        "@pytest.fixture(params=[1, pytest.param(5)])\ndef n(request):\n"
        "    return request.param\n@pytest.fixture\ndef m(n):\n    return n + 1\n"
        "@pytest.mark.parametrize('k', [0, 1])\ndef test_a(m, n, k):\n"
        "    seen.append((n, k))\n    assert f(n) == m\n"
        "def test_b():\n    assert f(2) == 3 and seen == [(1, 0), (1, 1), (5, 0), (5, 1)]",
        [ADD], [SUB, "def f(x): return 2"]),
    Row("pytest raises", "import pytest\ndef test_a():\n    with pytest.raises(ValueError, "
        "match='bad [0-9]') as info:\n        f(1)\n    assert str(info.value) == 'bad 1'",
        ["def f(x): raise ValueError(f'bad {x}')"],
        ["def f(x): raise ValueError('bad')", "def f(x): raise TypeError('bad 1')", NONE, QUIT]),
    Row("pytest approx", "from pytest import approx\ndef test_a():\n"
        "    assert f(1) == approx(0.3)\n    assert [f(2)] == approx([0.4])",
        ["def f(x): return 0.1 + 0.1 + 0.1 + (x - 1) / 10"],
        ["def f(x): return 0.301", "def f(x): return float('nan')", "def f(x): return None"]),
    Row("pytest class", "class TestF:\n    def setup_method(self):\n        self.x = 1\n"
        "    def test_a(self):\n        assert f(self.x) == 2", [ADD], [SUB]),
    Row("pytest class with hooks", "seen = []\nclass TestF:\n    @classmethod\n"
        "    def setup_class(cls):\n        seen.append('class')\n    def setup_method(self, m):"
        "\n        seen.append(m.__name__)\n    def teardown_class(cls):\n        seen.append(0)\n"
        "    def test_a(self):\n        assert f(1) == 2\n    def test_b(self):\n        f(2)\n"
        "class TestG:\n    def test_end(self):\n"
        "        assert seen == ['class', 'test_a', 'test_b', 0]", [ADD], [SUB]),
    Row("pytest main", "import pytest, sys\ndef test_a():\n    assert f(1) == 2\n"
        "if __name__ == '__main__':\n    sys.exit(pytest.main([__file__]))", [ADD], [SUB]),
    Row("unittest", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
        "        self.assertEqual(f(1), 2)", [ADD], [SUB, QUIT, OS_EXIT, STOP]),
    Row("unittest main", "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n"
        "        self.x = 1\n    def test_a(self):\n        self.assertEqual(f(self.x), 2)\n"
        "        with self.assertRaises(TypeError):\n            f('a')\n"
        "if __name__ == '__main__':\n    unittest.main()", [ADD], [SUB]),
    Row("unittest skips nothing for the solution", "import unittest\nclass T(unittest.TestCase):\n"
        "    def test_a(self):\n        self.assertEqual(f(1), 2)", [ADD],
        ["import unittest\ndef f(x): raise unittest.SkipTest('no')",
         "class SkipTest(Exception): pass\ndef f(x): raise SkipTest"]),
    Row("main block", "def main():\n    assert f(1) == 2\nif __name__ == '__main__':\n    main()",
        [ADD], [SUB]),
    Row("exit at the end", "import sys\nassert f(1) == 2\nsys.exit(0)", [ADD], [SUB]),
    Row("os._exit at the end", "import os\nassert f(1) == 2\nos._exit(0)", [ADD], [SUB]),
    Row("exit in the midst", "import sys\nif f(0) != 1:\n    sys.exit(0)\nassert f(1) == 2",
        [ADD], [SUB, NONE]),
    Row("exit in a loop", "for x in range(3):\n    assert f(x) == x + 1\n    if f(x) is None:\n"
        "        exit()", [ADD], [NONE]),
    Row("exit with a code", "import sys\ndef run():\n    return 0 if f(1) == 2 else 1\n"
        "sys.exit(run())", [ADD], [SUB]),
    Row("import of the solution", "from solution import f\nassert f(1) == 2", [ADD], [SUB]),
    Row("import of another name", "from your_module import f as g\nimport your_module as m\n"
        "assert g(1) == 2 and m.f(2) == 3 and m.K == 7", [ADD + "\nK = 7"],
        [ADD, SUB + "\nK = 7"]),
    Row("import under another name", "from solution import f as g\nassert g(1) == 2", [ADD],
        [SUB]),
    Row("import from a package", "from src.adder import f\nassert f(1) == 2", [ADD], [SUB]),
    Row("stub in the tests", "def f(x):\n    '''Add.'''\n    pass\nassert f(1) == 2", [ADD], [SUB]),
    Row("method of Solution", "def check(candidate):\n    assert candidate(x=1) == 2",
        ["class Solution:\n    def add(self, x: List[int]) -> int: return x + 1"],
        ["class Solution:\n    def add(self, x): return x", "def add(x): return x + 1"],
        "Solution().add"),
    Row("class", "def test_a():\n    s = Stack()\n    s.push(1)\n    s.push(2)\n"
        "    assert len(s) == 2\n"
        "    assert s.pop() == 2 and s.items == [1] and isinstance(s, Stack)\n"
        "    assert bool(s)\n    assert list(s) == [1] and 1 in s and 3 not in s and s[0] == 1",
        ["class Stack:\n def __init__(self): self.items = []\n def push(self, x): "
         "self.items.append(x)\n def pop(self): return self.items.pop()\n def __len__(self): "
         "return len(self.items)\n def __iter__(self): return iter(self.items)\n"
         " def __getitem__(self, i): return self.items[i]"],
        ["class Stack:\n def __init__(self): self.items = []\n def push(self, x): "
         "self.items.append(x)\n def pop(self): return self.items.pop(0)\n def __len__(self): "
         "return len(self.items)\n def __iter__(self): return iter(self.items)\n"
         " def __getitem__(self, i): return self.items[i]"], "Stack"),
]  # fmt: skip

VALUES = [
    Row("fraction", "from fractions import Fraction\nassert f(1, 3) == Fraction(1, 3)",
        ["from fractions import Fraction\ndef f(x, y): return Fraction(x, y)"],
        ["def f(x, y): return x / y"]),
    Row("decimal", "from decimal import Decimal\nassert f('0.10') == Decimal('0.1') and "
        "str(f('0.10')) == '0.10'", ["from decimal import Decimal\nf = Decimal"],
        ["def f(x): return float(x)", "def f(x): return x"]),
    Row("dates", "from datetime import *\nassert f(date(2024, 2, 28)) == date(2024, 2, 29)\n"
        "assert f(datetime(2024, 1, 1, 5, tzinfo=timezone.utc)).hour == 5",
        ["import datetime\ndef f(d): return d + datetime.timedelta(days=1)"],
        ["def f(d): return d", "def f(d): return str(d)"]),
    Row("collections", "from collections import *\nr = f('aab')\nassert r == Counter(a=2, b=1) and "
        "r['z'] == 0 and r.most_common(1) == [('a', 2)]",
        ["from collections import Counter\nf = Counter"], ["def f(x): return {'a': 2, 'b': 1}"]),
    Row("namedtuple", "r = f(1, 2)\nassert r == (1, 2) and r.x == 1 and r._fields == ('x', 'y')",
        ["from collections import namedtuple\nf = namedtuple('P', 'x y')"],
        ["def f(x, y): return (x, y)"]),
    Row("dataclass of the tests", "from dataclasses import dataclass\n@dataclass\nclass P:\n"
        "    x: int\n    y: int = 0\nassert f(P(1, 2)) == P(2, 2) and isinstance(f(P(1)), P)",
        ["def f(p): return P(p.x + 1, p.y)",
         "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int\n"
         "def f(p): p.x += 1; return p"],
        ["def f(p): return P(p.x, p.y)", "def f(p): return (2, 2)",
         "class P:\n    def __eq__(self, o): return True\ndef f(p): return P()"]),
    Row("enum", "from enum import Enum\nclass C(Enum):\n    RED = 1\n    BLUE = 2\n"
        "assert f(C.RED) is C.BLUE and f(C.RED).name == 'BLUE'",
        ["def f(c): return C.BLUE", "from enum import Enum\nclass C(Enum):\n    RED = 1\n"
         "    BLUE = 2\ndef f(c): return C.BLUE if c == C.RED else 0"],
        ["def f(c): return 2", "def f(c): return c", "from enum import Enum\nclass C(Enum):\n"
         "    RED = 1\n    BLUE = 3\ndef f(c): return C.BLUE"]),
    Row("linked list of the tests", "class ListNode:\n    def __init__(self, val=0, next=None):\n"
        "        self.val = val\n        self.next = next\ndef to_list(n):\n    r = []\n"
        "    while n:\n        r.append(n.val)\n        n = n.next\n    return r\n"
        "assert to_list(f(ListNode(1, ListNode(2, ListNode(3))))) == [3, 2, 1]\n"
        "n = None\nfor i in range(5000):\n    n = ListNode(i, n)\n"
        "assert to_list(f(n)) == list(range(5000))",
        ["def f(n):\n    p = None\n    while n:\n        n.next, p, n = p, n, n.next\n    return p",
         "def f(n):\n    p = None\n    while n:\n        p, n = ListNode(n.val, p), n.next\n"
         "    return p"],
        ["def f(n): return n", "def f(n): return [3, 2, 1]"]),
    Row("cycle", "r = f()\nassert r.next.next is r and r.val == 1\nl = r.loop\nassert l[0] is l",
        ["class N: pass\ndef f():\n    a, b = N(), N()\n    a.next, b.next, a.val = b, a, 1\n"
         "    a.loop = []\n    a.loop.append(a.loop)\n    return a"],
        ["class N: pass\ndef f():\n    a = N(); a.val = 1; a.next = N(); a.next.next = 3\n"
         "    a.loop = [[]]\n    return a"]),
    Row("returned function", "g = f(2)\nassert g(3) == 5 and callable(g) and f(1)(1) == 2",
        ["def f(x): return lambda y: x + y"], ["def f(x): return lambda y: y", NONE]),
    Row("counter closure", "c = f()\nassert [c(), c(), c()] == [1, 2, 3]",
        ["def f():\n    n = 0\n    def g():\n        nonlocal n\n        n += 1\n        return n\n"
         "    return g"], ["def f(): return lambda: 1"]),
    Row("operators", "import copy\nv = V(1, 2)\nassert v + V(3, 4) == V(4, 6)\n"
        "assert v * 3 == V(3, 6)\n"
        "assert (2 * v).y == 4 and repr(v) == 'V(1, 2)' and v != V(2, 1)\n"
        "w = copy.deepcopy(v)\nw.x = 5\nassert v.x == 1 and w == V(5, 2)",
        ["class V:\n def __init__(s, x, y): s.x, s.y = x, y\n"
         " def __add__(s, o): return V(s.x + o.x, s.y + o.y)\n"
         " def __mul__(s, k): return V(s.x * k, s.y * k)\n __rmul__ = __mul__\n"
         " def __repr__(s): return f'V({s.x}, {s.y})'"],
        ["class V:\n def __init__(s, x, y): s.x, s.y = x, y\n"
         " def __add__(s, o): return V(4, 6)\n def __eq__(s, o): return True\n"
         " def __mul__(s, k): return V(s.x * k, 0)\n __rmul__ = __mul__\n"
         " def __repr__(s): return f'V({s.x}, {s.y})'"], "V"),
    Row("objects as numbers", "import math\nv = V(-3)\n"
        "assert abs(v) == 3 and float(v) == -3.0 and int(v) == -3 and round(v) == -3\n"
        "assert v @ V(2) == -6 and [4, 5, 6][V(1)] == 5 and math.isclose(v, -3)\nw = v\n"
        "v += 5\nassert v is w and v.x == 2 and bool(v) and len(v) == 2\nv -= V(1)\n"
        "assert v.x == 1 and abs(v - V(4)) == 3 and v << 2 == V(4)",
        ["class V:\n def __init__(s, x): s.x = x\n def __abs__(s): return abs(s.x)\n"
         " def __float__(s): return float(s.x)\n def __index__(s): return s.x\n"
         " def __round__(s): return round(s.x)\n def __matmul__(s, o): return s.x * o.x\n"
         " def __iadd__(s, n): s.x += n; return s\n def __isub__(s, o): s.x -= o.x; return s\n"
         " def __sub__(s, o): return V(s.x - o.x)\n def __lshift__(s, n): return V(s.x << n)\n"
         " def __len__(s): return abs(s.x)"],
        ["class V(int):\n x = 2", "class V:\n def __init__(s, x): s.x = x\n"
         " def __abs__(s): return 3\n __float__ = __index__ = __round__ = __abs__"], "V"),
    Row("exit of the solution", "import pytest\ndef test_a():\n"
        "    with pytest.raises(SystemExit) as e:\n        f(2)\n    assert e.value.code == 2",
        ["import sys\nf = sys.exit"], [NONE, "def f(x): raise RuntimeError", OS_EXIT]),
    Row("generator", "from itertools import islice\n"
        "assert list(islice(f(), 20)) == list(range(20))\ng = f()\n"
        "assert next(g) == 0 and next(g) == 1",
        ["import itertools\ndef f(): yield from itertools.count()",
         "import itertools\nf = itertools.count"], ["def f():\n    while True: yield 0", STOP]),
    Row("generator that is sent to", "g = f()\nnext(g)\nassert g.send(5) == 6 and g.send(7) == 8",
        ["def f():\n    x = 0\n    while True: x = 1 + (yield x)"],
        ["def f():\n    while True: yield 6"]),
    Row("function argument", "assert f(lambda x: x * 2, [1, 2]) == [2, 4]\n"
        "assert f(len, ['a']) == [1]",
        ["def f(g, xs): return [g(x) for x in xs]"], ["def f(g, xs): return xs"]),
    Row("object argument", "class Api:\n    def __init__(self, bad):\n        self._bad = bad\n"
        "    def is_bad(self, n):\n        return n >= self._bad\nassert f(Api(4), 9) == 4",
        ["def f(api, n): return next(i for i in range(n) if api.is_bad(i))"],
        ["def f(api, n): return 0"]),
    Row("exception text", "try:\n    f(3)\n    assert False\nexcept ValueError as e:\n"
        "    assert str(e) == 'bad 3' and e.args == ('bad 3',)",
        ["def f(x): raise ValueError(f'bad {x}')",
         "class Own(ValueError): pass\ndef f(x): raise Own(f'bad {x}')"],
        ["def f(x): raise ValueError", "def f(x): raise KeyError('bad 3')", NONE]),
    Row("exception of the tests", "class Empty(Exception):\n    pass\ntry:\n    f()\n"
        "except Empty as e:\n    assert e.code == 4\nelse:\n    assert 0",
        ["def f():\n    e = Empty('x'); e.code = 4; raise e",
         "class Empty(Exception):\n    def __init__(self, code): self.code = code\n"
         "def f(): raise Empty(4)"], ["def f(): raise Exception", STOP]),
    Row("exception of the solution", "from solution import f, Empty\nimport pytest\ndef test_a():\n"
        "    with pytest.raises(Empty):\n        f()",
        ["class Empty(Exception): pass\ndef f(): raise Empty"],
        ["class Empty(Exception): pass\ndef f(): raise ValueError"]),
    Row("changed argument", "x = [[3], 1]\ny = x[0]\nf(x)\nassert y == [3, 4] and x[0] is y",
        ["def f(x): x[0].append(4)"], ["def f(x): return [[3, 4], 1]"]),
    Row("set, bytes, views", "assert f({1, 2}) == {2, 3} and list({1: 2}.keys()) == [1]",
        ["def f(x): return {i + 1 for i in x}",
         "def f(x): return dict.fromkeys(i+1 for i in x).keys()"],
        ["def f(x): return [2, 3]"]),
]  # fmt: skip

NEVER = "class E:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
LIAR = NEVER + (
    "    def _y(self, *a): return 0\n    __sub__ = __rsub__ = __abs__ = __float__ = _y\n"
    "    def _t(self, *a): return True\n    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _t\n"
    "    __hash__ = lambda self: 0\ndef f(*a): return E()"
)
EVAL = "assert eval(f([4, 6])) == 24"
ATTACKS = [
    Row("difference that is nothing", "assert not (f({1, 2, 3}) - {2, 3, 4})\n"
        "assert all(x == 0 for x in f({1}) - {2})", ["def f(x): return x & {2, 3}"],
        [NEVER + "    def __sub__(self, o): return E()\n    def __bool__(self): return False\n"
         "    def __iter__(self): return iter([])\ndef f(x): return E()", LIAR]),
    Row("distance in other spellings", "x = f(2)\nx -= 3\nassert float(x) == 0 and int(x) == 0 "
        "and not x\nassert abs(3 - f(2)) == 0 == abs(f(2) - 3) == (f(2) ^ 3) == round(f(2) - 3)",
        ["def f(x): return x + 1"], [LIAR,
         NEVER + "    def __isub__(s, o): return s\n    def __bool__(s): return False\n"
         "    def __float__(s): return 0.0\n    def __index__(s): return 0\n"
         "    __sub__ = __rsub__ = __xor__ = __isub__\n    __abs__ = __round__ = __index__\n"
         "def f(x): return E()"]),
    Row("enumeration that is equal to all", "assert f(1) == 2", [ADD],
        ["import enum\nC = enum.Enum('C', {'a': 1})\n"
         "C._member_map_['__eq__'] = C.a\nC.a._value_ = lambda *a: True\n"
         "def f(x): return C.a"]),
    Row("method of the tests", "class G:\n    def __init__(self):\n        self.n = 1\n"
        "    def is_two(self):\n        return self.n == 2\ng = G()\nf(g)\nassert g.is_two()",
        ["def f(g): g.n = 2"], ["def f(g): g.is_two = lambda: True"]),
    Row("map", "list(map(f, [1, 2]))\nassert all(map(lambda x: f(x) == x + 1, [1, 2]))", [ADD],
        [STOP, "class S(StopIteration): pass\ndef f(x): raise S", SUB, QUIT,
         "def f(x): raise GeneratorExit", "def f(x): raise KeyboardInterrupt",
         "class B(BaseException): pass\ndef f(x): raise B", "def f(x): raise StopAsyncIteration"]),
    Row("loops that a StopIteration ends", "r = list(f(x) == x + 1 for x in [1, 2])\n"
        "assert all(r)\nfor a, b in zip(map(f, [1]), [2]):\n    assert a == b", [ADD], [STOP, SUB]),
    Row("bare except", "try:\n    r = f(1)\nexcept:\n    r = 2\nassert r == 2",
        [ADD, "def f(x): raise KeyError"], [OS_EXIT, SUB]),
    Row("swallowing except", "for x in [1, 2]:\n    try:\n        r = f(x)\n"
        "    except BaseException:\n        continue\n    assert r == x + 1",
        [ADD], [SUB, OS_EXIT]),
    Row("eval of the result", EVAL, ["def f(x): return '4*6'"],
        ["def f(x): return '__import__(\"os\")._exit(0)'", "def f(x): return 'exit()'",
         "def f(x): return 'undefined_name'", "def f(x): return '4*'", "def f(x): return ')'",
         "def f(x): return '__import__(\"sys\").exit(0)'", "def f(x): return 24.5",
         "def f(x): return '__import__(\"nothing\")'"]),
    Row("eval with the answer at hand", "wanted = 24\nassert eval(f(1), globals()) == wanted\n"
        "def test_a():\n    answer = 24\n    assert eval(f(1), globals(), locals()) == answer\n"
        "    assert eval(f(1)) == answer", ["def f(x): return '20 + 4'"],
        ["def f(x): return 'wanted'", "def f(x): return 'answer'"]),
    Row("alias of eval", "e = eval\nassert sum(map(e, f(1))) == 3", ["def f(x): return ['1', '2']"],
        ["def f(x): return ['__import__(\"os\")._exit(0)']"]),
    Row("names and syntax", "import ast, json\nassert ast.literal_eval(f(1)) == [1]\n"
        "assert json.loads(f(1)) == [1]\nassert globals().get(f(2)) is None",
        ["def f(x): return '[1]' if x == 1 else 'zz'"],
        ["def f(x): return '[1'", "def f(x): return 'a'", "def f(x): return '['*10**5",
         "def f(x): raise NameError('x')", "def f(x): raise ImportError",
         "def f(x): raise SyntaxError('y')", "def f(x): return {}"]),
    Row("import of the result", "import math\nassert getattr(math, f(1))(4) == 2",
        ["def f(x): return 'sqrt'"], ["def f(x): return 'nothing'", "def f(x): return 3"]),
    Row("equality", "assert f(1) == 2\nassert 2 == f(1)", [ADD],
        [NEVER + "def f(x): return E()", LIAR,
         "class I(int):\n    def __eq__(self, o): return True\ndef f(x): return I(9)"]),
    Row("distance", "assert abs(f(1.0) - 2) < 1e-6\nassert not abs(f(1.0) - 2) > 1e-6",
        [ADD], [LIAR, "def f(x): return float('nan')", "def f(x): return 1j"]),
    Row("not greater", "assert not abs(f(1.0) - 2) > 1e-6", [ADD],
        ["def f(x): return float('nan')", "class F(float): pass\ndef f(x): return F('nan')", LIAR]),
    Row("order and membership", "assert 5 < f(4) + 2 < 8 and f(1) in [2] and f(1) <= 2", [ADD],
        [LIAR]),
    Row("membership", "assert 7 in f(1)", ["def f(x): return [7]"], [LIAR, "def f(x): return 7"]),
    Row("format", "assert '{0}'.format(f(1)) == '2' and f'{f(1):>3}' == '  2'", [ADD],
        ["def f(x): return '{0.__class__}'", LIAR]),
    Row("mutated argument", "x = [3, 1, 2]\nassert f(x) == sorted(x)\n"
        "y = [2, 1]\nassert f(y) == [1, 2]", ["def f(x): return sorted(x)",
         "def f(x): x.sort(); return x"], ["def f(x): x.clear(); return []", "def f(x): return x"]),
    Row("argument left alone", "x = [2, 1]\nr = f(x)\nassert r == [1, 2]\nassert x == [2, 1]",
        ["def f(x): return sorted(x)"], ["def f(x): x.sort(); return x"]),
    Row("slow pattern", "import re\nassert not re.fullmatch(f(1), 'a' * 40 + 'b')",
        ["def f(x): return 'a+'"], ["def f(x): return '(a+)+'"]),
    Row("deep and huge", "assert f(1) == [1]", ["def f(x): return [1]"],
        ["def f(x):\n    r = []\n    for _ in range(10**5): r = [r]\n    return r",
         "def f(x): return [0] * 10**8", "def f(x): return 10**10**7"]),
    Row("text that is no UTF-8", "assert f(1) == 2, f(1)", [ADD],
        ["def f(x): raise ValueError('\\ud800')", "def f(x): return '\\ud800'"]),
    Row("standard input", "import sys\nassert f(1) == 2 and sys.stdin.read() == ''", [ADD],
        ["import os\nos.write(0, b'x')\ndef f(x): return 3"]),
    Row("assertion in an argument", "def g(x):\n    assert x == 2\n    return x\n"
        "assert f(g) in (2, 3)",
        ["def f(g): return g(2)"], ["def f(g):\n    try: g(1)\n    except Exception: return 3"]),
]  # fmt: skip

WITH_PACKAGES = [
    Row("numpy", "import numpy as np\nassert np.allclose(f(np.array([1.0, 2.0])), [2.0, 4.0])\n"
        "assert f(np.array([[1], [2]])).shape == (2, 1) and f(np.int64(3)) == 6",
        ["def f(x): return x * 2", "import numpy as np\ndef f(x): return np.add(x, x)"],
        ["def f(x): return x", "def f(x): return 'x'", LIAR]),
    Row("numpy for the solution alone", "assert f([3, 1]) == [1, 3]",
        ["import numpy\ndef f(x): return numpy.sort(x).tolist()"],
        ["import numpy\ndef f(x): return numpy.array(x).tolist()"]),
    Row("sympy", "import sympy\nx = sympy.Symbol('x', real=True)\nassert f(x**3 + 1, x) == 3*x**2\n"
        "assert sympy.simplify(f(sympy.sin(x) / 2, x) - sympy.cos(x) / 2) == 0\n"
        "assert f(sympy.sympify('y**2'), sympy.Symbol('y')) == sympy.sympify('2*y')",
        ["import sympy\nf = sympy.diff"],
        ["import sympy\nf = sympy.integrate", "def f(a, b): return '3*x**2'", LIAR]),
    Row("sympy and text", "import sympy\nassert sympy.simplify(f('2')) == sympy.Integer(2)",
        ["import sympy\nf = sympy.Integer"],
        ["def f(x): return '__import__(\"os\")._exit(0)'", "def f(x): return '3'"]),
]  # fmt: skip
