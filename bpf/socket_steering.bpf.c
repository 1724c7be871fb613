// SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause
/* Socket steering: an sk_lookup program that assigns sessions to service addresses to one of the gateway's three listening sockets (HBONE,
 * plain, DNS). Services have no socket and no device address of their own. A closed socket removes itself from the map; if no socket
 * remains, the lookup is refused and the kernel sends a reset, so no other socket in the namespace can accept the session. It runs on the
 * sk_lookup hook of the replica's network namespace; the redirector's own socket lookups also pass through it.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi/tier.h"
#define CANAL_COUNTS CANAL_STEERING_COUNTS
#define CANAL_COUNTS_MAP canal_steering_counts
#include "lib/address.h"
#include "lib/count.h"

/* Not in the UAPI headers that a BPF program can include. */
#define AF_INET 2

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, CANAL_LISTENERS);
	__type(key, __u32);
	__type(value, __u64);
} canal_service_listeners SEC(".maps");

static __always_inline int is_service(struct bpf_sk_lookup *ctx)
{
	if (ctx->family == AF_INET) {
		__u32 ip4 = ctx->local_ip4;

		/* Without this, clang merges the branches into one load through a computed context pointer. */
		barrier_var(ip4);
		return (ip4 & bpf_htonl(0xff000000)) == bpf_htonl(CANAL_SERVICE_NET4);
	}
	return ctx->local_ip6[0] == bpf_htonl(CANAL_SERVICE_NET6 >> 32) && ctx->local_ip6[1] == bpf_htonl((__u32)CANAL_SERVICE_NET6) &&
	       ctx->local_ip6[2] == 0;
}

static __always_inline int no_listener(void)
{
	count(CANAL_STEERING_NO_LISTENER);
	return SK_DROP;
}

SEC("sk_lookup")
int canal_steer(struct bpf_sk_lookup *ctx)
{
	__u32 door = CANAL_LISTENER_PLAIN4;
	struct bpf_sock *sk;
	long err;

	if (!is_service(ctx))
		return SK_PASS;
	if (ctx->protocol == IPPROTO_UDP) {
		if (ctx->local_port != CANAL_DNS_PORT)
			return no_listener();
		door = CANAL_LISTENER_DNS4;
	} else if (ctx->local_port == CANAL_HBONE_PORT) {
		door = CANAL_LISTENER_HBONE4;
	}
	sk = bpf_map_lookup_elem(&canal_service_listeners, &door);
	if (!sk)
		return no_listener();
	/* The kernel selects the socket of a reuse-port group. */
	err = bpf_sk_assign(ctx, sk, 0);
	bpf_sk_release(sk);
	if (err)
		return no_listener();
	count(door == CANAL_LISTENER_HBONE4 ? CANAL_STEERING_HBONE : door == CANAL_LISTENER_PLAIN4 ? CANAL_STEERING_PLAIN : CANAL_STEERING_DNS);
	return SK_PASS;
}

/* The kernel requires a license for the use of its helpers. */
char _license[] SEC("license") = "Dual BSD/GPL";
