//! Features of this machine for asymmetric crypto and AES, and whether the crypto library uses
//! them. AWS-LC selects them when it starts.

use std::path::Path;

/// A feature that a machine may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Feature {
    /// Value of the label `feature`.
    pub name: &'static str,
    pub present: bool,
    /// True if the feature is present and AWS-LC uses it.
    pub used: bool,
}

/// Kernel drivers of Intel QuickAssist devices.
const QAT_DRIVERS: [&str; 8] = [
    "4xxx", "420xx", "401xx", "c6xx", "c3xxx", "dh895xcc", "c62x", "200xx",
];

/// Returns AVX-512 IFMA (RSA), VAES (AES-GCM), SHA extensions and QuickAssist. QuickAssist is only
/// reported, because AWS-LC has no engine for it.
pub fn features() -> Vec<Feature> {
    let one = |name, present, by_library| Feature {
        name,
        present,
        used: present && by_library,
    };
    vec![
        one("avx512_ifma", ifma(), true),
        one("vaes", vaes(), true),
        one("sha", sha(), true),
        one("qat", qat(Path::new("/sys/bus/pci/drivers")), false),
    ]
}

/// Returns whether a driver has a device: its directory then contains a link with the device's PCI
/// address.
fn qat(drivers: &Path) -> bool {
    let has_device = |driver: &str| {
        let Ok(entries) = std::fs::read_dir(drivers.join(driver)) else {
            return false;
        };
        entries
            .flatten()
            .any(|e| e.file_name().to_string_lossy().starts_with("0000:"))
    };
    QAT_DRIVERS.iter().any(|driver| has_device(driver))
}

#[cfg(target_arch = "x86_64")]
fn ifma() -> bool {
    std::is_x86_feature_detected!("avx512ifma")
}
#[cfg(target_arch = "x86_64")]
fn vaes() -> bool {
    std::is_x86_feature_detected!("vaes")
}
#[cfg(target_arch = "x86_64")]
fn sha() -> bool {
    std::is_x86_feature_detected!("sha")
}
#[cfg(not(target_arch = "x86_64"))]
fn ifma() -> bool {
    false
}
#[cfg(not(target_arch = "x86_64"))]
fn vaes() -> bool {
    false
}
#[cfg(not(target_arch = "x86_64"))]
fn sha() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_match_the_kernels() {
        let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let kernel = |flag: &str| {
            flags
                .lines()
                .find(|l| l.starts_with("flags"))
                .is_some_and(|l| l.split(' ').any(|f| f == flag))
        };
        for (name, flag) in [
            ("avx512_ifma", "avx512ifma"),
            ("vaes", "vaes"),
            ("sha", "sha_ni"),
        ] {
            let feature = *features().iter().find(|f| f.name == name).unwrap();
            // The kernel may hide features of the CPU from /proc, but it does not invent any.
            assert!(feature.present || !kernel(flag), "{name}");
            assert_eq!(feature.used, feature.present);
        }
    }

    #[test]
    fn quick_assist_is_a_driver_with_a_device() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!qat(dir.path()));
        let driver = dir.path().join("4xxx");
        std::fs::create_dir(&driver).unwrap();
        std::fs::write(driver.join("bind"), "").unwrap();
        assert!(!qat(dir.path()));
        std::fs::write(driver.join("0000:6b:00.0"), "").unwrap();
        assert!(qat(dir.path()));
    }
}
