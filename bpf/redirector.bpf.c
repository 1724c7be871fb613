// SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause
/* Redirector: processes the packets that the edge sends to this replica, before the host's VXLAN device sees them (Canal 4.4, appendix
 * C). It delivers packets of sessions that are owned here, and forwards the others along the chain of their bucket. It stores nothing
 * about flows: the kernel's own sockets show the owner of a session. See docs/design/0003-cloud-tier.md, "Buckets". Start reading at
 * canal_redirector().
 *
 *   the tier's VNI    to_service(): early limits; then new sessions to the bucket's head, others to the first member that owns them
 *   a tenant's VNI    answer(): accepted only for a connection that the gateway dialed for this tenant
 *   anything else     foreign4(), foreign6(): passed to the host, unless it tries to bypass the tunnel
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "abi/tier.h"
#define CANAL_COUNTS CANAL_REDIRECTOR_COUNTS
#define CANAL_COUNTS_MAP canal_redirector_counts
#include "lib/count.h"
#include "lib/flow.h"
#include "lib/too_big.h"

/* One token in the unit of canal_bucket.tokens, which is nanoseconds times tokens per second. */
#define TOKEN 1000000000ull

/* One element, which the agent writes: registration changes it while packets pass. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct canal_redirector_settings);
} canal_self SEC(".maps");

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

/* struct canal_throttle with the lock's type as the kernel requires it. */
struct throttle {
	struct bpf_spin_lock lock;
	__u32 part;
	struct canal_bucket sessions;
	struct canal_bucket packets;
};
_Static_assert(sizeof(struct throttle) == sizeof(struct canal_throttle), "one layout");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_THROTTLES_MAX);
	__type(key, struct canal_throttle_key);
	__type(value, struct throttle);
} canal_throttles SEC(".maps");

static __always_inline int drop(__u32 why)
{
	count(why);
	return TC_ACT_SHOT;
}

/* Early limits. */

/* Refills the bucket and takes `cost`; 0: there are fewer tokens. A replica with a part of a limit pays for one token as many times as
 * its part goes into the whole. So the parts of all replicas make up the limit, whatever fraction of a token per second each of them is.
 * The clock is read before the lock, because no helper may be called inside it. It can therefore be behind what another CPU has written;
 * then nothing is refilled. */
static __always_inline int take(struct canal_bucket *b, __u64 now, __u64 cost)
{
	__u64 full = b->burst * TOKEN;

	if (!b->rate)
		return 1;
	/* Otherwise no packet could ever pass. */
	if (full < cost)
		full = cost;
	if (now > b->at_ns) {
		__u64 elapsed = now - b->at_ns;

		b->at_ns = now;
		if (b->tokens >= full || elapsed > (full - b->tokens) / b->rate)
			b->tokens = full;
		else
			b->tokens += elapsed * b->rate;
	}
	if (b->tokens < cost) {
		b->refused++;
		return 0;
	}
	b->tokens -= cost;
	return 1;
}

enum taken {
	TAKEN,
	NO_SESSIONS,
	NO_PACKETS,
};

static __always_inline int throttle(__u32 scope, __u32 id, int is_session)
{
	struct canal_throttle_key key = { .scope = scope, .id = id };
	struct throttle *t = bpf_map_lookup_elem(&canal_throttles, &key);
	__u64 now, cost = TOKEN;
	int taken = TAKEN;
	__u32 part;

	if (!t)
		return TAKEN;
	part = t->part;
	if (part)
		cost = TOKEN * CANAL_BUCKETS / part;
	now = bpf_ktime_get_ns();
	bpf_spin_lock(&t->lock);
	if (is_session && !take(&t->sessions, now, cost))
		taken = NO_SESSIONS;
	else if (!take(&t->packets, now, cost))
		taken = NO_PACKETS;
	bpf_spin_unlock(&t->lock);
	return taken;
}

/* Returns 0, or the counter of the limit that is used up. */
static __noinline __u32 throttled(__u32 service, __u32 vni, int is_session)
{
	switch (throttle(CANAL_THROTTLE_SERVICE, service, is_session)) {
	case NO_SESSIONS:
		return CANAL_REDIRECTOR_THROTTLED_SERVICE_SESSIONS;
	case NO_PACKETS:
		return CANAL_REDIRECTOR_THROTTLED_SERVICE_PACKETS;
	}
	switch (throttle(CANAL_THROTTLE_TENANT, vni, is_session)) {
	case NO_SESSIONS:
		return CANAL_REDIRECTOR_THROTTLED_TENANT_SESSIONS;
	case NO_PACKETS:
		return CANAL_REDIRECTOR_THROTTLED_TENANT_PACKETS;
	}
	return 0;
}

/* Lookups in the kernel's sockets. */

/* Fills the tuple for the lookup helpers, and returns its length. */
static __always_inline __u32 socket_tuple(struct bpf_sock_tuple *to, const struct words *source, __be16 source_port_be,
					  const struct words *destination, __be16 destination_port_be, int v6)
{
	if (v6) {
		__builtin_memcpy(to->ipv6.saddr, source, 16);
		__builtin_memcpy(to->ipv6.daddr, destination, 16);
		to->ipv6.sport = source_port_be;
		to->ipv6.dport = destination_port_be;
		return sizeof(to->ipv6);
	}
	to->ipv4.saddr = source->w[3];
	to->ipv4.daddr = destination->w[3];
	to->ipv4.sport = source_port_be;
	to->ipv4.dport = destination_port_be;
	return sizeof(to->ipv4);
}

/* Fills the tuple of the session that a segment belongs to, or that an ICMP error is about; the error goes in the opposite direction. */
static __always_inline __u32 session_tuple(struct bpf_sock_tuple *to, const struct frame *f)
{
	const struct tuple *flow = &f->flow, *about = &f->about;

	if (f->kind == FRAME_ERROR)
		return socket_tuple(to, &about->destination, about->destination_port_be, &about->source, about->source_port_be, f->v6);
	return socket_tuple(to, &flow->source, flow->source_port_be, &flow->destination, flow->destination_port_be, f->v6);
}

/* Returns whether a gateway would accept a new session. The source port is 0, which no connection
 * has: only listeners match, through socket steering. So the remains of an old connection do not
 * count for a gateway that is gone. */
static __noinline int is_listening(struct __sk_buff *skb, const struct frame *f)
{
	struct bpf_sock_tuple tuple;
	struct bpf_sock *sk;
	__u32 length;

	length = socket_tuple(&tuple, &f->flow.source, 0, &f->flow.destination, f->flow.destination_port_be, f->v6);
	if (f->kind == FRAME_ECHO)
		return 1;
	if (f->kind == FRAME_TCP)
		sk = bpf_skc_lookup_tcp(skb, &tuple, length, BPF_F_CURRENT_NETNS, 0);
	else
		sk = bpf_sk_lookup_udp(skb, &tuple, length, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return 0;
	bpf_sk_release(sk);
	return 1;
}

/* Returns whether the segment's acknowledgment is a SYN cookie of this listener. */
static __always_inline int has_cookie(struct __sk_buff *skb, const struct frame *f, struct bpf_sock *listener)
{
	void *data = (void *)(long)skb->data;
	void *end = (void *)(long)skb->data_end;
	__u32 transport = f->transport;
	struct tcphdr *tcp;

	if ((f->flags & (FRAME_SYN | FRAME_RST | FRAME_ACK)) != FRAME_ACK || transport > FRAME_INNER_IP + 60)
		return 0;
	tcp = data + transport;
	if ((void *)(tcp + 1) > end || data + FRAME_INNER_IP + sizeof(struct ipv6hdr) > end)
		return 0;
	return !bpf_tcp_check_syncookie(listener, data + FRAME_INNER_IP, f->v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr), tcp,
					sizeof(*tcp));
}

/* Function of the kernel (Linux 6.2 or newer; without it any request matches any acknowledgment). bpf_skc_to_tcp_request_sock() does not
 * recognize a request whose listener is in a sockmap, as those of socket steering are. */
extern void *bpf_rdonly_cast(const void *object, __u32 type) __ksym __weak;

/* Only the field that is read here. */
struct tcp_request_sock {
	__u32 snt_isn;
} __attribute__((preserve_access_index));

/* Returns whether a half-open session that is found here is the segment's. A SYN that is retransmitted after a change of the head
 * creates a second one at the new head. The client accepts one of the two SYN-ACKs, and the other replica would reset the
 * acknowledgment. */
static __always_inline int is_answered(struct __sk_buff *skb, const struct frame *f, struct bpf_sock *sk)
{
	struct tcp_request_sock *request;
	__be32 acknowledged_be;

	if (sk->state != BPF_TCP_NEW_SYN_RECV || f->kind != FRAME_TCP || (f->flags & (FRAME_SYN | FRAME_RST | FRAME_ACK)) != FRAME_ACK)
		return 1;
	if (!bpf_rdonly_cast)
		return 1;
	request = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct tcp_request_sock));
	if (bpf_skb_load_bytes(skb, f->transport + 8, &acknowledged_be, sizeof(acknowledged_be)))
		return 1;
	return bpf_ntohl(acknowledged_be) == request->snt_isn + 1;
}

enum owner {
	NOBODY,
	SOCKET,
	COOKIE,
};

/* Returns whether this kernel owns the session of a TCP segment, or the session that an ICMP error is about. */
static __noinline int owner_here(struct __sk_buff *skb, const struct frame *f)
{
	struct bpf_sock_tuple tuple;
	struct bpf_sock *sk;
	int owner = NOBODY;
	__u32 length;

	length = session_tuple(&tuple, f);
	sk = bpf_skc_lookup_tcp(skb, &tuple, length, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return NOBODY;
	if (sk->state != BPF_TCP_LISTEN)
		owner = is_answered(skb, f, sk) ? SOCKET : NOBODY;
	else if (f->kind == FRAME_TCP && has_cookie(skb, f, sk))
		owner = COOKIE;
	bpf_sk_release(sk);
	return owner;
}

/* Chains. */

/* A packet's route along the chain so far. */
struct route {
	__u32 self;   /* this replica's number */
	__u32 sender; /* number of the replica that selected this one; 0: an edge did */
	__u32 stamp;  /* the packet's stamp when it is forwarded */
	__u8 hop;
};

struct chain_position {
	__u32 number; /* of the replica; 0: there is no member */
	__be32 address_be;
};

/* Creates the route of a packet. Tables reach replicas in no order, so the sender's version may differ from this one. */
static __always_inline struct route way_of(const struct frame *f, const struct canal_table *table, __u32 self, __u32 sender)
{
	__u32 version = table->version & CANAL_STAMP_VERSION;
	__u32 stamp = version | (f->stamp & ~CANAL_STAMP_VERSION);
	struct route way = { .self = self, .sender = sender, .stamp = stamp, .hop = f->hop };

	if ((f->stamp & CANAL_STAMP_VERSION) != version)
		way.stamp |= CANAL_STAMP_MIXED_VERSIONS;
	return way;
}

enum chain_role {
	OF_NEW,
	OF_SESSION, /* of a session that a slow replica may own */
};

/* Returns the first member at `from` or behind it whose replica accepts such packets and did not just have this one. */
static __always_inline struct chain_position next_member(const struct canal_table *table, __u32 bucket, __u32 from, struct route *way, enum chain_role of)
{
	struct chain_position none = {};

	if (way->hop >= CANAL_CHAIN)
		return none;
	for (__u32 i = 0; i < CANAL_CHAIN; i++) {
		__u32 number = table->chain[bucket][i];
		struct canal_replica *replica;

		if (!number)
			break;
		if (i < from || number == way->self || number == way->sender)
			continue;
		replica = bpf_map_lookup_elem(&canal_replicas, &number);
		if (replica && (replica->state == CANAL_REPLICA_UP || (of == OF_SESSION && replica->state == CANAL_REPLICA_SUSPECT))) {
			struct chain_position p = { .number = number, .address_be = replica->address_be };

			return p;
		}
		way->stamp |= CANAL_STAMP_SKIPPED;
	}
	return none;
}

/* Returns the index behind this replica's own, if a sender selected it, or behind the sender's, if this replica is not a member any
 * more. Members other than a new head keep their order from one table to the next, so those behind this index were not tried before. 0:
 * from the front. */
static __noinline __u32 next_in_chain(const struct canal_table *table, __u32 bucket, const struct route *way)
{
	__u32 place = 0;

	if (!way->hop)
		return 0;
	for (__u32 i = 0; i < CANAL_CHAIN; i++) {
		__u32 number = table->chain[bucket][i];

		if (!number)
			break;
		if (number == way->self)
			return i + 1;
		if (number == way->sender)
			place = i + 1;
	}
	return place;
}

/* Returns the next replica that may own the session. If a sender skipped a member that was not up, or selected by another table, the end
 * of the chain is not final. Then the chain is walked once more from the front, because a replica that answers a health check late has
 * its sessions all the same. */
static __always_inline struct chain_position next_owner(const struct canal_table *table, __u32 bucket, struct route *way)
{
	struct chain_position place = next_member(table, bucket, next_in_chain(table, bucket, way), way, OF_SESSION);

	if (place.number || way->stamp & CANAL_STAMP_LAST || !(way->stamp & (CANAL_STAMP_SKIPPED | CANAL_STAMP_MIXED_VERSIONS)))
		return place;
	way->stamp |= CANAL_STAMP_LAST;
	return next_member(table, bucket, 0, way, OF_SESSION);
}

static __always_inline int forward(struct __sk_buff *skb, struct frame *f, __be32 self_be, const struct chain_position *to, const struct route *way,
				   __u32 what)
{
	struct leg leg = {
		.source_be = self_be,
		.destination_be = to->address_be,
		.vni = f->vni,
		.stamp = way->stamp,
		.source_port_be = f->outer_source_port_be,
		.hop = way->hop + 1,
		.mac = CANAL_REPLICA_MAC,
		.mac_source = CANAL_EDGE_MAC,
	};

	if (frame_turn(skb, f, &leg))
		return drop(CANAL_REDIRECTOR_DROP_MALFORMED);
	count(what);
	return bpf_redirect(skb->ifindex, 0);
}

static __always_inline int deliver_local(struct __sk_buff *skb, struct frame *f, __u32 what)
{
	if ((f->hop || f->stamp) && frame_clear_reserved(skb, f))
		return drop(CANAL_REDIRECTOR_DROP_MALFORMED);
	count(what);
	return TC_ACT_OK;
}

/* Handles packets that begin a session, or have none: a SYN, a datagram, an echo. */
static __always_inline int start_session(struct __sk_buff *skb, struct frame *f, __be32 self_be, const struct canal_table *table, __u32 bucket,
				 struct route *way, __u32 what)
{
	struct route first = { .stamp = way->stamp };
	struct chain_position place;

	/* A hop count above 0 means that the sender has selected this replica. */
	if (!f->hop) {
		place = next_member(table, bucket, 0, &first, OF_NEW);
		if (place.number && place.number != way->self)
			return forward(skb, f, self_be, &place, &first, CANAL_REDIRECTOR_FORWARDED_NEW);
	}
	if (is_listening(skb, f))
		return deliver_local(skb, f, what);
	place = next_member(table, bucket, next_in_chain(table, bucket, way), way, OF_NEW);
	if (place.number)
		return forward(skb, f, self_be, &place, way, CANAL_REDIRECTOR_NOT_LISTENING);
	return deliver_local(skb, f, CANAL_REDIRECTOR_UNOWNED);
}

/* Handles packets that belong to a session. */
static __always_inline int continue_session(struct __sk_buff *skb, struct frame *f, __be32 self_be, const struct canal_table *table, __u32 bucket,
				 struct route *way)
{
	int is_error = f->kind == FRAME_ERROR;
	int owner = owner_here(skb, f);
	struct chain_position place;

	if (owner == SOCKET)
		return deliver_local(skb, f, is_error ? CANAL_REDIRECTOR_ICMP : CANAL_REDIRECTOR_OWNED);
	if (owner == COOKIE)
		return deliver_local(skb, f, CANAL_REDIRECTOR_COOKIE);
	place = next_owner(table, bucket, way);
	if (place.number)
		return forward(skb, f, self_be, &place, way, CANAL_REDIRECTOR_FORWARDED);
	if (is_error)
		return deliver_local(skb, f, CANAL_REDIRECTOR_ICMP);
	/* Between two table versions the owner may have been missed. TCP retransmits once there is one version. */
	return way->stamp & CANAL_STAMP_MIXED_VERSIONS ? drop(CANAL_REDIRECTOR_OWNERSHIP_UNSETTLED) : deliver_local(skb, f, CANAL_REDIRECTOR_UNOWNED);
}

/* Handles packets to a service, from an edge or from the previous replica of the chain (`sender` is its number). The number is read each
 * time: otherwise the verifier walks everything below once for edges and once for replicas, which doubles its cost. */
static __always_inline int to_service(struct __sk_buff *skb, struct frame *f, const struct canal_redirector_settings *self,
				      const volatile __u32 *sender)
{
	int is_error = f->kind == FRAME_ERROR;
	int is_syn = f->kind == FRAME_TCP && (f->flags & (FRAME_SYN | FRAME_ACK)) == FRAME_SYN;
	__u32 service = service_of(&f->flow.destination);
	struct canal_table *table;
	/* No socket shows whether a datagram continues a session, and one tenant could fill a table of flows: each datagram is a
	 * session. */
	int is_session = is_syn || f->kind == FRAME_DATAGRAM;
	__u32 refused, hash;
	struct route way;

	table = service ? bpf_map_lookup_elem(&canal_tables, &service) : 0;
	if (!table)
		return drop(CANAL_REDIRECTOR_DROP_SERVICE);
	if (is_error && !same_words(&f->about.source, &f->flow.destination))
		return drop(CANAL_REDIRECTOR_DROP_MALFORMED);
	/* A replica that forwarded the packet has charged it. The hop count does not show this: an edge raises it too, where a head is
	 * down. */
	refused = *sender ? 0 : throttled(service, table->vni, is_session);
	if (refused)
		return drop(refused);
	/* An error is about a packet in the opposite direction. */
	if (is_error)
		hash = flow_hash(&f->about.destination, f->about.destination_port_be, f->about.source_port_be, service);
	else
		hash = flow_hash(&f->flow.source, f->flow.source_port_be, f->flow.destination_port_be, service);
	hash = flow_bucket(hash);
	way = way_of(f, table, self->number, *sender);
	if (is_syn)
		return start_session(skb, f, self->address_be, table, hash, &way, CANAL_REDIRECTOR_NEW);
	if (f->kind == FRAME_DATAGRAM)
		return start_session(skb, f, self->address_be, table, hash, &way, CANAL_REDIRECTOR_DATAGRAM);
	if (f->kind == FRAME_ECHO)
		return start_session(skb, f, self->address_be, table, hash, &way, CANAL_REDIRECTOR_ICMP);
	/* Errors about datagrams too: no socket owns them, so they run along the chain and end where the kernel drops them. */
	return continue_session(skb, f, self->address_be, table, hash, &way);
}

enum dialled {
	DIALLED_NOBODY,
	DIALLED_HERE,
	DIALLED_CROSSED,
};

/* Returns whether this host dialed the connection of a response, for this tenant. Tenants' addresses may overlap; the gateway dials with
 * the tenant's VNI as the socket's mark. */
static __noinline int dialled_here(struct __sk_buff *skb, const struct frame *f)
{
	struct bpf_sock_tuple tuple;
	struct bpf_sock *sk, *full;
	int dialled = DIALLED_HERE;
	__u32 length;

	length = session_tuple(&tuple, f);
	sk = bpf_skc_lookup_tcp(skb, &tuple, length, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return DIALLED_NOBODY;
	full = bpf_sk_fullsock(sk);
	if (full && (full->state == BPF_TCP_LISTEN || full->mark != f->vni))
		dialled = DIALLED_CROSSED;
	bpf_sk_release(sk);
	return dialled;
}

/* Handles packets from an endpoint that the gateway dialed, through the edge. */
static __always_inline int answer(struct __sk_buff *skb, struct frame *f, const struct canal_redirector_settings *self)
{
	int is_error = f->kind == FRAME_ERROR;

	if (!is_error && f->kind != FRAME_TCP)
		return drop(CANAL_REDIRECTOR_DROP_PROTOCOL);
	if (is_error && f->about_protocol != IPPROTO_TCP)
		return drop(CANAL_REDIRECTOR_DROP_PROTOCOL);
	if (tier_host_of(&f->flow.destination) != self->address_be || (is_error && !same_words(&f->about.source, &f->flow.destination)))
		return drop(CANAL_REDIRECTOR_DROP_CROSSED);
	switch (dialled_here(skb, f)) {
	case DIALLED_CROSSED:
		return drop(CANAL_REDIRECTOR_DROP_CROSSED);
	case DIALLED_NOBODY:
		/* Endpoints do not dial replicas. The end of a connection that is gone here gets the kernel's RST. */
		if (is_error || f->flags & FRAME_SYN)
			return drop(CANAL_REDIRECTOR_DROP_CROSSED);
	}
	/* The kernel's own responses use the same VNI (net.ipv4.fwmark_reflect). */
	skb->mark = f->vni;
	return deliver_local(skb, f, CANAL_REDIRECTOR_ANSWER);
}

/* Handles a datagram that a router cut on the path, because a link is narrower than the edge is configured for. The inner packet's
 * sender gets an ICMP error through the edge, and sends smaller packets. Only the first fragment shows the sender; none is forwarded. */
static __always_inline int handle_fragment(struct __sk_buff *skb, struct frame *f, const struct canal_redirector_settings *self, int is_edge)
{
	struct leg leg = { .source_be = self->address_be, .mac_source = CANAL_REPLICA_MAC };
	const struct words *to = &f->flow.destination;
	const __u8 edge_mac[6] = CANAL_EDGE_MAC;

	if (!f->dont_fragment || (f->vni == CANAL_TIER_VNI ? !service_of(to) : !is_edge || tier_host_of(to) != self->address_be))
		return drop(CANAL_REDIRECTOR_DROP_FRAGMENT);
	if (write_too_big(skb, f, &leg, f->whole))
		return drop(CANAL_REDIRECTOR_TOO_BIG);
	/* Another replica may have forwarded the packet, but only edges can reach pods. */
	leg.destination_be = self->edge_be;
	__builtin_memcpy(leg.mac, edge_mac, 6);
	if (frame_turn(skb, f, &leg))
		return drop(CANAL_REDIRECTOR_DROP_MALFORMED);
	count(CANAL_REDIRECTOR_TOO_BIG);
	return bpf_redirect(skb->ifindex, 0);
}

/* Handles IPv4 packets that are no datagram for the VXLAN device. Addresses inside the tier are
 * this host's own. Without this check, a packet for them outside a tunnel would be accepted like
 * one from a tunnel. */
static __always_inline int foreign4(struct __sk_buff *skb)
{
	__be32 destination_be;

	if (bpf_skb_load_bytes(skb, FRAME_IP + 16, &destination_be, sizeof(destination_be)))
		return drop(CANAL_REDIRECTOR_DROP_MALFORMED);
	if ((destination_be & bpf_htonl(0xff000000)) == bpf_htonl(CANAL_SERVICE_NET4))
		return drop(CANAL_REDIRECTOR_DROP_UNKNOWN_SOURCE);
	count(CANAL_REDIRECTOR_PASSED);
	return TC_ACT_OK;
}

/* Extension headers that are parsed, at most. A packet with more is dropped, because its payload could be a datagram for the VXLAN
 * device. */
#define EXTENSIONS 4

/* Handles IPv6 packets. The VXLAN device listens on IPv6 too, where the tier has no tunnels. */
static __always_inline int foreign6(struct __sk_buff *skb)
{
	__u32 at = FRAME_IP + sizeof(struct ipv6hdr);
	struct words destination;
	__be16 port_be;
	__u8 next, extension[2];

	if (bpf_skb_load_bytes(skb, FRAME_IP + 24, &destination, sizeof(destination)) || bpf_skb_load_bytes(skb, FRAME_IP + 6, &next, 1))
		return drop(CANAL_REDIRECTOR_DROP_MALFORMED);
	if (has_high6(&destination, CANAL_SERVICE_NET6) || has_high6(&destination, CANAL_TIER_NET6))
		return drop(CANAL_REDIRECTOR_DROP_UNKNOWN_SOURCE);
	for (int i = 0; i <= EXTENSIONS; i++) {
		if (next == IPPROTO_UDP) {
			if (bpf_skb_load_bytes(skb, at + 2, &port_be, sizeof(port_be)))
				return drop(CANAL_REDIRECTOR_DROP_MALFORMED);
			if (port_be == bpf_htons(CANAL_VXLAN_PORT))
				return drop(CANAL_REDIRECTOR_DROP_UNKNOWN_SOURCE);
			break;
		}
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS && next != IPPROTO_FRAGMENT)
			break;
		if (i == EXTENSIONS || bpf_skb_load_bytes(skb, at, extension, sizeof(extension)))
			return drop(CANAL_REDIRECTOR_DROP_MALFORMED);
		/* The UDP header of a fragment may be in another fragment. */
		if (next == IPPROTO_FRAGMENT && extension[0] != IPPROTO_TCP && extension[0] != IPPROTO_ICMPV6)
			return drop(CANAL_REDIRECTOR_DROP_FRAGMENT);
		at += next == IPPROTO_FRAGMENT ? 8 : (extension[1] + 1) * 8;
		next = extension[0];
	}
	count(CANAL_REDIRECTOR_PASSED);
	return TC_ACT_OK;
}

static __always_inline int refuse(struct __sk_buff *skb, int verdict)
{
	switch (verdict) {
	case FRAME_FOREIGN:
		if (skb->protocol == bpf_htons(ETH_P_IP))
			return foreign4(skb);
		if (skb->protocol == bpf_htons(ETH_P_IPV6))
			return foreign6(skb);
		count(CANAL_REDIRECTOR_PASSED);
		return TC_ACT_OK;
	case FRAME_FRAGMENT:
		return drop(CANAL_REDIRECTOR_DROP_FRAGMENT);
	case FRAME_PROTOCOL:
		return drop(CANAL_REDIRECTOR_DROP_PROTOCOL);
	default:
		return drop(CANAL_REDIRECTOR_DROP_MALFORMED);
	}
}

SEC("tc")
int canal_redirector(struct __sk_buff *skb)
{
	struct frame f;
	int verdict = frame_parse(skb, &f);
	__u32 zero = 0;
	const struct canal_redirector_settings *self = bpf_map_lookup_elem(&canal_self, &zero);
	__u32 *host;

	if (verdict && verdict != FRAME_TORN)
		return refuse(skb, verdict);
	host = bpf_map_lookup_elem(&canal_hosts, &f.outer_source_be);
	if (!self || !host || f.outer_destination_be != self->address_be)
		return drop(CANAL_REDIRECTOR_DROP_UNKNOWN_SOURCE);
	if (verdict)
		return handle_fragment(skb, &f, self, !*host);
	if (f.vni == CANAL_TIER_VNI)
		return to_service(skb, &f, self, host);
	/* Responses come from edges, whose number is 0: they know which node may send for which pod. */
	return *host ? drop(CANAL_REDIRECTOR_DROP_UNKNOWN_SOURCE) : answer(skb, &f, self);
}

/* The kernel requires a license for the use of its helpers. */
char _license[] SEC("license") = "Dual BSD/GPL";
