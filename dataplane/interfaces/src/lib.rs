//! Guards the interfaces of this host's containers that have no node proxy. An edge and a node
//! proxy both run it for their host.
//!
//! It reads from a file which container is behind which interface, keeps the kernel's guard in
//! place, and counts and logs refused frames. It decides nothing about packets;
//! `bpf/interface_guard.bpf.c` does. Start at [`run`].

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use canal_model::ids::{TenantName, Vni};
use canal_offload::interface_guard::{InterfaceBinding, InterfaceGuard, RefusedFrames};
use canal_runtime::drain::DrainObserver;
use canal_runtime::metrics::{CounterFamily, GaugeFamily, MetricFamily, Registry};

/// Time between two checks of the bindings file and of the guarded interfaces. It bounds how long a
/// new container without a binding is dropped, and how long a guard that was removed externally is
/// missing. Nobody measured the value.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Size of the bindings file, at most. 1 KiB for each of the 4,096 interfaces that the map holds.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The interfaces to guard, and the location of the pinned kernel objects.
#[derive(Debug, Clone)]
pub struct Interfaces {
    /// File that lists the containers of this host that have an interface of their own; `None` if
    /// none is guarded.
    pub bindings: Option<PathBuf>,
    /// Directory on a bpffs for the pins.
    pub pin_dir: PathBuf,
}

/// Metrics of the guard. `docs/operations/counters.md` describes them.
#[derive(Clone)]
struct InterfaceCounts {
    frames: CounterFamily,
    refused: CounterFamily,
    interfaces: GaugeFamily,
    files: CounterFamily,
}

impl InterfaceCounts {
    fn new(r: &Registry) -> Self {
        let counters = |name, help, labels| r.counters(MetricFamily::new(name, help, labels));
        let interfaces = MetricFamily::new(
            "canal_interface_guard_interfaces",
            "Containers' interfaces, by whether they are guarded.",
            &["state"],
        );
        Self {
            frames: counters(
                "canal_interface_guard_frames_total",
                "Frames of containers, by the verdict of their guard.",
                &["what"],
            ),
            refused: counters(
                "canal_interface_guard_refused_total",
                "Refused frames of containers, by reason.",
                &["interface", "tenant"],
            ),
            interfaces: r.gauges(interfaces),
            files: counters(
                "canal_interface_guard_file_errors_total",
                "Files of interface bindings that were rejected.",
                &["reason"],
            ),
        }
    }
}

/// A container with an interface of its own, as written in the file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ContainerInterface {
    /// The host's end of the container's interface.
    interface: String,
    tenant: String,
    vni: u32,
    mac: String,
    addresses: Vec<IpAddr>,
}

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct BindingsFile {
    containers: Vec<ContainerInterface>,
}

/// The reason that a bindings file is rejected. The previous bindings stay.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum BindingsError {
    #[error(
        "the file cannot be read: {0}; fix: give --interface-bindings a file that this process may read"
    )]
    Unreadable(String),
    #[error(
        "the file is larger than {FILE_BYTES_MAX} bytes; fix: name only this host's containers"
    )]
    TooLarge,
    #[error(
        "the file has another format: {0}; fix: write {{\"containers\": [{{\"interface\", \"tenant\", \"vni\", \"mac\", \"addresses\"}}]}}"
    )]
    Format(String),
    #[error("container on {interface}: {what}; fix: {fix}")]
    Container {
        interface: String,
        what: String,
        fix: &'static str,
    },
}

impl BindingsError {
    /// Returns the value of the label `reason`.
    fn name(&self) -> &'static str {
        match self {
            Self::Unreadable(_) => "unreadable",
            Self::TooLarge => "too_large",
            Self::Format(_) => "format",
            Self::Container { .. } => "container",
        }
    }
}

/// The bindings by interface: the tenant's name and the binding.
type Bindings = BTreeMap<String, (TenantName, InterfaceBinding)>;

/// Parses the bindings file. One error rejects the whole file, because a part of it could leave a
/// container unguarded.
fn decide_bindings(text: &[u8]) -> Result<Bindings, BindingsError> {
    let file: BindingsFile =
        serde_json::from_slice(text).map_err(|e| BindingsError::Format(e.to_string()))?;
    let mut bindings = Bindings::new();
    let mut owners: BTreeMap<(u32, IpAddr), String> = BTreeMap::new();
    for container in file.containers {
        let ContainerInterface {
            interface,
            tenant,
            vni,
            mac,
            addresses,
        } = container;
        let refuse = |what: String, fix| BindingsError::Container {
            interface: interface.clone(),
            what,
            fix,
        };
        let name: TenantName = tenant.parse().map_err(|_| {
            refuse(
                format!("{tenant:?} is not a tenant's name"),
                "name the Tenant",
            )
        })?;
        let vni = Vni::new(vni).map_err(|_| {
            refuse(
                format!("{vni} is not a VNI"),
                "give the Tenant's VNI, 1 to 16777215",
            )
        })?;
        let mac = read_mac(&mac).ok_or_else(|| {
            refuse(
                format!("{mac:?} is not a unicast MAC address"),
                "write it as 02:00:00:00:00:01",
            )
        })?;
        for address in addresses.iter().map(IpAddr::to_canonical) {
            // No host has such a source (RFC 1122 §3.2.1.3).
            if address.is_unspecified() || address.is_multicast() {
                return Err(refuse(
                    format!("{address} is not an address of a host"),
                    "give the container's own addresses",
                ));
            }
            // Tenants may use the same addresses, so an address must be unique only within its VNI.
            if let Some(other) = owners.insert((vni.get(), address), interface.clone()) {
                return Err(refuse(
                    format!("{address} is also bound to {other}"),
                    "give each of a tenant's addresses to one container",
                ));
            }
        }
        let binding = InterfaceBinding {
            device: interface.clone(),
            vni: vni.get(),
            mac,
            addresses: addresses.iter().map(IpAddr::to_canonical).collect(),
        };
        if bindings
            .insert(interface.clone(), (name, binding))
            .is_some()
        {
            return Err(refuse(
                "the interface is named twice".into(),
                "give each container an interface of its own",
            ));
        }
    }
    Ok(bindings)
}

fn read_mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|part| {
            u8::from_str_radix(part, 16)
                .ok()
                .filter(|_| part.len() == 2)
        })
        .collect();
    let mac: [u8; 6] = bytes?.try_into().ok()?;
    // The lowest bit of the first byte marks a group address; the all-zero address belongs to no
    // host.
    (mac[0] & 1 == 0 && mac != [0; 6]).then_some(mac)
}

fn read_file(path: &Path) -> Result<Vec<u8>, BindingsError> {
    let unreadable =
        |e: std::io::Error| BindingsError::Unreadable(format!("{}: {e}", path.display()));
    let mut text = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    file.take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut text)
        .map_err(unreadable)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        Err(BindingsError::TooLarge)
    } else {
        Ok(text)
    }
}

/// State of the guard between two passes.
struct Guarded {
    guard: Option<InterfaceGuard>,
    /// The file as it was last read, valid or not.
    text: Option<Result<Vec<u8>, BindingsError>>,
    bindings: Bindings,
    /// A file was accepted. Before that, bindings of an earlier process stay.
    was_taken: bool,
    frames: BTreeMap<&'static str, u64>,
    refused: BTreeMap<String, u64>,
    /// The error of the last pass, so that a repeated error is logged once.
    error: String,
    counts: InterfaceCounts,
}

impl Guarded {
    /// Reads the file if it changed, and restores the guard wherever it is missing.
    fn pass(&mut self, path: &Path, pin_dir: &Path) {
        let text = read_file(path);
        if self.text.as_ref() != Some(&text) {
            let read = text
                .as_ref()
                .map_err(|e| BindingsError::Unreadable(e.to_string()))
                .and_then(|text| decide_bindings(text));
            match read {
                Ok(bindings) => (self.bindings, self.was_taken) = (bindings, true),
                Err(error) => {
                    let error = text.as_ref().err().unwrap_or(&error);
                    self.counts.files.shared(&[error.name()]).inc();
                    tracing::error!(%error, "interface guard: rejected the file of bindings; the previous bindings stay in force");
                }
            }
            self.text = Some(text);
        }
        // Without a valid file, the bindings that an earlier process pinned stay.
        if !self.was_taken {
            return;
        }
        if let Err(error) = self.apply(pin_dir) {
            if self.error != error {
                tracing::error!(
                    error,
                    "interface guard: could not guard interfaces; retrying"
                );
            }
            self.error = error;
        } else {
            self.error.clear();
        }
    }

    fn apply(&mut self, pin_dir: &Path) -> Result<(), String> {
        let text = |e: canal_offload::OffloadError| e.to_string();
        if self.guard.is_none() {
            self.guard = Some(InterfaceGuard::load(None, Some(pin_dir)).map_err(text)?);
        }
        let Some(guard) = &self.guard else {
            return Ok(());
        };
        let wanted: Vec<InterfaceBinding> = self
            .bindings
            .values()
            .map(|(_, binding)| binding.clone())
            .collect();
        let failed = guard.apply(&wanted).map_err(text)?;
        let guarded = i64::try_from(wanted.len() - failed.len()).unwrap_or(i64::MAX);
        self.counts.interfaces.shared(&["guarded"]).set(guarded);
        self.counts
            .interfaces
            .shared(&["failed"])
            .set(i64::try_from(failed.len()).unwrap_or(i64::MAX));
        let (frames, refused) = (
            guard.counts().map_err(text)?,
            guard.refused().map_err(text)?,
        );
        for (what, now) in frames {
            let before = self.frames.insert(what, now).unwrap_or(0);
            // The counters of new maps start at zero again.
            self.counts
                .frames
                .shared(&[what])
                .add(now.checked_sub(before).unwrap_or(now));
        }
        refused
            .iter()
            .for_each(|refused| self.show_refused(refused));
        match failed.into_iter().next() {
            Some((_, error)) => Err(error.to_string()),
            None => Ok(()),
        }
    }

    fn show_refused(&mut self, now: &RefusedFrames) {
        let before = self
            .refused
            .insert(now.device.clone(), now.frames)
            .unwrap_or(0);
        let frames = now.frames.checked_sub(before).unwrap_or(now.frames);
        if frames == 0 {
            return;
        }
        let tenant = self
            .bindings
            .get(&now.device)
            .map_or("", |(tenant, _)| tenant.as_str());
        self.counts
            .refused
            .shared(&[&now.device, tenant])
            .add(frames);
        let address = now.last_address.map(|address| address.to_string());
        tracing::warn!(
            interface = now.device,
            tenant,
            frames,
            address,
            "interface guard: dropped frames of a container that used an address or VNI that is not its own"
        );
    }
}

/// Guards the interfaces until the process ends. They stay guarded after that. Without a bindings
/// file it does nothing.
pub async fn run(interfaces: Interfaces, registry: Registry, end: DrainObserver) {
    let counts = InterfaceCounts::new(&registry);
    let Some(path) = interfaces.bindings.clone() else {
        return end.forced().await;
    };
    let mut guarded = Guarded {
        guard: None,
        text: None,
        bindings: Bindings::new(),
        was_taken: false,
        frames: BTreeMap::new(),
        refused: BTreeMap::new(),
        error: String::new(),
        counts,
    };
    loop {
        let (path, pin_dir) = (path.clone(), interfaces.pin_dir.clone());
        let passed = tokio::task::spawn_blocking(move || {
            guarded.pass(&path, &pin_dir);
            guarded
        });
        match passed.await {
            Ok(next) => guarded = next,
            // The pass panicked. The caller ends the process, and its supervisor starts a new one.
            Err(_) => return,
        }
        tokio::select! {
            () = end.forced() => return,
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"containers": [
        {"interface": "to-a", "tenant": "alpha", "vni": 101, "mac": "02:00:00:00:00:0a", "addresses": ["10.1.1.5", "fd00::5"]},
        {"interface": "to-b", "tenant": "beta", "vni": 102, "mac": "02:00:00:00:00:0B", "addresses": ["10.1.1.5"]}
    ]}"#;

    #[test]
    fn a_file_of_bindings_is_read_and_tenants_may_have_equal_addresses() {
        let bindings = decide_bindings(GOOD.as_bytes()).unwrap();
        let (tenant, binding) = &bindings["to-b"];
        assert_eq!(
            (tenant.as_str(), binding.vni, binding.mac),
            ("beta", 102, [2, 0, 0, 0, 0, 0xb])
        );
        assert_eq!(bindings["to-a"].1.addresses.len(), 2);
    }

    #[test]
    fn one_mistake_refuses_the_whole_file_with_a_fix() {
        for (from, to, expected) in [
            (
                "\"beta\", \"vni\": 102",
                "\"alpha\", \"vni\": 101",
                "10.1.1.5 is also bound to to-a",
            ),
            ("to-b", "to-a", "named twice"),
            ("00:0B", "00", "is not a unicast MAC address"),
            (
                "02:00:00:00:00:0B",
                "03:00:00:00:00:0B",
                "is not a unicast MAC address",
            ),
            ("fd00::5", "ff02::1", "is not an address of a host"),
            ("fd00::5", "0.0.0.0", "is not an address of a host"),
            ("102", "16777216", "is not a VNI"),
            ("\"beta\"", "\"Beta!\"", "is not a tenant's name"),
            ("\"mac\"", "\"max\"", "unknown field"),
            ("{\"containers\"", "{\"container\"", "unknown field"),
        ] {
            let text = GOOD.replace(from, to);
            assert_ne!(text, GOOD, "{from}");
            let error = decide_bindings(text.as_bytes()).unwrap_err().to_string();
            assert!(
                error.contains(expected) && error.contains("fix: "),
                "{from}: {error}"
            );
        }
    }
}
