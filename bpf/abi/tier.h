/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* What the cloud tier's programs (edge, redirector, doors, sessions) and their agents share. This header is the law: Rust is
 * generated from it (dataplane/abi) and the compiled objects' BTF is compared with the Rust layouts by a test. It holds no code.
 *
 * Addresses are 16 bytes, network order, IPv4 as ::ffff:a.b.c.d (RFC 4291 2.5.5.2). Fields that end in _be are network order;
 * everything else is host order.
 */
#ifndef CANAL_ABI_TIER_H
#define CANAL_ABI_TIER_H

#include <linux/types.h>

/* Raised with any change of a layout or of a map's meaning; part of the pin path, so old and new never share a map. */
#define CANAL_TIER_ABI 1

/* VXLAN (RFC 7348). The tier's own VNI is between edges and replicas only; no tenant may have it. */
#define CANAL_VXLAN_PORT 4789
#define CANAL_TIER_VNI 0xCA0A1

/* Where a service is on the inside of the tier: 240.0.0.0/8 + service ID, and fdca:a1:0:240::/96 + service ID. */
#define CANAL_SERVICE_NET4 0xF0000000u
/* The tier's own hosts, from which replicas dial endpoints: 250.0.0.0/8, and fdca:a1:0:250::/96 + that IPv4 address. */
#define CANAL_TIER_NET4 0xFA000000u
/* High 64 bits of both IPv6 prefixes, host order. The next 32 are zero. */
#define CANAL_SERVICE_NET6 0xFDCA00A100000240ull
#define CANAL_TIER_NET6 0xFDCA00A100000250ull

/* The one MAC of every replica's tunnel device, and the one of every edge as its tenants' overlays see it. */
#define CANAL_REPLICA_MAC {0x02, 0xca, 0x0a, 0x01, 0x00, 0x01}
#define CANAL_EDGE_MAC {0x02, 0xca, 0x0a, 0x01, 0x00, 0x02}

/* HBONE's port; any other TCP port of a service address is plain. */
#define CANAL_HBONE_PORT 15008
#define CANAL_DNS_PORT 53

/* Bucket tables (Canal appendix C, fig. 26): every service has this many buckets, every bucket a chain of so many replicas. */
#define CANAL_BUCKETS 128
#define CANAL_CHAIN 8

/* What a packet inside the tier carries in the VXLAN header's first reserved field (24 bits; RFC 7348): by which version of the table its
 * replica was chosen, and what that table, or another since, could not say. */
#define CANAL_STAMP_VERSION 0x1fffffu /* low bits of the version */
#define CANAL_STAMP_MIXED 0x200000u   /* tables of two versions have had a say */
#define CANAL_STAMP_SKIPPED 0x400000u /* somebody was passed over for not being up */
#define CANAL_STAMP_LAST 0x800000u    /* once more along the chain, whoever was passed over */

#define CANAL_SERVICES_MAX 16384
#define CANAL_REPLICAS_MAX 4096
#define CANAL_ADDRESSES_MAX 65536
#define CANAL_PREFIXES_MAX 65536
#define CANAL_THROTTLES_MAX 32768

/* A service's bucket table at one AZ. Map canal_tables: hash, key __u32 service ID. 0 ends a chain. The head takes new sessions;
 * all take the sessions they own. */
struct canal_table {
	__u32 vni;     /* the tenant's */
	__u32 version; /* raised with each change of this table */
	__u16 chain[CANAL_BUCKETS][CANAL_CHAIN]; /* replica numbers */
};

enum canal_replica_state {
	CANAL_REPLICA_UNKNOWN = 0, /* an empty slot: never chosen */
	CANAL_REPLICA_UP = 1,      /* takes packets, draining or not: what it takes follows from its places in chains */
	CANAL_REPLICA_DOWN = 2,    /* skipped */
	CANAL_REPLICA_SUSPECT = 3, /* down since a moment ago: no new sessions, but those it has may only have been slow */
};

/* Map canal_replicas: array, index = replica number (0 is nobody). */
struct canal_replica {
	__be32 address_be; /* underlay */
	__u32 state;       /* enum canal_replica_state */
};

/* Map canal_hosts: hash, key __be32 underlay address of every edge and replica of the tier; value __u32, a replica's number or 0.
 * Packets with the tier's VNI from anybody else are strangers. */

/* Map canal_addresses (edge): hash; the tenant's gateway addresses of this edge's AZ. */
struct canal_address_key {
	__u32 vni;
	__u8 address[16];
};
struct canal_address {
	__u32 service;
};

/* Map canal_returns (edge): hash, key __u32 service ID; what the way back restores. */
struct canal_return {
	__u32 vni;
	__u8 address4[16]; /* v4-mapped; zero if the service has none */
	__u8 address6[16];
};

/* Map canal_prefixes (edge): LPM trie; which node of the tenant has this pod address. prefixlen counts the VNI's 32 bits too;
 * vni_be is network order because a trie compares bytes. */
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

/* Map canal_nodes (edge): hash; who may send with a tenant's VNI. Value __u32, always 1. */
struct canal_node_key {
	__u32 vni;
	__be32 address_be;
};

/* Map canal_throttles: hash; key: a service's or a tenant's early limits, in tokens per second. 0 is no limit. One element is one
 * pair of buckets for the whole replica. Only packets that come from an edge are charged: what another replica passed on was charged
 * there. */
#define CANAL_THROTTLE_SERVICE 0
#define CANAL_THROTTLE_TENANT 1
struct canal_throttle_key {
	__u32 scope; /* CANAL_THROTTLE_* */
	__u32 id;    /* service ID, or VNI */
};
struct canal_bucket {
	__u64 rate;   /* tokens per second */
	__u64 burst;  /* most tokens */
	__u64 tokens; /* in 1/1e9 of a token */
	__u64 at_ns;  /* of the last refill */
	__u64 refused;
};
struct canal_throttle {
	__u32 lock; /* struct bpf_spin_lock in C; no other access from Rust than whole writes with BPF_F_LOCK */
	__u32 part; /* of the limit that is this replica's, in 1/CANAL_BUCKETS; 0: all of it */
	struct canal_bucket sessions; /* SYNs and UDP datagrams */
	struct canal_bucket packets;
};

/* Read-only settings, set before load; one object per program. */
struct canal_edge_settings {
	__be32 address_be; /* the edge's underlay address */
	__u32 tunnels;     /* source ports per replica; about 10 x cores (Canal 4.4) */
	__u32 aggregate;   /* 0: the source port carries each flow's hash instead, as RFC 7348 5 recommends */
	__u32 tunnel_port; /* first source port */
	__u32 mtu;         /* largest inner packet (with its IP header) that the tier takes; larger ones are answered by ICMP */
};
struct canal_redirector_settings {
	__be32 address_be; /* the replica's underlay address */
	__u32 number;      /* its number in bucket tables; changes with registration: map canal_self index 0 */
	__be32 edge_be;    /* the edge of its AZ */
	__u32 mtu;
};

/* Map canal_doors: sockmap; the gateway's listening sockets. One socket of each reuse-port group is enough. */
#define CANAL_DOOR_HBONE4 0
#define CANAL_DOOR_PLAIN4 1
#define CANAL_DOOR_DNS4 2
#define CANAL_DOORS 8

/* Map canal_sessions_outer / canal_sessions_inner (underlay session table): LRU-less hash, last seen in ns. */
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
#define CANAL_SESSIONS_MAX 524288

/* Counters: per-CPU arrays canal_edge_counts and canal_redirector_counts, __u64 each. */
enum canal_edge_count {
	CANAL_EDGE_TO_REPLICA,        /* service flows sent to a replica */
	CANAL_EDGE_TO_NODE,           /* answers sent to a tenant's node */
	CANAL_EDGE_DIALLED,           /* replicas' own connections to endpoints, sent to a node */
	CANAL_EDGE_ANSWERED,          /* their answers, sent to the replica */
	CANAL_EDGE_ICMP_TRANSLATED,
	CANAL_EDGE_TOO_BIG,           /* answered with ICMP fragmentation needed / packet too big */
	CANAL_EDGE_DROP_STRANGER,     /* a VNI from a host that is no node of the tenant, or the tier's VNI from no replica */
	CANAL_EDGE_DROP_FORGED,       /* an inner source that is not the sender's */
	CANAL_EDGE_DROP_ADDRESS,      /* a destination that is no gateway address of the tenant */
	CANAL_EDGE_DROP_SERVICE,      /* a service without a bucket table here */
	CANAL_EDGE_DROP_REPLICA,      /* no replica of the chain is up */
	CANAL_EDGE_DROP_NODE,         /* no node has this pod address */
	CANAL_EDGE_DROP_FRAGMENT,     /* inner or outer fragments: they carry no ports */
	CANAL_EDGE_DROP_MALFORMED,
	CANAL_EDGE_DROP_PROTOCOL,     /* neither TCP, UDP nor ICMP */
	CANAL_EDGE_PASSED,            /* not for the edge program: given to the host's stack */
	CANAL_EDGE_COUNTS,
};
enum canal_redirector_count {
	CANAL_REDIRECTOR_NEW,            /* SYNs taken here */
	CANAL_REDIRECTOR_OWNED,          /* packets of flows found here */
	CANAL_REDIRECTOR_COOKIE,         /* valid SYN cookies */
	CANAL_REDIRECTOR_FORWARDED_NEW,  /* SYNs sent to the head */
	CANAL_REDIRECTOR_FORWARDED,      /* packets sent along the chain */
	CANAL_REDIRECTOR_UNOWNED,        /* the end of the chain: the kernel resets */
	CANAL_REDIRECTOR_UNSETTLED,      /* the end of the chain while a table spreads: dropped, TCP sends it again */
	CANAL_REDIRECTOR_NOT_LISTENING,  /* a SYN passed on because the gateway here is gone */
	CANAL_REDIRECTOR_DATAGRAM,       /* UDP taken here */
	CANAL_REDIRECTOR_ICMP,
	CANAL_REDIRECTOR_ANSWER,         /* packets of connections that the gateway dialled */
	CANAL_REDIRECTOR_TOO_BIG,        /* cut on the way: answered with ICMP fragmentation needed / packet too big */
	CANAL_REDIRECTOR_DROP_STRANGER,
	CANAL_REDIRECTOR_DROP_CROSSED,   /* an answer by another tenant's VNI than the socket's mark */
	CANAL_REDIRECTOR_DROP_SERVICE,   /* no bucket table: the service does not live here */
	CANAL_REDIRECTOR_DROP_FRAGMENT,
	CANAL_REDIRECTOR_DROP_MALFORMED,
	CANAL_REDIRECTOR_DROP_PROTOCOL,
	CANAL_REDIRECTOR_THROTTLED_SERVICE_SESSIONS,
	CANAL_REDIRECTOR_THROTTLED_SERVICE_PACKETS,
	CANAL_REDIRECTOR_THROTTLED_TENANT_SESSIONS,
	CANAL_REDIRECTOR_THROTTLED_TENANT_PACKETS,
	CANAL_REDIRECTOR_PASSED,         /* not of the tier: given to the host's stack */
	CANAL_REDIRECTOR_COUNTS,
};

/* Map canal_tunnel_counts: what leaves a replica by its VXLAN device. */
enum canal_tunnel_count {
	CANAL_TUNNEL_SERVICE,       /* what services answer */
	CANAL_TUNNEL_DIALLED,       /* what the gateway dials for tenants */
	CANAL_TUNNEL_DROP_SOURCE,   /* a source that is neither a service (no mark) nor this replica (mark) */
	CANAL_TUNNEL_DROP_MARK,     /* a mark that is no tenant's VNI */
	CANAL_TUNNEL_DROP_PROTOCOL, /* neither IPv4 nor IPv6 */
	CANAL_TUNNEL_DROP_KEY,      /* the kernel had no memory for a tunnel key */
	CANAL_TUNNEL_COUNTS,
};
/* Map canal_doors_counts: look-ups of sockets for service addresses; the redirector's and the stack's. */
enum canal_doors_count {
	CANAL_DOORS_HBONE,
	CANAL_DOORS_PLAIN,
	CANAL_DOORS_DNS,
	CANAL_DOORS_CLOSED, /* no socket in that door */
	CANAL_DOORS_COUNTS,
};
/* Map canal_sessions_counts. */
enum canal_sessions_count {
	CANAL_SESSIONS_OUTER,      /* first packets of sessions */
	CANAL_SESSIONS_INNER,
	CANAL_SESSIONS_OUTER_FULL, /* packets of sessions that the table could not take */
	CANAL_SESSIONS_INNER_FULL,
	CANAL_SESSIONS_OTHER,      /* packets without ports, and malformed ones */
	CANAL_SESSIONS_PACKETS,
	CANAL_SESSIONS_COUNTS,
};

#endif
