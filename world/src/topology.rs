//! [`Topology`]: the checked description of a world. Its values are valid. `read` reads them from YAML, `check` checks them, and `plan`
//! assigns addresses. This module does no IO except reading the topology's own files. Start at
//! [`Topology::load`].

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::impairment::Impairment;
use crate::problem::{FilePosition, TopologyProblem};
use crate::{check, read, tree};

/// Description of a whole world in its YAML file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Topology {
    /// Name of the world: `[a-z0-9-]`, at most 20 characters.
    pub name: String,
    /// Path of the YAML file.
    pub file: PathBuf,
    /// Check that routers apply to the packets that tenants' nodes send into the cloud tier, like a
    /// cloud's virtual switch.
    pub vswitch: Vswitch,
    /// Availability zones, in the order of their addresses.
    pub azs: Vec<Az>,
    /// Rates and MTU of the links.
    pub links: Links,
    /// The controller, if the world has one.
    pub controller: Option<Component>,
    /// Edges of the cloud tier. The edges of one AZ share a tunnel end, to which routers have a
    /// route through each of them. One edge makes the world a *tier world*.
    pub edges: Vec<Component>,
    pub gateways: Vec<Component>,
    /// Hosts that run key servers.
    pub key_servers: Vec<Component>,
    /// Plain underlay hosts, such as load generators.
    pub hosts: Vec<Component>,
    /// Tenants with their nodes and pods.
    pub tenants: Vec<TenantTopology>,
}

/// An availability zone. It has one underlay router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Az {
    /// Name: `[a-z0-9-]`, at most 10 characters.
    pub name: String,
    /// Position of the AZ in the file.
    pub spot: FilePosition,
}

/// Treatment of packets that no honest node of a tenant sends (see `vswitch`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Vswitch {
    /// Such packets are dropped and counted.
    Checked,
    /// All packets pass, so that the refusals of the mesh itself can be observed.
    Open,
}

impl FromStr for Vswitch {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "Checked" => Ok(Self::Checked),
            "Open" => Ok(Self::Open),
            _ => Err(()),
        }
    }
}

/// Properties of links. A link without a rate is as fast as the machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Links {
    /// MTU inside the overlays, in bytes. The underlay's MTU is larger by
    /// [`Links::UNDERLAY_EXTRA`].
    pub mtu: u32,
    /// Rate between the routers of two AZs, per direction.
    pub inter_az: Option<LinkRate>,
    /// Rate between a node and its router, per direction.
    pub node: Option<LinkRate>,
    /// Rate between a pod and its node, per direction.
    pub pod: Option<LinkRate>,
    /// Rate between a gateway replica and its router, per direction.
    pub gateway: Option<LinkRate>,
    /// Rate between any other underlay host and its router, per direction.
    pub host: Option<LinkRate>,
    /// Delay, jitter and loss of these links. Pods' links have none.
    pub impaired: ImpairedLinks,
    /// Determines which frames are lost: links with the same seed, name and frames lose the same
    /// ones.
    pub seed: u64,
}

/// Delay, jitter and loss by kind of link. `None` joins the two ends directly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ImpairedLinks {
    /// Impairment between the routers of two AZs.
    pub inter_az: Option<Impairment>,
    /// Impairment between a node and its router.
    pub node: Option<Impairment>,
    /// Impairment between a gateway replica and its router.
    pub gateway: Option<Impairment>,
    /// Impairment between any other underlay host and its router.
    pub host: Option<Impairment>,
}

impl Links {
    /// Bytes by which the underlay's MTU exceeds the overlay's. VXLAN over IPv4 needs 50, and
    /// nothing may be fragmented. The rest is room for an IPv6 underlay's 20 bytes more.
    pub const UNDERLAY_EXTRA: u32 = 100;
    /// Default overlay MTU, in bytes. Ethernet's.
    pub const MTU_DEFAULT: u32 = 1500;
    /// Default seed of losses and jitter. Any number would do: a world without a seed behaves the
    /// same each time.
    pub const SEED_DEFAULT: u64 = 1;

    /// MTU of every underlay link, in bytes.
    pub fn underlay_mtu(&self) -> u32 {
        self.mtu + Self::UNDERLAY_EXTRA
    }
}

impl Default for Links {
    fn default() -> Self {
        Self {
            mtu: Self::MTU_DEFAULT,
            inter_az: None,
            node: None,
            pod: None,
            gateway: None,
            host: None,
            impaired: ImpairedLinks::default(),
            seed: Self::SEED_DEFAULT,
        }
    }
}

/// A link rate in bits per second, written `10mbit`, `1gbit` or `500kbit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkRate {
    /// Bits per second, from [`LinkRate::MIN`] to [`LinkRate::MAX`].
    pub bits: u64,
}

impl LinkRate {
    /// Minimum; slower links cannot carry even the mesh's own traffic.
    pub const MIN: u64 = 64_000;
    /// Maximum; it is faster than any veth here.
    pub const MAX: u64 = 400_000_000_000;
}

impl FromStr for LinkRate {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let digits = text
            .find(|letter: char| !letter.is_ascii_digit())
            .ok_or(())?;
        let (number, unit) = text.split_at(digits);
        let scale: u64 = match unit {
            "bit" => 1,
            "kbit" => 1_000,
            "mbit" => 1_000_000,
            "gbit" => 1_000_000_000,
            _ => return Err(()),
        };
        let bits = number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(scale))
            .ok_or(())?;
        (Self::MIN..=Self::MAX)
            .contains(&bits)
            .then_some(Self { bits })
            .ok_or(())
    }
}

/// Restart policy of a process that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Restart {
    /// The process stays ended. An end with status 0 counts as ready.
    Never,
    /// The process is restarted after a short, growing pause.
    Always,
}

impl FromStr for Restart {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "never" => Ok(Self::Never),
            "always" => Ok(Self::Always),
            _ => Err(()),
        }
    }
}

/// A process to run in a host or pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessTemplate {
    /// Program and arguments. If empty, the mesh's own components use the built-in command line.
    pub command: Vec<String>,
    /// Arguments that are added to the command line.
    pub args: Vec<String>,
    /// Variables that are added to the clean base environment.
    pub env: BTreeMap<String, String>,
    /// Restart policy of the process.
    pub restart: Restart,
    /// Readiness probe. Without one, a running process is ready.
    pub readiness: Option<Readiness>,
    /// Position of the command in the file.
    pub spot: FilePosition,
}

/// A readiness probe with its period.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Readiness {
    /// The check that must succeed.
    pub check: Check,
    /// Milliseconds from the start of one probe to the next.
    pub period_ms: u64,
}

impl Readiness {
    /// Default period of a probe, in milliseconds. Tests of readiness name shorter ones.
    pub const PERIOD_MS_DEFAULT: u64 = 1_000;
    /// Timeout of a probe, in milliseconds. A lost SYN is repeated once within it, after 1 s.
    pub const TIMEOUT_MS: u64 = 2_000;
}

/// The check of a readiness probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Check {
    /// An HTTP/1.1 GET to the host's own address; status 200–399 is ready.
    Http {
        /// TCP port of the host.
        port: u16,
        /// Path with its leading slash.
        path: String,
    },
    /// A TCP connection that is accepted.
    Tcp {
        /// TCP port of the host.
        port: u16,
    },
    /// A command in the host that ends with status 0.
    Exec(Vec<String>),
}

/// An underlay host: controller, edge, gateway replica, key server or plain host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Component {
    /// Name, which is unique in the world.
    pub name: String,
    /// Name of the host's AZ.
    pub az: String,
    /// Process of the host. A plain host may have none; then it only waits for `exec`.
    pub process: Option<ProcessTemplate>,
    /// Rate of the host's uplink, if it differs from that of its kind.
    pub rate: Option<LinkRate>,
    /// Delay, jitter and loss of the host's link, if they differ from those of its kind.
    pub impairment: Option<Impairment>,
    /// MTU of both ends of the host's link in bytes, if it differs from the underlay's (edges and
    /// gateways only).
    pub mtu: Option<u32>,
    /// Number of worker threads (gateways only).
    pub workers: u16,
    /// Number of the machine's cores, from the first, over which receive packet steering spreads
    /// the host's packets. 0 turns it off (gateways of tier worlds only).
    pub receive_cores: u16,
    /// Backend of the gateway (gateways of tier worlds only).
    pub backend: Option<String>,
    /// Pods of tenants with `outboundTrafficPolicy: Passthrough` may reach the host (plain hosts
    /// only).
    pub outside: bool,
    /// Tenant that owns the key server; `None` for the provider's (key servers only).
    pub tenant: Option<String>,
    /// Absolute path of a directory with the tenant's own certificates and keys, which the key
    /// server has at its start (a tenant's key server only).
    pub tls_dir: Option<PathBuf>,
    /// Position of the component in the file.
    pub spot: FilePosition,
}

/// Treatment of traffic to destinations that are unknown to the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OutsideTraffic {
    /// The mesh refuses such traffic.
    Deny,
    /// Such traffic passes in plaintext.
    Passthrough,
}

impl FromStr for OutsideTraffic {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "Deny" => Ok(Self::Deny),
            "Passthrough" => Ok(Self::Passthrough),
            _ => Err(()),
        }
    }
}

impl fmt::Display for OutsideTraffic {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, out)
    }
}

/// Location and kind of a tenant's private keys: the `keys` field of its Tenant object, word by
/// word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantKeysTopology {
    /// Location of the private keys.
    #[serde(rename = "place")]
    pub location: TopologyKeyLocation,
    /// Algorithm of the private keys.
    pub algorithm: TopologyKeyAlgorithm,
    /// Behavior of data planes while no key server answers.
    pub fallback: TopologyKeyFallback,
}

/// Storage location of private keys, by kind of host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TopologyKeyLocation {
    /// Nodes and gateways have the keys.
    Local,
    /// The keys are in key servers only.
    KeyServer,
}

/// Algorithm of a tenant's private keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TopologyKeyAlgorithm {
    /// ECDSA with the curve P-256.
    EcdsaP256,
    /// RSA with keys of 2048 bits.
    Rsa2048,
}

/// Behavior of data planes while no key server answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TopologyKeyFallback {
    /// Handshakes fail until a key server answers.
    Refuse,
    /// Data planes create keys of their own.
    Local,
}

impl FromStr for TopologyKeyLocation {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "Local" => Ok(Self::Local),
            "KeyServer" => Ok(Self::KeyServer),
            _ => Err(()),
        }
    }
}

impl FromStr for TopologyKeyAlgorithm {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "EcdsaP256" => Ok(Self::EcdsaP256),
            "Rsa2048" => Ok(Self::Rsa2048),
            _ => Err(()),
        }
    }
}

impl FromStr for TopologyKeyFallback {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "Refuse" => Ok(Self::Refuse),
            "Local" => Ok(Self::Local),
            _ => Err(()),
        }
    }
}

/// A tenant: an overlay, a trust domain, nodes and pods.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantTopology {
    /// Name, which is unique in the world.
    pub name: String,
    /// VXLAN network identifier: 24 bits, unique in the world.
    pub vni: u32,
    pub trust_domain: String,
    /// Treatment of traffic to unknown destinations.
    pub outside: OutsideTraffic,
    /// IPv4 range of the pods. Each node gets one /24, and the gateways get the top one.
    pub pods4: Ipv4Net,
    /// IPv6 range of the pods. Each node gets one /112.
    pub pods6: Ipv6Net,
    /// Ranges of service VIPs, which have no route anywhere.
    pub service_cidrs: Vec<ipnet::IpNet>,
    /// Ranges of the tenant's gateway addresses (tier worlds only). AZ number a has the a-th
    /// eighth.
    pub gateway_cidrs: Option<(Ipv4Net, Ipv6Net)>,
    /// The tenant is a network of clients outside the mesh; its gateway addresses are the pool for
    /// the Gateways of all tenants (tier worlds only).
    pub ingress_network: bool,
    /// AZ of the tenant's services that do not name another one (tier worlds only).
    pub home_az: Option<String>,
    /// Pods on nodes without a proxy resolve services with the tenant's DNS (tier worlds only).
    pub dns: bool,
    /// Location and kind of the tenant's private keys. `None` selects the mesh's defaults.
    pub keys: Option<TenantKeysTopology>,
    /// Absolute paths of YAML files that are copied to the controller's directory for this tenant.
    pub config: Vec<PathBuf>,
    pub nodes: Vec<NodeTopology>,
    pub pods: Vec<PodTemplate>,
    /// Positions of the tenant's fields in the file.
    pub spots: TenantPositions,
}

/// Positions of a tenant's fields in the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TenantPositions {
    /// Position of the tenant itself.
    pub tenant: FilePosition,
    pub vni: FilePosition,
    pub trust_domain: FilePosition,
    pub pods: FilePosition,
    pub services: FilePosition,
    pub gateways: FilePosition,
    pub home_az: FilePosition,
    pub dns: FilePosition,
    pub keys: FilePosition,
}

/// A node of a tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeTopology {
    /// Name, which is unique in the world.
    pub name: String,
    /// Name of the node's AZ.
    pub az: String,
    /// The node proxy; `None` if the file contains `proxy: false`.
    pub proxy: Option<ProcessTemplate>,
    /// Rate of the node's uplink, if it differs from that of its kind.
    pub rate: Option<LinkRate>,
    /// Delay, jitter and loss of the node's link, if they differ from those of its kind.
    pub impairment: Option<Impairment>,
    /// Position of the node in the file.
    pub spot: FilePosition,
}

/// A pod template with its number of replicas, which are named `NAME-0`, `NAME-1`, ….
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodTemplate {
    /// Name without the replica number.
    pub name: String,
    pub namespace: String,
    /// Nodes on which the pod runs. Replica i runs on the (i mod n)-th.
    pub nodes: Vec<String>,
    /// Position of `node` or `nodes` in the file.
    pub nodes_spot: FilePosition,
    /// Number of replicas, at least 1.
    pub replicas: u16,
    /// Service account, which is the last part of the pod's SPIFFE identity.
    pub service_account: String,
    pub labels: BTreeMap<String, String>,
    /// The node serves the SPIFFE Workload API to the pod.
    pub workload_api: bool,
    /// The process that the pod runs.
    pub process: ProcessTemplate,
    /// Rate of the pod's link, if it differs from that of its kind.
    pub rate: Option<LinkRate>,
    /// MTU of both ends of the pod's link in bytes, if it differs from the overlays'.
    pub mtu: Option<u32>,
    /// Position of the pod in the file.
    pub spot: FilePosition,
}

impl PodTemplate {
    /// Reads one pod in the form of an item of a topology's `pods:` list.
    ///
    /// # Errors
    ///
    /// All mistakes in `yaml`, with their lines.
    pub fn parse(yaml: &str) -> Result<Self, Vec<TopologyProblem>> {
        let file = Path::new("pod");
        let tree = tree::parse(file, yaml).map_err(|problem| vec![problem])?;
        read::pod_alone(&tree, file)
    }
}

/// Returns the files of a `tlsDir`, in order.
pub(crate) fn tls_files(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries: Vec<PathBuf> = std::fs::read_dir(dir)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    let mut files: Vec<PathBuf> = entries.into_iter().filter(|path| path.is_file()).collect();
    files.sort();
    Ok(files)
}

impl Topology {
    /// Returns whether gateways are reached through edges. If so, tenants may use the same
    /// addresses.
    pub fn is_tier(&self) -> bool {
        !self.edges.is_empty()
    }

    /// Reads and checks a topology file.
    ///
    /// # Errors
    ///
    /// All mistakes, in the order of the lines.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, Vec<TopologyProblem>> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|error| {
            vec![TopologyProblem {
                file: path.into(),
                spot: FilePosition::default(),
                what: format!("cannot be read: {error}"),
                fix: "name a topology file".into(),
            }]
        })?;
        let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
        Self::parse(&path, &text)
    }

    /// Reads and checks a topology from text. `file` is its path in messages, and relative paths
    /// start at its directory.
    ///
    /// # Errors
    ///
    /// All mistakes, in the order of the lines.
    pub fn parse(file: &Path, text: &str) -> Result<Self, Vec<TopologyProblem>> {
        let tree = tree::parse(file, text).map_err(|problem| vec![problem])?;
        let mut findings = crate::problem::TopologyProblems::of(file.into());
        let topology = read::topology(&tree, file, &mut findings);
        match topology {
            Some(topology) => {
                check::topology(&topology, &mut findings);
                if findings.is_empty() {
                    Ok(topology)
                } else {
                    Err(findings.into_sorted())
                }
            }
            None => Err(findings.into_sorted()),
        }
    }

    /// Returns a digest of everything that defines this world. It includes the contents of its
    /// configuration files, but not their directories.
    pub(crate) fn fingerprint(&self) -> String {
        let mut bare = self.clone();
        bare.file = PathBuf::new();
        let mut digest = Sha256::new();
        for tenant in &mut bare.tenants {
            for file in &mut tenant.config {
                // A file that has disappeared since then differs from one that exists.
                digest.update(std::fs::read(&*file).unwrap_or_default());
                *file = file.file_name().map(PathBuf::from).unwrap_or_default();
            }
        }
        for key_server in &mut bare.key_servers {
            for file in key_server
                .tls_dir
                .take()
                .map(|dir| tls_files(&dir).unwrap_or_default())
                .into_iter()
                .flatten()
            {
                digest.update(file.file_name().unwrap_or_default().as_encoded_bytes());
                digest.update(std::fs::read(&file).unwrap_or_default());
            }
        }
        // Checked topologies contain only texts, numbers and lists, which always have a JSON form.
        digest.update(serde_json::to_vec(&bare).unwrap_or_default());
        digest
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// Returns the topology under another name, so that one file can be several worlds at once.
    ///
    /// # Errors
    ///
    /// A world may not have this name.
    pub fn renamed(mut self, name: &str) -> Result<Self, TopologyProblem> {
        check::world_name(name).map_err(|(what, fix)| TopologyProblem {
            file: self.file.clone(),
            spot: FilePosition::default(),
            what,
            fix,
        })?;
        self.name = name.to_owned();
        Ok(self)
    }
}
