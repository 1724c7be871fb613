/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* ABI of inbound.bpf.c and the node proxy. This header is authoritative: the Rust view (dataplane/abi) is generated from it. It contains
 * no code. */
#ifndef CANAL_ABI_INBOUND_H
#define CANAL_ABI_INBOUND_H

/* Raised with every change of a map's meaning. It is part of the pin's name, so old and new programs never share a map. */
#define CANAL_INBOUND_ABI 1

/* Port to which plaintext connections into a pod are redirected, inside the pod's network namespace (Istio's number). */
#define CANAL_INBOUND_PORT 15006
/* The proxy's own HBONE port with mTLS (Istio's number), which is never redirected. */
#define CANAL_INBOUND_HBONE_PORT 15008

/* Map canal_inbound_listeners: sockmap, one per pod; the proxy's listening sockets. One socket of each reuse-port group is enough. */
#define CANAL_INBOUND_LISTENER4 0
#define CANAL_INBOUND_LISTENER6 1
#define CANAL_INBOUND_LISTENERS 2

/* Map canal_inbound_counts, for all pods of a node. Every result has a name and a counter, except that of datagrams: the hook sees each
 * of them, and does not handle them. Append only. */
enum canal_inbound_verdict {
	CANAL_INBOUND_LEFT_INSIDE = 0,	/* from inside the pod: connections of the proxy to the application, among others */
	CANAL_INBOUND_LEFT_HBONE = 1,
	CANAL_INBOUND_TAKEN_V4 = 2,
	CANAL_INBOUND_TAKEN_V6 = 3,
	CANAL_INBOUND_REFUSED_NO_LISTENER = 4,	/* no proxy runs: the kernel resets */
	CANAL_INBOUND_REFUSED_ASSIGN = 5,	/* the listener cannot accept it: the kernel resets */
	CANAL_INBOUND_VERDICTS = 6,		/* number of verdicts */
};

#endif
