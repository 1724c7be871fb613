/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* What the interface guard (bpf/interface_guard.bpf.c) and its agent share: which tenant's container is behind an interface of this host,
 * and which addresses it may use. Rust is generated from this header (dataplane/abi). It holds no code.
 *
 * Addresses are 16 bytes, network order, IPv4 as ::ffff:a.b.c.d (RFC 4291 2.5.5.2). All else is host order.
 */
#ifndef CANAL_ABI_INTERFACE_GUARD_H
#define CANAL_ABI_INTERFACE_GUARD_H

#include <linux/types.h>

/* Containers with an interface of their own on one host, and addresses of all of them. */
#define CANAL_GUARDED_INTERFACES_MAX 4096
#define CANAL_INTERFACE_ADDRESSES_MAX 16384

/* Map canal_guarded_interfaces: hash, key __u32 interface index on the host's side. The program refuses everything of an interface that it
 * is on and that is not here. */
struct canal_guarded_interface {
	__u32 vni;          /* the tenant's */
	__u8 mac[6];        /* the container's */
	__u8 zero[2];
	__u64 refused;      /* frames; counted by the program */
	__u8 last_address[16]; /* source of the last frame that was refused for its address; zero: none was */
};

/* Map canal_interface_addresses: hash; value __u32, the tenant's VNI. */
struct canal_interface_address_key {
	__u32 interface; /* index */
	__u8 address[16];
};

/* Counters: per-CPU array canal_interface_guard_counts, __u64 each. */
enum canal_interface_guard_count {
	CANAL_INTERFACE_GUARD_PASSED_V4,
	CANAL_INTERFACE_GUARD_PASSED_V6,
	CANAL_INTERFACE_GUARD_PASSED_ARP,
	CANAL_INTERFACE_GUARD_PASSED_DISCOVERY, /* IPv6 neighbour discovery and multicast listener reports (RFC 4861, 3810) */
	CANAL_INTERFACE_GUARD_DROP_UNBOUND,     /* an interface that no container is bound to */
	CANAL_INTERFACE_GUARD_DROP_MAC,         /* another source MAC */
	CANAL_INTERFACE_GUARD_DROP_ADDRESS,     /* a source address that is not bound to the interface */
	CANAL_INTERFACE_GUARD_DROP_ARP,         /* ARP that claims another's address or MAC */
	CANAL_INTERFACE_GUARD_DROP_DISCOVERY,   /* neighbour discovery that claims another's address or MAC, or a router's role */
	CANAL_INTERFACE_GUARD_DROP_PROTOCOL,    /* neither IPv4, IPv6 nor ARP, or inside a VLAN */
	CANAL_INTERFACE_GUARD_DROP_MALFORMED,
	CANAL_INTERFACE_GUARD_COUNTS,
};

#endif
