"""Small classical problems: a right and a wrong C++ solution each, expected outputs from Python.

The Python references are independent of the C++ programs, which share nothing but the statement.
The wrong solution is the right one with one piece replaced.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import NamedTuple

from verification.code.grading import Case, CodeTests

CASES = 20
_HEAD = "#include <bits/stdc++.h>\nusing namespace std;\ntypedef long long ll;\n"


class Problem(NamedTuple):
    """A problem; `body` is the C++ program, of which the wrong one replaces old by new."""

    name: str
    body: str
    old: str
    new: str
    make_input: Callable[[random.Random], str]
    solve: Callable[[list[str]], object]
    """From the words of the input to the output."""

    @property
    def right(self) -> str:
        return _HEAD + self.body

    @property
    def wrong(self) -> str:
        assert self.old in self.body
        return _HEAD + self.body.replace(self.old, self.new)

    def tests(self) -> CodeTests:
        """Tests with inputs of a fixed seed."""
        draw = random.Random(self.name)
        inputs = [self.make_input(draw) for _ in range(CASES)]
        cases = [Case(text, f"{self.solve(text.split())}\n") for text in inputs]
        return CodeTests(language="cpp", cases=cases)


def _numbers(draw: random.Random, low: int = -1000, high: int = 1000, size: int = 30) -> list[int]:
    return [draw.randint(low, high) for _ in range(draw.randint(2, size))]


def _array(draw: random.Random, low: int = -1000, high: int = 1000, size: int = 30) -> str:
    numbers = _numbers(draw, low, high, size)
    return f"{len(numbers)}\n{' '.join(map(str, numbers))}\n"


def _pair(draw: random.Random, low: int, high: int) -> str:
    return f"{draw.randint(low, high)} {draw.randint(low, high)}\n"


def _word(draw: random.Random, letters: str = "abc", size: int = 12) -> str:
    return "".join(draw.choice(letters) for _ in range(draw.randint(2, size)))


def _graph(draw: random.Random) -> str:
    nodes = draw.randint(3, 9)
    pairs = list(itertools.combinations(range(1, nodes + 1), 2))
    edges = draw.sample(pairs, draw.randint(2, len(pairs)))
    lines = [f"{a} {b} {draw.randint(1, 50)}" for a, b in edges]
    return "\n".join([f"{nodes} {len(edges)}", *lines]) + "\n"


def _edges(words: list[str]) -> tuple[int, list[tuple[int, int, int]]]:
    values = [int(word) for word in words]
    triples = [tuple(values[i : i + 3]) for i in range(2, len(values), 3)]
    return values[0], triples


def _ints(words: list[str]) -> list[int]:
    return [int(word) for word in words[1:]]


def _components(words: list[str]) -> int:
    nodes, edges = _edges(words)
    groups = [{node} for node in range(1, nodes + 1)]
    for a, b, _ in edges:
        joined = set().union(*(group for group in groups if a in group or b in group))
        groups = [group for group in groups if not group & joined] + [joined]
    return len(groups)


def _shortest(words: list[str]) -> int:
    nodes, edges = _edges(words)
    best = {1: 0}
    for _ in range(nodes):
        for a, b, weight in edges:
            for one, other in ((a, b), (b, a)):
                if one in best:
                    best[other] = min(best.get(other, 10**9), best[one] + weight)
    return best.get(nodes, -1)


def _spanning(words: list[str]) -> int:
    nodes, edges = _edges(words)
    seen, total = {1}, 0
    queue = [(w, b if a == 1 else a) for a, b, w in edges if 1 in (a, b)]
    heapq.heapify(queue)
    while queue:
        weight, node = heapq.heappop(queue)
        if node in seen:
            continue
        seen.add(node)
        total += weight
        for a, b, w in edges:
            if node in (a, b):
                heapq.heappush(queue, (w, b if a == node else a))
    return total if len(seen) == nodes else -1


def _increasing(values: list[int]) -> int:
    lengths: list[int] = []
    for i, value in enumerate(values):
        below = [lengths[j] for j in range(i) if values[j] < value]
        lengths.append(1 + max(below, default=0))
    return max(lengths)


def _common(words: list[str]) -> int:
    first, second = words
    picks = range(len(first), -1, -1)
    return next(k for k in picks if any(
        _is_subsequence(part, second) for part in itertools.combinations(first, k)
    ))  # fmt: skip


def _is_subsequence(part: tuple[str, ...], whole: str) -> bool:
    rest = iter(whole)
    return all(letter in rest for letter in part)


def _knapsack(words: list[str]) -> int:
    capacity, *values = (int(word) for word in words)
    items = list(zip(values[::2], values[1::2], strict=True))
    best = 0
    for chosen in itertools.product((0, 1), repeat=len(items)):
        weight = sum(w for (w, _), take in zip(items, chosen, strict=True) if take)
        if weight <= capacity:
            best = max(best, sum(v for (_, v), take in zip(items, chosen, strict=True) if take))
    return best


def _knapsack_input(draw: random.Random) -> str:
    items = [f"{draw.randint(1, 20)} {draw.randint(1, 50)}" for _ in range(draw.randint(3, 9))]
    return f"{draw.randint(15, 60)}\n" + "\n".join(items) + "\n"


def _is_balanced(words: list[str]) -> str:
    text = words[0]
    while (shorter := text.replace("()", "").replace("[]", "")) != text:
        text = shorter
    return "no" if text else "yes"


def _brackets(draw: random.Random) -> str:
    text = ""
    for _ in range(draw.randint(1, 6)):
        text = draw.choice([f"({text})", f"[{text}]", f"{text}()", f"{text}[]"])
    if draw.random() < 0.5:
        text = text.replace(draw.choice("(["), draw.choice(")]"), 1)
    return text + "\n"


def _max_sum(values: list[int]) -> int:
    spans = itertools.combinations(range(len(values) + 1), 2)
    return max(sum(values[a:b]) for a, b in spans)


def _coins(words: list[str]) -> int:
    amount, coins = int(words[0]), [int(word) for word in words[1:]]
    reach, count = {0}, 0
    while amount not in reach:
        longer = {total + coin for total in reach for coin in coins if total + coin <= amount}
        if longer <= reach:
            return -1
        reach, count = reach | longer, count + 1
    return count


def _coins_input(draw: random.Random) -> str:
    coins = draw.sample(range(2, 25), 3)
    return f"{draw.randint(20, 120)}\n{' '.join(map(str, coins))}\n"


def _edit(words: list[str]) -> int:
    one, other = words
    rows = [[i + j if not i * j else 0 for j in range(len(other) + 1)] for i in range(len(one) + 1)]
    for i, j in itertools.product(range(1, len(one) + 1), range(1, len(other) + 1)):
        change = rows[i - 1][j - 1] + (one[i - 1] != other[j - 1])
        rows[i][j] = min(change, rows[i - 1][j] + 1, rows[i][j - 1] + 1)
    return rows[-1][-1]


_READ = "int n;cin>>n;vector<ll>a(n);for(auto&x:a)cin>>x;"
_READ_EDGES = "int n,m;cin>>n>>m;vector<array<ll,3>>e(m);for(auto&x:e)cin>>x[1]>>x[2]>>x[0];"
_UNION = "vector<int>p(n+1);iota(p.begin(),p.end(),0);function<int(int)>f=[&](int x)"
_UNION += "{return p[x]==x?x:p[x]=f(p[x]);};"


def _main(body: str) -> str:
    return f"int main(){{{body}}}\n"


def _two_words(draw: random.Random) -> str:
    return f"{_word(draw, size=9)} {_word(draw, size=9)}\n"


PROBLEMS = [
    Problem("sum", _main("ll a,b;cin>>a>>b;cout<<a+b;"), "ll a", "int a",
            lambda d: _pair(d, 2**31, 2**40), lambda w: int(w[0]) + int(w[1])),
    Problem("gcd", _main("ll a,b;cin>>a>>b;cout<<gcd(a,b);"), "gcd(a,b)", "min(a,b)",
            lambda d: _pair(d, 1, 5000), lambda w: math.gcd(int(w[0]), int(w[1]))),
    Problem("maximum", _main(_READ + "cout<<*max_element(a.begin(),a.end());"), "max", "min",
            _array, lambda w: max(_ints(w))),
    Problem("sort", _main(_READ + "sort(a.begin(),a.end());for(ll x:a)cout<<x<<' ';"),
            "sort(a.begin(),", "sort(a.begin()+1,", _array,
            lambda w: " ".join(map(str, sorted(_ints(w))))),
    Problem("distinct", _main(_READ + "cout<<set<ll>(a.begin(),a.end()).size();"), "set<",
            "multiset<", lambda d: _array(d, 1, 8), lambda w: len(set(_ints(w)))),
    Problem("inversions", _main(_READ + "ll c=0;for(int i=0;i<n;i++)for(int j=i+1;j<n;j++)"
            "c+=a[i]>a[j];cout<<c;"), "a[i]>a[j]", "a[i]>=a[j]", lambda d: _array(d, 1, 9),
            lambda w: sum(a > b for a, b in itertools.combinations(_ints(w), 2))),
    Problem("maximal_sum", _main(_READ + "ll b=a[0],s=0;for(ll x:a){s=max(s,0LL)+x;b=max(b,s);}"
            "cout<<b;"), "max(s,0LL)", "s", lambda d: _array(d, -50, 30),
            lambda w: _max_sum(_ints(w))),
    Problem("primes", _main("int n;cin>>n;int c=0;for(int i=2;i<=n;i++){bool p=true;"
            "for(int j=2;j*j<=i;j++)if(i%j==0)p=false;c+=p;}cout<<c;"), "j*j<=i", "j*j<i",
            lambda d: f"{d.randint(10, 2000)}\n", lambda w: sum(
                all(k % j for j in range(2, k)) for k in range(2, int(w[0]) + 1))),
    Problem("fibonacci", _main("int n;cin>>n;ll a=0,b=1;while(n--){ll c=(a+b)%1000000007;a=b;b=c;}"
            "cout<<a;"), "a=0,b=1", "a=1,b=1", lambda d: f"{d.randint(1, 500)}\n",
            lambda w: _fibonacci(int(w[0])) % (10**9 + 7)),
    Problem("power", _main("ll a,b,m=998244353,r=1;cin>>a>>b;while(b){if(b&1)r=r*a%m;a=a*a%m;b/=2;}"
            "cout<<r;"), "a*a%m", "int(a*a)%m", lambda d: _pair(d, 2, 10**9),
            lambda w: pow(int(w[0]), int(w[1]), 998244353)),
    Problem("palindrome", _main("string s;cin>>s;string t(s.rbegin(),s.rend());"
            "cout<<(s==t?\"yes\":\"no\");"), "s==t", "s[0]==t[0]",
            lambda d: _word(d, "ab", 5) + "\n", lambda w: "yes" if w[0] == w[0][::-1] else "no"),
    Problem("brackets", _main("string s,t;cin>>s;for(char c:s){if(!t.empty()&&("
            "(t.back()=='('&&c==')')"
            "||(t.back()=='['&&c==']')))t.pop_back();else t+=c;}cout<<(t.empty()?\"yes\":\"no\");"),
            "&&c==')'", "&&c==']'", _brackets, _is_balanced),
    Problem("edit_distance", _main("string a,b;cin>>a>>b;vector<vector<int>>d(a.size()+1,"
            "vector<int>(b.size()+1));for(int i=0;i<=(int)a.size();i++)"
            "for(int j=0;j<=(int)b.size();j++)"
            "{if(!i||!j){d[i][j]=i+j;continue;}d[i][j]=min({d[i-1][j]+1,d[i][j-1]+1,"
            "d[i-1][j-1]+(a[i-1]!=b[j-1])});}cout<<d[a.size()][b.size()];"),
            "d[i-1][j]+1,", "", _two_words, _edit),
    Problem("common_subsequence", _main("string a,b;cin>>a>>b;vector<vector<int>>d(a.size()+1,"
            "vector<int>(b.size()+1));for(size_t i=1;i<=a.size();i++)"
            "for(size_t j=1;j<=b.size();j++)"
            "d[i][j]=a[i-1]==b[j-1]?d[i-1][j-1]+1:max(d[i-1][j],d[i][j-1]);"
            "cout<<d[a.size()][b.size()];"), "max(d[i-1][j],d[i][j-1])", "0", _two_words, _common),
    Problem("increasing_subsequence", _main(_READ + "vector<ll>t;for(ll x:a){auto i=lower_bound("
            "t.begin(),t.end(),x);if(i==t.end())t.push_back(x);else *i=x;}cout<<t.size();"),
            "lower_bound", "upper_bound", lambda d: _array(d, 1, 9),
            lambda w: _increasing(_ints(w))),
    Problem("knapsack", _main("int c,w,v;cin>>c;vector<int>b(c+1);while(cin>>w>>v)"
            "for(int i=c;i>=w;i--)b[i]=max(b[i],b[i-w]+v);cout<<b[c];"),
            "int i=c;i>=w;i--", "int i=w;i<=c;i++", _knapsack_input, _knapsack),
    Problem("coins", _main("int n,c;cin>>n;vector<int>k,b(n+1,1<<29);while(cin>>c)k.push_back(c);"
            "b[0]=0;for(int i=1;i<=n;i++)for(int c:k)if(i>=c)b[i]=min(b[i],b[i-c]+1);"
            "cout<<(b[n]<1<<29?b[n]:-1);"), "i>=c", "i>c", _coins_input, _coins),
    Problem("components", _main(_READ_EDGES + _UNION + "int c=n;for(auto&x:e)if(f(x[1])!=f(x[2]))"
            "{p[f(x[1])]=f(x[2]);c--;}cout<<c;"), "if(f(x[1])!=f(x[2]))", "", _graph, _components),
    Problem("spanning_tree", _main(_READ_EDGES + _UNION + "sort(e.begin(),e.end());int c=n;ll s=0;"
            "for(auto&x:e)if(f(x[1])!=f(x[2])){p[f(x[1])]=f(x[2]);c--;s+=x[0];}cout<<(c==1?s:-1);"),
            "sort(e.begin(),e.end());", "", _graph, _spanning),
    Problem("shortest_path", _main(_READ_EDGES + "vector<ll>d(n+1,1e15);d[1]=0;for(int i=0;i<n;i++)"
            "for(auto&x:e){d[x[2]]=min(d[x[2]],d[x[1]]+x[0]);d[x[1]]=min(d[x[1]],d[x[2]]+x[0]);}"
            "cout<<(d[n]<1e15?d[n]:-1);"), "i<n", "i<1&&d[n]>1e14", _graph, _shortest),
    Problem("bits", _main("ll n;cin>>n;cout<<__builtin_popcountll(n);"), "popcountll", "popcount",
            lambda d: f"{d.randint(2**33, 2**60)}\n", lambda w: int(w[0]).bit_count()),
    Problem("binary_search", _main(_READ + "ll t;cin>>t;sort(a.begin(),a.end());cout<<lower_bound("
            "a.begin(),a.end(),t)-a.begin();"), "lower_bound", "upper_bound",
            lambda d: _array(d, 1, 9) + f"{d.randint(1, 9)}\n",
            lambda w: sum(int(x) < int(w[-1]) for x in w[1:-1])),
    Problem("digits", _main("string s;cin>>s;ll t=0;for(char c:s)t+=c-'0';cout<<t;"), "c-'0'",
            "c-'1'", lambda d: f"{d.randint(1, 10**18)}\n", lambda w: sum(map(int, w[0]))),
    Problem("divisors", _main("ll n,c=0;cin>>n;for(ll i=1;i*i<=n;i++)if(n%i==0)"
            "c+=i*i==n?1:2;cout<<c;"), "i*i==n?1:2", "2", lambda d: f"{d.randint(1, 70) ** 2}\n",
            lambda w: sum(int(w[0]) % k == 0 for k in range(1, int(w[0]) + 1))),
]  # fmt: skip


def _fibonacci(index: int) -> int:
    first, second = 0, 1
    for _ in range(index):
        first, second = second, first + second
    return first
