"""Unit tests that compare results with a tolerance or ask for a difference, as unit_test_cases.

Right solutions return NaN, infinity and own objects, too; no wrong one may pass by them.
"""

from tests.verification.code.unit_test_cases import ADD, SUB, Row

NAN = "def f(x, y=0): return float('nan')"
INF = "def f(x, y=0): return float('inf')"
COMPLEX = "def f(x, y=0): return complex('nan')"
NUMPY_NAN = "import numpy as np\ndef f(x): return np.float64('nan')"
ARRAY_NAN = "import numpy as np\ndef f(x): return np.array([np.nan] * 2)"
NO_NUMBERS = [NAN, INF, COMPLEX, "def f(x, y=0): return 'nan'"]


def liar(claims: str, operators: str = "__sub__ = __rsub__ = __add__ = __radd__") -> str:
    """A solution whose object claims, in differences from it, to be zero."""
    return (
        f"class D:\n    {claims}\n    __abs__ = lambda s: s\n"
        f"class R:\n    def __sub__(s, o): return D()\n    {operators} = __sub__\n"
        "def f(*a): return R()"
    )


NUMBERS = [
    Row("raise above a tolerance", "if abs(f(1) - 2.0) > 1e-6:\n    raise AssertionError", [ADD],
        [SUB, *NO_NUMBERS]),
    Row("functions that make a plain NaN", "import math\ngot = float(f(1))\n"
        "if math.fabs(got - 2.0) > 1e-6 or math.sqrt((got - 2.0) ** 2) >= 0.1:\n"
        "    raise AssertionError\nassert not 1e-6 < math.fabs(f(1) - 2.0)", [ADD],
        [SUB, *NO_NUMBERS]),
    Row("root of the mean square", "import math\ngot = f([1.0, 2.0])\n"
        "assert not math.sqrt(sum((a - b) ** 2 for a, b in zip(got, [2.0, 4.0])) / 2) > 1e-3",
        ["def f(xs): return [2 * x for x in xs]"],
        ["def f(xs): return xs", "def f(xs): return [float('nan')] * 2",
         "def f(xs): return [complex('nan')] * 2"]),
    Row("greatest distance", "assert max(abs(a - b) for a, b in zip(f(1), [1, 2])) < 1e-6\n"
        "assert max([0, *(abs(a - b) for a, b in zip(f(1), [1, 2]))]) < 1e-6",
        ["def f(x): return [x, x + 1.0]"],
        ["def f(x): return [x, x]", "def f(x): return [x, complex('nan')]",
         "def f(x): return [x, float('nan')]"]),
    Row("own greatest", "def max(xs):\n    return xs[-1]\nassert max([abs(f(1) - 2), 0]) < 1\n"
        "assert not abs(f(1) - 2) > 1e-6", [ADD], [SUB, COMPLEX]),
    Row("relative distance", "got = f(1)\n"
        "assert not abs(got - 2.0) / max(abs(got), 2.0) > 1e-6", [ADD], [SUB, *NO_NUMBERS]),
    Row("distance in a graph", "INF = float('inf')\nfor x, d in ((0, 0), (1, INF)):\n"
        "    if abs(f(x) - d) > 1e-6:\n        raise AssertionError\n    assert f(x) <= d",
        ["def f(x): return x * 1e308 * 10", "import math\ndef f(x): return math.inf if x else 0"],
        ["def f(x): return 1", NAN]),
    Row("infinity that is written as a number", "assert not abs(f(1) - 1e400) > 1e-6",
        [INF], ["def f(x): return 1", NAN]),
    Row("NaN that is asked for", "import math\ndef close(a, b):\n"
        "    return abs(a - b) < 1e-6 or (math.isnan(a) and math.isnan(b))\n"
        "assert close(f(0), float('nan')) and close(f(1), 1)",
        ["def f(x): return float('nan') if x == 0 else x"], [ADD, NAN, INF]),
    Row("NaN that is not equal to itself", "def close(a, b):\n"
        "    return abs(a - b) < 1e-6 or (a != a and b != b)\nr = f(0)\nassert r != r\n"
        "assert close(f(1), 1) and close(r, r)",
        ["def f(x): return float('nan') if x == 0 else x"], [ADD, NAN]),
    Row("NaN beside what is compared", "r = f([3.0])\nassert r['mean'] > 2.9 and r['n'] <= 1\n"
        "assert isinstance(r['spread'], float) and max([r['mean'], r['n']]) == 3.0",
        ["def f(x): return {'mean': x[0], 'n': 1, 'spread': float('nan')}"],
        ["def f(x): return {'mean': float('nan'), 'n': 1, 'spread': 0.0}"]),
    Row("other values that have an order", "from fractions import Fraction\n"
        "from decimal import Decimal\nfrom datetime import date, timedelta\n"
        "assert 0 < f(Fraction(1, 3)) <= 1 and not f(Decimal('0.1')) > Decimal('0.1')\n"
        "assert f('a') < f('b') < 'c' and f([1, 2]) >= [1] and f({1}) <= {1, 2}\n"
        "assert f(date(2024, 1, 1)) < date(2024, 1, 2) and f((1, 'a')) > (0,)\n"
        "assert not f(timedelta(1)) > timedelta(1) and f(True) > False and max(f('ab')) == 'b'\n"
        "assert min(f({2: 1, 1: 2})) == 1 and max(f([]), default=7) == 7 and max(f(3), 2) == 3",
        ["def f(x): return x"], ["def f(x): return None"]),
    Row("order of the tests' and the solution's classes", "from solution import V\nclass T:\n"
        "    def __init__(self, x):\n        self.x = x\n"
        "    def __lt__(self, o):\n        return self.x < o.x\n"
        "assert T(1) < T(f(1)) and V(1) < V(2) and max([V(1), V(3), V(2)]).x == 3",
        ["class V:\n    def __init__(s, x): s.x = x\n    def __lt__(s, o): return s.x < o.x\n"
         "    def __gt__(s, o): return s.x > o.x\ndef f(x): return x + 1"],
        ["class V:\n    def __init__(s, x): s.x = 3\n    def __lt__(s, o): return s.x < o.x\n"
         "    def __gt__(s, o): return s.x > o.x\ndef f(x): return 0"], "f"),
    Row("difference of dates", "from datetime import datetime\n"
        "d = f('2020-01-02') - datetime(2020, 1, 2)\n"
        "assert abs(d.total_seconds()) < 1 and d.days == 0",
        ["from datetime import datetime\nf = datetime.fromisoformat"],
        ["from datetime import datetime\ndef f(x): return datetime(2021, 1, 1)",
         liar("days = 0; total_seconds = lambda s: 0.0")]),
    Row("difference of complex numbers", "d = f(1) - (1 + 2j)\n"
        "assert abs(d.real) < 1e-6 and abs(d.imag) < 1e-6",
        ["def f(x): return x + 2j"], ["def f(x): return x + 1j", liar("real = imag = 0")]),
    Row("difference of decimals", "from decimal import Decimal\n"
        "assert (f('1.5') - Decimal('1.50')).is_zero()",
        ["from decimal import Decimal\nf = Decimal"],
        ["from decimal import Decimal\nf = lambda x: Decimal(2)", liar("is_zero = lambda s: 1")]),
    Row("objects of a class that nobody names", "v = f(1, 2)\nw = v - 1\n"
        "assert (w.x, w.y) == (0, 1) and (v * 3).x == 3 and str(w) == 'V(0, 1)'\n"
        "assert w[1] == 1 and (2 + v).total() == 7 and f'{w}' == 'V(0, 1)'",
        ["class V:\n    def __init__(s, x, y): s.x, s.y = x, y\n"
         "    def __sub__(s, n): return V(s.x - n, s.y - n)\n"
         "    def __mul__(s, n): return V(s.x * n, s.y * n)\n"
         "    def __radd__(s, n): return V(s.x + n, s.y + n)\n"
         "    def __getitem__(s, i): return (s.x, s.y)[i]\n    def total(s): return s.x + s.y\n"
         "    def __str__(s): return f'V({s.x}, {s.y})'\nf = V"],
        ["class V:\n    def __init__(s, x, y): s.x, s.y = x, y\n"
         "    def __sub__(s, n): return V(s.x + n, s.y)\n    __mul__ = __radd__ = __sub__\n"
         "f = V"]),
    Row("a class of complex numbers", "c = Number(3, 4) - (1 + 2j)\n"
        "assert c.real == 2 and c.imag == 2 and c.conjugate().imag == -2",
        ["class Number:\n    def __init__(s, a, b): s.real, s.imag = a, b\n"
         "    def __sub__(s, o): return Number(s.real - o.real, s.imag - o.imag)\n"
         "    def conjugate(s): return Number(s.real, -s.imag)"],
        ["class Number:\n    def __init__(s, a, b): s.real, s.imag = a, b\n"
         "    def __sub__(s, o): return s\n    def conjugate(s): return s"], "Number"),
    Row("a class of fractions that nobody names", "q = f(1, 2)\n"
        "assert (q - 1).numerator == -1 and (q + 1).denominator == 2",
        ["class Q:\n    def __init__(s, a, b): s.numerator, s.denominator = a, b\n"
         "    def __add__(s, n): return Q(s.numerator + n * s.denominator, s.denominator)\n"
         "    def __sub__(s, n): return s + -n\nf = Q",
         "from fractions import Fraction\nf = Fraction"], ["def f(a, b): return a / b"]),
]  # fmt: skip

NUMBERS_OF_PACKAGES = [
    Row("numbers of numpy", "import numpy as np\nassert not abs(f(np.float64(2)) - 4.0) > 1e-6",
        ["def f(x): return x * x"], ["def f(x): return x", NUMPY_NAN, NAN, COMPLEX]),
    Row("arrays of numpy", "import numpy as np\nx, y = np.array([1.0, 2.0]), [2.0, 4.0]\n"
        "assert f(x).shape == (2,) and not np.any(np.abs(f(x) - np.array(y)) > 1e-6)\n"
        "assert not np.abs(f(x) - y).max() > 1e-6\n"
        "assert max(abs(a - b) for a, b in zip(f(x), y)) < 1e-6",
        ["def f(x): return x * 2"],
        ["def f(x): return x", ARRAY_NAN, "import numpy as np\ndef f(x): return x * np.array([2, "
         "np.nan])", liar("max = lambda s: 0.0; shape = (2,)")]),
    Row("distance of arrays", "import numpy as np\n"
        "assert np.abs(f([1.0]) - np.array([2.0])).max() < 1e-6", ["import numpy as np\n"
        "def f(x): return np.array(x) * 2"],
        ["import numpy as np\ndef f(x): return np.array(x)", liar("max = lambda s: 0.0")]),
    Row("times of numpy", "import numpy as np\nd = f(1) - np.datetime64('2020-01-02')\n"
        "assert not abs(d) > np.timedelta64(1, 's')",
        ["import numpy as np\ndef f(x): return np.datetime64('2020-01-02')"],
        ["import numpy as np\ndef f(x): return np.datetime64('2021-01-02')",
         "import numpy as np\ndef f(x): return np.datetime64('NaT')"]),
    Row("NaN and infinity that numpy computes", "import numpy as np\n"
        "def expected(x):\n    return x / x, np.exp(x * 1000)\n"
        "x = np.array([0.0, 2.0])\nfor a, b in zip(f(x), expected(x)):\n"
        "    assert not np.any(np.abs(a - b) > 1e-6)\n    np.testing.assert_allclose(a, b)",
        ["import numpy as np\ndef f(x): return x / x, np.exp(x * 1000)"],
        ["def f(x): return x, x"]),
    Row("NaN before what is compared", "import numpy as np\n"
        "r = f(np.arange(4.0))\nassert r.shape == (4,) and np.all(np.abs(r[1:] - [.5, 1.5, 2.5])"
        " < 1e-6)\nassert not (r[1:] > 3).any()",
        ["import numpy as np\ndef f(x): return np.append(np.nan, (x[1:] + x[:-1]) / 2)"],
        ["def f(x): return x", "import numpy as np\ndef f(x): return x * np.nan"]),
    Row("arrays with infinity", "import numpy as np\nd = f(np.array([0, 1]))\n"
        "assert not np.any(np.abs(d - np.array([0, np.inf])) > 1e-6) and (d >= 0).all()\n"
        "assert np.array_equal(d, [0, np.inf])",
        ["import numpy as np\ndef f(x): return np.where(x > 0, np.inf, 0)"],
        ["def f(x): return x"]),
    Row("difference of expressions", "import sympy\nx = sympy.symbols('x')\n"
        "assert sympy.simplify(f(x) - (x**2 + 1)) == 0\n"
        "assert sympy.simplify(x**2 + 1 - f(x)) == 0\n",
        ["def f(x): return x**2 + 1", "import sympy\ndef f(x): return sympy.sin(x)**2 + "
         "sympy.cos(x)**2 + x**2"],
        ["def f(x): return x**2 + 2", "import sympy\n"
         + liar("_sympy_ = lambda s: sympy.Integer(0)"), "import sympy\n"
         + liar("_sympy_ = lambda s: sympy.Integer(0)", "_op_priority = 99.0; __rsub__")]),
    Row("methods of expressions", "import sympy\nx = sympy.symbols('x')\nd = f(x) - (x + 1)\n"
        "assert d.simplify() == 0 and d.is_zero and (f(x) - (x + 1)).expand() == 0",
        ["def f(x): return x + 1"], ["def f(x): return x + 2",
         liar("is_zero = True; simplify = expand = lambda s: 0")]),
    Row("equals of expressions", "import sympy\nx = sympy.symbols('x')\n"
        "assert f(x).equals(x**2 + 1) and f(x).subs(x, 2) > 4 and f(x).is_polynomial()",
        ["def f(x): return x**2 + 1"], ["def f(x): return x**2",
         "class R:\n    __getattr__ = lambda s, n: lambda *a: True\ndef f(x): return R()"]),
    Row("numbers of expressions", "import sympy\nx = sympy.symbols('x', positive=True)\n"
        "assert abs(float(f(x).subs(x, 2)) - 5) < 1e-9 and f(x) > 0 and 6 > f(2) >= 5\n"
        "assert not abs(sympy.N(f(2)) - 5) > 1e-9 and f(sympy.oo) == sympy.oo",
        ["def f(x): return x**2 + 1"], ["def f(x): return x**2",
         "import sympy\ndef f(x): return sympy.nan"]),
]  # fmt: skip
