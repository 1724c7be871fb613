// Preloaded into user-mode Linux: its ptrace, so that it boots on processors with more state than it knows. Nothing else.
//
// To restore a process' vector registers, the kernel takes a buffer of exactly the size that the machine has (`xstateregs_set`:
// EFAULT else). User-mode Linux 6.1 has one of 2,696 bytes, AVX-512's; with AMX it is 11,008, and no process starts.
// What it does not know about is left as it is: nothing inside uses it.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

typedef long (*tracer)(enum __ptrace_request, pid_t, void *, void *);

long ptrace(enum __ptrace_request request, ...)
{
	// Its stacks are small, and it runs on one thread.
	static char whole[1 << 16] __attribute__((aligned(64)));
	static tracer next;
	__builtin_va_list args;

	__builtin_va_start(args, request);
	pid_t pid = __builtin_va_arg(args, pid_t);
	void *addr = __builtin_va_arg(args, void *);
	void *data = __builtin_va_arg(args, void *);
	__builtin_va_end(args);
	if (!next)
		next = (tracer)dlsym(RTLD_NEXT, "ptrace");
	if (request != PTRACE_SETREGSET || (long)addr != NT_X86_XSTATE)
		return next(request, pid, addr, data);

	struct iovec *given = data, all = { whole, sizeof(whole) };
	long got = next(PTRACE_GETREGSET, pid, addr, &all);
	if (got < 0 || all.iov_len <= given->iov_len)
		return next(request, pid, addr, data);
	memcpy(whole, given->iov_base, given->iov_len);
	return next(request, pid, addr, &all);
}
