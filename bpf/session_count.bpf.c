// SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause
/* Session count: the underlay's session table of one link, as a virtual switch maintains it. It counts the sessions by their outer
 * headers, and those inside of the tunnels (Canal 4.4). It passes everything. Both directions of a session are one entry. If a table is
 * full, this is counted, and the sessions that do not fit are not. */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi/tier.h"
#define CANAL_COUNTS CANAL_SESSIONS_COUNTS
#define CANAL_COUNTS_MAP canal_sessions_counts
#include "lib/count.h"
#include "lib/frame.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_SESSIONS_MAX);
	__type(key, struct canal_session_key);
	__type(value, struct canal_session);
} canal_sessions_outer SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_SESSIONS_MAX);
	__type(key, struct canal_session_key);
	__type(value, struct canal_session);
} canal_sessions_inner SEC(".maps");

/* Returns whether the destination's end is the lower one, which comes first in the key: both directions have one key. */
static __always_inline int is_reverse(const struct tuple *t)
{
#pragma unroll
	for (int i = 0; i < 4; i++)
		if (t->source.w[i] != t->destination.w[i])
			return bpf_ntohl(t->source.w[i]) > bpf_ntohl(t->destination.w[i]);
	return bpf_ntohs(t->source_port_be) > bpf_ntohs(t->destination_port_be);
}

static __always_inline void count_session(void *table, const struct tuple *t, __u8 protocol, __u32 vni, __u32 first, __u32 full)
{
	struct canal_session_key key = { .protocol = protocol, .vni = vni };
	struct canal_session new = {}, *known;
	int reverse = is_reverse(t);

	put_words(key.source, reverse ? &t->destination : &t->source);
	put_words(key.destination, reverse ? &t->source : &t->destination);
	key.source_port_be = reverse ? t->destination_port_be : t->source_port_be;
	key.destination_port_be = reverse ? t->source_port_be : t->destination_port_be;
	known = bpf_map_lookup_elem(table, &key);
	if (known) {
		known->last_ns = bpf_ktime_get_ns();
		__sync_fetch_and_add(&known->packets, 1);
		return;
	}
	new.first_ns = new.last_ns = bpf_ktime_get_ns();
	new.packets = 1;
	switch (bpf_map_update_elem(table, &key, &new, BPF_NOEXIST)) {
	case 0:
		count(first);
		break;
	case -17: /* EEXIST: another CPU saw its first packet too */
		break;
	default:
		count(full);
	}
}

/* Reads the tuple of a packet outside of a tunnel. Returns -1 if it has none. */
static __always_inline int read_plain(struct __sk_buff *skb, struct tuple *t, __u8 *protocol)
{
	__u32 at = FRAME_IP;
	__be32 v4[2];
	__be16 ports[2];
	__u8 head;

	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (bpf_skb_load_bytes(skb, at + 6, protocol, 1) || bpf_skb_load_bytes(skb, at + 8, t, 32))
			return -1;
		at += sizeof(struct ipv6hdr);
	} else if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes(skb, at, &head, 1) || bpf_skb_load_bytes(skb, at + 9, protocol, 1) ||
		    bpf_skb_load_bytes(skb, at + 12, v4, sizeof(v4)))
			return -1;
		t->source = words_v4(v4[0]);
		t->destination = words_v4(v4[1]);
		at += (head & 0xf) * 4;
	} else {
		return -1;
	}
	if ((*protocol != IPPROTO_TCP && *protocol != IPPROTO_UDP) || bpf_skb_load_bytes(skb, at, ports, sizeof(ports)))
		return -1;
	t->source_port_be = ports[0];
	t->destination_port_be = ports[1];
	return 0;
}

SEC("tc")
int canal_sessions(struct __sk_buff *skb)
{
	struct frame f;
	struct tuple outer = {};
	__u8 protocol = IPPROTO_UDP;
	int verdict = frame_parse(skb, &f);

	count(CANAL_SESSIONS_PACKETS);
	if (verdict == FRAME_OK) {
		outer.source = words_v4(f.outer_source_be);
		outer.destination = words_v4(f.outer_destination_be);
		outer.source_port_be = f.outer_source_port_be;
		outer.destination_port_be = bpf_htons(CANAL_VXLAN_PORT);
		count_session(&canal_sessions_outer, &outer, protocol, 0, CANAL_SESSIONS_OUTER, CANAL_SESSIONS_OUTER_FULL);
		/* An error is not a session of its own. */
		if (f.kind != FRAME_ERROR)
			count_session(&canal_sessions_inner, &f.flow, f.protocol, f.vni, CANAL_SESSIONS_INNER, CANAL_SESSIONS_INNER_FULL);
	} else if (verdict == FRAME_FOREIGN && !read_plain(skb, &outer, &protocol)) {
		count_session(&canal_sessions_outer, &outer, protocol, 0, CANAL_SESSIONS_OUTER, CANAL_SESSIONS_OUTER_FULL);
	} else {
		count(CANAL_SESSIONS_OTHER);
	}
	return TC_ACT_UNSPEC;
}

/* The kernel requires a license for the use of its helpers. */
char _license[] SEC("license") = "Dual BSD/GPL";
