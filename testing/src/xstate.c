// Preloaded into user-mode Linux: replaces its ptrace(), so that it boots on processors with more state than it supports.
// It changes nothing else.
//
// To restore a process' vector registers, the host's kernel requires a buffer of exactly the processor's size (`xstateregs_set`
// returns EFAULT otherwise). User-mode Linux 6.1 has a buffer of 2,696 bytes, which fits AVX-512. With AMX the size is 11,008 bytes,
// and no process would start. The state beyond its buffer stays unchanged, because nothing inside uses it.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

typedef long (*tracer)(enum __ptrace_request, pid_t, void *, void *);

long ptrace(enum __ptrace_request request, ...)
{
	// The buffer is static, because the stacks of user-mode Linux are small; it runs on one thread.
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

	// Reads the whole state first, so that the call below writes back what the given buffer does not cover.
	struct iovec *given = data, all = { whole, sizeof(whole) };
	long got = next(PTRACE_GETREGSET, pid, addr, &all);
	if (got < 0 || all.iov_len <= given->iov_len)
		return next(request, pid, addr, data);
	memcpy(whole, given->iov_base, given->iov_len);
	return next(request, pid, addr, &all);
}
