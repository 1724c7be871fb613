//! Tests how the edge's agent uses its maps: every limit, the exact contents, and what the next
//! process finds.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use crate::lab::LabNetns;
use canal_abi::Plain;
use canal_abi::tier::{
    ADDRESSES_MAX, Address, AddressKey, NodeKey, PREFIXES_MAX, Prefix, PrefixKey, REPLICAS_MAX,
    Replica, Return, SERVICES_MAX, Table,
};
use canal_offload::edge::{self, EdgeOptions, EdgeProgram, EdgeProgramSettings};
use canal_offload::entries::Entries;
use canal_offload::reconcile::MapWrites;
use libbpf_rs::{MapHandle, MapType};

const SETTINGS: EdgeProgramSettings = EdgeProgramSettings {
    address: Ipv4Addr::new(250, 1, 0, 1),
    tunnels: 20,
    aggregate: true,
    tunnel_port: 40_000,
    mtu: 1450,
};

/// Fills a map to its capacity. The next element must be refused with the map's name, an existing
/// element may still be changed, and removing one makes room for another.
fn fill<K: Plain + Eq + std::hash::Hash, V: Plain + PartialEq>(
    map: &Entries<K, V>,
    limit: u32,
    key: impl Fn(u32) -> K,
    value: V,
) {
    assert_eq!(map.capacity(), limit, "{}", map.name());
    for n in 0..limit {
        map.put(&key(n), &value)
            .unwrap_or_else(|e| panic!("element {n}: {e}"));
    }
    let refused = map.put(&key(limit), &value).unwrap_err();
    assert!(refused.is_full(), "{refused}");
    assert_eq!(
        refused.to_string(),
        format!(
            "BPF map {} is full: it has space for {limit} elements; fix: reduce what this host serves",
            map.name()
        )
    );
    map.put(&key(0), &value).unwrap();
    map.remove(&key(1)).unwrap();
    map.put(&key(limit), &value).unwrap();
}

#[test]
fn every_map_reports_its_limit() {
    let e = EdgeProgram::load(&SETTINGS, None).unwrap();
    let v4 = |n: u32| IpAddr::from(Ipv4Addr::from_bits(0x0a00_0000 + n));
    fill(e.hosts(), REPLICAS_MAX, |n| n, 1);
    fill(e.returns(), SERVICES_MAX, |n| n, Return::new(7, None, None));
    fill(e.tables(), SERVICES_MAX, |n| n, Table::default());
    fill(
        e.addresses(),
        ADDRESSES_MAX,
        |n| AddressKey::new(7, v4(n)),
        Address { service: 1 },
    );
    fill(
        e.nodes(),
        PREFIXES_MAX,
        |n| NodeKey::new(n, Ipv4Addr::LOCALHOST),
        1,
    );
    fill(
        e.prefixes(),
        PREFIXES_MAX,
        |n| PrefixKey::new(7, v4(n), 32),
        Prefix::new(Ipv4Addr::LOCALHOST, [2; 6]),
    );
    assert_eq!(e.replicas().capacity(), REPLICAS_MAX);
    e.replicas()
        .put(
            &(REPLICAS_MAX - 1),
            &Replica::new(Ipv4Addr::LOCALHOST, true),
        )
        .unwrap();
    assert!(
        e.replicas()
            .put(&REPLICAS_MAX, &Replica::default())
            .unwrap_err()
            .is_full(),
        "an array has no such number"
    );
}

#[test]
fn a_full_map_still_reaches_the_desired_state() {
    let e = EdgeProgram::load(&SETTINGS, None).unwrap();
    let hosts = |from: u32| {
        (from..from + REPLICAS_MAX)
            .map(|n| (n, n))
            .collect::<HashMap<u32, u32>>()
    };
    e.hosts().replace_all(&hosts(0)).unwrap();
    e.hosts().replace_all(&hosts(100)).unwrap();
    assert_eq!(e.hosts().all().unwrap(), hosts(100));
    let too_many = (0..REPLICAS_MAX + 1).map(|n| (n, n)).collect();
    assert!(e.hosts().replace_all(&too_many).unwrap_err().is_full());
}

#[test]
fn maps_match_the_desired_state_and_correct_entries_are_not_written() {
    let e = EdgeProgram::load(&SETTINGS, None).unwrap();
    let host = |n: u8| Ipv4Addr::new(250, 1, 0, n);
    let replicas = |of: &[(u32, u8, bool)]| {
        of.iter()
            .map(|(n, at, up)| (*n, Replica::new(host(*at), *up)))
            .collect::<HashMap<_, _>>()
    };
    // A replica's number, the last byte of its address, and whether it is up.
    for (case, wanted, replaced) in [
        (
            "from nothing",
            replicas(&[(1, 1, true), (2, 2, true)]),
            MapWrites { put: 2, removed: 0 },
        ),
        (
            "nothing new",
            replicas(&[(1, 1, true), (2, 2, true)]),
            MapWrites { put: 0, removed: 0 },
        ),
        (
            "one changes, one is added",
            replicas(&[(1, 1, false), (2, 2, true), (9, 9, true)]),
            MapWrites { put: 2, removed: 0 },
        ),
        (
            "one goes",
            replicas(&[(1, 1, false), (9, 9, true)]),
            MapWrites { put: 0, removed: 1 },
        ),
        ("all go", replicas(&[]), MapWrites { put: 0, removed: 2 }),
    ] {
        assert_eq!(
            e.replicas().replace_all(&wanted).unwrap(),
            replaced,
            "{case}"
        );
        assert_eq!(e.replicas().all().unwrap(), wanted, "{case}");
    }
    let range = |text: &str, length| PrefixKey::new(7, text.parse().unwrap(), length);
    let node = Prefix::new(host(1), [2; 6]);
    // Nested prefixes of the same address are distinct entries.
    for wanted in [
        vec![
            range("10.0.0.0", 8),
            range("10.1.0.0", 16),
            range("fd00::", 64),
            range("0.0.0.0", 0),
        ],
        vec![range("10.1.0.0", 17), range("10.1.128.0", 17)],
    ] {
        let wanted = wanted.into_iter().map(|k| (k, node)).collect();
        e.prefixes().replace_all(&wanted).unwrap();
        assert_eq!(e.prefixes().all().unwrap(), wanted);
    }
    // Removing what is not there is no error.
    e.prefixes().remove(&range("10.9.0.0", 16)).unwrap();
    assert_eq!(e.hosts().get(&7).unwrap(), None);
}

/// Pin directory that is unmounted even if the test fails.
struct UnmountedPins(tempfile::TempDir);

impl Drop for UnmountedPins {
    fn drop(&mut self) {
        if self.0.path().exists() {
            let _ = std::process::Command::new("umount")
                .args(["-l", "-q"])
                .arg(self.0.path())
                .output();
        }
    }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .flatten()
        .filter(|e| e.file_type().unwrap().is_dir())
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn the_next_process_finds_the_maps_and_nothing_else_is_left() {
    let (ns, pins) = (LabNetns::new(), UnmountedPins(tempfile::tempdir().unwrap()));
    let dir = pins.0.path();
    let options = EdgeOptions {
        netns: Some(ns.path()),
        device: "pod0".into(),
        pin_dir: Some(dir.to_path_buf()),
        settings: SETTINGS,
    };
    let first = EdgeProgram::attach(&options).unwrap();
    first.hosts().put(&1, &2).unwrap();
    assert!((first.is_adopted(), first.is_durable(), first.is_attached()) == (false, true, true));
    drop(first);
    // Pins of another version, and pins that do not belong to the edge.
    for other in ["edge-v0", "redirector-v1"] {
        std::fs::create_dir(dir.join(other)).unwrap();
    }
    let second = EdgeProgram::attach(&options).unwrap();
    assert!(second.is_adopted());
    // The present version is 3 (`CANAL_TIER_ABI`); the pins of the edge's version 0 are removed.
    assert_eq!(
        (second.hosts().all().unwrap(), names(dir)),
        (
            HashMap::from([(1, 2)]),
            vec!["edge-v3".to_string(), "redirector-v1".into()]
        )
    );

    // Another edge's program replaces this one; then the device's filters are flushed.
    let third = EdgeProgram::attach(&options).unwrap();
    assert!(!second.is_attached() && third.is_attached());
    let flushed = std::process::Command::new("tc")
        .args(["-n", ns.name(), "filter", "del", "dev", "pod0", "ingress"])
        .output()
        .unwrap();
    assert!(flushed.status.success() && !third.is_attached());
    third.remove().unwrap();
    assert_eq!(
        names(dir),
        ["redirector-v1"],
        "the directory is not only the edge's"
    );

    let unpinned = EdgeProgram::attach(&EdgeOptions {
        pin_dir: None,
        ..options.clone()
    })
    .unwrap();
    assert!(
        !unpinned.is_adopted()
            && !unpinned.is_durable()
            && unpinned.hosts().all().unwrap().is_empty()
    );
    // Both removals succeed, although the pins and their directory are gone or never were.
    drop(unpinned);
    edge::remove(Some(&ns.path()), "pod0", None).unwrap();
    edge::remove(Some(&ns.path()), "pod0", Some(dir)).unwrap();
}

#[test]
fn pinned_maps_of_another_shape_are_left_for_new_ones() {
    let pins = UnmountedPins(tempfile::tempdir().unwrap());
    drop(EdgeProgram::load(&SETTINGS, Some(pins.0.path())).unwrap());
    let hosts = pins.0.path().join("edge-v3/canal_hosts");
    std::fs::remove_file(&hosts).unwrap();
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _,
        ..Default::default()
    };
    let mut other =
        MapHandle::create(MapType::Hash, Some("canal_hosts"), 4, 8, 16, &options).unwrap();
    other.pin(&hosts).unwrap();
    let e = EdgeProgram::load(&SETTINGS, Some(pins.0.path())).unwrap();
    assert!(!e.is_adopted(), "new ones are empty");
    e.hosts().put(&1, &2).unwrap();
    assert_eq!(e.hosts().all().unwrap().len(), 1);
    e.remove().unwrap();
    assert!(!pins.0.path().exists());
}
