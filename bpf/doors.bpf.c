// SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause
/* Doors: which of the gateway's listening sockets takes a session to a service address. No service has a socket of its own, nor an address
 * on a device: all are behind three doors. A closed socket leaves the map by itself; then nobody else's socket may answer, and the
 * kernel resets. On the sk_lookup hook of the replica's network namespace; the redirector's lookups come here too.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi/tier.h"
#define CANAL_COUNTS CANAL_DOORS_COUNTS
#define CANAL_COUNTS_MAP canal_doors_counts
#include "lib/address.h"
#include "lib/count.h"

#define AF_INET 2

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, CANAL_DOORS);
	__type(key, __u32);
	__type(value, __u64);
} canal_doors SEC(".maps");

static __always_inline int is_service(struct bpf_sk_lookup *ctx)
{
	if (ctx->family == AF_INET) {
		__u32 ip4 = ctx->local_ip4;

		/* Without this clang merges the branches into one load through a computed context pointer. */
		barrier_var(ip4);
		return (ip4 & bpf_htonl(0xff000000)) == bpf_htonl(CANAL_SERVICE_NET4);
	}
	return ctx->local_ip6[0] == bpf_htonl(CANAL_SERVICE_NET6 >> 32) && ctx->local_ip6[1] == bpf_htonl((__u32)CANAL_SERVICE_NET6) &&
	       ctx->local_ip6[2] == 0;
}

static __always_inline int closed(void)
{
	count(CANAL_DOORS_CLOSED);
	return SK_DROP;
}

SEC("sk_lookup")
int canal_door(struct bpf_sk_lookup *ctx)
{
	__u32 door = CANAL_DOOR_PLAIN4;
	struct bpf_sock *sk;
	long err;

	if (!is_service(ctx))
		return SK_PASS;
	if (ctx->protocol == IPPROTO_UDP) {
		if (ctx->local_port != CANAL_DNS_PORT)
			return closed();
		door = CANAL_DOOR_DNS4;
	} else if (ctx->local_port == CANAL_HBONE_PORT) {
		door = CANAL_DOOR_HBONE4;
	}
	sk = bpf_map_lookup_elem(&canal_doors, &door);
	if (!sk)
		return closed();
	/* Which socket of a reuse-port group takes it, the kernel chooses. */
	err = bpf_sk_assign(ctx, sk, 0);
	bpf_sk_release(sk);
	if (err)
		return closed();
	count(door == CANAL_DOOR_HBONE4 ? CANAL_DOORS_HBONE : door == CANAL_DOOR_PLAIN4 ? CANAL_DOORS_PLAIN : CANAL_DOORS_DNS);
	return SK_PASS;
}

/* The kernel asks for a licence before it lends its helpers. */
char _license[] SEC("license") = "Dual BSD/GPL";
