// SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause
/* Interface guard: authenticates containers without a node proxy by the interface to which they are attached (Canal appendix B). It runs
 * on the host's side of each such interface. It passes only what the one container behind the interface may send: its MAC, its
 * addresses, and ARP and neighbor discovery that claim nothing else. It checks sources only; the edge and the policies decide on
 * destinations. Start reading at canal_interface_guard(). */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi/interface_guard.h"
#define CANAL_COUNTS CANAL_INTERFACE_GUARD_COUNTS
#define CANAL_COUNTS_MAP canal_interface_guard_counts
#include "lib/address.h"
#include "lib/count.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_GUARDED_INTERFACES_MAX);
	__type(key, __u32);
	__type(value, struct canal_guarded_interface);
} canal_guarded_interfaces SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CANAL_INTERFACE_ADDRESSES_MAX);
	__type(key, struct canal_interface_address_key);
	__type(value, __u32);
} canal_interface_addresses SEC(".maps");

/* linux/if_arp.h needs headers of the C library. */
#define ARPHRD_ETHER 1
#define ARPOP_REQUEST 1

/* Types of RFC 4861 4, RFC 2710 and RFC 3810, and options of RFC 4861 4.6. The program distinguishes only these. */
#define ICMP6_ROUTER_SOLICIT 133
#define ICMP6_NEIGHBOUR_SOLICIT 135
#define ICMP6_NEIGHBOUR_ADVERT 136
#define ICMP6_REDIRECT 137
#define ICMP6_LISTENER_FIRST 130
#define ICMP6_LISTENER_LAST 132
#define ICMP6_LISTENER_REPORT2 143
#define OPTION_SOURCE_MAC 1
#define OPTION_TARGET_MAC 2
/* Extension headers and options that are parsed, at most; a frame with more is dropped. RFC 8200 4.1 recommends an order with five
 * of the kinds that are parsed here, so a packet that uses all five is dropped. Neighbor discovery of a host needs no extension
 * header, a multicast listener report needs one, and both need two options or fewer (RFC 4861 4). */
#define EXTENSIONS 4
#define OPTIONS 4

/* Passes the frame to the other filters on the device, which TC_ACT_OK would skip. */
static __always_inline int pass(__u32 what)
{
	count(what);
	return TC_ACT_UNSPEC;
}

static __always_inline int refuse(struct canal_guarded_interface *on, __u32 what)
{
	if (on)
		__sync_fetch_and_add(&on->refused, 1);
	count(what);
	return TC_ACT_SHOT;
}

static __always_inline int refuse_address(struct canal_guarded_interface *on, const struct words *address, __u32 what)
{
	/* Two CPUs may mix two addresses here, which is acceptable in a log line. */
	put_words(on->last_address, address);
	return refuse(on, what);
}

static __always_inline int same_mac(const __u8 a[6], const __u8 b[6])
{
	return !((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]) | (a[4] ^ b[4]) | (a[5] ^ b[5]));
}

static __always_inline int is_bound(__u32 interface, const struct canal_guarded_interface *on, const struct words *address)
{
	struct canal_interface_address_key key = { .interface = interface };
	__u32 *vni;

	put_words(key.address, address);
	vni = bpf_map_lookup_elem(&canal_interface_addresses, &key);
	return vni && *vni == on->vni;
}

static __always_inline int is_zero(const struct words *a)
{
	return !(a->w[0] | a->w[1] | a->w[2] | a->w[3]);
}

/* Returns whether the address is fe80::/64 with the interface's EUI-64 (RFC 4291 appendix A), which no other interface can have. */
static __always_inline int is_own_link_local(const struct words *a, const __u8 mac[6])
{
	__u32 high = (__u32)(mac[0] ^ 2) << 24 | (__u32)mac[1] << 16 | (__u32)mac[2] << 8 | 0xff;
	__u32 low = 0xfe000000u | (__u32)mac[3] << 16 | (__u32)mac[4] << 8 | mac[5];

	return a->w[0] == bpf_htonl(0xfe800000) && a->w[1] == 0 && a->w[2] == bpf_htonl(high) && a->w[3] == bpf_htonl(low);
}

static __always_inline int arp(struct __sk_buff *skb, struct canal_guarded_interface *on)
{
	struct {
		__be16 hardware, protocol;
		__u8 hardware_length, protocol_length;
		__be16 operation;
		__u8 sender_mac[6], sender[4], target_mac[6], target[4];
	} __attribute__((packed)) a;
	struct words sender;
	__be32 sender_be;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &a, sizeof(a)))
		return refuse(on, CANAL_INTERFACE_GUARD_DROP_MALFORMED);
	if (a.hardware != bpf_htons(ARPHRD_ETHER) || a.protocol != bpf_htons(ETH_P_IP) || a.hardware_length != 6 || a.protocol_length != 4)
		return refuse(on, CANAL_INTERFACE_GUARD_DROP_MALFORMED);
	__builtin_memcpy(&sender_be, a.sender, 4);
	sender = words_v4(sender_be);
	if (!same_mac(a.sender_mac, on->mac))
		return refuse_address(on, &sender, CANAL_INTERFACE_GUARD_DROP_ARP);
	/* A probe claims no address (RFC 5227 1.1). */
	if (!sender_be && a.operation == bpf_htons(ARPOP_REQUEST))
		return pass(CANAL_INTERFACE_GUARD_PASSED_ARP);
	if (!is_bound(skb->ifindex, on, &sender))
		return refuse_address(on, &sender, CANAL_INTERFACE_GUARD_DROP_ARP);
	return pass(CANAL_INTERFACE_GUARD_PASSED_ARP);
}

static __always_inline int ipv4(struct __sk_buff *skb, struct canal_guarded_interface *on)
{
	struct words source;
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
		return refuse(on, CANAL_INTERFACE_GUARD_DROP_MALFORMED);
	source = words_v4(ip.saddr);
	if (!is_bound(skb->ifindex, on, &source))
		return refuse_address(on, &source, CANAL_INTERFACE_GUARD_DROP_ADDRESS);
	return pass(CANAL_INTERFACE_GUARD_PASSED_V4);
}

/* Returns whether the options of a neighbor discovery message name no other MAC than the container's. */
static __always_inline int has_own_macs(struct __sk_buff *skb, __u32 at, __u32 end, const __u8 mac[6])
{
	for (int i = 0; i <= OPTIONS; i++) {
		__u8 option[8];

		if (at >= end)
			return 1;
		if (i == OPTIONS || bpf_skb_load_bytes(skb, at, option, sizeof(option)) || !option[1])
			return 0;
		if ((option[0] == OPTION_SOURCE_MAC || option[0] == OPTION_TARGET_MAC) && !same_mac(option + 2, mac))
			return 0;
		at += option[1] * 8;
	}
	return 0;
}

/* Checks what an ICMPv6 message claims. Returns the counter, or -1 if the message claims nothing and is like any other packet. */
static __always_inline int discovery(struct __sk_buff *skb, struct canal_guarded_interface *on, __u32 at, __u32 end, const struct words *source,
				     int is_own_source)
{
	__u32 options = at + 24;
	struct words target;
	__u8 type;

	if (bpf_skb_load_bytes(skb, at, &type, 1))
		return CANAL_INTERFACE_GUARD_DROP_MALFORMED;
	if ((type >= ICMP6_LISTENER_FIRST && type <= ICMP6_LISTENER_LAST) || type == ICMP6_LISTENER_REPORT2)
		return is_own_source || is_zero(source) ? CANAL_INTERFACE_GUARD_PASSED_DISCOVERY : CANAL_INTERFACE_GUARD_DROP_ADDRESS;
	if (type < ICMP6_ROUTER_SOLICIT || type > ICMP6_REDIRECT)
		return -1;
	/* A container is no router: it may neither advertise one nor send redirects. */
	if (type != ICMP6_ROUTER_SOLICIT && type != ICMP6_NEIGHBOUR_SOLICIT && type != ICMP6_NEIGHBOUR_ADVERT)
		return CANAL_INTERFACE_GUARD_DROP_DISCOVERY;
	if (!is_own_source && !(is_zero(source) && type != ICMP6_NEIGHBOUR_ADVERT))
		return CANAL_INTERFACE_GUARD_DROP_DISCOVERY;
	if (type == ICMP6_ROUTER_SOLICIT)
		options = at + 8;
	else if (bpf_skb_load_bytes(skb, at + 8, &target, sizeof(target)))
		return CANAL_INTERFACE_GUARD_DROP_MALFORMED;
	/* Duplicate address detection claims its target like an advertisement (RFC 4862 5.4). */
	if ((type == ICMP6_NEIGHBOUR_ADVERT || (type == ICMP6_NEIGHBOUR_SOLICIT && is_zero(source))) &&
	    !is_bound(skb->ifindex, on, &target) && !is_own_link_local(&target, on->mac))
		return CANAL_INTERFACE_GUARD_DROP_DISCOVERY;
	return has_own_macs(skb, options, end, on->mac) ? CANAL_INTERFACE_GUARD_PASSED_DISCOVERY : CANAL_INTERFACE_GUARD_DROP_DISCOVERY;
}

/* Returns the offset of the ICMPv6 message; 0: there is none, or this is a later fragment of one; negative: more headers than are
 * parsed. */
static __always_inline int find_icmp6(struct __sk_buff *skb, __u8 next)
{
	__u32 at = ETH_HLEN + sizeof(struct ipv6hdr);

	for (int i = 0; i <= EXTENSIONS; i++) {
		__u8 extension[4];

		if (next == IPPROTO_ICMPV6)
			return at;
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS && next != IPPROTO_FRAGMENT)
			return 0;
		if (i == EXTENSIONS || bpf_skb_load_bytes(skb, at, extension, sizeof(extension)))
			return -1;
		/* The first fragment, which must have all headers (RFC 7112), decides for the later ones. */
		if (next == IPPROTO_FRAGMENT && (extension[2] || extension[3] & 0xf8))
			return 0;
		at += next == IPPROTO_FRAGMENT ? 8 : (extension[1] + 1) * 8;
		next = extension[0];
	}
	return -1;
}

static __always_inline int ipv6(struct __sk_buff *skb, struct canal_guarded_interface *on)
{
	struct words source;
	struct ipv6hdr ip;
	int at, is_own, what;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 6)
		return refuse(on, CANAL_INTERFACE_GUARD_DROP_MALFORMED);
	__builtin_memcpy(&source, &ip.saddr, 16);
	/* ::ffff:a.b.c.d is the maps' form of an IPv4 address; no host uses it on the wire. */
	if (is_mapped(&source))
		return refuse_address(on, &source, CANAL_INTERFACE_GUARD_DROP_ADDRESS);
	is_own = is_bound(skb->ifindex, on, &source) || is_own_link_local(&source, on->mac);
	at = find_icmp6(skb, ip.nexthdr);
	if (at < 0)
		return refuse(on, CANAL_INTERFACE_GUARD_DROP_MALFORMED);
	if (at) {
		what = discovery(skb, on, at, ETH_HLEN + sizeof(ip) + bpf_ntohs(ip.payload_len), &source, is_own);
		if (what == CANAL_INTERFACE_GUARD_PASSED_DISCOVERY)
			return pass(what);
		if (what >= 0)
			return refuse_address(on, &source, what);
	}
	if (!is_own)
		return refuse_address(on, &source, CANAL_INTERFACE_GUARD_DROP_ADDRESS);
	return pass(CANAL_INTERFACE_GUARD_PASSED_V6);
}

SEC("tc")
int canal_interface_guard(struct __sk_buff *skb)
{
	__u32 interface = skb->ifindex;
	struct canal_guarded_interface *on = bpf_map_lookup_elem(&canal_guarded_interfaces, &interface);
	__be16 protocol;
	__u8 mac[6];

	if (!on)
		return refuse(0, CANAL_INTERFACE_GUARD_DROP_UNBOUND);
	/* The kernel may have removed the tag already. */
	if (skb->vlan_present)
		return refuse(on, CANAL_INTERFACE_GUARD_DROP_PROTOCOL);
	if (bpf_skb_load_bytes(skb, ETH_ALEN, mac, sizeof(mac)) || bpf_skb_load_bytes(skb, 2 * ETH_ALEN, &protocol, sizeof(protocol)))
		return refuse(on, CANAL_INTERFACE_GUARD_DROP_MALFORMED);
	if (!same_mac(mac, on->mac))
		return refuse(on, CANAL_INTERFACE_GUARD_DROP_MAC);
	switch (protocol) {
	case bpf_htons(ETH_P_IP):
		return ipv4(skb, on);
	case bpf_htons(ETH_P_IPV6):
		return ipv6(skb, on);
	case bpf_htons(ETH_P_ARP):
		return arp(skb, on);
	default:
		return refuse(on, CANAL_INTERFACE_GUARD_DROP_PROTOCOL);
	}
}

/* The kernel requires a license for the use of its helpers. */
char _license[] SEC("license") = "Dual BSD/GPL";
