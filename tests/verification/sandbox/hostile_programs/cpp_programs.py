"""C++ programs that attack the sandbox or the compiler; each prints ESCAPED if it succeeded."""

_HEAD = "#include <bits/stdc++.h>\n#include <unistd.h>\n#include <sys/mman.h>\n"
_HEAD += "#include <sys/socket.h>\n#include <signal.h>\n#include <sys/syscall.h>\n"
_HEAD += '#define ESCAPE_IF(x) if (x) { puts("ESCAPED"); return 0; }\n'


def _program(body: str) -> str:
    return f"{_HEAD}int main() {{ {body} return 0; }}\n"


def _assembled(directives: str, attack: str = "system(nullptr)") -> str:
    """A program with directives of the assembler; whether it runs is not the question."""
    return f'asm("{directives}\\n.text");\nint main() {{ ESCAPE_IF({attack}) return 0; }}\n'


PROGRAMS = {
    "fork": _program("int p = fork(); if (!p) _exit(0); ESCAPE_IF(p > 0)"),
    "fork_bomb": _program("while (1) fork();"),
    "fork_by_interrupt_80": _program(
        'long r; asm volatile("int $0x80" : "=a"(r) : "a"(2) : "memory"); '
        "if (!r) _exit(0); ESCAPE_IF(r > 0)"
    ),
    "fork_by_x32": _program(
        "long r = syscall(0x40000000 | 57); if (!r) _exit(0); ESCAPE_IF(r > 0)"
    ),
    "fork_by_clone3": _program("long a[8] = {}; long r = syscall(435, a, 64); ESCAPE_IF(r > 0)"),
    "cpu_spin": _program("volatile long x = 0; while (1) x = x + 1;"),
    "sleep": _program("sleep(100);"),
    "memory": _program("std::vector<char> v(400 << 20, 1); ESCAPE_IF(v[5])"),
    "memory_by_mmap": _program(
        "ESCAPE_IF(mmap(0, 400 << 20, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED)"
    ),
    "memory_by_threads": _program(
        "std::atomic<int> n = 0; std::vector<std::thread> t; for (int i = 0; i < 8; i++) "
        "t.emplace_back([&] { char* p = (char*)malloc(60 << 20); if (p) { memset(p, 1, 60 << 20); "
        "n++; } }); for (auto& x : t) x.join(); ESCAPE_IF(n == 8)"
    ),
    "memory_static": _HEAD + "char a[1 << 30]; int main() { a[5] = 1; ESCAPE_IF(a[5]) }\n",
    "stack_overflow": _HEAD + "int f(int n) { volatile char a[4096]; a[n % 9] = 1; "
    "return f(n + 1) + a[0]; }\nint main() { return f(0); }\n",
    "output_flood": _program('while (1) puts("ESCAPED");'),
    "socket": _program("ESCAPE_IF(socket(AF_INET, SOCK_STREAM, 0) >= 0)"),
    "signal_to_all": _program("ESCAPE_IF(kill(-1, SIGKILL) == 0)"),
    "abort": _program('puts("ESCAPED"); fflush(stdout); abort();'),
    "uncaught_exception": _program('puts("ESCAPED"); fflush(stdout); throw 1;'),
    "read_passwd": _program('ESCAPE_IF(std::ifstream("/etc/passwd").good())'),
    "overwrite_itself": _program(
        'ESCAPE_IF(std::ofstream("../build/solution", std::ios::app).good())'
    ),
    "delete_itself": _program('ESCAPE_IF(unlink("../build/solution") == 0)'),
    "exec_shell": _program('execl("/bin/sh", "sh", "-c", "(echo ESCAPED) | cat", NULL);'),
    "set_user": _program("ESCAPE_IF(setuid(0) == 0)"),
}

COMPILATIONS = {
    "include_passwd": '#include "/etc/passwd"\n' + _program('puts("ESCAPED");'),
    "assemble_passwd": _HEAD
    + 'asm(".data\\n.globl secret\\nsecret: .incbin \\"/etc/passwd\\"\\n.byte 0");\n'
    + "extern char secret[]; int main() { ESCAPE_IF(secret[0]) }\n",
    "include_zeros": '#include "/dev/zero"\n' + _program('puts("ESCAPED");'),
    "include_itself": "#include __FILE__\n" + _program('puts("ESCAPED");'),
    "template_bomb": "template <int N, int M> struct F { static const long v = F<N - 1, M>::v + "
    "F<N - 1, M + (1 << (N % 30))>::v; };\ntemplate <int M> struct F<0, M> { static const long v = "
    'M; };\n#include <cstdio>\nint main() { printf("ESCAPED %ld", F<60, 0>::v); }\n',
    "template_depth": "template <int N> struct F { F<N + 1> x; };\nint main() { F<0> f; }\n",
    "constexpr_loop": "#include <cstdio>\nconsteval int f() { int x = 0; while (true) { for (int i "
    "= 0; i < 200000; i++) x ^= i; } return x; }\n"
    'int main() { static_assert(f()); puts("ESCAPED"); }',
    "macro_bomb": "#include <cstdio>\n#define A0 1+\n"
    + "".join(f"#define A{i + 1} A{i} A{i} A{i} A{i} A{i} A{i} A{i} A{i}\n" for i in range(12))
    + 'int main() { puts("ESCAPED"); return A12 0; }\n',
    "huge_object": '#include <cstdio>\nchar a[1 << 30] = {1};\nint main() { puts("ESCAPED"); }\n',
    "huge_object_by_assembler": '#include <cstdio>\nasm(".data\\n.fill 2000000000, 1, 65");\n'
    'int main() { puts("ESCAPED"); }\n',
    "interpreter_too_long": _HEAD + _assembled('.section .interp,\\"a\\"\\n.fill 5000,1,65'),
    "interpreter_missing": _HEAD
    + _assembled('.section .interp,\\"a\\"\\n.string \\"/no\\"', 'system("/bin/true") == 0'),
    "properties_that_are_none": _HEAD
    + _assembled('.section .note.gnu.property,\\"a\\"\\n.fill 5000,1,65', "fork() > 0"),
    "thread_data_beyond_memory": _HEAD
    + _assembled('.section .tbss,\\"awT\\",@nobits\\n.space 0x7fffffff0000'),
    "data_beyond_the_address_space": _HEAD + _assembled(".bss\\n.space 0x7ffffff00000"),
    "no_start": 'extern "C" int _start; int main() { return _start; }\n',
    "assembler_repeats": _HEAD + _assembled(".rept 1000000000\\n.long 1\\n.endr"),
    "assembler_recursion": _HEAD + _assembled(".macro x\\nx\\nx\\n.endm\\nx"),
    "assembler_far_origin": _HEAD + _assembled(".data\\n.org 0x7fffffffffff"),
    "assembler_includes_passwd": _HEAD + _assembled('.include \\"/etc/passwd\\"'),
    "assembler_includes_random": _HEAD + _assembled('.data\\n.incbin \\"/dev/urandom\\"'),
    "assembler_includes_input": _HEAD + _assembled('.incbin \\"/proc/self/fd/0\\"'),
    "assembler_prints_without_end": _HEAD
    + _assembled('.rept 100000000\\n.print \\"ESCAPED\\"\\n.endr'),
    "include_random": '#include "/dev/urandom"\n' + _program('puts("ESCAPED");'),
    "include_environment": '#include "/proc/self/environ"\n' + _program('puts("ESCAPED");'),
    "include_result": '#include "solution"\n' + _program('puts("ESCAPED");'),
    "precompiled_by_pragma": '#pragma GCC pch_preprocess "/etc/passwd"\n'
    + _program('ESCAPE_IF(system("true") == 0)'),
    "plugin_by_pragma": '#pragma GCC optimize ("-fplugin=/etc/passwd")\n'
    + _program('ESCAPE_IF(system("true") == 0)'),
    "dump_by_pragma": '#pragma GCC optimize ("-fdump-tree-all=/sandbox/x")\n'
    + _program('ESCAPE_IF(std::ifstream("/sandbox/x").good())'),
    "has_passwd": '#if __has_include("/etc/passwd")\n#define IT 1\n#else\n#define IT 0\n#endif\n'
    + _program('ESCAPE_IF(IT && std::ifstream("/etc/passwd").good())'),
    "errors_without_end": "int main() { " + "x; " * 200_000 + "}\n",
    "deep_nesting": "int main() { return " + "(" * 10**6 + "0" + ")" * 10**6 + "; }\n",
    "null_bytes": "\x00" * 1000 + _program('puts("NO");'),
    "no_main": "int x;\n",
    "lone_surrogate": "int main() { int \ud800 = 0; }\n",
}
