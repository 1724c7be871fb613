// SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause
/* Tunnel: sets the destination of packets that leave a replica by its one VXLAN device, which is always the edge of its AZ. Responses of
 * services use the tier's VNI. Packets of connections that the gateway dials for a tenant use the tenant's VNI, which is the packet's
 * mark. It runs on egress of the collect-metadata device, which drops packets without a tunnel key. */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi/tier.h"
#define CANAL_COUNTS CANAL_TUNNEL_COUNTS
#define CANAL_COUNTS_MAP canal_tunnel_counts
#include "lib/count.h"
#include "lib/flow.h"

/* Map of the redirector. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct canal_redirector_settings);
} canal_self SEC(".maps");

static __always_inline int drop(__u32 why)
{
	count(why);
	return TC_ACT_SHOT;
}

/* Reads the packet's source address. Returns -1 if the packet is neither IPv4 nor IPv6. */
static __always_inline int read_source(struct __sk_buff *skb, struct words *source)
{
	__be32 v4;

	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return bpf_skb_load_bytes(skb, ETH_HLEN + 8, source, 16);
	if (skb->protocol != bpf_htons(ETH_P_IP) || bpf_skb_load_bytes(skb, ETH_HLEN + 12, &v4, sizeof(v4)))
		return -1;
	*source = words_v4(v4);
	return 0;
}

/* Offset of the ICMPv6 message: IPv6's header has 40 bytes. */
#define ICMP6 (ETH_HLEN + 40)
/* Offset of the destination in the packet that an ICMPv6 error embeds (RFC 4443 3.1). */
#define ABOUT_DESTINATION (ICMP6 + 8 + 24)

/* Corrects the source of the kernel's ICMPv6 errors about packets to a service. No device has the service's address, so the kernel sends
 * them from the device's own (RFC 4443 2.2 (d)), which is unknown in a tenant's network. The right source is the service; over IPv4 it
 * already is. */
static __always_inline void set_service_source(struct __sk_buff *skb, struct words *source)
{
	struct words about;
	__u8 next, type;
	__s64 change;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) || bpf_skb_load_bytes(skb, ETH_HLEN + 6, &next, 1) || next != IPPROTO_ICMPV6 ||
	    bpf_skb_load_bytes(skb, ICMP6, &type, 1) || type & 0x80 || bpf_skb_load_bytes(skb, ABOUT_DESTINATION, &about, 16) ||
	    !service_of(&about))
		return;
	change = bpf_csum_diff((__be32 *)source, 16, (__be32 *)&about, 16, 0);
	if (bpf_l4_csum_replace(skb, ICMP6 + 2, 0, change, BPF_F_PSEUDO_HDR) || bpf_skb_store_bytes(skb, ETH_HLEN + 8, &about, 16, 0))
		return;
	*source = about;
}

SEC("tc")
int canal_tunnel(struct __sk_buff *skb)
{
	struct bpf_tunnel_key key = { .tunnel_id = CANAL_TIER_VNI, .tunnel_ttl = 64 };
	__u32 zero = 0, mark = skb->mark;
	const struct canal_redirector_settings *self = bpf_map_lookup_elem(&canal_self, &zero);
	struct words source;

	if (!self || read_source(skb, &source))
		return drop(CANAL_TUNNEL_DROP_PROTOCOL);
	/* A VNI has 24 bits, and the tier's own is not a tenant's. */
	if (mark > 0xffffff || mark == CANAL_TIER_VNI)
		return drop(CANAL_TUNNEL_DROP_MARK);
	if (!mark && tier_host_of(&source) == self->address_be)
		set_service_source(skb, &source);
	/* The gateway dials from this host's own address; services respond from theirs. */
	if (mark ? tier_host_of(&source) != self->address_be : !service_of(&source))
		return drop(CANAL_TUNNEL_DROP_SOURCE);
	if (mark)
		key.tunnel_id = mark;
	key.remote_ipv4 = bpf_ntohl(self->edge_be);
	if (bpf_skb_set_tunnel_key(skb, &key, sizeof(key), BPF_F_ZERO_CSUM_TX))
		return drop(CANAL_TUNNEL_DROP_KEY);
	/* The route to the edge does not depend on the tenant: with the mark, the outer packet would be routed into this device again. */
	skb->mark = 0;
	count(mark ? CANAL_TUNNEL_DIALLED : CANAL_TUNNEL_SERVICE);
	return TC_ACT_OK;
}

/* The kernel requires a license for the use of its helpers. */
char _license[] SEC("license") = "Dual BSD/GPL";
