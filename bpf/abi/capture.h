/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* What capture.bpf.c and the node proxy share. This header is the law: Rust is generated from it (dataplane/abi) and the
 * compiled object's BTF is compared with the Rust layout by a test. It holds no code.
 *
 * One form for addresses: 16 bytes, network order, IPv4 as ::ffff:a.b.c.d (RFC 4291 2.5.5.2), so that an IPv4 socket and a
 * v4-mapped IPv6 socket, which share one port space, also share one key space.
 */
#ifndef CANAL_ABI_CAPTURE_H
#define CANAL_ABI_CAPTURE_H

#include <linux/types.h>

/* Raised with any change of a layout or of a map's meaning; part of the pin path, so old and new never share a map. */
#define CANAL_CAPTURE_ABI 2

/* Where captured connections are sent, inside the pod's network namespace (Istio's number). */
#define CANAL_OUTBOUND_PORT 15001

/* Captured connections that the proxy has not accepted yet, per node. */
#define CANAL_ORIGINS_MAX 65536
/* Of one pod: its connections beyond that are refused, and those of other pods are not. */
#define CANAL_ORIGINS_POD_MAX 8192
/* Namespaces of which the counts are kept; the node serves fewer pods. */
#define CANAL_ORIGIN_PODS_MAX 4096

/* Which accepted connection: the client's own side of it. The whole source address is in the key, not only the port, because
 * a socket bound to the pod's address may use a port that another socket, bound to loopback, uses at the same time. */
struct canal_origin_key {
	__u64 netns_cookie;
	__u8 source_ip[16];
	__be16 source_port_be;
	__u8 zero[6];
};

/* Where the application meant to go. */
struct canal_origin {
	__u8 destination_ip[16];
	__be16 destination_port_be;
	__u8 zero[6];
	__u64 published_ns; /* bpf_ktime_get_ns (CLOCK_MONOTONIC) at publication */
};

/* Map canal_origin_pods: what the programs have counted for one network namespace. Map canal_origin_taken holds how many of the published
 * ones the proxy has taken, by the proxy's own count; what is left waits. */
struct canal_origin_pod {
	__u64 published;
	__u64 withdrawn;
};

/* Kept with the socket for its life: what getpeername answers, and the key to withdraw when the connection never came up. */
struct canal_socket {
	struct canal_origin_key key; /* all zero until published */
	struct canal_origin origin;
};

/* Every way out of every program has a name and a counter. Append only. */
enum canal_capture_verdict {
	CANAL_CAPTURE_LEFT_NOT_TCP = 0,		/* UDP, SCTP …: not ours */
	CANAL_CAPTURE_LEFT_LOOPBACK = 1,	/* 127.0.0.0/8, ::1, 0.0.0.0, ::: stays in the pod */
	CANAL_CAPTURE_LEFT_FAMILY = 2,		/* the address is not of the socket's family: the kernel refuses it itself */
	CANAL_CAPTURE_TAKEN_V4 = 3,
	CANAL_CAPTURE_TAKEN_V6 = 4,
	CANAL_CAPTURE_TAKEN_MAPPED = 5,		/* ::ffff:a.b.c.d on an IPv6 socket */
	CANAL_CAPTURE_REFUSED_STORAGE = 6,	/* no memory to remember the destination: ECONNREFUSED */
	CANAL_CAPTURE_REFUSED_DEVICE = 7,	/* SO_BINDTODEVICE could not be lifted: ECONNREFUSED */
	CANAL_CAPTURE_PUBLISHED = 8,
	CANAL_CAPTURE_PUBLISH_FULL = 9,		/* CANAL_ORIGINS_MAX reached: the proxy will reset the connection */
	CANAL_CAPTURE_WITHDRAWN = 10,		/* the connection never came up */
	CANAL_CAPTURE_PEER_RESTORED = 11,	/* getpeername answered with the dialled address */
	CANAL_CAPTURE_REFUSED_SHARE = 12,	/* CANAL_ORIGINS_POD_MAX of this pod wait already: ECONNREFUSED */
	CANAL_CAPTURE_VERDICTS = 13,		/* how many there are */
};

#define CANAL_OFFSET(type, field, want) \
	_Static_assert(__builtin_offsetof(struct type, field) == (want), #type "." #field " moved")
_Static_assert(sizeof(struct canal_origin_key) == 32, "canal_origin_key has a hole");
CANAL_OFFSET(canal_origin_key, source_ip, 8);
CANAL_OFFSET(canal_origin_key, source_port_be, 24);
CANAL_OFFSET(canal_origin_key, zero, 26);
_Static_assert(sizeof(struct canal_origin) == 32, "canal_origin has a hole");
CANAL_OFFSET(canal_origin, destination_port_be, 16);
CANAL_OFFSET(canal_origin, zero, 18);
CANAL_OFFSET(canal_origin, published_ns, 24);
_Static_assert(sizeof(struct canal_origin_pod) == 16, "canal_origin_pod has a hole");
_Static_assert(sizeof(struct canal_socket) == 64, "canal_socket has a hole");
CANAL_OFFSET(canal_socket, origin, 32);
#undef CANAL_OFFSET

#endif
