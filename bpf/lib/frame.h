/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* Frame of the tier: Ethernet, IPv4, UDP, VXLAN, Ethernet, IPv4 or IPv6, then TCP, UDP or ICMP. It is parsed once into a struct frame.
 * This header only reads; lib/flow.h writes. It defines no map.
 *
 * Everything before the inner IP header has a fixed offset, because the outer header has no options and no VLAN tag. A datagram with
 * options is malformed. It is never passed on, because the host's own VXLAN socket would accept what the program did not check.
 */
#ifndef CANAL_LIB_FRAME_H
#define CANAL_LIB_FRAME_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi/tier.h"
#include "lib/address.h"

/* Offsets from the start of the frame. */
#define FRAME_IP 14
#define FRAME_UDP 34
#define FRAME_VXLAN 42
#define FRAME_INNER 50    /* the inner Ethernet header */
#define FRAME_INNER_IP 64
/* Bytes that are read, at most: both IP headers with all options, the ICMP header between them, and the ports. */
#define FRAME_READ (FRAME_INNER_IP + 60 + 8 + 60 + 20)

/* Flags of TCP (RFC 9293 3.1). */
#define FRAME_FIN 0x01
#define FRAME_SYN 0x02
#define FRAME_RST 0x04
#define FRAME_ACK 0x10

enum frame_verdict {
	FRAME_OK,
	FRAME_FOREIGN,   /* not IPv4, or not UDP, or not VXLAN's port: the host's stack may get it */
	FRAME_MALFORMED, /* shorter than its headers state, or a header that no sender of the tier writes */
	FRAME_FRAGMENT,  /* outer or inner; an outer one may be of any UDP datagram */
	FRAME_TORN,      /* first fragment of an outer datagram; it contains all inner headers, which have been read */
	FRAME_PROTOCOL,  /* inside is neither TCP, UDP, an echo nor an ICMP error about TCP or UDP */
};

enum frame_kind {
	FRAME_TCP,
	FRAME_DATAGRAM,
	FRAME_ECHO,  /* ports are 0 */
	FRAME_ERROR, /* `about` is the tuple that the error is about; the ports of `flow` are 0 */
};

struct tuple {
	struct words source; /* IPv4 as v4-mapped */
	struct words destination;
	__be16 source_port_be;
	__be16 destination_port_be;
};

struct frame {
	struct tuple flow;  /* of the inner packet */
	struct tuple about; /* of the packet that an ICMP error embeds; the error goes in the opposite direction */
	__be32 outer_source_be;
	__be32 outer_destination_be;
	__be16 outer_source_port_be;
	__u16 pending;      /* offset of the header whose checksum the device finishes (CHECKSUM_PARTIAL); 0: none */
	__u32 vni;
	__u32 stamp;        /* CANAL_STAMP_*; only inside the tier */
	__u16 segment;      /* gso_size; 0: not a GSO packet */
	__u16 transport;    /* offset of the inner TCP, UDP or ICMP header */
	__u16 length;       /* length of the inner packet with its IP header */
	__u16 whole;        /* length with which this datagram would have come unfragmented */
	__u16 header;       /* length of the TCP, UDP or ICMP header */
	__u16 embedded;     /* offset of the embedded IP header */
	__u8 hop;           /* the VXLAN header's last byte */
	__u8 v6;            /* the inner packet's family */
	__u8 protocol;      /* the inner packet's IPPROTO_*; ICMP's own for errors */
	__u8 about_protocol;/* protocol of the embedded packet */
	__u8 kind;          /* enum frame_kind */
	__u8 flags;         /* flags of TCP */
	__u8 icmp_type;
	__u8 dont_fragment; /* IPv4's DF; 1 with IPv6 */
};

/* The part of the kernel's struct that no context field exposes. */
struct sk_buff___canal {
	unsigned char *head;
	unsigned char *data;
	__u16 csum_start;
	__u8 ip_summed : 2;
} __attribute__((preserve_access_index));
extern void *bpf_cast_to_kern_ctx(void *) __ksym;
/* CHECKSUM_PARTIAL of the kernel (linux/skbuff.h). */
#define FRAME_CHECKSUM_PARTIAL 3

/* Returns the offset of the header with the pending checksum; 0: none. A tunnel's packet may have it outside or inside, and the two need
 * opposite arithmetic: the checksum helpers do not distinguish the headers, and would corrupt the checksum that is not pending. */
static __always_inline __u16 frame_pending(struct __sk_buff *skb)
{
	const struct sk_buff___canal *kernel = bpf_cast_to_kern_ctx(skb);

	if (BPF_CORE_READ_BITFIELD(kernel, ip_summed) != FRAME_CHECKSUM_PARTIAL)
		return 0;
	return kernel->csum_start - (__u16)((__u64)kernel->data - (__u64)kernel->head);
}

static __always_inline int frame_is_error(__u8 v6, __u8 type)
{
	/* Unreachable, too big, time exceeded, parameter problem (RFC 4443 3); those of RFC 792 without redirects and quenches. */
	return v6 ? type >= 1 && type <= 4 : type == 3 || type == 11 || type == 12;
}

static __always_inline int frame_is_echo(__u8 v6, __u8 type)
{
	return v6 ? type == 128 || type == 129 : type == 0 || type == 8;
}

/* Reads the addresses, protocol and header length of the IP packet at `at`, which may have `left` bytes. With `whole`, a packet that
 * states more is malformed; a packet that an ICMP error embeds is cut short. */
static __always_inline int frame_ip(void *data, void *end, __u32 at, __u32 left, int v6, int whole, struct tuple *t, __u8 *protocol,
				    __u32 *header, __u32 *length, __u8 *dont_fragment)
{
	if (v6) {
		struct ipv6hdr *ip = data + at;

		if ((void *)(ip + 1) > end || left < sizeof(*ip) || ip->version != 6)
			return FRAME_MALFORMED;
		__builtin_memcpy(&t->source, &ip->saddr, 16);
		__builtin_memcpy(&t->destination, &ip->daddr, 16);
		*header = sizeof(*ip);
		*length = sizeof(*ip) + bpf_ntohs(ip->payload_len);
		*protocol = ip->nexthdr;
		*dont_fragment = 1;
		if (ip->nexthdr == IPPROTO_FRAGMENT)
			return FRAME_FRAGMENT;
	} else {
		struct iphdr *ip = data + at;

		if ((void *)(ip + 1) > end || left < sizeof(*ip) || ip->version != 4 || ip->ihl < 5)
			return FRAME_MALFORMED;
		t->source = words_v4(ip->saddr);
		t->destination = words_v4(ip->daddr);
		*header = ip->ihl * 4;
		*length = bpf_ntohs(ip->tot_len);
		*protocol = ip->protocol;
		*dont_fragment = !!(ip->frag_off & bpf_htons(0x4000));
		if (ip->frag_off & bpf_htons(0x3fff))
			return FRAME_FRAGMENT;
	}
	if (*length < *header || *header > left || (whole && *length > left))
		return FRAME_MALFORMED;
	return FRAME_OK;
}

/* Reads the packet that an ICMP error is about. It has at least 8 bytes behind its IP header (RFC 792), the ports among them. */
static __always_inline int frame_about(void *data, void *end, struct frame *f, __u32 left)
{
	__u32 header, length, at = f->embedded;
	__u8 dont_fragment;
	__be16 *ports;
	int verdict = frame_ip(data, end, at, left, f->v6, 0, &f->about, &f->about_protocol, &header, &length, &dont_fragment);

	if (verdict)
		return verdict;
	if (f->about_protocol != IPPROTO_TCP && f->about_protocol != IPPROTO_UDP)
		return FRAME_PROTOCOL;
	ports = data + at + header;
	if ((void *)(ports + 4) > end || left < header + 8)
		return FRAME_MALFORMED;
	f->about.source_port_be = ports[0];
	f->about.destination_port_be = ports[1];
	return FRAME_OK;
}

/* Reads the inner transport header. `left` is the number of bytes behind the inner IP header. */
static __always_inline int frame_transport(void *data, void *end, struct frame *f, __u32 left)
{
	__u32 at = f->transport;
	__u8 *h = data + at;
	__be16 *ports = data + at;

	if (f->protocol == IPPROTO_TCP) {
		if ((void *)(h + 20) > end || left < 20)
			return FRAME_MALFORMED;
		f->header = (h[12] >> 4) * 4;
		if (f->header < 20 || f->header > left)
			return FRAME_MALFORMED;
		f->flags = h[13];
		f->kind = FRAME_TCP;
	} else if (f->protocol == IPPROTO_UDP) {
		if ((void *)(h + 8) > end || left < 8)
			return FRAME_MALFORMED;
		f->header = 8;
		f->kind = FRAME_DATAGRAM;
	} else if (f->protocol == (f->v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP)) {
		if ((void *)(h + 8) > end || left < 8)
			return FRAME_MALFORMED;
		f->header = 8;
		f->icmp_type = h[0];
		if (frame_is_echo(f->v6, f->icmp_type)) {
			f->kind = FRAME_ECHO;
			return FRAME_OK;
		}
		if (!frame_is_error(f->v6, f->icmp_type))
			return FRAME_PROTOCOL;
		f->kind = FRAME_ERROR;
		f->embedded = at + 8;
		return frame_about(data, end, f, left - 8);
	} else {
		return FRAME_PROTOCOL;
	}
	f->flow.source_port_be = ports[0];
	f->flow.destination_port_be = ports[1];
	return FRAME_OK;
}

/* Parses the frame. The program itself compares the outer addresses with its own: a VXLAN device of the host accepts every datagram for
 * VXLAN's port that is passed on, whichever of the host's addresses it is for. */
static __noinline __attribute__((unused)) int frame_parse(struct __sk_buff *skb, struct frame *f)
{
	__u32 read = skb->len < FRAME_READ ? skb->len : FRAME_READ;
	__u32 header, length, left, first;
	void *data, *end;
	struct ethhdr *ether;
	struct iphdr *ip;
	struct udphdr *udp;
	__be32 *vxlan;
	int verdict, torn;

	__builtin_memset(f, 0, sizeof(*f));
	/* A program can read only the linear part of a packet, so the headers are moved there. */
	if (skb->data_end - skb->data < read && bpf_skb_pull_data(skb, read))
		return FRAME_MALFORMED;
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	ether = data;
	ip = data + FRAME_IP;
	udp = data + FRAME_UDP;
	vxlan = data + FRAME_VXLAN;
	if ((void *)(ether + 1) > end || ether->h_proto != bpf_htons(ETH_P_IP))
		return FRAME_FOREIGN;
	if ((void *)(ip + 1) > end)
		return FRAME_MALFORMED;
	if (ip->protocol != IPPROTO_UDP)
		return FRAME_FOREIGN;
	/* With options, the headers behind would not be at the constant offsets. */
	if (ip->version != 4 || ip->ihl != 5)
		return FRAME_MALFORMED;
	/* A later fragment has no UDP header, so its flow is unknown. */
	if (ip->frag_off & bpf_htons(0x1fff))
		return FRAME_FRAGMENT;
	if ((void *)(udp + 1) > end)
		return FRAME_MALFORMED;
	if (udp->dest != bpf_htons(CANAL_VXLAN_PORT))
		return FRAME_FOREIGN;
	torn = !!(ip->frag_off & bpf_htons(0x2000));
	length = bpf_ntohs(ip->tot_len);
	/* A first fragment is shorter than its datagram. */
	if (torn && bpf_ntohs(udp->len) <= length - sizeof(*ip))
		return FRAME_FRAGMENT;
	if (data + FRAME_INNER_IP > end || length < FRAME_INNER_IP - FRAME_IP || FRAME_IP + length > skb->len ||
	    (!torn && bpf_ntohs(udp->len) != length - sizeof(*ip)))
		return FRAME_MALFORMED;
	first = bpf_ntohl(vxlan[1]);
	f->stamp = bpf_ntohl(vxlan[0]) & 0xffffff;
	/* The flags must be the I flag alone (RFC 7348 section 5). Reserved bits are used only inside the tier. */
	if (bpf_ntohl(vxlan[0]) >> 24 != 0x08 || (f->stamp && first >> 8 != CANAL_TIER_VNI))
		return FRAME_MALFORMED;
	f->outer_source_be = ip->saddr;
	f->outer_destination_be = ip->daddr;
	f->outer_source_port_be = udp->source;
	f->vni = first >> 8;
	f->hop = first & 0xff;
	f->segment = skb->gso_size;
	ether = data + FRAME_INNER;
	f->v6 = ether->h_proto == bpf_htons(ETH_P_IPV6);
	if (!f->v6 && ether->h_proto != bpf_htons(ETH_P_IP))
		return FRAME_PROTOCOL;
	left = f->whole = length - (FRAME_INNER_IP - FRAME_IP);
	verdict = frame_ip(data, end, FRAME_INNER_IP, left, f->v6, !torn, &f->flow, &f->protocol, &header, &left, &f->dont_fragment);
	/* Headers that look malformed in a first fragment may go on in the next one. */
	if (verdict)
		return torn ? FRAME_FRAGMENT : verdict;
	f->length = left;
	f->transport = FRAME_INNER_IP + header;
	verdict = frame_transport(data, end, f, left - header);
	f->pending = frame_pending(skb);
	if (torn)
		return verdict ? FRAME_FRAGMENT : FRAME_TORN;
	return verdict;
}

/* Returns the largest inner packet on the wire: a GSO packet is cut into segments. */
static __always_inline __u32 frame_largest(const struct frame *f)
{
	return f->segment ? f->transport + f->header - FRAME_INNER_IP + f->segment : f->length;
}
/* 0x2000 is the flag that more fragments follow (RFC 791). */

#endif
