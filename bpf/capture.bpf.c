// SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause
/* Capture: takes the TCP connections of a pod's cgroup to the node proxy that listens on loopback inside the pod's network
 * namespace, and tells the proxy where each was going. Decides nothing about policy: every connection that could leave the pod is
 * taken, whatever its port, mark or source address; the proxy decides. What is no TCP is pod.bpf.c's.
 *
 * connect4/6       remember the destination with the socket, rewrite it to loopback:CANAL_OUTBOUND_PORT
 * sockops          TCP_CONNECT_CB: the local port is known and no SYN has left: publish the origin for the proxy
 *                  STATE_CB SYN_SENT -> CLOSE: the connection never came up: withdraw it
 * getpeername4/6   answer with the address that the application dialled
 *
 * The proxy is not in the pod's cgroup, so its own sockets never come here. MSG_FASTOPEN and TCP_FASTOPEN_CONNECT run the
 * connect hook too (__inet_stream_connect calls pre_connect for both). Start reading at take().
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

/* What a connect hook may return. */
#define REFUSE 0
#define GO_ON 1
/* What a sockops program must return, always: a 0 anywhere on the cgroup path switches TCP header options off for everyone. */
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

/* Whether as many of the pod's connections wait for the proxy as may. The proxy's count lags behind by a few. */
static __always_inline int is_share_used(__u64 netns_cookie)
{
	struct canal_origin_pod *pod = bpf_map_lookup_elem(&canal_origin_pods, &netns_cookie);
	__u64 *taken = bpf_map_lookup_elem(&canal_origin_taken, &netns_cookie);

	return pod && (__s64)(pod->published - pod->withdrawn - (taken ? *taken : 0)) >= CANAL_ORIGINS_POD_MAX;
}

static __always_inline int refuse(__u32 verdict)
{
	count(verdict);
	/* The application sees what it would see if nobody listened, not EPERM. */
	bpf_set_retval(-ECONNREFUSED);
	return REFUSE;
}

/* Not taken. A socket may be dialled again after AF_UNSPEC or a refusal: what was remembered for the last time must not answer
 * for this one. */
static __always_inline int leave(struct bpf_sock_addr *ctx, __u32 verdict)
{
	if (ctx->sk)
		bpf_sk_storage_delete(&canal_sockets, ctx->sk);
	count(verdict);
	return GO_ON;
}

/* Remembers `to` with the socket and makes sure that loopback can be reached from it. */
static __always_inline int take(struct bpf_sock_addr *ctx, const struct words *to, __u32 verdict)
{
	struct bpf_sock *sk = ctx->sk;
	struct canal_socket *s;
	char no_device[4] = {};

	if (!sk)
		return refuse(CANAL_CAPTURE_REFUSED_STORAGE);
	if (is_share_used(bpf_get_netns_cookie(ctx)))
		return refuse(CANAL_CAPTURE_REFUSED_SHARE);
	/* A socket bound to the pod's interface could not reach loopback: the packet would leave by that interface. */
	if (sk->bound_dev_if && bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTODEVICE, no_device, sizeof(no_device)))
		return refuse(CANAL_CAPTURE_REFUSED_DEVICE);
	s = bpf_sk_storage_get(&canal_sockets, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!s)
		return refuse(CANAL_CAPTURE_REFUSED_STORAGE);
	__builtin_memset(s, 0, sizeof(*s));
	put_words(s->origin.destination_ip, to);
	s->origin.destination_port_be = ctx->user_port;
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
	struct words to;

	if (!is_tcp(ctx))
		return leave(ctx, CANAL_CAPTURE_LEFT_NOT_TCP);
	if (ctx->user_family != AF_INET)
		return leave(ctx, CANAL_CAPTURE_LEFT_FAMILY);
	to = words_v4(ctx->user_ip4);
	if (is_loopback(&to))
		return leave(ctx, CANAL_CAPTURE_LEFT_LOOPBACK);
	if (take(ctx, &to, CANAL_CAPTURE_TAKEN_V4) == REFUSE)
		return REFUSE;
	ctx->user_ip4 = bpf_htonl(0x7f000001);
	ctx->user_port = bpf_htons(CANAL_OUTBOUND_PORT);
	return GO_ON;
}

SEC("cgroup/connect6")
int canal_connect6(struct bpf_sock_addr *ctx)
{
	struct words to;
	int mapped;

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
	mapped = is_mapped(&to);
	if (take(ctx, &to, mapped ? CANAL_CAPTURE_TAKEN_MAPPED : CANAL_CAPTURE_TAKEN_V6) == REFUSE)
		return REFUSE;
	ctx->user_ip6[0] = 0;
	ctx->user_ip6[1] = 0;
	ctx->user_ip6[2] = mapped ? bpf_htonl(0xffff) : 0;
	ctx->user_ip6[3] = mapped ? bpf_htonl(0x7f000001) : bpf_htonl(1);
	ctx->user_port = bpf_htons(CANAL_OUTBOUND_PORT);
	return GO_ON;
}

/* The socket's own address. An IPv6 socket that dialled a mapped address holds a mapped address here. */
static __always_inline struct words local_address(struct bpf_sock_ops *ops)
{
	struct words from;

	if (ops->family == AF_INET) {
		__u32 ip4 = ops->local_ip4;

		/* Without this clang merges the two branches into one load through a computed pointer into the context, which the
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
	/* Only this socket, and only beside what other programs asked for. */
	bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
}

/* Only a connection that never came up is withdrawn here. One that did is the proxy's to look up, even when the client has
 * closed already: send-and-close clients would lose their bytes otherwise. What the proxy never asks for, it sweeps by age. */
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

/* The kernel asks for a licence before it lends its helpers. */
char _license[] SEC("license") = "Dual BSD/GPL";
