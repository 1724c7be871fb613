//! [`HostEnvironment`] is what a process on a host needs: network namespace, cgroup, addresses,
//! files, command line. [`EnvironmentBuilder`] derives it from topology and plan. This module
//! starts nothing.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::impairment::Impairment;
use crate::net::netns_path;
use crate::plan::{HostKind, HostPlan, PodPlan, RelayPlan, WorldPlan};
use crate::problem::FilePosition;
use crate::relay;
use crate::services::{self, ServiceVips};
use crate::state::{WorldPaths, file_name, make_dir, write_whole};
use crate::topology::{
    Check, Component, PodTemplate, ProcessTemplate, Readiness, Restart, TenantTopology, Topology,
};

/// Port of the controller's gRPC services. Istio's number of istiod.
pub const CONTROLLER_PORT: u16 = 15012;
/// Port of the readiness endpoint of nodes and gateways. Istio's number for health checks.
pub const READINESS_PORT: u16 = 15021;
/// Port on which a key server accepts requests. Any port will do; it is next to the controller's.
pub const KEYS_PORT: u16 = 15013;
/// Port on the pod's loopback address on which a node proxy serves the SPIFFE Workload API. The
/// node proxy's `PORT` of its Workload API.
const WORKLOAD_API_PORT: u16 = 15010;
/// Port inside the pod on which a node proxy accepts the pod's captured connections. Istio's
/// number.
pub const CAPTURE_PORT: u16 = 15001;

/// Period of a relay's readiness probe, in milliseconds. A relay that listens keeps listening. So
/// one check in ten seconds is enough.
const RELAY_PERIOD_MS: u64 = 10_000;

/// Everything that a process on a host needs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostEnvironment {
    /// Name in the world: `gw1`, `a-n1`, `alpha/bookinfo/reviews-v1-0`.
    pub name: String,
    /// One of `router`, `relay`, `controller`, `edge`, `gateway`, `keyServer`, `host`, `node` and
    /// `pod`.
    pub kind: String,
    pub az: String,
    /// Tenant of a node or pod.
    pub tenant: Option<String>,
    /// Name of a pod's node.
    pub node: Option<String>,
    /// The router's interface toward an underlay host, in the namespace of `router-AZ`. All
    /// underlay traffic of the host passes it.
    pub router_device: Option<String>,
    /// File of the network namespace.
    pub netns: PathBuf,
    /// Namespace from which readiness is probed. For a pod it is the node's, as with a kubelet, so
    /// that no capture in the pod is involved. For other hosts it is their own.
    pub probe_netns: PathBuf,
    /// The cgroup v2 directory of the host's processes.
    pub cgroup: PathBuf,
    /// IPv4 address of the pod, or of the host on the underlay.
    pub ip4: Option<Ipv4Addr>,
    /// IPv6 address of the pod; underlay hosts have none.
    pub ip6: Option<Ipv6Addr>,
    /// Addresses inside tenants' overlays, by tenant (gateways and nodes).
    pub overlay: BTreeMap<String, (Ipv4Addr, Ipv6Addr)>,
    /// Directory with the files that the host sees as `/etc/hosts` and `/etc/resolv.conf`.
    pub etc: PathBuf,
    /// Working directory of the host's processes.
    pub data: PathBuf,
    /// File with standard output and error.
    pub log: PathBuf,
    /// The complete environment of the host's processes.
    pub env: BTreeMap<String, String>,
    /// The process that runs permanently, if any.
    pub job: Option<ManagedProcess>,
}

/// A process that the process supervisor runs permanently.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ManagedProcess {
    /// Program (as written) and arguments.
    pub argv: Vec<String>,
    /// All other settings from the topology.
    pub process: ProcessTemplate,
    /// Conditions that must hold before the process is started.
    pub after: Vec<StartCondition>,
}

/// Condition for the start of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StartCondition {
    /// The file at this path exists.
    File(PathBuf),
    /// A process listens on this TCP port on loopback, inside the host's namespace.
    Listener(u16),
}

impl std::fmt::Display for StartCondition {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StartCondition::File(path) => write!(out, "the file {}", path.display()),
            StartCondition::Listener(port) => {
                write!(out, "capture by the node proxy (a listener on port {port})")
            }
        }
    }
}

/// Builds the environments of one world's hosts.
pub(crate) struct EnvironmentBuilder<'w> {
    pub(crate) topology: &'w Topology,
    pub(crate) plan: &'w WorldPlan,
    pub(crate) paths: &'w WorldPaths,
    pub(crate) cgroup: &'w Path,
    pub(crate) bin_dirs: &'w [PathBuf],
}

impl EnvironmentBuilder<'_> {
    /// Returns the environments of routers, relays and underlay hosts.
    pub(crate) fn fixed(&self) -> Vec<HostEnvironment> {
        let routers = self.plan.routers.iter().map(|router| {
            let mut environment = self.blank(&router.name, "router", &router.az, &router.netns);
            environment.ip4 = Some(router.ip4);
            environment
        });
        let relays = self
            .plan
            .relays()
            .into_iter()
            .map(|relay| self.relay(&relay));
        routers
            .chain(relays)
            .chain(self.plan.hosts.iter().map(|host| self.host(host)))
            .collect()
    }

    /// Returns the environment of a link's relay.
    pub(crate) fn relay(&self, relay: &RelayPlan) -> HostEnvironment {
        let mut environment = self.blank(
            &relay.name,
            "relay",
            &self.plan.routers[relay.az].az,
            &relay.netns,
        );
        let Impairment {
            delay,
            jitter,
            loss_ppm,
        } = relay.impairment;
        let numbers = [
            // A delay is ten seconds at most (`Delay::MAX`), so the casts lose nothing.
            delay.as_micros() as u64,
            jitter.as_micros() as u64,
            loss_ppm.into(),
            relay.seed,
        ];
        let command = ["canal-world-relay", "carry"]
            .map(str::to_owned)
            .into_iter()
            .chain(numbers.iter().map(u64::to_string))
            .collect();
        // The relay listens once it has opened its devices.
        let check = Check::Exec(["test", "-S", relay::SOCKET].map(str::to_owned).into());
        let readiness = Some(Readiness {
            check,
            period_ms: RELAY_PERIOD_MS,
        });
        let (args, env, restart, spot) = (
            Vec::new(),
            BTreeMap::new(),
            Restart::Always,
            FilePosition::default(),
        );
        environment.job = Some(written_job(ProcessTemplate {
            command,
            args,
            env,
            restart,
            readiness,
            spot,
        }));
        environment
    }

    fn blank(&self, name: &str, kind: &str, az: &str, netns: &str) -> HostEnvironment {
        HostEnvironment {
            name: name.to_owned(),
            kind: kind.to_owned(),
            az: az.to_owned(),
            tenant: None,
            node: None,
            router_device: None,
            netns: netns_path(netns),
            probe_netns: netns_path(netns),
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

    /// Returns the base environment. No variable of the machine's environment reaches a host.
    fn base_env(&self, name: &str) -> BTreeMap<String, String> {
        let own: Vec<String> = self
            .bin_dirs
            .iter()
            .map(|dir| dir.display().to_string())
            .collect();
        let system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let path = own
            .into_iter()
            .chain([system.to_owned()])
            .collect::<Vec<_>>()
            .join(":");
        [
            ("PATH", path.as_str()),
            ("HOME", "/root"),
            ("LANG", "C.UTF-8"),
            ("CANAL_WORLD", self.paths.world()),
            ("CANAL_HOST", name),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
    }

    pub(crate) fn host(&self, host: &HostPlan) -> HostEnvironment {
        let az = &self.plan.routers[host.az].az;
        let kind = match host.kind {
            HostKind::Controller => "controller",
            HostKind::Edge => "edge",
            HostKind::Gateway(_) => "gateway",
            HostKind::KeyServer { .. } => "keyServer",
            HostKind::Host { .. } => "host",
            HostKind::Node { .. } => "node",
        };
        let mut environment = self.blank(&host.name, kind, az, &host.netns);
        environment.ip4 = Some(host.ip4);
        environment.router_device = Some(host.router_device());
        for tenant in &self.plan.tenants {
            for vtep in tenant
                .nodes
                .iter()
                .chain(&tenant.gateways)
                .filter(|vtep| vtep.host == host.name)
            {
                environment
                    .overlay
                    .insert(tenant.name.clone(), (vtep.ip4, vtep.ip6));
            }
        }
        if let HostKind::Node { tenant, .. } = host.kind {
            environment.tenant = Some(self.plan.tenants[tenant].name.clone());
            // The pods' cgroups are siblings, so that the CPU time of this cgroup is the node
            // proxy's own.
            environment.cgroup = environment.cgroup.join("_proxy");
        }
        environment.job = self.host_job(host);
        self.add_env(environment)
    }

    fn add_env(&self, mut environment: HostEnvironment) -> HostEnvironment {
        if let Some(job) = &environment.job {
            environment.env.extend(job.process.env.clone());
        }
        environment
    }

    fn host_job(&self, host: &HostPlan) -> Option<ManagedProcess> {
        let named = |list: &'_ [Component]| {
            list.iter()
                .find(|component| component.name == host.name)
                .cloned()
        };
        let component = match host.kind {
            HostKind::Controller => self.topology.controller.clone(),
            HostKind::Edge => named(&self.topology.edges),
            HostKind::Gateway(_) => named(&self.topology.gateways),
            HostKind::KeyServer { .. } => named(&self.topology.key_servers),
            HostKind::Host { .. } => named(&self.topology.hosts),
            HostKind::Node { tenant, node } => {
                return self.node_job(host, &self.topology.tenants[tenant], node);
            }
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

    fn controller_job(&self, process: ProcessTemplate) -> ManagedProcess {
        let argv = vec![
            "canal-controller".into(),
            "--listen".into(),
            format!("0.0.0.0:{CONTROLLER_PORT}"),
            "--data-dir".into(),
            path_text(&self.paths.data("controller")),
            "--config-dir".into(),
            path_text(&self.paths.config()),
            "--principals".into(),
            path_text(&self.paths.principals()),
            "--infra-dir".into(),
            path_text(&self.paths.infra()),
        ];
        built_in(
            argv,
            process,
            Vec::new(),
            Check::Tcp {
                port: CONTROLLER_PORT,
            },
        )
    }

    /// Returns the arguments with which nodes, gateways, edges and key servers reach the
    /// controller.
    fn controller_args(&self, host: &HostPlan) -> Vec<String> {
        let controller = self
            .plan
            .hosts
            .iter()
            .find(|host| host.kind == HostKind::Controller);
        let address = controller.map_or(Ipv4Addr::LOCALHOST, |controller| controller.ip4);
        vec![
            "--az".into(),
            self.plan.routers[host.az].az.clone(),
            "--controller".into(),
            format!("https://{address}:{CONTROLLER_PORT}"),
            "--root-ca".into(),
            path_text(&self.paths.root_ca()),
            "--token-file".into(),
            path_text(&self.paths.token(&host.name)),
            "--data-dir".into(),
            path_text(&self.paths.data(&host.name)),
        ]
    }

    fn edge_job(&self, host: &HostPlan, process: ProcessTemplate) -> ManagedProcess {
        let mut argv = vec![
            "canal-edge".into(),
            "--edge".into(),
            host.name.clone(),
            "--address".into(),
            host.ip4.to_string(),
        ];
        argv.extend(
            self.plan
                .anycast(host)
                .into_iter()
                .flat_map(|end| ["--anycast".into(), end.to_string()]),
        );
        argv.extend(self.controller_args(host));
        argv.extend(self.program_args(host));
        built_in(
            argv,
            process,
            vec![StartCondition::File(self.paths.root_ca())],
            mesh_check(),
        )
    }

    /// Returns the arguments of processes that attach BPF programs to their uplink.
    fn program_args(&self, host: &HostPlan) -> [String; 4] {
        [
            "--device".into(),
            "eth0".into(),
            "--pin-dir".into(),
            path_text(&self.paths.bpffs(&host.name)),
        ]
    }

    fn key_server_job(
        &self,
        host: &HostPlan,
        tenant: Option<usize>,
        process: ProcessTemplate,
    ) -> ManagedProcess {
        let mut argv = vec!["canal-keyserver".into(), "--name".into(), host.name.clone()];
        argv.extend(self.controller_args(host));
        argv.extend(["--listen".into(), format!("0.0.0.0:{KEYS_PORT}")]);
        if let Some(tenant) = tenant {
            argv.extend(["--tenant".into(), self.plan.tenants[tenant].name.clone()]);
            argv.extend(["--tls-dir".into(), path_text(&self.paths.tls(&host.name))]);
        }
        built_in(
            argv,
            process,
            vec![StartCondition::File(self.paths.root_ca())],
            mesh_check(),
        )
    }

    /// Returns the arguments with the provider's key servers, for their clients.
    fn key_server_args(&self) -> Vec<String> {
        let own = self
            .plan
            .hosts
            .iter()
            .filter(|host| host.kind == HostKind::KeyServer { tenant: None });
        let shown = |host: &HostPlan| {
            format!(
                "{}={}@{}:{KEYS_PORT}",
                self.plan.routers[host.az].az, host.name, host.ip4
            )
        };
        own.flat_map(|host| ["--key-server".to_owned(), shown(host)])
            .collect()
    }

    fn gateway_job(
        &self,
        host: &HostPlan,
        gateway: &Component,
        process: ProcessTemplate,
    ) -> ManagedProcess {
        let mut argv = vec![
            "canal-gateway".into(),
            "--replica".into(),
            host.name.clone(),
        ];
        argv.extend(self.controller_args(host));
        argv.extend(["--workers".into(), gateway.workers.to_string()]);
        argv.extend(self.key_server_args());
        if let Some(backend) = &host.backend {
            argv.extend([
                "--backend".into(),
                backend.clone(),
                "--underlay".into(),
                host.ip4.to_string(),
            ]);
            argv.extend(self.program_args(host));
            if host.receive_cores > 0 {
                argv.extend(["--sysfs".into(), path_text(&self.paths.sysfs(&host.name))]);
            }
        }
        built_in(
            argv,
            process,
            vec![StartCondition::File(self.paths.root_ca())],
            mesh_check(),
        )
    }

    fn node_job(
        &self,
        host: &HostPlan,
        tenant: &TenantTopology,
        node: usize,
    ) -> Option<ManagedProcess> {
        let process = tenant.nodes[node].proxy.clone()?;
        if !process.command.is_empty() {
            return Some(written_job(process));
        }
        let mut argv = vec!["canal-node".into(), "--node".into(), host.name.clone()];
        argv.extend(self.controller_args(host));
        argv.extend(self.key_server_args());
        argv.extend([
            "--pods-dir".into(),
            path_text(&self.paths.node_pods(&host.name)),
        ]);
        argv.extend([
            "--bpf-pin-dir".into(),
            path_text(&self.paths.bpffs(&host.name)),
        ]);
        Some(built_in(
            argv,
            process,
            vec![StartCondition::File(self.paths.root_ca())],
            mesh_check(),
        ))
    }

    /// Returns the environment of a pod.
    pub(crate) fn pod(&self, plan: &PodPlan, pod: &PodTemplate) -> HostEnvironment {
        let tenant = &self.topology.tenants[plan.tenant];
        let node = &tenant.nodes[plan.node];
        let mut environment = self.blank(&plan.uid, "pod", &node.az, &plan.netns);
        environment.tenant = Some(tenant.name.clone());
        environment.node = Some(node.name.clone());
        if let Some(host) = self.plan.host(&node.name) {
            // A pod is probed from its node, as kubelet does.
            environment.probe_netns = netns_path(&host.netns);
        }
        environment.cgroup = self
            .cgroup
            .join(&node.name)
            .join(format!("{}.{}", plan.namespace, plan.name));
        (environment.ip4, environment.ip6) = (Some(plan.ip4), Some(plan.ip6));
        // Kubernetes manifests usually give these names to values of the downward API.
        for (key, value) in [
            ("POD_NAME", plan.name.clone()),
            ("POD_NAMESPACE", plan.namespace.clone()),
            ("POD_IP", plan.ip4.to_string()),
            ("POD_IPS", format!("{},{}", plan.ip4, plan.ip6)),
            ("NODE_NAME", node.name.clone()),
            ("SERVICE_ACCOUNT", pod.service_account.clone()),
            ("AZ", node.az.clone()),
        ] {
            environment.env.insert(key.into(), value);
        }
        if pod.workload_api {
            environment.env.insert(
                "SPIFFE_ENDPOINT_SOCKET".into(),
                format!("tcp://127.0.0.1:{WORKLOAD_API_PORT}"),
            );
        }
        let mut job = written_job(pod.process.clone());
        // Fail closed: on a node with the built-in proxy no application runs uncaptured.
        if node
            .proxy
            .as_ref()
            .is_some_and(|proxy| proxy.command.is_empty())
        {
            job.after.push(StartCondition::Listener(CAPTURE_PORT));
        }
        environment.job = Some(job);
        self.add_env(environment)
    }

    /// Creates the directories, the cgroup and the /etc files of a host.
    pub(crate) fn private_files(
        &self,
        environment: &HostEnvironment,
        services: &[ServiceVips],
    ) -> crate::Result<()> {
        for dir in [&environment.etc, &environment.data, &self.paths.logs()] {
            make_dir(dir)?;
        }
        crate::cgroup::make(&environment.cgroup)?;
        let addresses: Vec<IpAddr> = environment
            .ip4
            .map(IpAddr::V4)
            .into_iter()
            .chain(environment.ip6.map(IpAddr::V6))
            .collect();
        let servers = self.name_servers(environment);
        let hosts = if environment.kind == "pod" {
            // A pod with a DNS server must resolve services there.
            let services = if servers.is_empty() { services } else { &[] };
            services::hosts_file(
                environment.hostname(),
                &addresses,
                pod_namespace(environment),
                services,
            )
        } else {
            let mut text = services::hosts_file(environment.hostname(), &addresses, "", &[]);
            for host in self
                .plan
                .hosts
                .iter()
                .filter(|host| host.name != environment.name)
            {
                text.push_str(&format!("{} {}\n", host.ip4, host.name));
            }
            text
        };
        write_whole(&environment.etc.join("hosts"), &hosts, 0o644)?;
        write_whole(
            &environment.etc.join("resolv.conf"),
            &services::resolver_file(pod_namespace(environment), &servers),
            0o644,
        )
    }

    /// Returns the tenant's DNS servers in every AZ, for pods that resolve services only by DNS.
    fn name_servers(&self, environment: &HostEnvironment) -> Vec<Ipv4Addr> {
        let named = |tenant: &&TenantTopology| Some(&tenant.name) == environment.tenant.as_ref();
        let (Some(tenant), Some(node)) =
            (self.topology.tenants.iter().find(named), &environment.node)
        else {
            return Vec::new();
        };
        let captured = tenant
            .nodes
            .iter()
            .any(|other| other.name == *node && other.proxy.is_some());
        if captured || !tenant.dns {
            return Vec::new();
        }
        let plan = self
            .plan
            .tenants
            .iter()
            .find(|plan| plan.name == tenant.name);
        let az = self
            .plan
            .routers
            .iter()
            .find(|router| router.az == environment.az)
            .map_or(0, |router| router.number);
        plan.map(|plan| crate::tier::name_servers(self.plan, plan, az))
            .unwrap_or_default()
    }
}

impl HostEnvironment {
    /// Host name that the host's processes see. A pod has its bare name.
    pub fn hostname(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or(&self.name)
    }

    /// Name of the host's files.
    pub fn file_name(&self) -> String {
        file_name(&self.name)
    }
}

fn pod_namespace(environment: &HostEnvironment) -> &str {
    environment
        .env
        .get("POD_NAMESPACE")
        .map_or("", String::as_str)
}

fn path_text(path: &Path) -> String {
    path.display().to_string()
}

fn mesh_check() -> Check {
    Check::Http {
        port: READINESS_PORT,
        path: "/healthz/ready".into(),
    }
}

/// Returns a process with the command line from the topology.
fn written_job(process: ProcessTemplate) -> ManagedProcess {
    let argv = process
        .command
        .iter()
        .chain(&process.args)
        .cloned()
        .collect();
    ManagedProcess {
        argv,
        process,
        after: Vec::new(),
    }
}

/// Returns a process of one of the mesh's own components, with its built-in command line.
fn built_in(
    mut argv: Vec<String>,
    mut process: ProcessTemplate,
    after: Vec<StartCondition>,
    check: Check,
) -> ManagedProcess {
    argv.extend(process.args.clone());
    process.readiness.get_or_insert(Readiness {
        check,
        period_ms: Readiness::PERIOD_MS_DEFAULT,
    });
    ManagedProcess {
        argv,
        process,
        after,
    }
}

/// Finds a program: by its path if the name has a slash, else in the given directories, else in
/// PATH.
pub(crate) fn find_program(name: &str, bin_dirs: &[PathBuf]) -> Option<PathBuf> {
    let runnable = |path: &Path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::metadata(path)
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        let path = PathBuf::from(name);
        return runnable(&path).then_some(path);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = std::env::split_paths(&path).collect::<Vec<_>>();
    bin_dirs
        .iter()
        .chain(&system)
        .map(|dir| dir.join(name))
        .find(|path| runnable(path))
}
