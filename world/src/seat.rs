//! A seat is a host as a place for processes: namespace, cgroup, files, command line.
//! Works them out from topology and plan; starts nothing.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::net::netns_path;
use crate::plan::{HostKind, HostPlan, Plan, PodPlan};
use crate::services::{self, Service};
use crate::state::{Paths, file_name, make_dir, write_whole};
use crate::topology::{Check, Component, Pod, Process, Readiness, Tenant, Topology};

/// Port of the controller's gRPC services.
pub const CONTROLLER_PORT: u16 = 15012;
/// Port of the readiness endpoint of nodes and gateways.
pub const READINESS_PORT: u16 = 15021;
/// Port on which a key server takes requests.
pub const KEYS_PORT: u16 = 15013;
/// Port on loopback, inside the pod, on which a node proxy serves the SPIFFE Workload API.
const WORKLOAD_API_PORT: u16 = 15010;
/// Port on which a node proxy takes a pod's outbound connections, inside the pod.
pub const CAPTURE_PORT: u16 = 15001;

/// Where a process runs and with what.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Seat {
    /// Name in the world: `gw1`, `a-n1`, `alpha/bookinfo/reviews-v1-0`.
    pub name: String,
    /// `router`, `controller`, `edge`, `gateway`, `keyServer`, `host`, `node` or `pod`.
    pub kind: String,
    /// Name of the AZ.
    pub az: String,
    /// Tenant of a node or pod.
    pub tenant: Option<String>,
    /// Node of a pod.
    pub node: Option<String>,
    /// The router's interface towards an underlay host, in the namespace of `router-AZ`: where the underlay sees all the host says
    /// and hears.
    pub router_device: Option<String>,
    /// File of the network namespace.
    pub netns: PathBuf,
    /// Namespace from which readiness is asked: a pod's node, as a kubelet does (so that no
    /// capture inside the pod is in between), else its own.
    pub vantage: PathBuf,
    /// cgroup v2 directory of its processes.
    pub cgroup: PathBuf,
    /// Its own IPv4 address: a pod's, or the underlay's.
    pub ip4: Option<Ipv4Addr>,
    /// Its own IPv6 address; the underlay has none.
    pub ip6: Option<Ipv6Addr>,
    /// Addresses inside tenants' overlays, by tenant (gateways and nodes).
    pub overlay: BTreeMap<String, (Ipv4Addr, Ipv6Addr)>,
    /// Holds `hosts` and `resolv.conf`, seen as /etc's.
    pub etc: PathBuf,
    /// Working directory.
    pub data: PathBuf,
    /// Standard output and error.
    pub log: PathBuf,
    /// Environment, complete.
    pub env: BTreeMap<String, String>,
    /// The process to keep running, if any.
    pub job: Option<Job>,
}

/// A process to keep running.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// Program (as written) and arguments.
    pub argv: Vec<String>,
    /// Everything else the topology says.
    pub process: Process,
    /// Must hold before it is started.
    pub after: Vec<Condition>,
}

/// Something to wait for before a start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Condition {
    /// A file exists.
    File(PathBuf),
    /// Somebody listens on this TCP port on loopback, inside the host's namespace.
    Listener(u16),
}

impl std::fmt::Display for Condition {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Condition::File(path) => write!(out, "the file {}", path.display()),
            Condition::Listener(port) => write!(out, "capture by the node proxy (a listener on port {port})"),
        }
    }
}

/// Makes seats for the hosts of one world.
pub(crate) struct Seats<'w> {
    pub(crate) topology: &'w Topology,
    pub(crate) plan: &'w Plan,
    pub(crate) paths: &'w Paths,
    pub(crate) cgroup: &'w Path,
    pub(crate) bin_dirs: &'w [PathBuf],
}

impl Seats<'_> {
    /// Routers and underlay hosts.
    pub(crate) fn fixed(&self) -> Vec<Seat> {
        let routers = self.plan.routers.iter().map(|router| {
            let mut seat = self.blank(&router.name, "router", &router.az, &router.netns);
            seat.ip4 = Some(router.ip4);
            seat
        });
        routers.chain(self.plan.hosts.iter().map(|host| self.host(host))).collect()
    }

    fn blank(&self, name: &str, kind: &str, az: &str, netns: &str) -> Seat {
        Seat {
            name: name.to_owned(),
            kind: kind.to_owned(),
            az: az.to_owned(),
            tenant: None,
            node: None,
            router_device: None,
            netns: netns_path(netns),
            vantage: netns_path(netns),
            cgroup: self.cgroup.join(name),
            ip4: None,
            ip6: None,
            overlay: BTreeMap::new(),
            etc: self.paths.etc(name),
            data: self.paths.data(name),
            log: self.paths.log(name),
            env: self.base_env(name),
            job: None,
        }
    }

    /// Nothing of the machine's environment reaches a host.
    fn base_env(&self, name: &str) -> BTreeMap<String, String> {
        let own: Vec<String> = self.bin_dirs.iter().map(|dir| dir.display().to_string()).collect();
        let system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let path = own.into_iter().chain([system.to_owned()]).collect::<Vec<_>>().join(":");
        [("PATH", path.as_str()), ("HOME", "/root"), ("LANG", "C.UTF-8"), ("CANAL_WORLD", self.paths.world()), ("CANAL_HOST", name)]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into()
    }

    pub(crate) fn host(&self, host: &HostPlan) -> Seat {
        let az = &self.plan.routers[host.az].az;
        let kind = match host.kind {
            HostKind::Controller => "controller",
            HostKind::Edge => "edge",
            HostKind::Gateway(_) => "gateway",
            HostKind::KeyServer { .. } => "keyServer",
            HostKind::Host { .. } => "host",
            HostKind::Node { .. } => "node",
        };
        let mut seat = self.blank(&host.name, kind, az, &host.netns);
        seat.ip4 = Some(host.ip4);
        seat.router_device = Some(host.router_device());
        for tenant in &self.plan.tenants {
            for vtep in tenant.nodes.iter().chain(&tenant.gateways).filter(|vtep| vtep.host == host.name) {
                seat.overlay.insert(tenant.name.clone(), (vtep.ip4, vtep.ip6));
            }
        }
        if let HostKind::Node { tenant, .. } = host.kind {
            seat.tenant = Some(self.plan.tenants[tenant].name.clone());
            // The pods' cgroups are beside it, so that its CPU time is its own.
            seat.cgroup = seat.cgroup.join("_proxy");
        }
        seat.job = self.host_job(host);
        self.add_env(seat)
    }

    fn add_env(&self, mut seat: Seat) -> Seat {
        if let Some(job) = &seat.job {
            seat.env.extend(job.process.env.clone());
        }
        seat
    }

    fn host_job(&self, host: &HostPlan) -> Option<Job> {
        let named = |list: &'_ [Component]| list.iter().find(|component| component.name == host.name).cloned();
        let component = match host.kind {
            HostKind::Controller => self.topology.controller.clone(),
            HostKind::Edge => named(&self.topology.edges),
            HostKind::Gateway(_) => named(&self.topology.gateways),
            HostKind::KeyServer { .. } => named(&self.topology.key_servers),
            HostKind::Host { .. } => named(&self.topology.hosts),
            HostKind::Node { tenant, node } => return self.node_job(host, &self.topology.tenants[tenant], node),
        }?;
        let process = component.process.clone()?;
        if !process.command.is_empty() {
            return Some(written_job(process));
        }
        match host.kind {
            HostKind::Controller => Some(self.controller_job(process)),
            HostKind::Edge => Some(self.edge_job(host, process)),
            HostKind::Gateway(_) => Some(self.gateway_job(host, &component, process)),
            HostKind::KeyServer { tenant } => Some(self.key_server_job(host, tenant, process)),
            HostKind::Host { .. } | HostKind::Node { .. } => None,
        }
    }

    fn controller_job(&self, process: Process) -> Job {
        let argv = vec![
            "canal-controller".into(),
            "--listen".into(),
            format!("0.0.0.0:{CONTROLLER_PORT}"),
            "--data-dir".into(),
            shown(&self.paths.data("controller")),
            "--config-dir".into(),
            shown(&self.paths.config()),
            "--principals".into(),
            shown(&self.paths.principals()),
            "--infra-dir".into(),
            shown(&self.paths.infra()),
        ];
        built_in(argv, process, Vec::new(), Check::Tcp { port: CONTROLLER_PORT })
    }

    /// What nodes and gateways need to reach the controller.
    fn controller_args(&self, host: &HostPlan) -> Vec<String> {
        let controller = self.plan.hosts.iter().find(|host| host.kind == HostKind::Controller);
        let address = controller.map_or(Ipv4Addr::LOCALHOST, |controller| controller.ip4);
        vec![
            "--az".into(),
            self.plan.routers[host.az].az.clone(),
            "--controller".into(),
            format!("https://{address}:{CONTROLLER_PORT}"),
            "--root-ca".into(),
            shown(&self.paths.root_ca()),
            "--token-file".into(),
            shown(&self.paths.token(&host.name)),
            "--data-dir".into(),
            shown(&self.paths.data(&host.name)),
        ]
    }

    fn edge_job(&self, host: &HostPlan, process: Process) -> Job {
        let mut argv = vec!["canal-edge".into(), "--edge".into(), host.name.clone(), "--address".into(), host.ip4.to_string()];
        argv.extend(self.controller_args(host));
        argv.extend(self.program_args(host));
        built_in(argv, process, vec![Condition::File(self.paths.root_ca())], mesh_check())
    }

    /// What those need that hang programs on their uplink.
    fn program_args(&self, host: &HostPlan) -> [String; 4] {
        ["--device".into(), "eth0".into(), "--pin-dir".into(), shown(&self.paths.bpffs(&host.name))]
    }

    fn key_server_job(&self, host: &HostPlan, tenant: Option<usize>, process: Process) -> Job {
        let mut argv = vec!["canal-keyserver".into(), "--name".into(), host.name.clone()];
        argv.extend(self.controller_args(host));
        argv.extend(["--listen".into(), format!("0.0.0.0:{KEYS_PORT}")]);
        if let Some(tenant) = tenant {
            argv.extend(["--tenant".into(), self.plan.tenants[tenant].name.clone()]);
            argv.extend(["--tls-dir".into(), shown(&self.paths.tls(&host.name))]);
        }
        built_in(argv, process, vec![Condition::File(self.paths.root_ca())], mesh_check())
    }

    /// The provider's key servers, for those who ask them.
    fn key_server_args(&self) -> Vec<String> {
        let own = self.plan.hosts.iter().filter(|host| host.kind == HostKind::KeyServer { tenant: None });
        let shown = |host: &HostPlan| format!("{}={}@{}:{KEYS_PORT}", self.plan.routers[host.az].az, host.name, host.ip4);
        own.flat_map(|host| ["--key-server".to_owned(), shown(host)]).collect()
    }

    fn gateway_job(&self, host: &HostPlan, gateway: &Component, process: Process) -> Job {
        let mut argv = vec!["canal-gateway".into(), "--replica".into(), host.name.clone()];
        argv.extend(self.controller_args(host));
        argv.extend(["--workers".into(), gateway.workers.to_string()]);
        argv.extend(self.key_server_args());
        if let Some(backend) = &host.backend {
            argv.extend(["--backend".into(), backend.clone(), "--underlay".into(), host.ip4.to_string()]);
            argv.extend(self.program_args(host));
        }
        built_in(argv, process, vec![Condition::File(self.paths.root_ca())], mesh_check())
    }

    fn node_job(&self, host: &HostPlan, tenant: &Tenant, node: usize) -> Option<Job> {
        let process = tenant.nodes[node].proxy.clone()?;
        if !process.command.is_empty() {
            return Some(written_job(process));
        }
        let mut argv = vec!["canal-node".into(), "--node".into(), host.name.clone()];
        argv.extend(self.controller_args(host));
        argv.extend(self.key_server_args());
        argv.extend(["--pods-dir".into(), shown(&self.paths.node_pods(&host.name))]);
        argv.extend(["--bpf-pin-dir".into(), shown(&self.paths.bpffs(&host.name))]);
        Some(built_in(argv, process, vec![Condition::File(self.paths.root_ca())], mesh_check()))
    }

    /// The seat of a pod.
    pub(crate) fn pod(&self, plan: &PodPlan, pod: &Pod) -> Seat {
        let tenant = &self.topology.tenants[plan.tenant];
        let node = &tenant.nodes[plan.node];
        let mut seat = self.blank(&plan.uid, "pod", &node.az, &plan.netns);
        seat.tenant = Some(tenant.name.clone());
        seat.node = Some(node.name.clone());
        if let Some(host) = self.plan.host(&node.name) {
            seat.vantage = netns_path(&host.netns);
        }
        seat.cgroup = self.cgroup.join(&node.name).join(format!("{}.{}", plan.namespace, plan.name));
        (seat.ip4, seat.ip6) = (Some(plan.ip4), Some(plan.ip6));
        for (key, value) in [
            ("POD_NAME", plan.name.clone()),
            ("POD_NAMESPACE", plan.namespace.clone()),
            ("POD_IP", plan.ip4.to_string()),
            ("POD_IPS", format!("{},{}", plan.ip4, plan.ip6)),
            ("NODE_NAME", node.name.clone()),
            ("SERVICE_ACCOUNT", pod.service_account.clone()),
            ("AZ", node.az.clone()),
        ] {
            seat.env.insert(key.into(), value);
        }
        if pod.workload_api {
            seat.env.insert("SPIFFE_ENDPOINT_SOCKET".into(), format!("tcp://127.0.0.1:{WORKLOAD_API_PORT}"));
        }
        let mut job = written_job(pod.process.clone());
        // Fail closed: on a node with the built-in proxy no application runs uncaptured.
        if node.proxy.as_ref().is_some_and(|proxy| proxy.command.is_empty()) {
            job.after.push(Condition::Listener(CAPTURE_PORT));
        }
        seat.job = Some(job);
        self.add_env(seat)
    }

    /// Directories and /etc files of a seat.
    pub(crate) fn furnish(&self, seat: &Seat, services: &[Service]) -> crate::Result<()> {
        for dir in [&seat.etc, &seat.data, &self.paths.logs()] {
            make_dir(dir)?;
        }
        crate::cgroup::make(&seat.cgroup)?;
        let addresses: Vec<IpAddr> = seat.ip4.map(IpAddr::V4).into_iter().chain(seat.ip6.map(IpAddr::V6)).collect();
        let servers = self.name_servers(seat);
        let hosts = if seat.kind == "pod" {
            // Whoever has a DNS must find services there.
            let services = if servers.is_empty() { services } else { &[] };
            services::hosts_file(seat.hostname(), &addresses, pod_namespace(seat), services)
        } else {
            let mut text = services::hosts_file(seat.hostname(), &addresses, "", &[]);
            for host in self.plan.hosts.iter().filter(|host| host.name != seat.name) {
                text.push_str(&format!("{} {}\n", host.ip4, host.name));
            }
            text
        };
        write_whole(&seat.etc.join("hosts"), &hosts, 0o644)?;
        write_whole(&seat.etc.join("resolv.conf"), &services::resolver_file(pod_namespace(seat), &servers), 0o644)
    }

    /// The tenant's DNS in every AZ, for pods that find services by it alone.
    fn name_servers(&self, seat: &Seat) -> Vec<Ipv4Addr> {
        let named = |tenant: &&Tenant| Some(&tenant.name) == seat.tenant.as_ref();
        let (Some(tenant), Some(node)) = (self.topology.tenants.iter().find(named), &seat.node) else { return Vec::new() };
        let captured = tenant.nodes.iter().any(|other| other.name == *node && other.proxy.is_some());
        if captured || !tenant.dns {
            return Vec::new();
        }
        let plan = self.plan.tenants.iter().find(|plan| plan.name == tenant.name);
        let az = self.plan.routers.iter().find(|router| router.az == seat.az).map_or(0, |router| router.number);
        plan.map(|plan| crate::tier::name_servers(self.plan, plan, az)).unwrap_or_default()
    }
}

impl Seat {
    /// Host name as processes see it: a pod's bare name.
    pub fn hostname(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or(&self.name)
    }

    /// Name of its files.
    pub fn file_name(&self) -> String {
        file_name(&self.name)
    }
}

fn pod_namespace(seat: &Seat) -> &str {
    seat.env.get("POD_NAMESPACE").map_or("", String::as_str)
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn mesh_check() -> Check {
    Check::Http { port: READINESS_PORT, path: "/healthz/ready".into() }
}

/// A command the topology wrote in full.
fn written_job(process: Process) -> Job {
    let argv = process.command.iter().chain(&process.args).cloned().collect();
    Job { argv, process, after: Vec::new() }
}

/// One of the mesh's own components.
fn built_in(mut argv: Vec<String>, mut process: Process, after: Vec<Condition>, check: Check) -> Job {
    argv.extend(process.args.clone());
    process.readiness.get_or_insert(Readiness { check, period_ms: Readiness::PERIOD_MS_DEFAULT });
    Job { argv, process, after }
}

/// Finds a program: as a path if it has a slash, else in the given directories, else in PATH.
pub(crate) fn find_program(name: &str, bin_dirs: &[PathBuf]) -> Option<PathBuf> {
    let runnable = |path: &Path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        let path = PathBuf::from(name);
        return runnable(&path).then_some(path);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = std::env::split_paths(&path).collect::<Vec<_>>();
    bin_dirs.iter().chain(&system).map(|dir| dir.join(name)).find(|path| runnable(path))
}
