//! Receive distribution: the cores on which this replica's packets are received, and the tunnel
//! source ports that spread evenly over them.
//!
//! Pure except for [`steering_cores`], which reads the kernel's configuration.

use std::path::Path;

/// Source ports of tunnels for each core (Canal §4.4).
const PER_CORE: usize = 10;
/// Source ports of all cores together, at most: `CANAL_TUNNELS_MAX` of `bpf/abi/tier.h`.
const PORTS_MAX: usize = canal_abi::tier::TUNNELS_MAX;
/// Candidate ports per needed port. With this factor a core gets fewer ports than it needs in one
/// of 10^15 cases.
const CANDIDATES: usize = 8;

/// Distribution of received packets over the cores of this replica.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Receive {
    /// Number of cores that receive packets.
    pub cores: usize,
    /// Source ports of tunnels that hash evenly over the cores. Empty: the hash is unknown, as that
    /// of a network card is.
    pub ports: Vec<u16>,
}

/// Returns how many candidate ports to hash for a number of cores.
pub fn candidates(cores: usize) -> u16 {
    u16::try_from(ports_per_core(cores) * cores.min(PORTS_MAX) * CANDIDATES).unwrap_or(u16::MAX)
}

fn ports_per_core(cores: usize) -> usize {
    (PORTS_MAX / cores.max(1)).clamp(1, PER_CORE)
}

/// Selects ports from `first` on by their hashes, the same number for each core. The kernel selects
/// the core `cpus[hash * cores / 2^32]` (`get_rps_cpu`).
pub fn decide_ports(first: u16, hashes: &[u32], cores: usize) -> Vec<u16> {
    let wanted = ports_per_core(cores);
    let mut chosen = vec![0; cores];
    let mut ports = Vec::new();
    for (port, hash) in (first..=u16::MAX).zip(hashes) {
        let core = ((u64::from(*hash) * cores as u64) >> 32) as usize;
        if chosen.get(core).is_some_and(|n| *n < wanted) && ports.len() < PORTS_MAX {
            chosen[core] += 1;
            ports.push(port);
        }
    }
    ports
}

/// Returns over how many cores receive packet steering spreads `device`'s packets, read from
/// `sysfs`; 0: it is off or unreadable.
pub fn steering_cores(sysfs: &Path, device: &str) -> usize {
    let path = sysfs
        .join("class/net")
        .join(device)
        .join("queues/rx-0/rps_cpus");
    std::fs::read_to_string(path).map_or(0, |mask| count_cores(&mask))
}

/// Counts the cores in a mask of sysfs, which consists of hexadecimal words with commas.
fn count_cores(mask: &str) -> usize {
    mask.chars()
        .filter_map(|digit| digit.to_digit(16))
        .map(|digit| digit.count_ones() as usize)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_core_gets_as_many_ports_whatever_the_hash() {
        for cores in [1, 2, 3, 8, 64, 128] {
            let count = candidates(cores);
            // Any hash function that spreads well serves here.
            let hashes: Vec<u32> = (0..u32::from(count))
                .map(|n| {
                    n.wrapping_mul(0x9e37_79b9)
                        .rotate_left(7)
                        .wrapping_mul(0x85eb_ca6b)
                })
                .collect();
            let ports = decide_ports(40_000, &hashes, cores);
            let mut of_core = vec![0; cores];
            for port in &ports {
                let hash = hashes[usize::from(port - 40_000)];
                of_core[((u64::from(hash) * cores as u64) >> 32) as usize] += 1;
            }
            let wanted = if cores == 128 { 5 } else { 10 };
            assert!(
                of_core.iter().all(|n| *n == wanted),
                "{cores} cores: {of_core:?}"
            );
        }
    }

    #[test]
    fn controller_and_program_take_as_many_ports() {
        assert_eq!(PORTS_MAX, canal_wire::tier::TUNNELS_MAX);
    }

    #[test]
    fn cores_are_read_from_the_mask() {
        for (mask, cores) in [
            ("0\n", 0),
            ("3\n", 2),
            ("ff\n", 8),
            ("1,00000000\n", 1),
            ("ffffffff,ffffffff\n", 64),
            ("", 0),
        ] {
            assert_eq!(count_cores(mask), cores, "{mask:?}");
        }
    }
}
