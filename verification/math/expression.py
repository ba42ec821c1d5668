"""A grammar of mathematical expressions: text -> tree.

Runs in grading processes. The grammar is closed: unknown text is refused, nothing is
evaluated, and time is linear in the text.
"""

import functools
import re
from fractions import Fraction

from verification.math.trees import MINUS_ONE, Tree, inverse, num

MAX_NESTING = 60
MAX_TOKENS = 600

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot ln exp".split()
)
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi "
    "rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi "
    "Omega ell hbar".split()
)
_ACCENTS = frozenset("overline bar vec hat tilde widehat overrightarrow mathcal mathbb".split())
_TOKEN = re.compile(
    r" *(?:(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))|(?P<text>\\text\{[^{}]*\})"
    r"|(?P<command>\\[A-Za-z]+)|(?P<name>(?<![A-Za-z])(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?"
    r"|ln|log|exp|sqrt|gcd|lcm|max|min|floor|ceil|cis)(?=\())|(?P<letter>[A-Za-z])"
    r"|(?P<sign>\\[{}|]|[-+*/^_!%()\[\]{}|',]))"
)
# Functions of numbers with several arguments or none of the grammar above: spelling -> call.
_CALLS = {
    "gcd": "gcd", "lcm": "lcm", "max": "max", "min": "min", "floor": "floor", "ceil": "ceil",
    "sgn": "sign", "sign": "sign", "abs": "abs",
}  # fmt: skip
_NAMED_FUNCTIONS = frozenset({"Re", "Im", "arg", "det"})
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_PAIRS = {"lfloor": ("rfloor", "floor"), "lceil": ("rceil", "ceil"), "|": ("|", "abs")}


class NotAnExpression(ValueError):
    """The text is not an expression of this grammar."""


@functools.lru_cache(maxsize=256)
def parse_expression(text: str) -> Tree | None:
    """Tree of a normalised text; None for text outside the grammar."""
    try:
        parser = _Parser(_tokens(text))
        tree = parser.sum()
        return tree if parser.is_at_end() else None
    except NotAnExpression:
        return None


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or len(tokens) > MAX_TOKENS:
            raise NotAnExpression(text)
        kind = str(match.lastgroup)
        token = match[kind]
        position = match.end()
        if kind in ("command", "name"):
            kind, token = "command", token.removeprefix("\\")
        elif kind == "text" and _is_function_text(token[6:-1], text[position:]):
            kind, token = "command", token[6:-1].strip()
        if token != "by":
            tokens.append((kind, token))
        elif tokens and tokens[-1][0] == "letter":
            tokens[-1] = ("factor", tokens[-1][1])
    return tokens


def _is_function_text(words: str, rest: str) -> bool:
    """Whether words in text are a function: a known one, or any before parentheses."""
    words = words.strip()
    is_known = words in _CALLS or words in _NAMED_FUNCTIONS or words in ("cis", "lg")
    return is_known or (len(words) > 1 and words.isalpha() and rest.lstrip().startswith("("))


class _Parser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._next = 0
        self._nesting = 0
        self._open_bars = 0

    def is_at_end(self) -> bool:
        return self._next == len(self._tokens)

    def sum(self) -> Tree:
        """additive := ['+'|'-'] product (('+'|'-') product)*"""
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise NotAnExpression("nesting")
        terms = []
        sign = self._sign()
        terms.append(_negated(self.product(), sign))
        while self._peek() in ("+", "-"):
            sign = self._sign()
            terms.append(_negated(self.product(), sign))
        self._nesting -= 1
        return terms[0] if len(terms) == 1 else ("sum", *terms)

    def product(self, *, is_argument: bool = False) -> Tree:
        """product := power (['*'|'/'] power)*; an argument ends before an operator or function."""
        factors = [self.power()]
        while not self.is_at_end():
            token = self._peek()
            if token in ("*", "/"):
                if is_argument:
                    break
                self._take()
                sign = self._sign()
                factor = _negated(self.power(), sign)
                factors.append(inverse(factor) if token == "/" else factor)
            elif self._starts_factor(is_argument):
                factors.append(self._adjacent(factors[-1]))
                if factors[-1][0] == "mixed":
                    factors[-2:] = [factors[-1][1]]
            else:
                break
        return factors[0] if len(factors) == 1 else ("prod", *factors)

    def power(self) -> Tree:
        """power := postfix ['^' exponent], binding to the right."""
        base = self._postfix(self._atom())
        if self._peek() != "^":
            return base
        self._take()
        start = self._next
        power = ("pow", base, self._exponent())
        if self._peek() == "of" and base[0] == "sym":
            # f^{-1}(x), f^{(3)}(x), f^2(x)
            marks = "".join(token for _, token in self._tokens[start : self._next])
            return self._postfix(self._applied(f"{base[1]}^{marks}"))
        return self._postfix(power)

    def _sign(self) -> int:
        sign = 1
        while self._peek() in ("+", "-"):
            sign *= -1 if self._take()[1] == "-" else 1
        return sign

    def _postfix(self, tree: Tree) -> Tree:
        while not self.is_at_end():
            kind, token = self._tokens[self._next]
            if token == "!":
                tree = ("call", "factorial", tree)
            elif token == "%":
                tree = ("prod", tree, num(Fraction(1, 100)))
            elif (kind, token) == ("command", "deg"):
                tree = ("prod", tree, ("const", "pi"), num(Fraction(1, 180)))
            else:
                break
            self._next += 1
        return tree

    def _exponent(self) -> Tree:
        """The group, or for `x^-3` the signed factor, behind a caret."""
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise NotAnExpression("nesting")
        sign = self._sign()
        exponent = self._atom()
        if self._peek() == "^":
            self._take()
            exponent = ("pow", exponent, self._exponent())
        self._nesting -= 1
        return _negated(exponent, sign)

    def _adjacent(self, previous: Tree) -> Tree:
        """The next factor of a product without sign; 3\\frac{1}{2} is a mixed number."""
        is_whole = previous[0] == "num" and previous[1].denominator == 1
        is_fraction = self._peek() == "frac"
        if self._tokens[self._next][0] == "number" and previous[:2] != ("call", "factorial"):
            # 2 3, or x^2 3: an omitted sign between digits means nothing sensible, but 2!3! does.
            raise NotAnExpression("adjacent numbers")
        factor = self.power()
        is_quotient = factor[0] == "prod" and len(factor) == 3 and factor[2][0] == "pow"
        if is_whole and is_fraction and is_quotient:
            top, bottom = factor[1], factor[2][1]
            if top[0] == bottom[0] == "num" and top[1] > 0 and bottom[1] > 0:
                return ("mixed", num(previous[1] + top[1] / bottom[1]))
        return factor

    def _starts_factor(self, is_argument: bool) -> bool:
        kind, token = self._tokens[self._next]
        if kind in ("number", "letter", "factor", "text"):
            return True
        if kind == "command":
            is_function = token in FUNCTIONS or token == "log"
            return not (is_argument and is_function) and token not in ("rfloor", "rceil", "of")
        return token in ("(", "[", "{", "\\{") or (token == "|" and not self._open_bars)

    def _peek(self) -> str:
        return "" if self.is_at_end() else self._tokens[self._next][1]

    def _take(self) -> tuple[str, str]:
        if self.is_at_end():
            raise NotAnExpression("end of text")
        self._next += 1
        return self._tokens[self._next - 1]

    def _expect(self, token: str) -> None:
        if self._take()[1] != token:
            raise NotAnExpression(token)

    def _atom(self) -> Tree:
        kind, token = self._take()
        if kind == "number":
            return num(Fraction(token))
        if kind == "text":
            words = token[6:-1]
            return self._letter(words) if len(words) == 1 else ("sym", self._subscripted(token))
        if kind in ("letter", "factor"):
            return self._letter(token, is_factor=kind == "factor")
        if token in _CLOSING:
            tree = self.sum()
            self._expect(_CLOSING[token])
            return tree
        if token in _PAIRS:
            return self._bars(token)
        if kind == "command":
            return self._command(token)
        raise NotAnExpression(token)

    def _bars(self, token: str) -> Tree:
        closing, name = _PAIRS[token]
        outer, self._open_bars = self._open_bars, int(token == "|")
        tree = self.sum()
        self._expect(closing)
        self._open_bars = outer
        return ("call", name, tree)

    def _letter(self, token: str, *, is_factor: bool = False) -> Tree:
        name = self._subscripted(token)
        if self._peek() == "of":
            return self._applied(name)
        if name == token and token in "fgh" and self._peek() == "(" and not is_factor:
            raise NotAnExpression("unknown function")
        return ("const", token) if name in ("e", "i") else ("sym", name)

    def _subscripted(self, name: str) -> str:
        """A name with its subscript and primes."""
        while self._peek() in ("_", "'"):
            mark = self._take()[1]
            name += mark if mark == "'" else "_" + self._raw_group()
        return name

    def _raw_group(self) -> str:
        """Text of the next token or braced group, unread."""
        kind, token = self._take()
        if token != "{":
            return token
        parts = []
        depth = 1
        while True:
            kind, token = self._take()
            depth += {"{": 1, "}": -1}.get(token, 0)
            if depth == 0:
                return "".join(parts)
            parts.append("\\" + token if kind == "command" else token)

    def _command(self, name: str) -> Tree:
        if name == "frac":
            top = self._group()
            return ("prod", top, inverse(self._group()))
        if name == "sqrt":
            return self._root()
        if name == "binom":
            top = self._group()
            return ("call", "binom", top, self._group())
        if name in _CALLS:
            return ("call", _CALLS[name], *self._arguments())
        if name == "cis":
            angle = self._argument()
            return ("sum", ("call", "cos", angle), ("prod", ("const", "i"), ("call", "sin", angle)))
        if name in _NAMED_FUNCTIONS:
            return ("apply", name, self._argument())
        if name == "pi":
            return ("const", "pi")
        if name == "infty":
            return ("const", "infty")
        if name in ("log", "lg") or name in FUNCTIONS:
            return self._function("log" if name == "lg" else name)
        if name in _GREEK:
            return self._letter(name)
        if name in _ACCENTS:
            return ("sym", self._subscripted(f"{name}({self._raw_group()})"))
        if self._peek() == "(":
            # Words before parentheses, which the tokens mark as a command.
            return self._applied(name)
        raise NotAnExpression(name)

    def _applied(self, name: str) -> Tree:
        """A function of which only the name is known, and its arguments."""
        if self._peek() == "of":
            self._take()
        return ("apply", name, *self._arguments())

    def _arguments(self) -> list[Tree]:
        """One argument, or several in parentheses."""
        if self._peek() not in ("(", "["):
            return [self._argument()]
        closing = _CLOSING[self._take()[1]]
        arguments = [self.sum()]
        while self._peek() == ",":
            self._take()
            arguments.append(self.sum())
        self._expect(closing)
        return arguments

    def _group(self) -> Tree:
        """A braced group, or the one digit, letter or command that TeX takes instead."""
        kind, token = self._tokens[self._next] if not self.is_at_end() else ("", "")
        if kind == "number" and len(token) > 1:
            self._tokens[self._next] = (kind, token[1:])
            return num(Fraction(token[0])) if token[0] != "." else self._expect("")
        return self._atom()

    def _root(self) -> Tree:
        if self._peek() != "[":
            return ("pow", self._group(), num(Fraction(1, 2)))
        self._take()
        degree = self.sum()
        self._expect("]")
        return ("call", "root", self._group(), degree)

    def _function(self, name: str) -> Tree:
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise NotAnExpression("nesting")
        base = None
        if name == "log" and self._peek() == "_":
            self._take()
            base = self._group()
        exponent = None
        if self._peek() == "^":
            self._take()
            exponent = self._exponent()
        if exponent == MINUS_ONE and "arc" + name in FUNCTIONS:
            name, exponent = "arc" + name, None
        argument = self._argument()
        self._nesting -= 1
        tree = ("call", "log", argument, base or num(10)) if name == "log" else None
        tree = tree or ("call", name, argument)
        return ("pow", tree, exponent) if exponent else tree

    def _argument(self) -> Tree:
        """Argument of a function: a group in parentheses, or the factors that follow."""
        if self._peek() in ("(", "{", "["):
            return self._atom()
        sign = self._sign()
        return _negated(self.product(is_argument=True), sign)


def _negated(tree: Tree, sign: int) -> Tree:
    if sign == 1:
        return tree
    return ("num", -tree[1]) if tree[0] == "num" else ("prod", MINUS_ONE, tree)
