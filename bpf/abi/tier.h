/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* ABI of the cloud tier's programs (edge, redirector, socket steering, session count) and their agents. This header is authoritative:
 * the Rust view (dataplane/abi) is generated from it, and a test compares the BTF of the compiled objects with the Rust layouts. It
 * contains no code.
 *
 * Addresses are 16 bytes in network order, IPv4 as ::ffff:a.b.c.d (RFC 4291 2.5.5.2). Fields that end in _be are in network order;
 * everything else is in host order.
 */
#ifndef CANAL_ABI_TIER_H
#define CANAL_ABI_TIER_H

#include <linux/types.h>

/* Raised with every change of a layout or of a map's meaning. It is part of the pin path, so old and new programs never share a map. */
#define CANAL_TIER_ABI 3

/* VXLAN (RFC 7348). The tier's own VNI is used only between edges and replicas; no tenant may have it. */
#define CANAL_VXLAN_PORT 4789
/* Any reserved number of 24 bits would do; this one spells CANAL as far as hexadecimal digits can. */
#define CANAL_TIER_VNI 0xCA0A1

/* Address of a service inside the tier: 240.0.0.0/8 + service ID, and fdca:a1:0:240::/96 + service ID. 240.0.0.0/4 is reserved (RFC
 * 1112 4), so no tenant's pod has such an address. A /8 leaves the 24 bits of a service ID. */
#define CANAL_SERVICE_NET4 0xF0000000u
/* Addresses of the tier's own hosts, from which replicas dial endpoints: 250.0.0.0/8, and fdca:a1:0:250::/96 + that IPv4 address. */
#define CANAL_TIER_NET4 0xFA000000u
/* High 64 bits of both IPv6 prefixes in host order. The next 32 bits are zero. */
#define CANAL_SERVICE_NET6 0xFDCA00A100000240ull
#define CANAL_TIER_NET6 0xFDCA00A100000250ull

/* MAC of every replica's tunnel device, and MAC of every edge in its tenants' overlays. Both are locally administered (bit 0x02 of
 * the first byte), so no manufacturer assigns them. */
#define CANAL_REPLICA_MAC {0x02, 0xca, 0x0a, 0x01, 0x00, 0x01}
#define CANAL_EDGE_MAC {0x02, 0xca, 0x0a, 0x01, 0x00, 0x02}

/* HBONE's port (Istio's number); every other TCP port of a service address is plain. */
#define CANAL_HBONE_PORT 15008
#define CANAL_DNS_PORT 53

/* Bucket tables (Canal appendix C, fig. 26): every service has this many buckets, every bucket a chain of at most this many replicas. */
#define CANAL_BUCKETS 128
#define CANAL_CHAIN 8

/* Stamp of a packet inside the tier, in the first reserved field of the VXLAN header (24 bits; RFC 7348). It contains the version of the
 * table that selected the replica, and what that table, or another since, could not decide. */
#define CANAL_STAMP_VERSION 0x1fffffu /* low bits of the version */
#define CANAL_STAMP_MIXED_VERSIONS 0x200000u   /* tables of two versions took part */
#define CANAL_STAMP_SKIPPED 0x400000u /* a member was skipped because it was not up */
#define CANAL_STAMP_LAST 0x800000u    /* the chain is walked once more, including skipped members */

/* Map sizes. A table has 2,056 bytes, so 16,384 services take 33 MiB. Addresses: four for each service. Prefixes: eight tenants with
 * 8,192 nodes (NODES_PER_TENANT_MAX of the compiler's limits). Replicas: the number 0 ends a chain, so 4,095 can be registered.
 * Throttles: two for each service. Nobody measured these values. The agents omit what does not fit, by name, and divide each map
 * among the tenants. */
#define CANAL_SERVICES_MAX 16384
#define CANAL_REPLICAS_MAX 4096
#define CANAL_ADDRESSES_MAX 65536
#define CANAL_PREFIXES_MAX 65536
#define CANAL_THROTTLES_MAX 32768
/* Source ports, and so tunnels, from an edge to one replica, at most: ten for each of 64 cores (Canal 4.4). */
#define CANAL_TUNNELS_MAX 640

/* Map canal_tables: hash, key __u32 service ID; the service's bucket table at one AZ. 0 ends a chain. The head receives new sessions;
 * every member receives the sessions that it owns. */
struct canal_table {
	__u32 vni;     /* the VNI of the service's tenant */
	__u32 version; /* raised with each change of this table */
	__u16 chain[CANAL_BUCKETS][CANAL_CHAIN]; /* replica numbers */
};

enum canal_replica_state {
	CANAL_REPLICA_UNKNOWN = 0, /* an empty slot: never selected */
	CANAL_REPLICA_UP = 1,      /* receives packets, draining or not; which ones follows from its positions in chains */
	CANAL_REPLICA_DOWN = 2,    /* skipped */
	CANAL_REPLICA_SUSPECT = 3, /* down since a moment ago: no new sessions, but packets of its own, since it may only be slow */
};

/* Map canal_replicas: array, index = replica number. 0 is not a replica. */
struct canal_replica {
	__be32 address_be; /* underlay */
	__u32 state;       /* enum canal_replica_state */
};

/* Map canal_hosts: hash, key __be32 underlay address of every edge and replica of the tier; value __u32, a replica's number, or 0.
 * Packets with the tier's VNI from any other host have an unknown source. */

/* Map canal_addresses (edge): hash; the tenants' gateway addresses in this edge's AZ. */
struct canal_address_key {
	__u32 vni;
	__u8 address[16];
};
struct canal_address {
	__u32 service;
};

/* Map canal_returns (edge): hash, key __u32 service ID; the VNI and the addresses that responses of the service get. */
struct canal_return {
	__u32 vni;
	__u8 address4[16]; /* v4-mapped; zero if the service has none */
	__u8 address6[16];
};

/* Map canal_prefixes (edge): LPM trie; the node of the tenant that has this pod address. prefixlen includes the 32 bits of the VNI.
 * vni_be is in network order because a trie compares bytes. */
struct canal_prefix_key {
	__u32 prefixlen;
	__be32 vni_be;
	__u8 address[16];
};
struct canal_prefix {
	__be32 node_be; /* underlay address */
	__u8 mac[6];    /* of the node's tunnel device */
	__u8 zero[2];
};

/* Map canal_nodes (edge): hash; the hosts that may send with a tenant's VNI. The value is a __u32, always 1. */
struct canal_node_key {
	__u32 vni;
	__be32 address_be;
};

/* Map canal_tunnels (edge): hash, key __be32 underlay address of a replica; the source ports that the replica's receive hash spreads
 * evenly over its cores, as the replica itself has determined. A replica without an element gets canal_edge_settings.tunnels ports from
 * tunnel_port. */
struct canal_tunnels {
	__u32 count; /* 1 to CANAL_TUNNELS_MAX */
	__u16 ports[CANAL_TUNNELS_MAX];
};

/* Map canal_throttles: hash; early limits of a service or a tenant, in tokens per second. 0 is no limit. One element is one pair of
 * token buckets for the whole replica. Only packets that come from an edge are charged: a replica that forwards a packet has charged it. */
#define CANAL_THROTTLE_SERVICE 0
#define CANAL_THROTTLE_TENANT 1
struct canal_throttle_key {
	__u32 scope; /* CANAL_THROTTLE_* */
	__u32 id;    /* service ID, or VNI */
};
struct canal_bucket {
	__u64 rate;   /* tokens per second */
	__u64 burst;  /* tokens, at most */
	__u64 tokens; /* in 1/1e9 of a token */
	__u64 at_ns;  /* time of the last refill */
	__u64 refused;
};
struct canal_throttle {
	__u32 lock; /* struct bpf_spin_lock in C; Rust only writes whole elements, with BPF_F_LOCK */
	__u32 part; /* this replica's part of the limit, in 1/CANAL_BUCKETS; 0: all of it */
	struct canal_bucket sessions; /* SYNs and UDP datagrams */
	struct canal_bucket packets;
};

/* Read-only settings, which are set before load; one object per program. */
struct canal_edge_settings {
	__be32 address_be; /* tunnel endpoint: the edge's underlay address, or the one that all edges of its AZ share */
	__u32 tunnels;     /* source ports for a replica that has no element in canal_tunnels */
	__u32 aggregate;   /* 0: the source port contains each flow's hash instead, as RFC 7348 5 recommends */
	__u32 tunnel_port; /* first source port */
	__u32 mtu;         /* largest inner packet (with its IP header) that the tier accepts; larger ones are answered by ICMP */
};
struct canal_redirector_settings {
	__be32 address_be; /* the replica's underlay address */
	__u32 number;      /* its number in bucket tables; changes with registration: map canal_self index 0 */
	__be32 edge_be;    /* the edge of its AZ */
	__u32 mtu;
};

/* Map canal_service_listeners: sockmap; the gateway's listening sockets. One socket of each reuse-port group is enough. */
#define CANAL_LISTENER_HBONE4 0
#define CANAL_LISTENER_PLAIN4 1
#define CANAL_LISTENER_DNS4 2
/* The size of the map, of which three are used. */
#define CANAL_LISTENERS 8

/* Maps canal_sessions_outer and canal_sessions_inner (underlay session table): hash without LRU; times in ns. */
struct canal_session_key {
	__u8 source[16];
	__u8 destination[16];
	__be16 source_port_be;
	__be16 destination_port_be;
	__u8 protocol;
	__u8 zero[3];
	__u32 vni; /* 0 in the outer table */
};
struct canal_session {
	__u64 first_ns;
	__u64 last_ns;
	__u64 packets;
};
/* Sessions of one link that are counted, at most. An entry has 68 bytes of key and value: 34 MiB for each of the two maps. Beyond it
 * sessions pass and are counted as not counted; nobody measured this value. */
#define CANAL_SESSIONS_MAX 524288

/* Counters: per-CPU arrays canal_edge_counts and canal_redirector_counts, __u64 each. */
enum canal_edge_count {
	CANAL_EDGE_TO_REPLICA,        /* packets of service flows, sent to a replica */
	CANAL_EDGE_TO_DOWN,           /* first packets of sessions without a replica that is up, sent to the chain's first one */
	CANAL_EDGE_TO_NODE,           /* responses, sent to a tenant's node */
	CANAL_EDGE_DIALLED,           /* replicas' own connections to endpoints, sent to a node */
	CANAL_EDGE_ANSWERED,          /* their responses, sent to the replica */
	CANAL_EDGE_ICMP_TRANSLATED,
	CANAL_EDGE_TOO_BIG,           /* answered with ICMP fragmentation needed / packet too big */
	CANAL_EDGE_DROP_UNKNOWN_SOURCE,     /* a VNI from a host that is no node of the tenant, or the tier's VNI from no replica */
	CANAL_EDGE_DROP_FORGED,       /* an inner source that does not belong to the sender */
	CANAL_EDGE_DROP_ADDRESS,      /* a destination that is no gateway address of the tenant */
	CANAL_EDGE_DROP_SERVICE,      /* a service without a bucket table here */
	CANAL_EDGE_DROP_REPLICA,      /* no replica of the chain is up, and the packet begins no session, or the edge does not know the chain's first */
	CANAL_EDGE_DROP_NODE,         /* no node has this pod address */
	CANAL_EDGE_DROP_FRAGMENT,     /* inner or outer fragments: they carry no ports */
	CANAL_EDGE_DROP_MALFORMED,
	CANAL_EDGE_DROP_PROTOCOL,     /* neither TCP, UDP nor ICMP */
	CANAL_EDGE_PASSED,            /* not for the edge program: passed to the host's stack */
	CANAL_EDGE_COUNTS,
};
enum canal_redirector_count {
	CANAL_REDIRECTOR_NEW,            /* SYNs delivered here */
	CANAL_REDIRECTOR_OWNED,          /* packets of sessions with a socket here */
	CANAL_REDIRECTOR_COOKIE,         /* valid SYN cookies */
	CANAL_REDIRECTOR_FORWARDED_NEW,  /* SYNs forwarded to the head */
	CANAL_REDIRECTOR_FORWARDED,      /* packets forwarded along the chain */
	CANAL_REDIRECTOR_UNOWNED,        /* the end of the chain: the kernel resets */
	CANAL_REDIRECTOR_OWNERSHIP_UNSETTLED,      /* the end of the chain between two table versions: dropped, TCP retransmits */
	CANAL_REDIRECTOR_NOT_LISTENING,  /* SYNs forwarded because no gateway listens here */
	CANAL_REDIRECTOR_DATAGRAM,       /* UDP delivered here */
	CANAL_REDIRECTOR_ICMP,
	CANAL_REDIRECTOR_ANSWER,         /* packets of connections that the gateway dialed */
	CANAL_REDIRECTOR_TOO_BIG,        /* fragmented on the path: answered with ICMP fragmentation needed / packet too big */
	CANAL_REDIRECTOR_DROP_UNKNOWN_SOURCE,
	CANAL_REDIRECTOR_DROP_CROSSED,   /* a response with another VNI than the socket's mark */
	CANAL_REDIRECTOR_DROP_SERVICE,   /* no bucket table: the service is not served here */
	CANAL_REDIRECTOR_DROP_FRAGMENT,
	CANAL_REDIRECTOR_DROP_MALFORMED,
	CANAL_REDIRECTOR_DROP_PROTOCOL,
	CANAL_REDIRECTOR_THROTTLED_SERVICE_SESSIONS,
	CANAL_REDIRECTOR_THROTTLED_SERVICE_PACKETS,
	CANAL_REDIRECTOR_THROTTLED_TENANT_SESSIONS,
	CANAL_REDIRECTOR_THROTTLED_TENANT_PACKETS,
	CANAL_REDIRECTOR_PASSED,         /* not of the tier: passed to the host's stack */
	CANAL_REDIRECTOR_COUNTS,
};

/* Map canal_tunnel_counts: packets that leave a replica through its VXLAN device. */
enum canal_tunnel_count {
	CANAL_TUNNEL_SERVICE,       /* responses of services */
	CANAL_TUNNEL_DIALLED,       /* packets of connections that the gateway dials for tenants */
	CANAL_TUNNEL_DROP_SOURCE,   /* a source that is neither a service (no mark) nor this replica (mark) */
	CANAL_TUNNEL_DROP_MARK,     /* a mark that is no tenant's VNI */
	CANAL_TUNNEL_DROP_PROTOCOL, /* neither IPv4 nor IPv6 */
	CANAL_TUNNEL_DROP_KEY,      /* the kernel had no memory for a tunnel key */
	CANAL_TUNNEL_COUNTS,
};
/* Map canal_steering_counts: socket lookups for service addresses, by the redirector and by the stack. */
enum canal_steering_count {
	CANAL_STEERING_HBONE,
	CANAL_STEERING_PLAIN,
	CANAL_STEERING_DNS,
	CANAL_STEERING_NO_LISTENER, /* no socket for this listener */
	CANAL_STEERING_COUNTS,
};
/* Map canal_sessions_counts: results of the session count. */
enum canal_sessions_count {
	CANAL_SESSIONS_OUTER,      /* first packets of sessions */
	CANAL_SESSIONS_INNER,
	CANAL_SESSIONS_OUTER_FULL, /* packets of sessions that did not fit into the table */
	CANAL_SESSIONS_INNER_FULL,
	CANAL_SESSIONS_OTHER,      /* packets without ports, and malformed ones */
	CANAL_SESSIONS_PACKETS,
	CANAL_SESSIONS_COUNTS,
};

#endif
