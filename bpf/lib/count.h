/* SPDX-License-Identifier: Apache-2.0 OR BSD-2-Clause */
/* One counter per verdict and CPU, so that counting never contends. The including program defines the number of counters before the
 * inclusion, and may define the map's name. */
#ifndef CANAL_LIB_COUNT_H
#define CANAL_LIB_COUNT_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#ifndef CANAL_COUNTS
#error "define CANAL_COUNTS, the number of verdicts, before including lib/count.h"
#endif
#ifndef CANAL_COUNTS_MAP
#define CANAL_COUNTS_MAP canal_counts
#endif

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, CANAL_COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} CANAL_COUNTS_MAP SEC(".maps");

static __always_inline void count(__u32 verdict)
{
	__u64 *n = bpf_map_lookup_elem(&CANAL_COUNTS_MAP, &verdict);

	if (n)
		*n += 1;
}

#endif
