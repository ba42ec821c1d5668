"""Attacks in C++, all in one program that its first argument chooses from: one compilation.

System calls by instructions of their own: the 64-bit one, the 32-bit one (other numbers, same
kernel) and the numbers of x32. Each prints ESCAPED if the kernel did what it was asked.
"""

_HEAD = r"""
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
static long call64(long n, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0, long f = 0) {
  long r;
  register long r10 asm("r10") = d, r8 asm("r8") = e, r9 asm("r9") = f;
  asm volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
               : "rcx", "r11", "memory");
  return r;
}
static int call32(int n, int a = 0, int b = 0, int c = 0, int d = 0, int e = 0) {
  int r;
  asm volatile("int $0x80" : "=a"(r) : "a"(n), "b"(a), "c"(b), "d"(c), "S"(d), "D"(e) : "memory");
  return r;
}
static const long X32 = 0x40000000;
static pid_t parent;
static int r, w;
static void escape_if(bool is_escaped) { if (is_escaped) { puts("ESCAPED"); fflush(stdout); } }
static void escape_unless_refused(long result) { escape_if(result != -ENOSYS && result != -EPERM); }
static void* low_page() {
  return mmap((void*)0x10000000, 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}
"""

# Name -> body of the attack.
_BODIES = {
    "fcntl_64": "for (long high : {0L, 1L << 32, 1L << 63, -1L << 32}) "
    "escape_unless_refused(call64(72, r, high | F_SETOWN, parent));",
    "fcntl_64_async": "for (long high : {0L, 1L << 32, -1L << 32}) "
    "escape_unless_refused(call64(72, r, high | F_SETFL, high | O_ASYNC));",
    "fcntl_32": "escape_if(call32(55, r, F_SETOWN, parent) >= 0);",
    "fcntl64_32": "escape_if(call32(221, r, F_SETOWN, parent) >= 0);",
    "fcntl_x32": "escape_if(call64(X32 | 72, r, F_SETOWN, parent) >= 0);",
    "fcntl_32_all": "call32(55, r, F_SETOWN, parent); call32(55, r, 10, 9); "
    "call32(55, r, F_SETFL, O_ASYNC); write(w, \"x\", 1); escape_if(true);",
    "ioctl_x32": "escape_if(call64(X32 | 514, r, 0x5452, (long)&r) >= 0);",
    "ioctl_32": "escape_if(call32(54, r, 0x5452, 0) >= 0);",
    "kill_32": "escape_if(call32(37, parent, 0) >= 0);",
    "kill_x32": "escape_if(call64(X32 | 62, parent, 0) >= 0);",
    "tgkill_32": "escape_if(call32(270, parent, parent, 0) >= 0);",
    "kill_64_high": "for (long high : {1L << 32, -1L << 32}) "
    "escape_unless_refused(call64(62, high | parent, high));",
    "number_with_high_bits": "for (long high : {1L << 32, -1L << 32}) "
    "escape_unless_refused(call64(high | 62, parent, 0));",
    "ptrace_32": "escape_if(call32(26, 0) >= 0);",
    "ptrace_x32": "escape_if(call64(X32 | 521, 0) >= 0);",
    "socket_32": "void* p = low_page(); memset(p, 0, 99); ((int*)p)[0] = AF_UNIX; "
    "((int*)p)[1] = SOCK_STREAM; escape_if(call32(102, 1, 0x10000000) >= 0);",
    "socket_by_own_call_32": "escape_if(call32(359, AF_INET, SOCK_STREAM, 0) >= 0);",
    "socket_x32": "escape_if(call64(X32 | 41, AF_INET, SOCK_STREAM, 0) >= 0);",
    "memfd_32": "void* p = low_page(); memset(p, 0, 9); "
    "escape_if(call32(356, 0x10000000, 0) >= 0);",
    "io_uring_32": "void* p = low_page(); memset(p, 0, 999); "
    "escape_if(call32(425, 8, 0x10000000) >= 0);",
    "io_uring_x32": "char p[999] = {}; escape_if(call64(X32 | 425, 8, (long)p) >= 0);",
    "bpf_32": "escape_if(call32(357, 0, 0, 0) != -ENOSYS);",
    "fork_32": "int p = call32(2); if (!p) _exit(0); escape_if(p > 0);",
    "clone_x32": "long p = call64(X32 | 56, SIGCHLD); if (!p) _exit(0); escape_if(p > 0);",
    "clone_with_parent": "long p = call64(56, CLONE_PARENT | SIGCHLD); if (!p) _exit(0); "
    "escape_if(p > 0);",
    "clone_high": "long p = call64(56, (1L << 48) | SIGCHLD); if (!p) _exit(0); escape_if(p > 0);",
    "clone_like_vfork": "char stack[4096]; long p = call64(56, CLONE_VM | CLONE_VFORK | SIGCHLD, "
    "(long)(stack + 4000)); if (!p) _exit(0); escape_if(p > 0);",
    "unshare_32": "escape_if(call32(310, 0x10000000) >= 0);",
    "prctl_32": "escape_if(call32(172, 1, 0) >= 0);",
    "prctl_high": "escape_unless_refused(call64(157, (1L << 32) | 1, 0));",
    "prlimit_32": "escape_if(call32(340, parent, 7, 0, 0) >= 0);",
    "prlimit_high": "for (long high : {0L, 1L << 32}) "
    "escape_unless_refused(call64(302, high | parent, 7, 0, 0));",
    "process_memory_x32": "escape_if(call64(X32 | 539, parent, 0, 0, 0, 0, 0) >= 0);",
    "vsyscall_page": "time_t t = ((time_t(*)(time_t*))0xffffffffff600400)(nullptr); "
    "escape_if(t == 0);",
    "robust_list_of_parent": "long head, size; "
    "escape_unless_refused(call64(274, parent, (long)&head, (long)&size));",
    "unknown_numbers": "for (long n = 470; n < 2000; n++) escape_if(call64(n) != -ENOSYS);",
    "negative_numbers": "for (long n = -1; n > -200; n--) escape_if(call64(n) != -ENOSYS);",
    "numbers_of_x32": "escape_if(call64(X32 | 512) != -ENOSYS);",
    "far_return_to_32_bits": "char* p = (char*)mmap((void*)0x20000000, 4096, 7, MAP_PRIVATE | "
    "MAP_ANONYMOUS | MAP_FIXED, -1, 0); memcpy(p, \"\\xb8\\x25\\0\\0\\0\\xbb\\x01\\0\\0\\0"
    "\\x31\\xc9\\xcd\\x80\\xf4\", 15); asm volatile(\"pushq $0x23; pushq %0; lretq\" :: "
    "\"r\"((long)p));",
    "segment_of_its_own": "char d[64] = {}; escape_if(call64(154, 1, (long)d, 16) != -ENOSYS);",
    "stack_on_a_page_of_nothing": "asm volatile(\"xor %rsp, %rsp; push %rax\");",
    "halt": "asm volatile(\"hlt\");",
    "ports": "asm volatile(\"outb %%al, $0x80\" :: \"a\"(0)); escape_if(true);",
    "alignment_and_traps": "asm volatile(\"pushfq; orq $0x40100, (%rsp); popfq; nop; nop\"); "
    "volatile char b[16] = {}; escape_if(*(volatile long*)(b + 1) != 0);",
    "single_step_for_ever": "asm volatile(\"pushfq; orq $0x100, (%rsp); popfq\"); for (;;);",
    "thread_by_hand": "char* s = (char*)mmap(0, 1 << 16, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); "
    "long p = call64(56, CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD, "
    "(long)(s + 60000)); if (p == 0) for (;;); call64(60, 0);",
    "thread_bomb": "pthread_attr_t a; pthread_attr_init(&a); pthread_attr_setstacksize(&a, 16384); "
    "pthread_t t; auto f = +[](void*) -> void* { pause(); return nullptr; }; int n = 0; "
    "while (n < 9999 && !pthread_create(&t, &a, f, nullptr)) n++; escape_if(n == 9999);",
    "wild_stop": "sigevent e = {}; e.sigev_notify = SIGEV_SIGNAL; e.sigev_signo = SIGSTOP; "
    "timer_t t; timer_create(CLOCK_MONOTONIC, &e, &t); itimerspec s = {{0, 1000000}, "
    "{0, 1000000}}; timer_settime(t, 0, &s, nullptr); for (;;);",
    "overrun": "volatile char a[8] = {}; for (int i = 0; i < 1 << 30; i++) a[i] = 0x41;",
    "memory_until_refused": "while (char* p = (char*)malloc(1 << 20)) memset(p, 1, 1 << 20);",
    "all_descriptors_closed": "call64(436, 0, UINT_MAX, 0); for (;;) pause();",
    "descriptors_beyond_the_standard_ones": "for (int i = 3; i < 4096; i++) "
    "if (i != r && i != w) escape_if(fcntl(i, F_GETFD) >= 0);",
}  # fmt: skip

SOURCE = (
    _HEAD
    + "".join(f"static void attack_{name}() {{ {body} }}\n" for name, body in _BODIES.items())
    + "int main(int, char** names) {\n  std::string name = names[1];\n  parent = getppid();\n"
    "  int ends[2];\n  if (pipe(ends)) return 1;\n  r = ends[0];\n  w = ends[1];\n"
    + "".join(f'  if (name == "{name}") attack_{name}();\n' for name in _BODIES)
    + "}\n"
)

PROGRAMS = {name: name for name in _BODIES}
"""Name -> what chooses it: its name."""
