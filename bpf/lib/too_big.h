/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* Turns a packet that is too big for the path ahead into the ICMP error to its sender. The programs decide whether a packet is too big,
 * and where the error goes. It defines one map, for composing. */
#ifndef CANAL_LIB_TOO_BIG_H
#define CANAL_LIB_TOO_BIG_H

#include "lib/flow.h"

/* Bytes of the packet that the error quotes: an IPv4 header with all options and 8 bytes (RFC 792); an IPv6 header and the whole
 * header of TCP. 60 + 8 bytes for IPv4; 40 + 20, and 8 of the options of TCP, for IPv6. */
#define SHOWN 68

/* MTU that every IPv6 link supports (RFC 8200 5). */
#define TOO_BIG_LEAST6 1280

static __always_inline __u64 sum_of(void *bytes, __u32 length)
{
	return (__u32)bpf_csum_diff(0, 0, bytes, length, 0);
}

struct too_big_icmp {
	__u8 type, code;
	__be16 sum;
	__be32 mtu_be;
	__u8 shown[SHOWN];
};
struct too_big4 {
	struct iphdr ip;
	struct too_big_icmp icmp;
};
struct too_big6 {
	struct ipv6hdr ip;
	struct too_big_icmp icmp;
};
struct too_big {
	__u16 head[FRAME_INNER_IP / 2];
	union {
		struct too_big4 v4;
		struct too_big6 v6;
	};
};

/* Memory for composing an error, which does not fit into the stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct too_big);
} canal_too_big SEC(".maps");

static __always_inline void fill_too_big4(struct too_big4 *a, const struct frame *f, __u32 mtu)
{
	__builtin_memset(&a->ip, 0, sizeof(a->ip));
	a->ip.version = 4;
	a->ip.ihl = 5;
	a->ip.tot_len = bpf_htons(sizeof(*a));
	a->ip.frag_off = bpf_htons(0x4000);
	a->ip.ttl = 64;
	a->ip.protocol = IPPROTO_ICMP;
	a->ip.saddr = f->flow.destination.w[3];
	a->ip.daddr = f->flow.source.w[3];
	a->ip.check = ~sum_fold(sum_of(&a->ip, sizeof(a->ip)));
	a->icmp.type = 3;
	a->icmp.code = 4;
	a->icmp.sum = 0;
	a->icmp.mtu_be = bpf_htonl(mtu);
	a->icmp.sum = ~sum_fold(sum_of(&a->icmp, sizeof(a->icmp)));
}

static __always_inline void fill_too_big6(struct too_big6 *a, const struct frame *f, __u32 mtu)
{
	__builtin_memset(&a->ip, 0, sizeof(a->ip));
	a->ip.version = 6;
	a->ip.payload_len = bpf_htons(sizeof(a->icmp));
	a->ip.nexthdr = IPPROTO_ICMPV6;
	a->ip.hop_limit = 64;
	__builtin_memcpy(&a->ip.saddr, &f->flow.destination, 16);
	__builtin_memcpy(&a->ip.daddr, &f->flow.source, 16);
	a->icmp.type = 2;
	a->icmp.code = 0;
	a->icmp.sum = 0;
	a->icmp.mtu_be = bpf_htonl(mtu);
	/* The pseudo header has both addresses, the length and the protocol. */
	a->icmp.sum = ~sum_fold(sum_of(&a->ip.saddr, 32) + a->ip.payload_len + bpf_htons(IPPROTO_ICMPV6) +
				sum_of(&a->icmp, sizeof(a->icmp)));
}

/* Shortens the frame to `length` bytes by removing bytes behind its Ethernet header; everything is rewritten afterwards. Removal at the
 * front also removes a pending checksum's header, so that the kernel drops the checksum with the next write (skb_postpull_rcsum). */
static __always_inline int shorten(struct __sk_buff *skb, __u32 length)
{
	for (int i = 0; i < 20 && skb->len > length; i++) {
		__u32 excess = skb->len - length;

		/* One call removes at most 0xfff bytes. */
		if (bpf_skb_adjust_room(skb, -(__s32)(excess > 0xf00 ? 0xf00 : excess), BPF_ADJ_ROOM_MAC, 0))
			return -1;
	}
	return skb->len != length;
}

/* Writes the error to the packet's sender, from the address that it dialed, with the size that passes (RFC 1191, RFC 8201). `leg` leads
 * back to the packet's origin. Returns 0, or a negative value if there is no error to send. */
static __noinline int write_too_big(struct __sk_buff *skb, struct frame *f, struct leg *leg, __u32 mtu)
{
	__u32 inner = f->v6 ? sizeof(struct too_big6) : sizeof(struct too_big4);
	__u32 zero = 0;
	struct too_big *a = bpf_map_lookup_elem(&canal_too_big, &zero);

	/* The kernel offers no function to cut a single segment out of a GSO packet. TCP retransmits what
	 * is not delivered in single segments, which are answered. An error is never answered by an error
	 * (RFC 1122 3.2.2). */
	if (!a || f->segment || f->kind == FRAME_ERROR || f->length < SHOWN + 64)
		return -1;
	if (bpf_skb_load_bytes(skb, 0, a->head, sizeof(a->head)) ||
	    bpf_skb_load_bytes(skb, FRAME_INNER_IP, f->v6 ? a->v6.icmp.shown : a->v4.icmp.shown, SHOWN) ||
	    shorten(skb, FRAME_INNER_IP + inner))
		return -1;
	f->pending = 0;
	a->head[8] = bpf_htons(FRAME_INNER_IP - FRAME_IP + inner);
	/* The error to a fragment is not a fragment. */
	a->head[10] &= bpf_htons(0x4000);
	a->head[19] = bpf_htons(FRAME_INNER_IP - FRAME_UDP + inner);
	leg->destination_be = f->outer_source_be;
	leg->source_port_be = f->outer_source_port_be;
	leg->vni = f->vni;
	leg->hop = 0;
	leg->stamp = 0;
	__builtin_memcpy(leg->mac, &a->head[28], 6);
	if (f->v6)
		fill_too_big6(&a->v6, f, mtu < TOO_BIG_LEAST6 ? TOO_BIG_LEAST6 : mtu);
	else
		fill_too_big4(&a->v4, f, mtu);
	if (bpf_skb_store_bytes(skb, 0, a->head, sizeof(a->head), BPF_F_RECOMPUTE_CSUM))
		return -1;
	return bpf_skb_store_bytes(skb, FRAME_INNER_IP, &a->v4, inner, BPF_F_RECOMPUTE_CSUM);
}

#endif
