/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* ABI of the interface guard (bpf/interface_guard.bpf.c) and its agent: the container behind an interface of this host with its tenant,
 * and the addresses that it may use. The Rust view (dataplane/abi) is generated from this header. It contains no code.
 *
 * Addresses are 16 bytes in network order, IPv4 as ::ffff:a.b.c.d (RFC 4291 2.5.5.2). Everything else is in host order.
 */
#ifndef CANAL_ABI_INTERFACE_GUARD_H
#define CANAL_ABI_INTERFACE_GUARD_H

#include <linux/types.h>

/* Containers with an interface of their own on one host, and addresses of all of them, at most. Four addresses for each interface on
 * average; a container with one of each family has two. Nobody measured these values. An interface beyond them has no element, so
 * everything from it is dropped. */
#define CANAL_GUARDED_INTERFACES_MAX 4096
#define CANAL_INTERFACE_ADDRESSES_MAX 16384

/* Map canal_guarded_interfaces: hash, key __u32 interface index on the host's side. The program drops everything from an interface that
 * it is attached to and that has no element here. */
struct canal_guarded_interface {
	__u32 vni;          /* VNI of the tenant */
	__u8 mac[6];        /* MAC of the container */
	__u8 zero[2];
	__u64 refused;      /* dropped frames, counted by the program */
	__u8 last_address[16]; /* source of the last frame that was dropped for its address; zero: none was */
};

/* Map canal_interface_addresses: hash; the value is a __u32, the tenant's VNI. */
struct canal_interface_address_key {
	__u32 interface; /* interface index */
	__u8 address[16];
};

/* Counters: per-CPU array canal_interface_guard_counts, __u64 each. */
enum canal_interface_guard_count {
	CANAL_INTERFACE_GUARD_PASSED_V4,
	CANAL_INTERFACE_GUARD_PASSED_V6,
	CANAL_INTERFACE_GUARD_PASSED_ARP,
	CANAL_INTERFACE_GUARD_PASSED_DISCOVERY, /* IPv6 neighbor discovery and multicast listener reports (RFC 4861, 3810) */
	CANAL_INTERFACE_GUARD_DROP_UNBOUND,     /* an interface without a bound container */
	CANAL_INTERFACE_GUARD_DROP_MAC,         /* another source MAC */
	CANAL_INTERFACE_GUARD_DROP_ADDRESS,     /* a source address that is not bound to the interface */
	CANAL_INTERFACE_GUARD_DROP_ARP,         /* ARP that claims another address or MAC */
	CANAL_INTERFACE_GUARD_DROP_DISCOVERY,   /* neighbor discovery that claims another address or MAC, or a router's role */
	CANAL_INTERFACE_GUARD_DROP_PROTOCOL,    /* neither IPv4, IPv6 nor ARP, or inside a VLAN */
	CANAL_INTERFACE_GUARD_DROP_MALFORMED,
	CANAL_INTERFACE_GUARD_COUNTS,
};

#endif
