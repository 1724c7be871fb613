/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* What inbound.bpf.c and the node proxy share. This header is the law: Rust is generated from it (dataplane/abi). It holds no code. */
#ifndef CANAL_ABI_INBOUND_H
#define CANAL_ABI_INBOUND_H

/* Raised with any change of a map's meaning; part of the pin's name, so old and new never share a map. */
#define CANAL_INBOUND_ABI 1

/* Where the node proxy takes plaintext connections into a pod, inside the pod's network namespace (Istio's number). */
#define CANAL_INBOUND_PORT 15006
/* HBONE: mTLS, the proxy's own; never taken. */
#define CANAL_INBOUND_HBONE_PORT 15008

/* Map canal_inbound_listeners: sockmap, one per pod; the proxy's listening sockets. One socket of each reuse-port group is enough. */
#define CANAL_INBOUND_LISTENER4 0
#define CANAL_INBOUND_LISTENER6 1
#define CANAL_INBOUND_LISTENERS 2

/* Map canal_inbound_counts, over all pods of a node. Every way out has a name and a counter, but for datagrams: the hook sees each of
 * them, and they are not ours. Append only. */
enum canal_inbound_verdict {
	CANAL_INBOUND_LEFT_INSIDE = 0,	/* came from inside the pod: the proxy's own way to the application, among others */
	CANAL_INBOUND_LEFT_HBONE = 1,
	CANAL_INBOUND_TAKEN_V4 = 2,
	CANAL_INBOUND_TAKEN_V6 = 3,
	CANAL_INBOUND_REFUSED_NO_LISTENER = 4,	/* no proxy runs: the kernel resets */
	CANAL_INBOUND_REFUSED_ASSIGN = 5,	/* the listener cannot take it: the kernel resets */
	CANAL_INBOUND_VERDICTS = 6,		/* how many there are */
};

#endif
