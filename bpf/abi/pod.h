/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* ABI of pod.bpf.c and the node proxy. This header is authoritative: the Rust view (dataplane/abi) is generated from it. It contains no
 * code. */
#ifndef CANAL_ABI_POD_H
#define CANAL_ABI_POD_H

#include <linux/types.h>

/* Raised with every change of a layout or of a map's meaning. It is part of the pins' names, so old and new programs never share a map. */
#define CANAL_POD_ABI 2

/* Map canal_pod_mode: array of one. Zero, its initial value, is the stricter mode. */
#define CANAL_POD_STOP 0  /* outboundTrafficPolicy: Deny; packets that the mesh does not carry are dropped */
#define CANAL_POD_WATCH 1 /* outboundTrafficPolicy: Passthrough; they are counted */

/* Map canal_pod_resolvers: hash of addresses in the form of abi/capture.h. As many as the compiler accepts for a tenant
 * (RESOLVERS_MAX in compiler/ir/src/limits.rs); the node omits further ones. */
#define CANAL_POD_RESOLVERS_MAX 64
#define CANAL_POD_DNS_PORT 53

/* Map canal_pod_udp_ports: hash of the pod's own UDP ports that UDPRoutes name, in host order. As many as the compiler accepts for a
 * workload (UDP_PORTS_PER_WORKLOAD_MAX in model/src/limits.rs), which the node proxy asserts when it is compiled. */
#define CANAL_POD_UDP_PORTS_MAX 64

/* Map canal_pod_tier: LPM trie of the addresses from which the tier sends datagrams to those ports, and to which their responses go.
 * Nobody measured this value. The node omits further ranges, so datagrams from them are stopped. */
#define CANAL_POD_TIER_MAX 256

/* Key of canal_pod_tier. */
struct canal_pod_range {
	__u32 prefixlen; /* of the address's 128 bits */
	__u8 ip[16];
};

/* Longest ARP and neighbor discovery of the kernel itself, in bytes from the network header: longer packets carry data. ARP for IPv4
 * has 28 bytes, and 46 with the padding to Ethernet's shortest frame. Neighbor discovery has 40 bytes of IPv6 and 24 of ICMPv6,
 * which leaves 64 for options, of which a MAC takes 8. */
#define CANAL_POD_ARP_MAX 50
#define CANAL_POD_NEIGHBOUR_MAX 128
/* Longest multicast listener report: the header, the hop-by-hop option, 8 bytes, and 20 for each of 22 groups. That is 496 bytes; a
 * report of more groups is dropped. */
#define CANAL_POD_LISTENER_MAX 512

/* Map canal_pod_last: array of one, the packet that was stopped last. Written without a lock, because it serves a log line and not a
 * decision. */
struct canal_pod_packet {
	__u8 remote_ip[16];
	__be16 remote_port_be; /* 0: the protocol has no ports */
	__u8 protocol;	       /* IANA's number; 0: not an IP packet */
	__u8 is_outgoing;
	__u32 verdict; /* 0: none was stopped */
};

/* Map canal_pod_counts, per pod. Every result of every program has a name and a counter. Verdicts that pass precede those that stop; the
 * blocks STOPPED and CLEAR have the same order. A change of the order needs a new CANAL_POD_ABI. */
enum canal_pod_verdict {
	CANAL_POD_PASSED_LOOPBACK = 0,	/* stays in the pod */
	CANAL_POD_PASSED_TCP = 1,	/* of a TCP socket: left to capture and inbound; into the pod: all TCP */
	CANAL_POD_PASSED_RESET = 2,	/* the kernel's own RST or ACK, without payload */
	CANAL_POD_PASSED_RESOLVER = 3,	/* DNS to or from a resolver that the tenant names */
	CANAL_POD_PASSED_NEIGHBOUR = 4, /* ARP, IPv6 neighbor discovery, multicast listener reports */
	CANAL_POD_PASSED_ERROR = 5,	/* an ICMP error about the pod's TCP, its DNS, or its responses to the tier */
	CANAL_POD_PASSED_UDP_ROUTE = 6, /* UDP between the tier and a port that a UDPRoute names */
	CANAL_POD_LEFT_WATCHED = 7,	/* outboundTrafficPolicy: Passthrough; counted where it leaves the pod */
	CANAL_POD_STOPPED_UDP = 8,
	CANAL_POD_STOPPED_ICMP = 9,
	CANAL_POD_STOPPED_SCTP = 10,
	CANAL_POD_STOPPED_TCP = 11,	/* TCP that no TCP socket sent: a raw socket, or a forwarded packet */
	CANAL_POD_STOPPED_PROTOCOL = 12, /* any other IP protocol */
	CANAL_POD_STOPPED_FRAME = 13,	/* not IP, or neighbor discovery that carries data */
	CANAL_POD_STOPPED_PACKET_SOCKET = 14, /* AF_PACKET or AF_XDP, whatever the content */
	CANAL_POD_STOPPED_MALFORMED = 15, /* incomplete or invalid headers */
	CANAL_POD_CLEAR_UDP = 16,
	CANAL_POD_CLEAR_ICMP = 17,
	CANAL_POD_CLEAR_SCTP = 18,
	CANAL_POD_CLEAR_TCP = 19,
	CANAL_POD_CLEAR_PROTOCOL = 20,
	CANAL_POD_CLEAR_FRAME = 21,
	CANAL_POD_CLEAR_PACKET_SOCKET = 22,
	CANAL_POD_CLEAR_MALFORMED = 23,
	CANAL_POD_VERDICTS = 24, /* number of verdicts */
};

_Static_assert(sizeof(struct canal_pod_packet) == 24, "canal_pod_packet has a hole");
_Static_assert(sizeof(struct canal_pod_range) == 20, "canal_pod_range has a hole");
_Static_assert(CANAL_POD_CLEAR_MALFORMED - CANAL_POD_CLEAR_UDP == CANAL_POD_STOPPED_MALFORMED - CANAL_POD_STOPPED_UDP, "the blocks differ");

#endif
