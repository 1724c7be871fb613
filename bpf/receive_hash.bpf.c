// SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause
/* Receive hash: returns this kernel's hash of a frame, by which receive packet steering (RPS) selects the core. The hash has a key that
 * is drawn at boot and not exposed, so a host must use its own kernel: it runs this program over frames as they would arrive. It is
 * never attached. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC("tc")
int canal_receive_hash(struct __sk_buff *skb)
{
	return bpf_get_hash_recalc(skb);
}

/* The kernel requires a license for the use of its helpers. */
char _license[] SEC("license") = "Dual BSD/GPL";
