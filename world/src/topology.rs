//! A checked topology: what a world shall be. Values here are valid; `read` makes them from YAML,
//! `plan` gives them addresses. Does no IO beyond reading the topology's own files.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::problem::{Problem, Spot};
use crate::{check, read, tree};

/// A whole world, as its YAML file describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Topology {
    /// Name of the world: `[a-z0-9-]`, at most 12 characters.
    pub name: String,
    /// The file it came from.
    pub file: PathBuf,
    /// Whether routers check what tenants' nodes send into the cloud tier, as a cloud's virtual switch does.
    pub vswitch: Vswitch,
    /// Availability zones, in the order of their addresses.
    pub azs: Vec<Az>,
    /// Rates and MTU of the links.
    pub links: Links,
    /// The controller, if the world has one.
    pub controller: Option<Component>,
    /// Edges of the cloud tier, at most one per AZ. One edge makes the whole world a *tier world*.
    pub edges: Vec<Component>,
    /// Gateway replicas.
    pub gateways: Vec<Component>,
    /// Key-server hosts.
    pub key_servers: Vec<Component>,
    /// Plain underlay hosts, such as load generators.
    pub hosts: Vec<Component>,
    /// Tenants with their nodes and pods.
    pub tenants: Vec<Tenant>,
}

/// An availability zone: one underlay router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Az {
    /// `[a-z0-9-]`, at most 10 characters.
    pub name: String,
    /// Where it is written.
    pub spot: Spot,
}

/// What routers do with what no honest node of a tenant sends (see `vswitch`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Vswitch {
    /// It is dropped and counted.
    Checked,
    /// Everything passes, so that what the mesh itself refuses can be seen.
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

/// Properties of links; a rate of `None` is as fast as the machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Links {
    /// MTU inside the overlays, bytes. The underlay gets [`Links::UNDERLAY_EXTRA`] more.
    pub mtu: u32,
    /// Between the routers of two AZs, each direction.
    pub inter_az: Option<Rate>,
    /// Between a node and its router, each direction.
    pub node: Option<Rate>,
    /// Between a pod and its node, each direction.
    pub pod: Option<Rate>,
    /// Between a gateway replica and its router, each direction.
    pub gateway: Option<Rate>,
    /// Between any other underlay host and its router, each direction.
    pub host: Option<Rate>,
}

impl Links {
    /// Bytes the underlay MTU exceeds the overlay's: VXLAN over IPv4 needs 50, and nothing may fragment.
    pub const UNDERLAY_EXTRA: u32 = 100;
    /// Overlay MTU when the file names none.
    pub const MTU_DEFAULT: u32 = 1500;

    /// MTU of every underlay link, bytes.
    pub fn underlay_mtu(&self) -> u32 {
        self.mtu + Self::UNDERLAY_EXTRA
    }
}

impl Default for Links {
    fn default() -> Self {
        Self { mtu: Self::MTU_DEFAULT, inter_az: None, node: None, pod: None, gateway: None, host: None }
    }
}

/// A link rate in bits per second, written `10mbit`, `1gbit`, `500kbit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// Bits per second, at least [`Rate::MIN`].
    pub bits: u64,
}

impl Rate {
    /// Slower links cannot even carry the mesh's own traffic.
    pub const MIN: u64 = 64_000;
    /// Faster than any veth here.
    pub const MAX: u64 = 400_000_000_000;
}

impl FromStr for Rate {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let digits = text.find(|letter: char| !letter.is_ascii_digit()).ok_or(())?;
        let (number, unit) = text.split_at(digits);
        let scale: u64 = match unit {
            "bit" => 1,
            "kbit" => 1_000,
            "mbit" => 1_000_000,
            "gbit" => 1_000_000_000,
            _ => return Err(()),
        };
        let bits = number.parse::<u64>().ok().and_then(|number| number.checked_mul(scale)).ok_or(())?;
        (Self::MIN..=Self::MAX).contains(&bits).then_some(Self { bits }).ok_or(())
    }
}

/// When a process that ended is started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Restart {
    /// It stays ended; an end with status 0 counts as ready.
    Never,
    /// It is started again after a short, growing wait.
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
pub struct Process {
    /// Program and arguments. For the mesh's own components: empty means the built-in command line.
    pub command: Vec<String>,
    /// Arguments added to the command line.
    pub args: Vec<String>,
    /// Environment on top of the clean base environment.
    pub env: BTreeMap<String, String>,
    /// What happens when it ends.
    pub restart: Restart,
    /// How to know that it is ready; without one, running is ready.
    pub readiness: Option<Readiness>,
    /// Where it is written.
    pub spot: Spot,
}

/// A readiness probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Readiness {
    /// What is asked.
    pub check: Check,
    /// Milliseconds from the start of one probe to the next.
    pub period_ms: u64,
}

impl Readiness {
    /// Period when the file names none, milliseconds.
    pub const PERIOD_MS_DEFAULT: u64 = 1_000;
    /// A probe that takes longer has failed, milliseconds.
    pub const TIMEOUT_MS: u64 = 2_000;
}

/// What a readiness probe asks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Check {
    /// GET over HTTP/1.1 to the host's own address; 200–399 is ready.
    Http {
        /// TCP port.
        port: u16,
        /// Path with its leading slash.
        path: String,
    },
    /// A TCP connection that opens.
    Tcp {
        /// TCP port.
        port: u16,
    },
    /// A command in the host that ends with 0.
    Exec(Vec<String>),
}

/// An underlay host: controller, edge, gateway replica, key server or plain host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Component {
    /// Unique in the world.
    pub name: String,
    /// Its AZ.
    pub az: String,
    /// Its process; plain hosts may have none (then they only wait for `exec`).
    pub process: Option<Process>,
    /// Rate of its uplink, if not the kind's.
    pub rate: Option<Rate>,
    /// MTU of its link in bytes, both ends, if not the underlay's (edges and gateways only).
    pub mtu: Option<u32>,
    /// Worker threads (gateways only).
    pub workers: u16,
    /// The backend it belongs to (gateways of tier worlds only).
    pub backend: Option<String>,
    /// Pods of tenants with `outside: Passthrough` may reach it (plain hosts only).
    pub outside: bool,
    /// The tenant whose own it is; without one it is the provider's (key servers only).
    pub tenant: Option<String>,
    /// Directory whose files it starts with, absolute: the tenant's own certificates and keys (a tenant's key server only).
    pub tls_dir: Option<PathBuf>,
    /// Where it is written.
    pub spot: Spot,
}

/// What happens to traffic for destinations the mesh does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outside {
    /// It is refused.
    Deny,
    /// It passes in plaintext.
    Passthrough,
}

impl FromStr for Outside {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "Deny" => Ok(Self::Deny),
            "Passthrough" => Ok(Self::Passthrough),
            _ => Err(()),
        }
    }
}

impl fmt::Display for Outside {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, out)
    }
}

/// How a tenant's private keys are kept: `keys` of its Tenant object, word by word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keys {
    /// Where they are.
    pub place: KeyPlace,
    /// Of which kind.
    pub algorithm: KeyAlgorithm,
    /// What data planes do while no key server answers.
    pub fallback: KeyFallback,
}

/// Where private keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeyPlace {
    /// At nodes and gateways.
    Local,
    /// In key servers alone.
    KeyServer,
}

/// Of which kind keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeyAlgorithm {
    /// ECDSA with P-256.
    EcdsaP256,
    /// RSA of 2048 bits.
    Rsa2048,
}

/// What happens while no key server answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeyFallback {
    /// Handshakes fail.
    Refuse,
    /// Data planes make keys of their own.
    Local,
}

impl FromStr for KeyPlace {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "Local" => Ok(Self::Local),
            "KeyServer" => Ok(Self::KeyServer),
            _ => Err(()),
        }
    }
}

impl FromStr for KeyAlgorithm {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "EcdsaP256" => Ok(Self::EcdsaP256),
            "Rsa2048" => Ok(Self::Rsa2048),
            _ => Err(()),
        }
    }
}

impl FromStr for KeyFallback {
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
pub struct Tenant {
    /// Unique in the world.
    pub name: String,
    /// VXLAN network identifier, 24 bits, unique in the world.
    pub vni: u32,
    /// SPIFFE trust domain.
    pub trust_domain: String,
    /// Policy for unknown destinations.
    pub outside: Outside,
    /// Pods' IPv4 range; each node takes one /24, gateways the top one.
    pub pods4: Ipv4Net,
    /// Pods' IPv6 range; each node takes one /112.
    pub pods6: Ipv6Net,
    /// Ranges of service VIPs, which have no route anywhere.
    pub service_cidrs: Vec<ipnet::IpNet>,
    /// Ranges of the tenant's gateway addresses (tier worlds only). AZ number a has the a-th eighth.
    pub gateway_cidrs: Option<(Ipv4Net, Ipv6Net)>,
    /// The AZ in which its services live if they do not say otherwise (tier worlds only).
    pub home_az: Option<String>,
    /// Pods on nodes without a proxy ask the tenant's DNS for services (tier worlds only).
    pub dns: bool,
    /// How its private keys are kept; `None`: as the mesh does by itself.
    pub keys: Option<Keys>,
    /// YAML files (absolute paths) copied to the controller's directory for this tenant.
    pub config: Vec<PathBuf>,
    /// Nodes.
    pub nodes: Vec<Node>,
    /// Pods.
    pub pods: Vec<Pod>,
    /// Where it is written.
    pub spots: TenantSpots,
}

/// Where the parts of a tenant are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TenantSpots {
    /// The tenant itself.
    pub whole: Spot,
    /// `vni`.
    pub vni: Spot,
    /// `trustDomain`.
    pub trust_domain: Spot,
    /// `podCidrs`.
    pub pods: Spot,
    /// `serviceCidrs`.
    pub services: Spot,
    /// `gatewayCidrs`.
    pub gateways: Spot,
    /// `homeAz`.
    pub home_az: Spot,
    /// `dns`.
    pub dns: Spot,
    /// `keys`.
    pub keys: Spot,
}

/// A tenant's node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Unique in the world.
    pub name: String,
    /// Its AZ.
    pub az: String,
    /// The node proxy; `None` when the file says `proxy: false`.
    pub proxy: Option<Process>,
    /// Rate of its uplink, if not the kind's.
    pub rate: Option<Rate>,
    /// Where it is written.
    pub spot: Spot,
}

/// A pod template with its number of replicas, named `NAME-0`, `NAME-1`, ….
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pod {
    /// Name without the replica number.
    pub name: String,
    /// Kubernetes namespace.
    pub namespace: String,
    /// The nodes it runs on; replica i runs on the (i mod n)-th.
    pub nodes: Vec<String>,
    /// Where they are written.
    pub nodes_spot: Spot,
    /// Number of copies, from 1.
    pub replicas: u16,
    /// Service account, the last part of its SPIFFE identity.
    pub service_account: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// The node serves the SPIFFE Workload API to it.
    pub workload_api: bool,
    /// Its process.
    pub process: Process,
    /// Rate of its link, if not the kind's.
    pub rate: Option<Rate>,
    /// MTU of its link in bytes, both ends, if not the overlays'.
    pub mtu: Option<u32>,
    /// Where it is written.
    pub spot: Spot,
}

impl Pod {
    /// Reads one pod as it would stand in a topology's `pods:` list.
    ///
    /// Errors: every mistake in `yaml`, by line.
    pub fn parse(yaml: &str) -> Result<Self, Vec<Problem>> {
        let file = Path::new("pod");
        let tree = tree::parse(file, yaml).map_err(|problem| vec![problem])?;
        read::pod_alone(&tree, file)
    }
}

/// The files of a `tlsDir`, in order.
pub(crate) fn tls_files(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries: Vec<PathBuf> = std::fs::read_dir(dir)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    let mut files: Vec<PathBuf> = entries.into_iter().filter(|path| path.is_file()).collect();
    files.sort();
    Ok(files)
}

impl Topology {
    /// Whether gateways are reached through edges, and tenants may use the same addresses.
    pub fn is_tier(&self) -> bool {
        !self.edges.is_empty()
    }

    /// Reads and checks a topology file.
    ///
    /// Errors: every mistake found, in the order of the lines.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, Vec<Problem>> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|error| {
            vec![Problem {
                file: path.into(),
                spot: Spot::default(),
                what: format!("cannot be read: {error}"),
                mend: "name a topology file".into(),
            }]
        })?;
        let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
        Self::parse(&path, &text)
    }

    /// Reads and checks a topology from text; `file` names it in messages and anchors relative paths.
    ///
    /// Errors: every mistake found, in the order of the lines.
    pub fn parse(file: &Path, text: &str) -> Result<Self, Vec<Problem>> {
        let tree = tree::parse(file, text).map_err(|problem| vec![problem])?;
        let mut findings = crate::problem::Findings::of(file.into());
        let topology = read::topology(&tree, file, &mut findings);
        match topology {
            Some(topology) => {
                check::topology(&topology, &mut findings);
                if findings.is_empty() { Ok(topology) } else { Err(findings.into_sorted()) }
            }
            None => Err(findings.into_sorted()),
        }
    }

    /// Digest of everything that makes this world what it is, contents of its configuration files
    /// included, wherever those files are.
    pub(crate) fn fingerprint(&self) -> String {
        let mut bare = self.clone();
        bare.file = PathBuf::new();
        let mut digest = Sha256::new();
        for tenant in &mut bare.tenants {
            for file in &mut tenant.config {
                // A file that has vanished since differs from one that is there.
                digest.update(std::fs::read(&*file).unwrap_or_default());
                *file = file.file_name().map(PathBuf::from).unwrap_or_default();
            }
        }
        for key_server in &mut bare.key_servers {
            for file in key_server.tls_dir.take().map(|dir| tls_files(&dir).unwrap_or_default()).into_iter().flatten() {
                digest.update(file.file_name().unwrap_or_default().as_encoded_bytes());
                digest.update(std::fs::read(&file).unwrap_or_default());
            }
        }
        // Checked topologies hold only texts, numbers and lists, which always have a JSON form.
        digest.update(serde_json::to_vec(&bare).unwrap_or_default());
        digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The same topology under another name, so that one file can be several worlds at once.
    ///
    /// Errors: the name is not one a world may have.
    pub fn renamed(mut self, name: &str) -> Result<Self, Problem> {
        check::world_name(name).map_err(|(what, mend)| Problem { file: self.file.clone(), spot: Spot::default(), what, mend })?;
        self.name = name.to_owned();
        Ok(self)
    }
}
