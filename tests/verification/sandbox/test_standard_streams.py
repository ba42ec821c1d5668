import pytest

from verification.code.grading import Case, CodeTests, grade
from verification.code.setup import CodeLimits, limits_of_test, open_sandbox, prepare
from verification.sandbox import confinement
from verification.sandbox.confinement import LEAST_LANDLOCK


@pytest.fixture(scope="module")
def limits() -> CodeLimits:
    return prepare(CodeLimits(test_s=2.0))


CPP_STREAMS = r"""
#include <fstream>
int main() { std::ifstream in("/dev/stdin"); int x; in >> x;
  std::ofstream("/dev/stdout") << 2 * x; }
"""
CPP_REOPENED = r"""
#include <cstdio>
int main() { int x; freopen("/dev/stdin", "r", stdin); freopen("/dev/stdout", "w", stdout);
  scanf("%d", &x); printf("%d", 2 * x); }
"""
DOUBLES = {
    **{
        f"python_reads_{name}": ("python", f"print(2 * int(open('{name}').read()))")
        for name in ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
    },
    **{
        f"python_writes_{name}": ("python", f"open('{name}', 'w').write(str(2 * int(input())))")
        for name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
    },
    "cpp_streams": ("cpp", CPP_STREAMS),
    "cpp_reopened": ("cpp", CPP_REOPENED),
}


@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("name", DOUBLES)
def test_the_names_of_the_standard_streams_lead_to_them(name: str, kind: str) -> None:
    if kind == "landlock" and confinement.landlock_version() < LEAST_LANDLOCK:
        pytest.skip("this kernel has no Landlock")
    tag, source = DOUBLES[name]
    # The second test sees its own input, not what the first one had.
    tests = CodeTests(cases=[Case("21", "42"), Case("4", "8")])
    assert grade(source, tag, tests, seed=0, limits=CodeLimits(isolation=kind)).reason == "correct"


ATTACKS = """
import fcntl, os
names = ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0", os.path.realpath("/dev/stdin")]
folder = os.path.dirname(names[-1])
def fails(action, *arguments):
    try: action(*arguments)
    except (OSError, AttributeError): return True
done = [name for name in names for flag in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC)
        if not fails(os.open, name, flag)]
done += [name for name in names if not fails(os.truncate, name, 0)]
for path in (*names, *(f"{folder}/{name}" for name in os.listdir(folder))):
    done += [path for action in (os.unlink, lambda p: os.rename(p, p + "x"),
                                 lambda p: os.chmod(p, 0o777)) if not fails(action, path)]
done += ["new"] * (not fails(open, f"{folder}/new", "w"))
done += ["mode"] * (not fails(os.chmod, folder, 0o777))
print(done, open("/dev/stdin").read())
"""


def test_no_name_of_a_stream_gives_more_than_the_stream(limits: CodeLimits) -> None:
    tests = CodeTests(cases=[Case("one", "[] one"), Case("two", "[] two")])
    assert grade(ATTACKS, "python", tests, seed=0, limits=limits).reason == "correct"


@pytest.mark.parametrize(
    ("source", "output", "errors"),
    [
        # What a program prints comes before what it writes under a name.
        ("open('/dev/stdout', 'w').write('b'); print('a')", b"a\nb", ""),
        ("open('/dev/stderr', 'w').write('b')", b"", "b"),
        # The kernel refuses to copy into a file that is set to append.
        (
            "import fcntl, os; fcntl.fcntl(1, fcntl.F_SETFL, os.O_APPEND); os.write(1, b'a'); "
            "open('/dev/stdout', 'w').write('b'); os.lseek(1, 0, 0)",
            b"ab",
            "",
        ),
        ("print('a'); open('/dev/stdout', 'a').truncate(3)", b"a\n\0\0\0", ""),
    ],
)
def test_what_is_written_under_a_name_follows_what_is_printed(
    source: str, output: bytes, errors: str, limits: CodeLimits
) -> None:
    with open_sandbox("python", limits) as sandbox:
        result = sandbox.run(None, source.encode(), stdin=b"", limits=limits_of_test(limits))
    assert (result.output, result.errors) == (output, errors)


def test_output_under_a_name_has_the_limit_of_output(limits: CodeLimits) -> None:
    source = "f = open('/dev/stdout', 'w')\nwhile True: f.write('x' * (1 << 20))"
    tests = CodeTests(cases=[Case("", "")])
    assert grade(source, "python", tests, seed=0, limits=limits).reason == "output_limit"


def test_unit_tests_and_their_solution_share_no_named_stream(limits: CodeLimits) -> None:
    solution = "import os\ndef f(): return os.path.exists('/dev/stdout')"
    tests = CodeTests(unit_tests="def check(f): assert f() is False", entry_point="f")
    assert grade(solution, "python", tests, seed=0, limits=limits).reason == "correct"
