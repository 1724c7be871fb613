// SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause
/* Edge: the one program of a cloud tier's edge, on ingress of its only device. It receives VXLAN datagrams from tenants' nodes and from
 * replicas, rewrites them in place, and sends each back to the router from which it came. It stores nothing about flows: the result
 * depends only on the packet and on the maps that the agent fills. So any edge can process any packet at any time, and a restart of the
 * agent does not affect traffic. See docs/design/0003-cloud-tier.md for the legs. Start reading at canal_edge().
 *
 *   tenant's VNI, from a node       to a gateway address: to_service(); to a replica's own address: to_replica()
 *   tenant's VNI, from a replica    from_replica_to_node()
 *   the tier's VNI, from a replica  to_client()
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi/tier.h"
#define CANAL_COUNTS CANAL_EDGE_COUNTS
#define CANAL_COUNTS_MAP canal_edge_counts
#include "lib/count.h"
#include "lib/flow.h"
#include "lib/too_big.h"

/* In a section of its own, so that the loader writes it as a whole. A new agent loads a new program with its own settings; the maps
 * stay. */
const volatile struct canal_edge_settings settings SEC(".rodata.settings");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_ADDRESSES_MAX);
	__type(key, struct canal_address_key);
	__type(value, struct canal_address);
} canal_addresses SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_SERVICES_MAX);
	__type(key, __u32);
	__type(value, struct canal_return);
} canal_returns SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_PREFIXES_MAX);
	__type(key, struct canal_prefix_key);
	__type(value, struct canal_prefix);
} canal_prefixes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_PREFIXES_MAX);
	__type(key, struct canal_node_key);
	__type(value, __u32);
} canal_nodes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_SERVICES_MAX);
	__type(key, __u32);
	__type(value, struct canal_table);
} canal_tables SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CANAL_REPLICAS_MAX);
	__type(key, __u32);
	__type(value, struct canal_replica);
} canal_replicas SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_REPLICAS_MAX);
	__type(key, __be32);
	__type(value, __u32);
} canal_hosts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_REPLICAS_MAX);
	__type(key, __be32);
	__type(value, struct canal_tunnels);
} canal_tunnels SEC(".maps");

static const __u8 replica_mac[6] = CANAL_REPLICA_MAC;

static __always_inline int drop(__u32 why)
{
	count(why);
	return TC_ACT_SHOT;
}

/* Returns the source port of the tunnel to this replica for a flow with this hash. Only the replica knows which ports its receive hash
 * spreads over its cores. */
static __always_inline __be16 tunnel_port(__u32 hash, __be32 replica_be)
{
	struct canal_tunnels *tunnels;

	if (!settings.aggregate)
		/* Dynamic ports, as RFC 7348 5 recommends. */
		return bpf_htons(0xc000 | hash >> 16);
	tunnels = bpf_map_lookup_elem(&canal_tunnels, &replica_be);
	if (tunnels && tunnels->count) {
		__u32 at = (hash >> 16) % tunnels->count;

		if (at < CANAL_TUNNELS_MAX)
			return bpf_htons(tunnels->ports[at]);
	}
	return bpf_htons(settings.tunnel_port + (hash >> 16) % settings.tunnels);
}

static __always_inline int send(struct __sk_buff *skb, struct frame *f, struct leg *leg, __u32 what)
{
	if (frame_turn(skb, f, leg))
		return drop(CANAL_EDGE_DROP_MALFORMED);
	count(what);
	return bpf_redirect(skb->ifindex, 0);
}

static __always_inline struct canal_prefix *prefix_of(__u32 vni, const struct words *pod)
{
	struct canal_prefix_key key = { .prefixlen = 32 + 128, .vni_be = bpf_htonl(vni) };

	put_words(key.address, pod);
	return bpf_map_lookup_elem(&canal_prefixes, &key);
}

static __always_inline int send_to_node(struct __sk_buff *skb, struct frame *f, struct leg *leg, __u32 what)
{
	struct canal_prefix *prefix = prefix_of(leg->vni, &f->flow.destination);

	if (!prefix)
		return drop(CANAL_EDGE_DROP_NODE);
	leg->destination_be = prefix->node_be;
	__builtin_memcpy(leg->mac, prefix->mac, 6);
	/* There are many nodes, each with its own device, so the replica's port is not replaced. */
	leg->source_port_be = f->outer_source_port_be;
	return send(skb, f, leg, what);
}

/* Handles packets from a replica to an endpoint that it dials. */
static __always_inline int from_replica_to_node(struct __sk_buff *skb, struct frame *f, struct leg *leg)
{
	if (tier_host_of(&f->flow.source) != f->outer_source_be)
		return drop(CANAL_EDGE_DROP_FORGED);
	return send_to_node(skb, f, leg, CANAL_EDGE_DIALLED);
}

/* Handles packets from a service's replica to its client. */
static __always_inline int to_client(struct __sk_buff *skb, struct frame *f, struct leg *leg)
{
	int is_error = f->kind == FRAME_ERROR;
	__u32 service = service_of(is_error ? &f->about.destination : &f->flow.source);
	struct canal_return *way;
	struct words address;

	if (!service)
		return drop(CANAL_EDGE_DROP_FORGED);
	way = bpf_map_lookup_elem(&canal_returns, &service);
	if (!way)
		return drop(CANAL_EDGE_DROP_SERVICE);
	leg->vni = way->vni;
	address = get_words(f->v6 ? way->address6 : way->address4);
	if (!(address.w[0] | address.w[1] | address.w[2] | address.w[3]))
		return drop(CANAL_EDGE_DROP_SERVICE);
	if (is_error && embedded_set_destination(skb, f, &address))
		return drop(CANAL_EDGE_DROP_MALFORMED);
	if (inner_set_source(skb, f, &address))
		return drop(CANAL_EDGE_DROP_MALFORMED);
	return send_to_node(skb, f, leg, is_error ? CANAL_EDGE_ICMP_TRANSLATED : CANAL_EDGE_TO_NODE);
}

static __always_inline int answer_too_big(struct __sk_buff *skb, struct frame *f, struct leg *leg, __u32 mtu)
{
	return write_too_big(skb, f, leg, mtu) ? drop(CANAL_EDGE_TOO_BIG) : send(skb, f, leg, CANAL_EDGE_TOO_BIG);
}

/* Returns whether the packet is too big for the tier. IPv4 without DF is sent on: routers behind may cut it, and it was not too big for
 * the link by which it came. */
static __always_inline int is_too_big(const struct frame *f)
{
	return f->dont_fragment && frame_largest(f) > settings.mtu;
}

/* Handles a datagram that a router cut on the path, because a link is narrower than this edge is configured for. The inner packet's
 * sender gets an ICMP error, and sends smaller packets. Only the first fragment shows the sender; none is sent on. */
static __always_inline int handle_fragment(struct __sk_buff *skb, struct frame *f, struct leg *leg, int is_replica)
{
	struct canal_node_key node = { .vni = f->vni, .address_be = f->outer_source_be };

	if (!f->dont_fragment || (!is_replica && !bpf_map_lookup_elem(&canal_nodes, &node)))
		return drop(CANAL_EDGE_DROP_FRAGMENT);
	return answer_too_big(skb, f, leg, f->whole);
}

/* Handles packets from a pod to the replica that dialed it. */
static __always_inline int to_replica(struct __sk_buff *skb, struct frame *f, struct leg *leg, __be32 host_be)
{
	__u32 hash = flow_hash(&f->flow.source, f->flow.source_port_be, f->flow.destination_port_be, 0);
	__u32 *number = bpf_map_lookup_elem(&canal_hosts, &host_be);

	if (!number || !*number)
		return drop(CANAL_EDGE_DROP_ADDRESS);
	if (is_too_big(f))
		return answer_too_big(skb, f, leg, settings.mtu);
	leg->destination_be = host_be;
	leg->source_port_be = tunnel_port(hash, host_be);
	__builtin_memcpy(leg->mac, replica_mac, 6);
	return send(skb, f, leg, CANAL_EDGE_ANSWERED);
}

/* Returns the first replica of the chain that is up, and sets its index and the table's version in `leg`. If none is up and the packet
 * `begins` a session, it returns the first one of the chain, and sets `what` to the counter for that. Such a replica refuses a connection
 * while it does not listen, and accepts one as soon as it does. A dropped SYN would wait for TCP's timer instead: 1 s, then 3 s, then
 * 7 s. Other packets are dropped: a replica that does not have their session would reset it, although its owner may only be slow. 0: no
 * replica gets the packet. */
static __always_inline __be32 choose(const struct canal_table *table, __u32 bucket, struct leg *leg, int begins, __u32 *what)
{
	__be32 first = 0;

	for (__u32 i = 0; i < CANAL_CHAIN; i++) {
		__u32 number = table->chain[bucket][i];
		struct canal_replica *replica;

		if (!number)
			break;
		replica = bpf_map_lookup_elem(&canal_replicas, &number);
		if (!replica)
			continue;
		if (replica->state == CANAL_REPLICA_UP) {
			leg->hop = i;
			leg->stamp = (table->version & CANAL_STAMP_VERSION) | (i ? CANAL_STAMP_SKIPPED : 0);
			return replica->address_be;
		}
		if (!first)
			first = replica->address_be;
	}
	if (!begins)
		return 0;
	leg->hop = 0;
	leg->stamp = table->version & CANAL_STAMP_VERSION;
	*what = CANAL_EDGE_TO_DOWN;
	return first;
}

/* Handles packets from a pod to a gateway address. An ICMP error goes to the session that it is about, whose packets go in the opposite
 * direction. */
static __always_inline int to_service(struct __sk_buff *skb, struct frame *f, struct leg *leg)
{
	int is_error = f->kind == FRAME_ERROR;
	/* A datagram counts as the first one of its session, as at the redirector. */
	int begins = f->kind == FRAME_TCP ? (f->flags & (FRAME_SYN | FRAME_ACK)) == FRAME_SYN : !is_error;
	const struct tuple *flow = is_error ? &f->about : &f->flow;
	struct canal_address_key key = { .vni = f->vni };
	struct canal_address *address;
	struct canal_table *table;
	struct words inside;
	__u32 hash, service, what = is_error ? CANAL_EDGE_ICMP_TRANSLATED : CANAL_EDGE_TO_REPLICA;

	put_words(key.address, &f->flow.destination);
	address = bpf_map_lookup_elem(&canal_addresses, &key);
	if (!address)
		return drop(CANAL_EDGE_DROP_ADDRESS);
	service = address->service;
	table = bpf_map_lookup_elem(&canal_tables, &service);
	if (!table || table->vni != f->vni)
		return drop(CANAL_EDGE_DROP_SERVICE);
	if (is_error)
		hash = flow_hash(&flow->destination, flow->destination_port_be, flow->source_port_be, service);
	else
		hash = flow_hash(&flow->source, flow->source_port_be, flow->destination_port_be, service);
	leg->destination_be = choose(table, flow_bucket(hash), leg, begins, &what);
	if (!leg->destination_be)
		return drop(CANAL_EDGE_DROP_REPLICA);
	if (is_too_big(f))
		return answer_too_big(skb, f, leg, settings.mtu);
	inside = service_words(service, f->v6);
	if (is_error && (!same_words(&f->about.source, &f->flow.destination) || embedded_set_source(skb, f, &inside)))
		return drop(CANAL_EDGE_DROP_MALFORMED);
	if (inner_set_destination(skb, f, &inside))
		return drop(CANAL_EDGE_DROP_MALFORMED);
	leg->vni = CANAL_TIER_VNI;
	leg->source_port_be = tunnel_port(hash, leg->destination_be);
	__builtin_memcpy(leg->mac, replica_mac, 6);
	return send(skb, f, leg, what);
}

/* Handles packets from a tenant's node. Responses to a pod go to the node in the tables, so no other node may send for the pod. An ICMP
 * error may come from any host on the path to the pod that it is about. */
static __always_inline int from_node(struct __sk_buff *skb, struct frame *f, struct leg *leg)
{
	struct canal_node_key node = { .vni = f->vni, .address_be = f->outer_source_be };
	struct canal_prefix *prefix;
	__be32 host_be;

	if (!bpf_map_lookup_elem(&canal_nodes, &node))
		return drop(CANAL_EDGE_DROP_UNKNOWN_SOURCE);
	prefix = prefix_of(f->vni, f->kind == FRAME_ERROR ? &f->about.destination : &f->flow.source);
	if (!prefix || prefix->node_be != f->outer_source_be)
		return drop(CANAL_EDGE_DROP_FORGED);
	host_be = tier_host_of(&f->flow.destination);
	return host_be ? to_replica(skb, f, leg, host_be) : to_service(skb, f, leg);
}

static __always_inline int pass(void)
{
	count(CANAL_EDGE_PASSED);
	return TC_ACT_OK;
}

static __always_inline int refuse(int verdict)
{
	switch (verdict) {
	case FRAME_FOREIGN:
		return pass();
	case FRAME_FRAGMENT:
		return drop(CANAL_EDGE_DROP_FRAGMENT);
	case FRAME_PROTOCOL:
		return drop(CANAL_EDGE_DROP_PROTOCOL);
	default:
		return drop(CANAL_EDGE_DROP_MALFORMED);
	}
}

SEC("tc")
int canal_edge(struct __sk_buff *skb)
{
	struct leg leg = { .source_be = settings.address_be, .mac_source = CANAL_EDGE_MAC };
	struct frame f;
	int verdict = frame_parse(skb, &f);
	__u32 *number;
	int is_replica;

	if (verdict && verdict != FRAME_TORN)
		return refuse(verdict);
	if (f.outer_destination_be != settings.address_be)
		return verdict ? refuse(FRAME_FRAGMENT) : pass();
	number = bpf_map_lookup_elem(&canal_hosts, &f.outer_source_be);
	is_replica = number && *number;
	leg.vni = f.vni;
	if (verdict)
		return handle_fragment(skb, &f, &leg, is_replica);
	if (f.vni == CANAL_TIER_VNI)
		return is_replica ? to_client(skb, &f, &leg) : drop(CANAL_EDGE_DROP_UNKNOWN_SOURCE);
	return is_replica ? from_replica_to_node(skb, &f, &leg) : from_node(skb, &f, &leg);
}

/* The kernel requires a license for the use of its helpers. */
char _license[] SEC("license") = "Dual BSD/GPL";
