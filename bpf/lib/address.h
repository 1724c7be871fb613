/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* Addresses in the 16-byte form of bpf/abi: construction and tests. It defines no program and no map. */
#ifndef CANAL_LIB_ADDRESS_H
#define CANAL_LIB_ADDRESS_H

#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* An address as four words in network order, as in the kernel's context structures. */
struct words {
	__u32 w[4];
};

static __always_inline struct words words_v4(__u32 ip4_be)
{
	struct words a = { { 0, 0, bpf_htonl(0xffff), ip4_be } };

	return a;
}

static __always_inline int is_mapped(const struct words *a)
{
	return a->w[0] == 0 && a->w[1] == 0 && a->w[2] == bpf_htonl(0xffff);
}

static __always_inline int is_loopback_v4(__u32 ip4_be)
{
	/* connect(0.0.0.0) means this host. */
	return ip4_be == 0 || (ip4_be & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
}

static __always_inline int is_loopback(const struct words *a)
{
	if (is_mapped(a))
		return is_loopback_v4(a->w[3]);
	/* connect(::) means ::1, as on BSD. */
	return a->w[0] == 0 && a->w[1] == 0 && a->w[2] == 0 && (a->w[3] == bpf_htonl(1) || a->w[3] == 0);
}

static __always_inline void put_words(__u8 to[16], const struct words *a)
{
	__builtin_memcpy(to, a, 16);
}

static __always_inline struct words get_words(const __u8 from[16])
{
	struct words a;

	__builtin_memcpy(&a, from, 16);
	return a;
}

#endif
