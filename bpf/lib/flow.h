/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* Flows of the tier: their hash, and the rewriting of a frame in place. Lengths never change. It defines no map; lib/frame.h reads
 * frames.
 *
 * Checksums are patched by difference (RFC 1624). A pending checksum (frame.pending) is the plain sum of its pseudo header, so only
 * changes of the pseudo header are added. Every other checksum is the complement of the sum of everything. Every write keeps
 * CHECKSUM_COMPLETE true.
 */
#ifndef CANAL_LIB_FLOW_H
#define CANAL_LIB_FLOW_H

#include "lib/frame.h"

static __always_inline __u32 flow_rotate(__u32 x, int by)
{
	return x << by | x >> (32 - by);
}

/* Murmur3's 32-bit mix, byte for byte as canal_wire::tier::flow_hash. Ports are in network order; for ICMP they are 0. */
static __always_inline __u32 flow_hash(const struct words *client, __be16 client_port_be, __be16 service_port_be, __u32 service)
{
	__u32 input[6] = {
		bpf_ntohl(client->w[0]),
		bpf_ntohl(client->w[1]),
		bpf_ntohl(client->w[2]),
		bpf_ntohl(client->w[3]),
		(__u32)bpf_ntohs(client_port_be) << 16 | bpf_ntohs(service_port_be),
		service,
	};
	__u32 hash = 0xca0a1000;

#pragma unroll
	for (int i = 0; i < 6; i++) {
		hash ^= flow_rotate(input[i] * 0xcc9e2d51, 15) * 0x1b873593;
		hash = flow_rotate(hash, 13) * 5 + 0xe6546b64;
	}
	hash ^= 24;
	hash = (hash ^ hash >> 16) * 0x85ebca6b;
	hash = (hash ^ hash >> 13) * 0xc2b2ae35;
	return hash ^ hash >> 16;
}

static __always_inline __u32 flow_bucket(__u32 hash)
{
	return hash % CANAL_BUCKETS;
}

/* Addresses inside the tier. */

static __always_inline int same_words(const struct words *a, const struct words *b)
{
	return a->w[0] == b->w[0] && a->w[1] == b->w[1] && a->w[2] == b->w[2] && a->w[3] == b->w[3];
}

static __always_inline int has_high6(const struct words *a, __u64 high)
{
	return a->w[0] == bpf_htonl(high >> 32) && a->w[1] == bpf_htonl((__u32)high) && a->w[2] == 0;
}

/* Returns the service with this address; 0: none. */
static __always_inline __u32 service_of(const struct words *a)
{
	__u32 low = bpf_ntohl(a->w[3]);

	if (is_mapped(a))
		return (low & 0xff000000) == CANAL_SERVICE_NET4 ? low & 0xffffff : 0;
	return has_high6(a, CANAL_SERVICE_NET6) && !(low >> 24) ? low : 0;
}

static __always_inline struct words service_words(__u32 service, int v6)
{
	struct words a = { { bpf_htonl(CANAL_SERVICE_NET6 >> 32), bpf_htonl((__u32)CANAL_SERVICE_NET6), 0, bpf_htonl(service) } };

	return v6 ? a : words_v4(bpf_htonl(CANAL_SERVICE_NET4 | service));
}

/* Returns the underlay address of the tier's host that dials from this address, or receives responses at it; 0: none. */
static __always_inline __be32 tier_host_of(const struct words *a)
{
	if (is_mapped(a))
		return (a->w[3] & bpf_htonl(0xff000000)) == bpf_htonl(CANAL_TIER_NET4) ? a->w[3] : 0;
	return has_high6(a, CANAL_TIER_NET6) ? a->w[3] : 0;
}

/* Checksums. */

static __always_inline __u16 sum_fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

static __always_inline __u64 sum_change(const struct words *from, const struct words *to)
{
	__u64 sum = 0;

#pragma unroll
	for (int i = 0; i < 4; i++)
		sum += (__u64)(__u32)~from->w[i] + to->w[i];
	return sum;
}

static __always_inline __u16 sum_patched(__u16 sum, __u64 change)
{
	return ~sum_fold((__u64)(__u16)~sum + change);
}

static __always_inline int sum_store(struct __sk_buff *skb, __u32 at, __u16 sum)
{
	return bpf_skb_store_bytes(skb, at, &sum, sizeof(sum), BPF_F_RECOMPUTE_CSUM);
}

/* Patches the checksum of the IPv4 header at `ip` for `change`. */
static __always_inline int sum_patch_ip(struct __sk_buff *skb, __u32 ip, __u64 change)
{
	__u16 sum;

	if (bpf_skb_load_bytes(skb, ip + 10, &sum, sizeof(sum)))
		return -1;
	return sum_store(skb, ip + 10, sum_patched(sum, change));
}

/* Patches the inner packet's transport checksum for `change` in its pseudo header (`pseudo`), or else in its payload. */
static __always_inline int sum_patch_transport(struct __sk_buff *skb, const struct frame *f, __u64 change, int pseudo)
{
	int pending = f->pending == f->transport;
	__u32 at = f->transport;
	__u16 sum;

	switch (f->protocol) {
	case IPPROTO_TCP:
		at += 16;
		break;
	case IPPROTO_UDP:
		at += 6;
		break;
	case IPPROTO_ICMPV6:
		at += 2;
		break;
	default:
		/* ICMP has no pseudo header, and a change inside its errors is balanced by the embedded header's own checksum. */
		return 0;
	}
	if (bpf_skb_load_bytes(skb, at, &sum, sizeof(sum)))
		return -1;
	if (pending)
		return pseudo ? sum_store(skb, at, sum_fold(sum + change)) : 0;
	/* UDP without a checksum stays without one. */
	if (f->protocol == IPPROTO_UDP && !sum)
		return 0;
	sum = sum_patched(sum, change);
	return sum_store(skb, at, f->protocol == IPPROTO_UDP && !sum ? 0xffff : sum);
}

/* Writes `to` over the address `old`, source or destination of the IP header at `ip`; `to` is of the same family. Returns 0, or a
 * negative value if the packet is too short. */
static __always_inline int address_write(struct __sk_buff *skb, int v6, __u32 ip, int is_destination, const struct words *old,
					 const struct words *to)
{
	if (v6)
		return bpf_skb_store_bytes(skb, ip + (is_destination ? 24 : 8), to, 16, BPF_F_RECOMPUTE_CSUM);
	if (bpf_skb_store_bytes(skb, ip + (is_destination ? 16 : 12), &to->w[3], 4, BPF_F_RECOMPUTE_CSUM))
		return -1;
	return sum_patch_ip(skb, ip, sum_change(old, to));
}

static __always_inline int inner_set(struct __sk_buff *skb, struct frame *f, int is_destination, const struct words *to)
{
	struct words *old = is_destination ? &f->flow.destination : &f->flow.source;
	__u64 change = sum_change(old, to);

	if (address_write(skb, f->v6, FRAME_INNER_IP, is_destination, old, to) || sum_patch_transport(skb, f, change, 1))
		return -1;
	*old = *to;
	return 0;
}

/* Sets the inner packet's source, in the packet and in `f`. Returns 0, or a negative value if the packet is shorter than it was. */
static __always_inline int inner_set_source(struct __sk_buff *skb, struct frame *f, const struct words *to)
{
	return inner_set(skb, f, 0, to);
}

static __always_inline int inner_set_destination(struct __sk_buff *skb, struct frame *f, const struct words *to)
{
	return inner_set(skb, f, 1, to);
}

static __always_inline int embedded_set(struct __sk_buff *skb, struct frame *f, int is_destination, const struct words *to)
{
	struct words *old = is_destination ? &f->about.destination : &f->about.source;
	__u64 change = sum_change(old, to);

	/* The embedded packet's own TCP or UDP checksum stays: the packet is cut short, so no receiver can check it. */
	if (address_write(skb, f->v6, f->embedded, is_destination, old, to) || sum_patch_transport(skb, f, change, 0))
		return -1;
	*old = *to;
	return 0;
}

/* Sets the source inside an ICMP error (f->kind is FRAME_ERROR), in the packet and in `f`. */
static __always_inline int embedded_set_source(struct __sk_buff *skb, struct frame *f, const struct words *to)
{
	return embedded_set(skb, f, 0, to);
}

static __always_inline int embedded_set_destination(struct __sk_buff *skb, struct frame *f, const struct words *to)
{
	return embedded_set(skb, f, 1, to);
}

/* Leg of a tunnel: the new values of the outer headers. */
struct leg {
	__be32 source_be;
	__be32 destination_be;
	__u32 vni;
	__u32 stamp;
	__be16 source_port_be;
	__u8 hop;
	__u8 mac[6];        /* inner destination */
	__u8 mac_source[6]; /* inner source */
};

/* Returns the outer UDP checksum after a change of the addresses. A pending one and that of a GSO packet are the pseudo header's sum.
 * Any other is cleared: over IPv4 it is optional, and with a pending inner checksum it cannot be patched by difference. */
static __always_inline __u16 outer_sum(const struct frame *f, __u16 sum, __u64 change)
{
	if (f->pending == FRAME_UDP || (f->segment && sum))
		return sum_fold(sum + change);
	return 0;
}

/* Rewrites the frame for `leg`, back to the neighbor from which it came: the one router of this host. */
static __noinline __attribute__((unused)) int frame_turn(struct __sk_buff *skb, struct frame *f, const struct leg *leg)
{
	/* In 16-bit words, because the Ethernet header's 14 bytes would misalign anything wider. */
	__u16 h[FRAME_INNER_IP / 2], mac;
	/* Only the addresses change, so the sum changes by the complements of the old ones and by the new ones (RFC 1624). */
	__u64 change = (__u64)(__u32)~f->outer_source_be + (__u32)~f->outer_destination_be + leg->source_be + leg->destination_be;
	__u64 sum = 0;
	/* 0x08 is the I flag of VXLAN: the VNI is valid (RFC 7348 section 5). */
	__u32 id = bpf_htonl(leg->vni << 8 | leg->hop), flags = bpf_htonl(0x08000000 | leg->stamp);

	if (bpf_skb_load_bytes(skb, 0, h, sizeof(h)))
		return -1;
	/* Otherwise a virtual device would carry the inner flow's hash to the next host, as no wire does, and spread packets by it. */
	bpf_set_hash_invalid(skb);
#pragma unroll
	for (int i = 0; i < 3; i++) {
		mac = h[i];
		h[i] = h[i + 3];
		h[i + 3] = mac;
	}
	/* The end of a tunnel writes a new outer header: full TTL, and an unchanged type of service. */
	h[11] = bpf_htons(64 << 8 | IPPROTO_UDP);
	h[12] = 0;
	h[13] = leg->source_be & 0xffff;
	h[14] = leg->source_be >> 16;
	h[15] = leg->destination_be & 0xffff;
	h[16] = leg->destination_be >> 16;
#pragma unroll
	/* Words 7 to 16 are the IPv4 header. */
	for (int i = 7; i < 17; i++)
		sum += h[i];
	h[12] = ~sum_fold(sum);
	h[17] = leg->source_port_be;
	h[20] = outer_sum(f, h[20], change);
	h[21] = flags & 0xffff;
	h[22] = flags >> 16;
	h[23] = id & 0xffff;
	h[24] = id >> 16;
	__builtin_memcpy(&h[25], leg->mac, 6);
	__builtin_memcpy(&h[28], leg->mac_source, 6);
	/* Swapping the Ethernet addresses does not change their sum, so recomputing over them is right although CHECKSUM_COMPLETE does
	 * not cover them. */
	return bpf_skb_store_bytes(skb, 0, h, sizeof(h), BPF_F_RECOMPUTE_CSUM);
}

/* Clears the reserved bits for local delivery: Linux drops VXLAN headers with bits that it does not know. */
static __always_inline int frame_clear_reserved(struct __sk_buff *skb, const struct frame *f)
{
	__be32 vxlan[2] = { bpf_htonl(0x08000000), bpf_htonl(f->vni << 8) };
	__u16 sum;

	if (bpf_skb_store_bytes(skb, FRAME_VXLAN, vxlan, sizeof(vxlan), BPF_F_RECOMPUTE_CSUM))
		return -1;
	if (f->pending == FRAME_UDP || f->segment)
		return 0;
	if (bpf_skb_load_bytes(skb, FRAME_UDP + 6, &sum, sizeof(sum)))
		return -1;
	return sum ? sum_store(skb, FRAME_UDP + 6, 0) : 0;
}

#endif
