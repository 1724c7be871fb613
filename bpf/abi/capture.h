/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* ABI of capture.bpf.c and the node proxy. This header is authoritative: the Rust view (dataplane/abi) is generated from it, and a test
 * compares the BTF of the compiled object with the Rust layout. It contains no code.
 *
 * Addresses have one form: 16 bytes in network order, IPv4 as ::ffff:a.b.c.d (RFC 4291 2.5.5.2). Therefore an IPv4 socket and a
 * v4-mapped IPv6 socket, which share one port space, also share one key space.
 */
#ifndef CANAL_ABI_CAPTURE_H
#define CANAL_ABI_CAPTURE_H

#include <linux/types.h>

/* Raised with every change of a layout or of a map's meaning. It is part of the pin path, so old and new programs never share a map. */
#define CANAL_CAPTURE_ABI 3

/* Port to which captured connections are redirected, inside the pod's network namespace (Istio's number). */
#define CANAL_OUTBOUND_PORT 15001
/* The proxy's other ports in a pod (Istio's numbers). None of the three may be dialed at a pod. */
#define CANAL_RESERVED_PLAINTEXT_PORT 15006
#define CANAL_RESERVED_HBONE_PORT 15008

/* Addresses to which captured connections are redirected. They are local to the namespace. A hash
 * of the destination selects one, so that two connections from one source port to two destinations
 * differ. IPv4: 127.64.0.0/10, in host order. IPv6 has only one loopback address, so
 * fd63:616e:616c:1:0:1::/96 is used, which is local by a route that the proxy adds
 * (CANAL_CAPTURED_POD_SPREADS_V6: the route exists). A namespace without an entry in
 * canal_captured_pods uses 127.0.0.1 and ::1. */
#define CANAL_PROXY_V4 0x7f400000
#define CANAL_PROXY_V4_MASK 0x003fffff
#define CANAL_PROXY_V6_0 0xfd63616e
#define CANAL_PROXY_V6_1 0x616c0001
#define CANAL_PROXY_V6_2 0x00000001

/* Captured connections of a node that the proxy has not accepted yet, at most. An entry has 64 bytes of key and value: 4 MiB for
 * all. Beyond it the proxy does not learn where a connection goes, and resets it. Nobody measured this value; it only has to exceed
 * what is dialed between two accepts of the proxy. */
#define CANAL_ORIGINS_MAX 65536
/* Such connections of one pod, at most: further ones are refused, and those of other pods are not affected. An eighth of
 * CANAL_ORIGINS_MAX, so one pod cannot use up the node's map. It is twice the proxy's accept queue for one listener (BACKLOG in
 * dataplane/net/src/sys.rs). */
#define CANAL_ORIGINS_POD_MAX 8192
/* Namespaces whose counts are stored, at most. A node serves at most 1,000 pods (PODS_MAX of the node proxy), so this never limits. */
#define CANAL_ORIGIN_PODS_MAX 4096

/* Tenants, ranges of their addresses, and single addresses per node for which the connect hook knows the proxy's decision, at most.
 * A node serves 1,000 pods at most, so no more tenants than that. One tenant may use a 64th of the ranges (256) and a quarter of the
 * addresses (65,536), which dataplane/offload/src/connect_tables.rs enforces. Beyond each limit the proxy decides, and nothing is
 * refused here. An address takes 52 bytes of key and value: 13 MiB for all. */
#define CANAL_CAPTURED_TENANTS_MAX 4096
#define CANAL_RANGES_MAX 16384
#define CANAL_DESTINATIONS_MAX 262144
/* Ports of one address, at most. The proxy decides on an address with more. With 13 ports the value has 32 bytes. */
#define CANAL_DESTINATION_PORTS_MAX 13

/* Key of an accepted connection: both its ends. The key contains the whole source address and not
 * only the port: a socket bound to the pod's address may use the same port as a socket bound to
 * loopback. It contains the proxy's address, because one source may have connections to several. */
struct canal_origin_key {
	__u64 netns_cookie;
	__u8 source_ip[16];
	__be16 source_port_be;
	__u8 zero[2];
	__be32 proxy_suffix_be; /* the last four bytes of the proxy's address */
};

/* Original destination of a connection. */
struct canal_origin {
	__u8 destination_ip[16];
	__be16 destination_port_be;
	__u8 zero[6];
	__u64 published_ns; /* bpf_ktime_get_ns (CLOCK_MONOTONIC) at publication */
};

/* Map canal_origin_pods: the programs' counts for one network namespace. Map canal_origin_taken contains how many of the published
 * origins the proxy has taken, by the proxy's own count; the rest waits. */
struct canal_origin_pod {
	__u64 published;
	__u64 withdrawn;
};

/* Stored with the socket for its life: the results of getpeername and getsockname, and the key to withdraw if no connection was
 * established. */
struct canal_socket {
	struct canal_origin_key key; /* the cookie is zero until publication */
	struct canal_origin origin;
	__u8 local_ip[16]; /* replaces the loopback address that the kernel selected; all zero: the application selected it */
};

/* Map canal_captured_pods: the proxy's settings for one network namespace, by its cookie. */
#define CANAL_CAPTURED_POD_SPREADS_V6 1 /* the route for CANAL_PROXY_V6 exists */
#define CANAL_CAPTURED_POD_HAS_MORE 2	/* more addresses than fit here: connects are not checked */
struct canal_captured_pod {
	__u8 ip4[16]; /* the pod's address of each family; all zero: none */
	__u8 ip6[16];
	__u32 tenant; /* key of canal_captured_tenants */
	__u32 flags;
};

/* Map canal_captured_tenants. Without an entry the tenant is unknown, and everything is captured. Each field is a verdict, 0 for none. */
struct canal_captured_tenant {
	__u32 all;     /* refuses everything but the pod itself */
	__u32 outside; /* refuses what is neither in canal_destinations nor in canal_ranges */
};

/* Map canal_destinations: single addresses of a tenant, which take precedence over ranges. An element is replaced as a whole. */
struct canal_destination_key {
	__u32 tenant;
	__u8 ip[16];
};
struct canal_destination {
	__u32 refused; /* the verdict for other ports than these; 0: all are captured */
	__u16 ports;   /* number of ports */
	__be16 port_be[CANAL_DESTINATION_PORTS_MAX];
};

/* Map canal_ranges: LPM trie. The value is the verdict that refuses the whole range; 0: pods, where only reserved ports are refused. */
struct canal_range_key {
	__u32 prefixlen; /* of the tenant and the address: 32 more than the address's own of 128 bits */
	__u32 tenant;
	__u8 ip[16];
};

/* Map canal_connect_refusals, by the namespace's cookie: refusals of the connect hook by verdict, and the last destination of each. The
 * last destination is written without a lock, because it serves a log line and not a decision. */
#define CANAL_CONNECT_REFUSALS 5
struct canal_refused_destination {
	__u8 ip[16];
	__be16 port_be;
	__u8 zero[6];
};
struct canal_connect_refusals {
	__u64 count[CANAL_CONNECT_REFUSALS];
	struct canal_refused_destination last[CANAL_CONNECT_REFUSALS];
};

/* Every result of every program has a name and a counter. Append only. */
enum canal_capture_verdict {
	CANAL_CAPTURE_LEFT_NOT_TCP = 0,		/* UDP, SCTP …: not captured */
	CANAL_CAPTURE_LEFT_LOOPBACK = 1,	/* 127.0.0.0/8, ::1, 0.0.0.0, ::: stays in the pod */
	CANAL_CAPTURE_LEFT_FAMILY = 2,		/* the address is not of the socket's family: the kernel refuses it itself */
	CANAL_CAPTURE_TAKEN_V4 = 3,
	CANAL_CAPTURE_TAKEN_V6 = 4,
	CANAL_CAPTURE_TAKEN_MAPPED = 5,		/* ::ffff:a.b.c.d on an IPv6 socket */
	CANAL_CAPTURE_REFUSED_STORAGE = 6,	/* no memory to store the destination: ECONNREFUSED */
	CANAL_CAPTURE_REFUSED_DEVICE = 7,	/* SO_BINDTODEVICE could not be removed: ECONNREFUSED */
	CANAL_CAPTURE_PUBLISHED = 8,
	CANAL_CAPTURE_PUBLISH_FULL = 9,		/* CANAL_ORIGINS_MAX reached: the proxy will reset the connection */
	CANAL_CAPTURE_WITHDRAWN = 10,		/* the connection was never established */
	CANAL_CAPTURE_PEER_RESTORED = 11,	/* getpeername returned the dialed address */
	CANAL_CAPTURE_REFUSED_SHARE = 12,	/* CANAL_ORIGINS_POD_MAX of this pod wait already: ECONNREFUSED */
	CANAL_CAPTURE_LOCAL_RESTORED = 13,	/* getsockname returned the pod's address */
	/* The proxy would refuse these anyway, so they are refused at connect(): ECONNREFUSED. One block of CANAL_CONNECT_REFUSALS. */
	CANAL_CAPTURE_REFUSED_UNKNOWN_PORT = 14,
	CANAL_CAPTURE_REFUSED_OUTSIDE_MESH = 15,
	CANAL_CAPTURE_REFUSED_RESERVED_PORT = 16,
	CANAL_CAPTURE_REFUSED_GATEWAY_ADDRESS = 17,
	CANAL_CAPTURE_REFUSED_TENANT_CLOSED = 18,
	CANAL_CAPTURE_VERDICTS = 19,		/* number of verdicts */
};

#define CANAL_OFFSET(type, field, want) \
	_Static_assert(__builtin_offsetof(struct type, field) == (want), #type "." #field " moved")
_Static_assert(sizeof(struct canal_origin_key) == 32, "canal_origin_key has a hole");
CANAL_OFFSET(canal_origin_key, source_ip, 8);
CANAL_OFFSET(canal_origin_key, source_port_be, 24);
CANAL_OFFSET(canal_origin_key, zero, 26);
CANAL_OFFSET(canal_origin_key, proxy_suffix_be, 28);
_Static_assert(sizeof(struct canal_origin) == 32, "canal_origin has a hole");
CANAL_OFFSET(canal_origin, destination_port_be, 16);
CANAL_OFFSET(canal_origin, zero, 18);
CANAL_OFFSET(canal_origin, published_ns, 24);
_Static_assert(sizeof(struct canal_origin_pod) == 16, "canal_origin_pod has a hole");
_Static_assert(sizeof(struct canal_socket) == 80, "canal_socket has a hole");
CANAL_OFFSET(canal_socket, origin, 32);
CANAL_OFFSET(canal_socket, local_ip, 64);
_Static_assert(sizeof(struct canal_captured_pod) == 40, "canal_captured_pod has a hole");
_Static_assert(sizeof(struct canal_captured_tenant) == 8, "canal_captured_tenant has a hole");
_Static_assert(sizeof(struct canal_destination_key) == 20, "canal_destination_key has a hole");
_Static_assert(sizeof(struct canal_destination) == 32, "canal_destination has a hole");
_Static_assert(sizeof(struct canal_range_key) == 24, "canal_range_key has a hole");
_Static_assert(sizeof(struct canal_refused_destination) == 24, "canal_refused_destination has a hole");
_Static_assert(sizeof(struct canal_connect_refusals) == 160, "canal_connect_refusals has a hole");
_Static_assert(CANAL_CAPTURE_REFUSED_TENANT_CLOSED - CANAL_CAPTURE_REFUSED_UNKNOWN_PORT + 1 == CANAL_CONNECT_REFUSALS, "a block");
#undef CANAL_OFFSET

#endif
