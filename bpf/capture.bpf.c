// SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause
/* Capture: redirects the TCP connections of a pod's cgroup to the node proxy, which listens on loopback inside the pod's network
 * namespace, and publishes their original destinations for the proxy. Every connection that could leave the pod is captured, whatever
 * its port, mark or source address; the proxy decides. Destinations that the proxy is known to refuse are refused here, by the tables
 * that it fills; all others are captured. Packets other than TCP are left to pod.bpf.c.
 *
 * connect4/6       refuse unreachable destinations; store the destination with the socket, and rewrite it to the proxy's address and port
 * sockops          TCP_CONNECT_CB: the local port is known and no SYN has left: publish the origin for the proxy
 *                  STATE_CB SYN_SENT -> CLOSE: the connection was never established: withdraw the origin
 * getpeername4/6   return the address that the application dialed
 * getsockname4/6   return the pod's address where the kernel selected a loopback address for the connection to the proxy
 *
 * An MPTCP socket dials by a subflow, which is what the connect hook sees; the names are requested from the MPTCP socket. Both store the
 * destination.
 *
 * The proxy is not in the pod's cgroup, so its own sockets never come here. MSG_FASTOPEN and TCP_FASTOPEN_CONNECT run the connect hook
 * too (__inet_stream_connect calls pre_connect for both). Start reading at redirect_to_proxy().
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/socket.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi/capture.h"
#define CANAL_COUNTS CANAL_CAPTURE_VERDICTS
#include "lib/address.h"
#include "lib/count.h"

/* Not in the UAPI headers that a BPF program can include. */
#define AF_INET 2
#define AF_INET6 10
#define SOCK_STREAM 1
#define SOL_SOCKET 1
#define SO_BINDTODEVICE 25
#define ECONNREFUSED 111

/* Return values of a connect hook. */
#define REFUSE 0
#define GO_ON 1
/* Return value of a sockops program, always: a 0 anywhere on the cgroup path switches TCP header options off for all programs. */
#define SOCKOPS_DONE 1

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct canal_socket);
} canal_sockets SEC(".maps");

/* Not LRU: an entry silently pushed out would be a connection silently lost. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_ORIGINS_MAX);
	__type(key, struct canal_origin_key);
	__type(value, struct canal_origin);
} canal_origins SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_ORIGIN_PODS_MAX);
	__type(key, __u64);
	__type(value, struct canal_origin_pod);
} canal_origin_pods SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_ORIGIN_PODS_MAX);
	__type(key, __u64);
	__type(value, __u64);
} canal_origin_taken SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_ORIGIN_PODS_MAX);
	__type(key, __u64);
	__type(value, struct canal_captured_pod);
} canal_captured_pods SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_CAPTURED_TENANTS_MAX);
	__type(key, __u32);
	__type(value, struct canal_captured_tenant);
} canal_captured_tenants SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_DESTINATIONS_MAX);
	__type(key, struct canal_destination_key);
	__type(value, struct canal_destination);
} canal_destinations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_RANGES_MAX);
	__type(key, struct canal_range_key);
	__type(value, __u32);
} canal_ranges SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_ORIGIN_PODS_MAX);
	__type(key, __u64);
	__type(value, struct canal_connect_refusals);
} canal_connect_refusals SEC(".maps");

/* Returns whether the pod's share of connections that wait for the proxy is used up. The proxy's count lags behind by a few. */
static __always_inline int is_share_used(__u64 netns_cookie)
{
	struct canal_origin_pod *pod = bpf_map_lookup_elem(&canal_origin_pods, &netns_cookie);
	__u64 *taken = bpf_map_lookup_elem(&canal_origin_taken, &netns_cookie);

	return pod && (__s64)(pod->published - pod->withdrawn - (taken ? *taken : 0)) >= CANAL_ORIGINS_POD_MAX;
}

static __always_inline int refuse(__u32 verdict)
{
	count(verdict);
	/* The application sees the error of a port without a listener, not EPERM. */
	bpf_set_retval(-ECONNREFUSED);
	return REFUSE;
}

/* Refuses on behalf of the proxy, and records the destination and the count for it. */
static __always_inline int refuse_destination(__u64 netns_cookie, const struct words *to, __be16 port_be, __u32 verdict)
{
	struct canal_connect_refusals *refusals = bpf_map_lookup_elem(&canal_connect_refusals, &netns_cookie);
	__u32 i = verdict - CANAL_CAPTURE_REFUSED_UNKNOWN_PORT;

	if (refusals && i < CANAL_CONNECT_REFUSALS) {
		put_words(refusals->last[i].ip, to);
		refusals->last[i].port_be = port_be;
		__sync_fetch_and_add(&refusals->count[i], 1);
	}
	return refuse(verdict);
}

static __always_inline int is_reserved(__be16 port_be)
{
	return port_be == bpf_htons(CANAL_OUTBOUND_PORT) || port_be == bpf_htons(CANAL_RESERVED_PLAINTEXT_PORT) ||
	       port_be == bpf_htons(CANAL_RESERVED_HBONE_PORT);
}

static __always_inline int is_same(const struct words *a, const struct words *b)
{
	return a->w[0] == b->w[0] && a->w[1] == b->w[1] && a->w[2] == b->w[2] && a->w[3] == b->w[3];
}

/* Returns the verdict that refuses the destination; 0: no refusal is known here. The order is the proxy's own
 * (dataplane/node-proxy/src/routing.rs). */
static __always_inline __u32 refusal_of(const struct canal_captured_pod *pod, const struct words *to, __be16 port_be)
{
	struct words ip4 = get_words(pod->ip4), ip6 = get_words(pod->ip6);
	struct canal_destination_key key = { .tenant = pod->tenant };
	struct canal_range_key range = { .prefixlen = 32 + 128, .tenant = pod->tenant };
	struct canal_captured_tenant *tenant;
	struct canal_destination *destination;
	__u32 *of_range;

	if (is_same(to, &ip4) || is_same(to, &ip6))
		return is_reserved(port_be) ? CANAL_CAPTURE_REFUSED_RESERVED_PORT : 0;
	tenant = bpf_map_lookup_elem(&canal_captured_tenants, &key.tenant);
	if (!tenant || pod->flags & CANAL_CAPTURED_POD_HAS_MORE)
		return 0;
	if (tenant->all)
		return tenant->all;
	put_words(key.ip, to);
	destination = bpf_map_lookup_elem(&canal_destinations, &key);
	if (destination) {
		for (int i = 0; i < CANAL_DESTINATION_PORTS_MAX; i++) {
			if (i >= destination->ports)
				break;
			if (destination->port_be[i] == port_be)
				return 0;
		}
		return destination->refused;
	}
	put_words(range.ip, to);
	of_range = bpf_map_lookup_elem(&canal_ranges, &range);
	if (!of_range)
		return tenant->outside;
	if (*of_range)
		return *of_range;
	return is_reserved(port_be) ? CANAL_CAPTURE_REFUSED_RESERVED_PORT : 0;
}

/* Returns the address at which the proxy accepts connections to this destination. Two destinations may share one. */
static __always_inline struct words proxy_address(const struct canal_captured_pod *pod, const struct words *to, __be16 port_be)
{
	struct words proxy = { { 0, 0, 0, bpf_htonl(1) } };
	__u32 hash = port_be;

#pragma unroll
	for (int i = 0; i < 4; i++) {
		hash = (hash ^ to->w[i]) * 0x9e3779b1;
		hash ^= hash >> 15;
	}
	if (is_mapped(to))
		return words_v4(bpf_htonl(pod ? CANAL_PROXY_V4 | (hash & CANAL_PROXY_V4_MASK) : 0x7f000001));
	if (pod && pod->flags & CANAL_CAPTURED_POD_SPREADS_V6) {
		proxy.w[0] = bpf_htonl(CANAL_PROXY_V6_0);
		proxy.w[1] = bpf_htonl(CANAL_PROXY_V6_1);
		proxy.w[2] = bpf_htonl(CANAL_PROXY_V6_2);
		proxy.w[3] = bpf_htonl(hash);
	}
	return proxy;
}

/* Returns whether the application selected the source address itself. */
static __always_inline int is_bound(const struct bpf_sock *sk, int is_v4)
{
	if (is_v4)
		return sk->src_ip4 != 0;
	return (sk->src_ip6[0] | sk->src_ip6[1] | sk->src_ip6[2] | sk->src_ip6[3]) != 0;
}

static __always_inline void forget(struct bpf_sock *sk)
{
	struct mptcp_sock *mptcp = bpf_skc_to_mptcp_sock(sk);

	bpf_sk_storage_delete(&canal_sockets, sk);
	if (mptcp)
		bpf_sk_storage_delete(&canal_sockets, mptcp);
}

/* Leaves the connection uncaptured. A socket may be dialed again after AF_UNSPEC or a refusal: the
 * destination that was stored for the previous dial must not apply to this one. */
static __always_inline int leave(struct bpf_sock_addr *ctx, __u32 verdict)
{
	struct bpf_sock *sk = ctx->sk;

	if (sk)
		forget(sk);
	count(verdict);
	return GO_ON;
}

/* Stores `to` with the socket, selects `proxy`, and makes sure that the socket can reach it. */
static __always_inline int redirect_to_proxy(struct bpf_sock_addr *ctx, const struct words *to, struct words *proxy, __u32 verdict)
{
	struct bpf_sock *sk = ctx->sk;
	__u64 netns_cookie = bpf_get_netns_cookie(ctx);
	struct canal_captured_pod *pod = bpf_map_lookup_elem(&canal_captured_pods, &netns_cookie);
	struct canal_socket *s, *of_mptcp;
	struct mptcp_sock *mptcp;
	char no_device[4] = {};
	__u32 refused;

	/* The hook always has a socket, but the verifier requires the check. */
	if (!sk)
		return refuse(CANAL_CAPTURE_REFUSED_STORAGE);
	/* A pod without an entry is refused nothing here: the proxy checks each connection again. */
	if (pod) {
		refused = refusal_of(pod, to, ctx->user_port);
		if (refused)
			return refuse_destination(netns_cookie, to, ctx->user_port, refused);
	}
	/* After the refusals: a refused destination takes nothing of the share, and its own reason helps more than the share's. */
	if (is_share_used(netns_cookie))
		return refuse(CANAL_CAPTURE_REFUSED_SHARE);
	/* A socket bound to the pod's interface could not reach loopback: the packet would leave by that interface. */
	if (sk->bound_dev_if && bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTODEVICE, no_device, sizeof(no_device)))
		return refuse(CANAL_CAPTURE_REFUSED_DEVICE);
	s = bpf_sk_storage_get(&canal_sockets, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	/* Fails closed: the proxy could not learn the destination, and uncaptured the connection would leave unencrypted. */
	if (!s)
		return refuse(CANAL_CAPTURE_REFUSED_STORAGE);
	*proxy = proxy_address(pod, to, ctx->user_port);
	__builtin_memset(s, 0, sizeof(*s));
	/* The proxy's addresses differ in this word only. */
	s->key.proxy_suffix_be = proxy->w[3];
	put_words(s->origin.destination_ip, to);
	s->origin.destination_port_be = ctx->user_port;
	/* getsockname() shows this address: the kernel selects a loopback address for the connection to the proxy. */
	if (pod && !is_bound(sk, sk->family == AF_INET))
		__builtin_memcpy(s->local_ip, is_mapped(to) ? pod->ip4 : pod->ip6, sizeof(s->local_ip));
	/* This hook sees the subflow, but getpeername() and getsockname() see the MPTCP socket that the application has. */
	mptcp = bpf_skc_to_mptcp_sock(sk);
	if (mptcp) {
		of_mptcp = bpf_sk_storage_get(&canal_sockets, mptcp, 0, BPF_SK_STORAGE_GET_F_CREATE);
		if (!of_mptcp)
			return refuse(CANAL_CAPTURE_REFUSED_STORAGE);
		*of_mptcp = *s;
	}
	count(verdict);
	return GO_ON;
}

static __always_inline int is_tcp(const struct bpf_sock_addr *ctx)
{
	return ctx->type == SOCK_STREAM && ctx->protocol == IPPROTO_TCP;
}

SEC("cgroup/connect4")
int canal_connect4(struct bpf_sock_addr *ctx)
{
	struct words to, proxy = {};

	if (!is_tcp(ctx))
		return leave(ctx, CANAL_CAPTURE_LEFT_NOT_TCP);
	if (ctx->user_family != AF_INET)
		return leave(ctx, CANAL_CAPTURE_LEFT_FAMILY);
	to = words_v4(ctx->user_ip4);
	if (is_loopback(&to))
		return leave(ctx, CANAL_CAPTURE_LEFT_LOOPBACK);
	if (redirect_to_proxy(ctx, &to, &proxy, CANAL_CAPTURE_TAKEN_V4) == REFUSE)
		return REFUSE;
	ctx->user_ip4 = proxy.w[3];
	ctx->user_port = bpf_htons(CANAL_OUTBOUND_PORT);
	return GO_ON;
}

SEC("cgroup/connect6")
int canal_connect6(struct bpf_sock_addr *ctx)
{
	struct words to, proxy = {};

	if (!is_tcp(ctx))
		return leave(ctx, CANAL_CAPTURE_LEFT_NOT_TCP);
	if (ctx->user_family != AF_INET6)
		return leave(ctx, CANAL_CAPTURE_LEFT_FAMILY);
	to.w[0] = ctx->user_ip6[0];
	to.w[1] = ctx->user_ip6[1];
	to.w[2] = ctx->user_ip6[2];
	to.w[3] = ctx->user_ip6[3];
	if (is_loopback(&to))
		return leave(ctx, CANAL_CAPTURE_LEFT_LOOPBACK);
	if (redirect_to_proxy(ctx, &to, &proxy, is_mapped(&to) ? CANAL_CAPTURE_TAKEN_MAPPED : CANAL_CAPTURE_TAKEN_V6) == REFUSE)
		return REFUSE;
	ctx->user_ip6[0] = proxy.w[0];
	ctx->user_ip6[1] = proxy.w[1];
	ctx->user_ip6[2] = proxy.w[2];
	ctx->user_ip6[3] = proxy.w[3];
	ctx->user_port = bpf_htons(CANAL_OUTBOUND_PORT);
	return GO_ON;
}

/* Returns the socket's own address. An IPv6 socket that dialed a mapped address has a mapped address here. */
static __always_inline struct words local_address(struct bpf_sock_ops *ops)
{
	struct words from;

	if (ops->family == AF_INET) {
		__u32 ip4 = ops->local_ip4;

		/* Without this, clang merges the two branches into one load through a computed pointer into the context, which the
		 * verifier forbids. */
		barrier_var(ip4);
		return words_v4(ip4);
	}
	from.w[0] = ops->local_ip6[0];
	from.w[1] = ops->local_ip6[1];
	from.w[2] = ops->local_ip6[2];
	from.w[3] = ops->local_ip6[3];
	return from;
}

static __always_inline void publish(struct bpf_sock_ops *ops, struct canal_socket *s)
{
	struct words from = local_address(ops);
	struct canal_origin_pod none = {}, *pod;

	s->key.netns_cookie = bpf_get_netns_cookie(ops);
	put_words(s->key.source_ip, &from);
	s->key.source_port_be = bpf_htons(ops->local_port);
	s->origin.published_ns = bpf_ktime_get_ns();
	if (bpf_map_update_elem(&canal_origins, &s->key, &s->origin, BPF_ANY)) {
		count(CANAL_CAPTURE_PUBLISH_FULL);
		return;
	}
	count(CANAL_CAPTURE_PUBLISHED);
	pod = bpf_map_lookup_elem(&canal_origin_pods, &s->key.netns_cookie);
	if (!pod) {
		bpf_map_update_elem(&canal_origin_pods, &s->key.netns_cookie, &none, BPF_NOEXIST);
		pod = bpf_map_lookup_elem(&canal_origin_pods, &s->key.netns_cookie);
	}
	if (pod)
		__sync_fetch_and_add(&pod->published, 1);
	/* For this socket only, and in addition to the callbacks that other programs requested. */
	bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
}

/* Withdraws a connection that was never established. The proxy takes the origin of one that was, even if the client has closed already:
 * clients that send and close would lose their bytes otherwise. Origins that the proxy never takes are swept by age. */
static __always_inline void withdraw(struct canal_socket *s)
{
	struct canal_origin_pod *pod;

	if (!s->key.netns_cookie || bpf_map_delete_elem(&canal_origins, &s->key))
		return;
	count(CANAL_CAPTURE_WITHDRAWN);
	pod = bpf_map_lookup_elem(&canal_origin_pods, &s->key.netns_cookie);
	if (pod)
		__sync_fetch_and_add(&pod->withdrawn, 1);
}

SEC("sockops")
int canal_sockops(struct bpf_sock_ops *ops)
{
	struct bpf_sock *sk = ops->sk;
	struct canal_socket *s;

	if (!sk)
		return SOCKOPS_DONE;
	if (ops->op != BPF_SOCK_OPS_TCP_CONNECT_CB && ops->op != BPF_SOCK_OPS_STATE_CB)
		return SOCKOPS_DONE;
	s = bpf_sk_storage_get(&canal_sockets, sk, 0, 0);
	if (!s)
		return SOCKOPS_DONE;
	if (ops->op == BPF_SOCK_OPS_TCP_CONNECT_CB)
		publish(ops, s);
	else if (ops->args[0] == BPF_TCP_SYN_SENT && ops->args[1] == BPF_TCP_CLOSE)
		withdraw(s);
	return SOCKOPS_DONE;
}

SEC("cgroup/getpeername4")
int canal_getpeername4(struct bpf_sock_addr *ctx)
{
	struct canal_socket *s = ctx->sk ? bpf_sk_storage_get(&canal_sockets, ctx->sk, 0, 0) : 0;
	struct words to;

	if (!s)
		return GO_ON;
	to = get_words(s->origin.destination_ip);
	ctx->user_ip4 = to.w[3];
	ctx->user_port = s->origin.destination_port_be;
	count(CANAL_CAPTURE_PEER_RESTORED);
	return GO_ON;
}

SEC("cgroup/getpeername6")
int canal_getpeername6(struct bpf_sock_addr *ctx)
{
	struct canal_socket *s = ctx->sk ? bpf_sk_storage_get(&canal_sockets, ctx->sk, 0, 0) : 0;
	struct words to;

	if (!s)
		return GO_ON;
	to = get_words(s->origin.destination_ip);
	ctx->user_ip6[0] = to.w[0];
	ctx->user_ip6[1] = to.w[1];
	ctx->user_ip6[2] = to.w[2];
	ctx->user_ip6[3] = to.w[3];
	ctx->user_port = s->origin.destination_port_be;
	count(CANAL_CAPTURE_PEER_RESTORED);
	return GO_ON;
}

/* Returns whether `shown` must be replaced by `own`, because the kernel selected it for the connection to the proxy. */
static __always_inline int restore_local(struct bpf_sock_addr *ctx, const struct words *shown, struct words *own)
{
	struct canal_socket *s;

	/* Before connect() and after AF_UNSPEC the address is unspecified, and stays so. */
	if (!is_loopback(shown) || shown->w[3] == 0)
		return 0;
	s = ctx->sk ? bpf_sk_storage_get(&canal_sockets, ctx->sk, 0, 0) : 0;
	if (!s)
		return 0;
	*own = get_words(s->local_ip);
	if (!(own->w[0] | own->w[1] | own->w[2] | own->w[3]))
		return 0;
	count(CANAL_CAPTURE_LOCAL_RESTORED);
	return 1;
}

SEC("cgroup/getsockname4")
int canal_getsockname4(struct bpf_sock_addr *ctx)
{
	struct words shown = words_v4(ctx->user_ip4), own;

	if (restore_local(ctx, &shown, &own))
		ctx->user_ip4 = own.w[3];
	return GO_ON;
}

SEC("cgroup/getsockname6")
int canal_getsockname6(struct bpf_sock_addr *ctx)
{
	struct words shown, own;

	shown.w[0] = ctx->user_ip6[0];
	shown.w[1] = ctx->user_ip6[1];
	shown.w[2] = ctx->user_ip6[2];
	shown.w[3] = ctx->user_ip6[3];
	if (!restore_local(ctx, &shown, &own))
		return GO_ON;
	ctx->user_ip6[0] = own.w[0];
	ctx->user_ip6[1] = own.w[1];
	ctx->user_ip6[2] = own.w[2];
	ctx->user_ip6[3] = own.w[3];
	return GO_ON;
}

/* The kernel requires a license for the use of its helpers. */
char _license[] SEC("license") = "Dual BSD/GPL";
