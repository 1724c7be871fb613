// SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause
/* Inbound: assigns plaintext TCP connections into a pod from outside to the node proxy's listener in the pod, whatever address and port
 * they are for. The accepted socket has the dialed address as its own, so nothing is translated, and after the lookup no packet comes
 * here. It makes no policy decision: the node proxy attaches it only while policies require it.
 *
 * It runs on the sk_lookup hook of the pod's network namespace, which the kernel calls when a SYN matches no connection. A closed
 * listener removes itself from the map; then the kernel resets, so that no other socket can accept the connection.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_helpers.h>

#include "abi/inbound.h"
#define CANAL_COUNTS CANAL_INBOUND_VERDICTS
#define CANAL_COUNTS_MAP canal_inbound_counts
#include "lib/count.h"

/* Not in the UAPI headers that a BPF program can include. */
#define AF_INET 2
/* The loopback device is the first of every namespace (net/core/dev.h LOOPBACK_IFINDEX). */
#define LOOPBACK 1

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, CANAL_INBOUND_LISTENERS);
	__type(key, __u32);
	__type(value, __u64);
} canal_inbound_listeners SEC(".maps");

/* Returns whether the connection comes from inside the pod: over the loopback device, or to an
 * address of the pod from that address itself. For the latter the kernel reports the address's
 * device, as if it came from outside. But no such connection from outside is established: the
 * kernel drops IPv4 packets from its own addresses as martians, and responses to IPv6 ones stay
 * inside. */
static __always_inline int is_inside(struct bpf_sk_lookup *ctx)
{
	if (ctx->ingress_ifindex == LOOPBACK)
		return 1;
	if (ctx->family == AF_INET) {
		__u32 remote = ctx->remote_ip4, local = ctx->local_ip4;

		/* Without this, clang merges the branches into loads through a computed context pointer. */
		barrier_var(remote);
		barrier_var(local);
		return remote == local;
	}
	return ctx->remote_ip6[0] == ctx->local_ip6[0] && ctx->remote_ip6[1] == ctx->local_ip6[1] &&
	       ctx->remote_ip6[2] == ctx->local_ip6[2] && ctx->remote_ip6[3] == ctx->local_ip6[3];
}

static __always_inline int leave(__u32 verdict)
{
	count(verdict);
	return SK_PASS;
}

static __always_inline int refuse(__u32 verdict)
{
	count(verdict);
	return SK_DROP;
}

SEC("sk_lookup")
int canal_inbound(struct bpf_sk_lookup *ctx)
{
	__u32 is_v4 = ctx->family == AF_INET;
	__u32 listener = is_v4 ? CANAL_INBOUND_LISTENER4 : CANAL_INBOUND_LISTENER6;
	struct bpf_sock *sk;
	long err;

	if (ctx->protocol != IPPROTO_TCP)
		return SK_PASS;
	if (is_inside(ctx))
		return leave(CANAL_INBOUND_LEFT_INSIDE);
	if (ctx->local_port == CANAL_INBOUND_HBONE_PORT)
		return leave(CANAL_INBOUND_LEFT_HBONE);
	sk = bpf_map_lookup_elem(&canal_inbound_listeners, &listener);
	if (!sk)
		return refuse(CANAL_INBOUND_REFUSED_NO_LISTENER);
	/* The kernel selects the socket of a reuse-port group. */
	err = bpf_sk_assign(ctx, sk, 0);
	bpf_sk_release(sk);
	if (err)
		return refuse(CANAL_INBOUND_REFUSED_ASSIGN);
	return leave(is_v4 ? CANAL_INBOUND_TAKEN_V4 : CANAL_INBOUND_TAKEN_V6);
}

/* The kernel requires a license for the use of its helpers. */
char _license[] SEC("license") = "Dual BSD/GPL";
