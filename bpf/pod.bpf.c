// SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause
/* Pod guard: packets that the mesh does not carry neither leave nor enter a pod. It stops UDP, SCTP, ICMP, raw IP and frames of packet
 * sockets, or counts them where the tenant permits them. It leaves the TCP of TCP sockets to capture.bpf.c and inbound.bpf.c.
 *
 * canal_pod_egress, canal_pod_ingress   on the pod's cgroup: every IP packet of its sockets, whenever they were opened; a sender gets EPERM
 * canal_pod_out, canal_pod_in           on the node's end of the pod's interface, which the pod cannot reach: every frame, whatever sent it
 *
 * The proxy's sockets are TCP sockets of another cgroup: only the second pair sees them. There is one object per pod. Start reading at
 * judge().
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi/pod.h"
#define CANAL_COUNTS CANAL_POD_VERDICTS
#define CANAL_COUNTS_MAP canal_pod_counts
#include "lib/address.h"
#include "lib/count.h"

/* Not in the UAPI headers that a BPF program can include. */
#define AF_INET 2
#define AF_INET6 10
#define SOCK_STREAM 1
#define LOOPBACK 1
#define TCP_FIN_SYN 0x03
#define FRAGMENT_OFFSET 0x1fff
#define FRAGMENT_ANY 0x3fff /* an offset, or more to come */
#define IPPROTO_HOPOPTS 0
#define IPPROTO_ROUTING 43
#define IPPROTO_FRAGMENT 44
#define IPPROTO_ICMPV6 58
#define IPPROTO_DSTOPTS 60
/* Extension headers between IPv6's header and the payload that are parsed, at most. RFC 8200 4.1 recommends an order with five of
 * the kinds that are parsed here (destination options may occur twice). A packet with more than six is stopped as malformed. */
#define EXTENSIONS_MAX 6

/* Return values of a cgroup program. */
#define DROP 0
#define GO_ON 1

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} canal_pod_mode SEC(".maps");

struct address {
	__u8 bytes[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_POD_RESOLVERS_MAX);
	__type(key, struct address);
	__type(value, __u32);
} canal_pod_resolvers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_POD_UDP_PORTS_MAX);
	__type(key, __u32);
	__type(value, __u32);
} canal_pod_udp_ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_POD_TIER_MAX);
	__type(key, struct canal_pod_range);
	__type(value, __u32);
} canal_pod_tier SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct canal_pod_packet);
} canal_pod_last SEC(".maps");

/* Direction of a packet, and offset of its network header. They are constant in each program, so that the compiler removes the branches
 * on them. */
struct place {
	__u32 network; /* offset in the packet */
	__u32 is_out;
};

/* A packet as far as it was parsed. */
struct packet {
	struct words remote;
	__u32 payload;	/* offset of the transport header */
	__u32 end;	/* where the IP packet ends, as its header states */
	__u16 remote_port_be;
	__u8 protocol;
	__u8 hops;
	__u8 is_v6;
	__u8 is_fragment;
	__u8 is_late_fragment; /* it has no transport header */
	__u8 is_multicast;     /* to IPv6's link-local groups */
};

struct v4 {
	__u8 version_length;
	__u8 tos;
	__be16 length;
	__be16 id;
	__be16 fragment;
	__u8 hops;
	__u8 protocol;
	__be16 check;
	__be32 from;
	__be32 to;
};

struct v6 {
	__be32 flow;
	__be16 length;
	__u8 next;
	__u8 hops;
	struct words from;
	struct words to;
};

struct extension {
	__u8 next;
	__u8 length;
	__be16 fragment;
};

/* Returns whether the packet is of a kernel TCP socket: capture has seen its connect(), or inbound has admitted it. */
static __always_inline int is_of_tcp_socket(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	struct bpf_sock *full;

	if (!sk)
		return 0;
	/* A SYN-ACK has a request, a late ACK a socket in TIME_WAIT: only TCP has either, and neither has more fields to check. */
	if ((sk->family == AF_INET || sk->family == AF_INET6) && (sk->state == BPF_TCP_NEW_SYN_RECV || sk->state == BPF_TCP_TIME_WAIT))
		return 1;
	full = bpf_sk_fullsock(sk);
	return full && (full->family == AF_INET || full->family == AF_INET6) && full->type == SOCK_STREAM && full->protocol == IPPROTO_TCP;
}

/* Returns whether a packet socket sent the frame. The kernel's own frames are of sockets of its protocols, or of none. */
static __always_inline int is_of_packet_socket(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;

	return sk && sk->family != AF_INET && sk->family != AF_INET6;
}

static __always_inline int is_resolver(const struct words *remote)
{
	return bpf_map_lookup_elem(&canal_pod_resolvers, remote) != 0;
}

/* Returns whether a UDPRoute names the pod's port and the other end is the tier. */
static __always_inline int is_udp_route(const struct words *remote, __be16 own_port)
{
	struct canal_pod_range at = { .prefixlen = 128 };
	__u32 port = bpf_ntohs(own_port);

	if (!bpf_map_lookup_elem(&canal_pod_udp_ports, &port))
		return 0;
	put_words(at.ip, remote);
	return bpf_map_lookup_elem(&canal_pod_tier, &at) != 0;
}

/* Returns 0, or the verdict that ends the parsing. */
static __always_inline __u32 read_v4(struct __sk_buff *skb, const struct place *at, struct packet *p)
{
	struct v4 h;

	if (bpf_skb_load_bytes(skb, at->network, &h, sizeof(h)))
		return CANAL_POD_STOPPED_MALFORMED;
	if (h.version_length >> 4 != 4 || (h.version_length & 15) < 5)
		return CANAL_POD_STOPPED_MALFORMED;
	p->remote = words_v4(at->is_out ? h.to : h.from);
	p->payload = at->network + (h.version_length & 15) * 4;
	p->end = at->network + bpf_ntohs(h.length);
	p->protocol = h.protocol;
	p->hops = h.hops;
	p->is_fragment = (h.fragment & bpf_htons(FRAGMENT_ANY)) != 0;
	p->is_late_fragment = (h.fragment & bpf_htons(FRAGMENT_OFFSET)) != 0;
	return 0;
}

static __always_inline int is_extension(__u8 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_ROUTING || protocol == IPPROTO_FRAGMENT || protocol == IPPROTO_DSTOPTS;
}

static __always_inline __u32 read_v6(struct __sk_buff *skb, const struct place *at, struct packet *p)
{
	struct v6 h;
	struct extension e;

	if (bpf_skb_load_bytes(skb, at->network, &h, sizeof(h)))
		return CANAL_POD_STOPPED_MALFORMED;
	if ((bpf_ntohl(h.flow) >> 28) != 6)
		return CANAL_POD_STOPPED_MALFORMED;
	p->remote = at->is_out ? h.to : h.from;
	p->payload = at->network + sizeof(h);
	p->end = p->payload + bpf_ntohs(h.length);
	p->protocol = h.next;
	p->hops = h.hops;
	p->is_v6 = 1;
	p->is_multicast = (h.to.w[0] & bpf_htonl(0xffff0000)) == bpf_htonl(0xff020000);
	for (int i = 0; i < EXTENSIONS_MAX; i++) {
		if (!is_extension(p->protocol))
			return 0;
		if (bpf_skb_load_bytes(skb, p->payload, &e, sizeof(e)))
			return CANAL_POD_STOPPED_MALFORMED;
		if (p->protocol == IPPROTO_FRAGMENT) {
			p->payload += 8;
			p->is_late_fragment = (e.fragment & bpf_htons(0xfff8)) != 0;
			p->is_fragment |= (e.fragment & bpf_htons(0xfff9)) != 0;
		} else {
			p->payload += (e.length + 1) * 8;
		}
		p->protocol = e.next;
		if (p->is_late_fragment)
			return 0;
	}
	return is_extension(p->protocol) ? CANAL_POD_STOPPED_MALFORMED : 0;
}

static __always_inline __u32 judge_udp(struct __sk_buff *skb, const struct place *at, struct packet *p)
{
	__be16 ports[2];

	if (p->is_late_fragment)
		/* A long DNS response comes in fragments. Later ones have no port, so only the address is checked. */
		return is_resolver(&p->remote) ? CANAL_POD_PASSED_RESOLVER : CANAL_POD_STOPPED_UDP;
	if (bpf_skb_load_bytes(skb, p->payload, ports, sizeof(ports)))
		return CANAL_POD_STOPPED_MALFORMED;
	p->remote_port_be = at->is_out ? ports[1] : ports[0];
	if (p->remote_port_be == bpf_htons(CANAL_POD_DNS_PORT) && is_resolver(&p->remote))
		return CANAL_POD_PASSED_RESOLVER;
	/* Only the first fragment of a datagram contains the port, so no fragment passes. The tier does not carry fragments either. */
	if (!p->is_fragment && is_udp_route(&p->remote, at->is_out ? ports[0] : ports[1]))
		return CANAL_POD_PASSED_UDP_ROUTE;
	return CANAL_POD_STOPPED_UDP;
}

/* The kernel answers segments that match no connection with RST or ACK, from no socket or from one of its own. Such an answer has no
 * payload and opens no connection. */
static __always_inline __u32 judge_tcp(struct __sk_buff *skb, const struct place *at, struct packet *p, int is_frame)
{
	__be16 ports[2];
	__u8 shape[2];

	if (!at->is_out || is_of_tcp_socket(skb))
		return CANAL_POD_PASSED_TCP;
	if (p->is_late_fragment || bpf_skb_load_bytes(skb, p->payload, ports, sizeof(ports)))
		return CANAL_POD_STOPPED_TCP;
	p->remote_port_be = ports[1];
	/* A socket of the pod's cgroup that is no TCP socket is a raw socket. */
	if (!is_frame || bpf_skb_load_bytes(skb, p->payload + 12, shape, sizeof(shape)))
		return CANAL_POD_STOPPED_TCP;
	if ((shape[1] & TCP_FIN_SYN) == 0 && p->payload + (shape[0] >> 4) * 4 == p->end && skb->len == p->end)
		return CANAL_POD_PASSED_RESET;
	return CANAL_POD_STOPPED_TCP;
}

/* Checks whether an ICMP error quotes a packet that the mesh or DNS sent from here: TCP to any host, DNS to a resolver, or UDP from a
 * UDPRoute's port to the tier. */
static __always_inline __u32 judge_error(struct __sk_buff *skb, struct packet *p)
{
	__u32 quoted = p->payload + 8;
	struct words to;
	__be16 ports[2];
	__u8 protocol;

	if (p->is_v6) {
		struct v6 h;

		if (bpf_skb_load_bytes(skb, quoted, &h, sizeof(h)))
			return CANAL_POD_STOPPED_MALFORMED;
		to = h.to;
		protocol = h.next;
		quoted += sizeof(h);
	} else {
		struct v4 h;

		if (bpf_skb_load_bytes(skb, quoted, &h, sizeof(h)))
			return CANAL_POD_STOPPED_MALFORMED;
		to = words_v4(h.to);
		protocol = h.protocol;
		quoted += (h.version_length & 15) * 4;
	}
	if (protocol == IPPROTO_TCP)
		return CANAL_POD_PASSED_ERROR;
	if (protocol != IPPROTO_UDP || bpf_skb_load_bytes(skb, quoted, ports, sizeof(ports)))
		return CANAL_POD_STOPPED_ICMP;
	if (ports[1] == bpf_htons(CANAL_POD_DNS_PORT) && is_resolver(&to))
		return CANAL_POD_PASSED_ERROR;
	return is_udp_route(&to, ports[0]) ? CANAL_POD_PASSED_ERROR : CANAL_POD_STOPPED_ICMP;
}

/* Types of RFC 792: unreachable (fragmentation needed among them), time exceeded, parameter problem. */
static __always_inline __u32 judge_icmp4(struct __sk_buff *skb, const struct place *at, struct packet *p)
{
	__u8 kind;

	if (at->is_out || p->is_late_fragment || bpf_skb_load_bytes(skb, p->payload, &kind, 1))
		return CANAL_POD_STOPPED_ICMP;
	return kind == 3 || kind == 11 || kind == 12 ? judge_error(skb, p) : CANAL_POD_STOPPED_ICMP;
}

/* Types of RFC 4443 (errors 1 to 4), RFC 4861 (133 to 137), and RFC 2710 and 3810 (130 to 132, 143). Neighbor discovery is accepted only
 * from the link itself, with 255 hops. Listener reports do not leave the link, with 1 hop. */
static __always_inline __u32 judge_icmp6(struct __sk_buff *skb, const struct place *at, struct packet *p)
{
	__u32 length = p->end - at->network;
	__u8 kind;

	if (p->is_late_fragment || bpf_skb_load_bytes(skb, p->payload, &kind, 1))
		return CANAL_POD_STOPPED_ICMP;
	if (kind >= 1 && kind <= 4)
		return at->is_out ? CANAL_POD_STOPPED_ICMP : judge_error(skb, p);
	if (kind >= 133 && kind <= 137) {
		if (p->hops != 255)
			return CANAL_POD_STOPPED_ICMP;
		if (!at->is_out)
			return CANAL_POD_PASSED_NEIGHBOUR;
		/* The pod may not claim to be a router either. */
		if (kind == 134 || kind == 137)
			return CANAL_POD_STOPPED_ICMP;
		/* Bytes behind the packet's stated end could carry data out of the pod. */
		return length <= CANAL_POD_NEIGHBOUR_MAX && skb->len == p->end ? CANAL_POD_PASSED_NEIGHBOUR : CANAL_POD_STOPPED_FRAME;
	}
	if ((kind >= 130 && kind <= 132) || kind == 143) {
		if (p->hops != 1 || (at->is_out && !p->is_multicast))
			return CANAL_POD_STOPPED_ICMP;
		if (!at->is_out)
			return CANAL_POD_PASSED_NEIGHBOUR;
		return length <= CANAL_POD_LISTENER_MAX && skb->len == p->end ? CANAL_POD_PASSED_NEIGHBOUR : CANAL_POD_STOPPED_FRAME;
	}
	return CANAL_POD_STOPPED_ICMP;
}

static __always_inline __u32 judge(struct __sk_buff *skb, const struct place *at, __u32 protocol, struct packet *p, int is_frame)
{
	__u32 unread = protocol == bpf_htons(ETH_P_IP) ? read_v4(skb, at, p) : read_v6(skb, at, p);

	if (unread)
		return unread;
	switch (p->protocol) {
	case IPPROTO_TCP:
		return judge_tcp(skb, at, p, is_frame);
	case IPPROTO_UDP:
		return judge_udp(skb, at, p);
	case IPPROTO_ICMP:
		return p->is_v6 ? CANAL_POD_STOPPED_PROTOCOL : judge_icmp4(skb, at, p);
	case IPPROTO_ICMPV6:
		return p->is_v6 ? judge_icmp6(skb, at, p) : CANAL_POD_STOPPED_PROTOCOL;
	case IPPROTO_SCTP:
		return CANAL_POD_STOPPED_SCTP;
	default:
		return CANAL_POD_STOPPED_PROTOCOL;
	}
}

static __always_inline int is_watched(void)
{
	__u32 zero = 0;
	__u32 *mode = bpf_map_lookup_elem(&canal_pod_mode, &zero);

	return mode && *mode == CANAL_POD_WATCH;
}

/* Counts a packet, and records it if it is stopped. Returns whether it may pass. */
static __always_inline int settle(__u32 verdict, const struct place *at, const struct packet *p, int is_frame)
{
	struct canal_pod_packet *last;
	__u32 zero = 0;

	if (verdict < CANAL_POD_STOPPED_UDP) {
		count(verdict);
		return GO_ON;
	}
	if (is_watched()) {
		count(is_frame ? verdict + (CANAL_POD_CLEAR_UDP - CANAL_POD_STOPPED_UDP) : CANAL_POD_LEFT_WATCHED);
		return GO_ON;
	}
	last = bpf_map_lookup_elem(&canal_pod_last, &zero);
	if (last) {
		put_words(last->remote_ip, &p->remote);
		last->remote_port_be = p->remote_port_be;
		last->protocol = p->protocol;
		last->is_outgoing = at->is_out;
		last->verdict = verdict;
	}
	count(verdict);
	return DROP;
}

static __always_inline int of_socket(struct __sk_buff *skb, __u32 is_out)
{
	const struct place at = { 0, is_out };
	struct packet p = {};

	if (skb->ifindex == LOOPBACK) {
		count(CANAL_POD_PASSED_LOOPBACK);
		return GO_ON;
	}
	return settle(judge(skb, &at, skb->protocol, &p, 0), &at, &p, 0);
}

static __always_inline int of_interface(struct __sk_buff *skb, __u32 is_out)
{
	const struct place at = { ETH_HLEN, is_out };
	__u32 verdict = CANAL_POD_STOPPED_FRAME;
	struct packet p = {};
	__be16 protocol;

	if (is_out && is_of_packet_socket(skb))
		verdict = CANAL_POD_STOPPED_PACKET_SOCKET;
	else if (bpf_skb_load_bytes(skb, ETH_HLEN - 2, &protocol, 2) || skb->vlan_present)
		verdict = CANAL_POD_STOPPED_FRAME;
	else if (protocol == bpf_htons(ETH_P_IP) || protocol == bpf_htons(ETH_P_IPV6))
		verdict = judge(skb, &at, protocol, &p, 1);
	else if (protocol == bpf_htons(ETH_P_ARP) && (!is_out || skb->len <= ETH_HLEN + CANAL_POD_ARP_MAX))
		verdict = CANAL_POD_PASSED_NEIGHBOUR;
	return settle(verdict, &at, &p, 1) == GO_ON ? TC_ACT_UNSPEC : TC_ACT_SHOT;
}

SEC("cgroup_skb/egress")
int canal_pod_egress(struct __sk_buff *skb)
{
	return of_socket(skb, 1);
}

SEC("cgroup_skb/ingress")
int canal_pod_ingress(struct __sk_buff *skb)
{
	return of_socket(skb, 0);
}

SEC("tc")
int canal_pod_out(struct __sk_buff *skb)
{
	return of_interface(skb, 1);
}

SEC("tc")
int canal_pod_in(struct __sk_buff *skb)
{
	return of_interface(skb, 0);
}

/* The kernel requires a license for the use of its helpers. */
char _license[] SEC("license") = "Dual BSD/GPL";
