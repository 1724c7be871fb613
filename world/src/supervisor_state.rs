//! [`SupervisorState`]: builds a world's namespaces, starts its hosts, and adds and removes pods while the world runs. The supervisor owns
//! it; requests arrive through `supervisor`. Gateways that join or leave and AZ faults are in
//! `fleet`. Start at [`SupervisorState::build_network`].

mod fleet;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::control::HostStatus;
use crate::error::{Error, IoContext, Result};
use crate::host_environment::{EnvironmentBuilder, HostEnvironment};
use crate::net::{Tools, netns_path};
use crate::plan::{HostKind, HostPlan, POD_NUMBER_FIRST, PODS_PER_NODE_MAX, PodPlan, WorldPlan};
use crate::process_supervisor::{
    ProcessCommand, ProcessCommandSender, ProcessStatus, ProcessStatusTable, ProcessSupervisor,
};
use crate::registry::{self, PodRecord, PrincipalFiles};
use crate::relay::DEVICES;
use crate::services::{self, ServiceVips};
use crate::state::{WorldPaths, WorldRecord, make_dir};
use crate::tool_batch::{self, Forwarding, Tool, ToolBatch};
use crate::topology::{PodTemplate, Topology, tls_files};
use crate::{cgroup, net, sys};

/// The complete state of a supervisor.
pub(crate) struct SupervisorState {
    pub(crate) paths: WorldPaths,
    pub(crate) statuses: Arc<ProcessStatusTable>,
    design: Mutex<Arc<WorldDesign>>,
    cgroup: PathBuf,
    tools: Tools,
    bin_dirs: Vec<PathBuf>,
    services: Vec<Vec<ServiceVips>>,
    host_entries: Mutex<BTreeMap<String, HostEntry>>,
    principals: Mutex<PrincipalFiles>,
    /// Highest host number assigned so far in each AZ, by AZ index. Numbers of removed gateways are
    /// not assigned again at once.
    last_numbers: Mutex<BTreeMap<usize, u16>>,
    /// Hosts that were stopped with their AZ and start again with it.
    stopped_with_az: Mutex<BTreeSet<String>>,
    /// Serializes the adding and removing of pods and gateways, so that no address is assigned
    /// twice.
    changes: Mutex<()>,
    /// Edges whose links are down. Routes that are written again leave them out.
    dead_edges: Mutex<BTreeSet<String>>,
    /// Serializes the writers of the registry's files, so that the last one writes the newest
    /// state.
    registry: Mutex<()>,
}

/// The desired topology and its addresses. It is replaced as a whole when gateways join or leave.
#[derive(Clone)]
struct WorldDesign {
    topology: Topology,
    plan: WorldPlan,
}

/// A host of the running world: its environment, the commands to its process supervisor, and for a
/// pod its plan and template.
struct HostEntry {
    environment: HostEnvironment,
    orders: Option<ProcessCommandSender>,
    pod: Option<(PodPlan, PodTemplate)>,
}

impl SupervisorState {
    pub(crate) fn of(paths: WorldPaths, topology: Topology, record: WorldRecord) -> Result<Self> {
        let services = topology
            .tenants
            .iter()
            .map(|tenant| services::in_files(&tenant.config))
            .collect();
        let cgroup = cgroup::of_world(paths.world())?;
        let tools = cgroup.join("_tools");
        cgroup::make(&tools)?;
        Ok(Self {
            cgroup,
            tools: Tools {
                cgroup: Some(tools),
            },
            paths,
            statuses: Arc::default(),
            design: Mutex::new(Arc::new(WorldDesign {
                plan: WorldPlan::of(&topology),
                topology,
            })),
            bin_dirs: record.bin_dirs,
            services,
            host_entries: Mutex::default(),
            principals: Mutex::default(),
            last_numbers: Mutex::default(),
            stopped_with_az: Mutex::default(),
            dead_edges: Mutex::default(),
            changes: Mutex::default(),
            registry: Mutex::default(),
        })
    }

    fn host_entries(&self) -> MutexGuard<'_, BTreeMap<String, HostEntry>> {
        // A panic under the lock leaves a host that `down` removes like any other.
        self.host_entries
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn lock_changes(&self) -> MutexGuard<'_, ()> {
        self.changes
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the desired topology with its addresses.
    fn design(&self) -> Arc<WorldDesign> {
        Arc::clone(
            &self
                .design
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner()),
        )
    }

    fn environments<'s>(&'s self, design: &'s WorldDesign) -> EnvironmentBuilder<'s> {
        EnvironmentBuilder {
            topology: &design.topology,
            plan: &design.plan,
            paths: &self.paths,
            cgroup: &self.cgroup,
            bin_dirs: &self.bin_dirs,
        }
    }

    /// Creates namespaces, links, addresses, routes, tunnels and rates. Starts no process.
    pub(crate) fn build_network(&self, go_on: impl Fn() -> Result<()>) -> Result<()> {
        let design = self.design();
        let relays = design.plan.relays();
        let spaces = [
            tool_batch::spaces(&design.plan),
            tool_batch::relay_spaces(&relays),
        ]
        .concat();
        self.tools.run(&tool_batch::make_spaces(
            spaces.iter().map(|(name, _)| *name),
        ))?;
        go_on()?;
        net::each(&spaces, |(name, forwarding)| {
            net::configure_space(name, *forwarding)
        })?;
        go_on()?;
        net::each(&tool_batch::wires(&design.plan), |batch| {
            self.tools.run(batch)
        })?;
        go_on()?;
        // A device must exist before it can get addresses and routes.
        self.tools.run_all(&tool_batch::configuration(&design.plan))
    }

    /// Prepares everything that processes need at their start: files, mounts of bpffs, and
    /// steering.
    pub(crate) fn prepare_files(&self) -> Result<()> {
        let design = self.design();
        make_dir(&self.paths.infra())?;
        make_dir(&self.paths.config())?;
        *self.principals() = PrincipalFiles::of(&self.paths, &design.plan)?;
        // Only hosts that run BPF programs of the tier need a BPF filesystem and receive steering.
        for host in design
            .plan
            .hosts
            .iter()
            .filter(|host| host.kind == HostKind::Edge || host.backend.is_some())
        {
            mount_bpffs(&self.paths.bpffs(&host.name))?;
            steer(&self.paths, host)?;
        }
        // Only a tenant's key server reads keys from files.
        for key_server in design
            .topology
            .key_servers
            .iter()
            .filter(|key_server| key_server.tenant.is_some())
        {
            let to = self.paths.tls(&key_server.name);
            make_dir(&to)?;
            // Without `tlsDir` the server starts with an empty directory.
            let Some(from) = &key_server.tls_dir else {
                continue;
            };
            for file in tls_files(from).tried("cannot read", from)? {
                // Files of a directory have names.
                std::fs::copy(&file, to.join(file.file_name().unwrap_or_default()))
                    .tried("cannot copy", &file)?;
            }
        }
        for (tenant, plan) in design.topology.tenants.iter().zip(&design.plan.tenants) {
            registry::write_tenant(&self.paths, tenant, plan, &design.plan)?;
            // No pod runs yet; the list is written again when one does.
            registry::write_pods(&self.paths, &tenant.name, &[])?;
            for node in &tenant.nodes {
                // The node proxy looks for pods in this directory.
                make_dir(&self.paths.node_pods(&node.name))?;
                if node.proxy.is_some() {
                    mount_bpffs(&self.paths.bpffs(&node.name))?;
                }
            }
        }
        Ok(())
    }

    /// Registers every planned host and starts its process.
    pub(crate) fn open(&self) -> Result<()> {
        let design = self.design();
        let environments = self.environments(&design);
        for environment in environments.fixed() {
            environments.private_files(&environment, &[])?;
            self.settle(environment, None)?;
        }
        let templates = design
            .topology
            .tenants
            .iter()
            .enumerate()
            .flat_map(|(index, tenant)| {
                tenant
                    .pods
                    .iter()
                    .flat_map(move |pod| (0..pod.replicas).map(move |_| (index, pod)))
            });
        // The plan lists pods in the same order.
        for (plan, (tenant, pod)) in design.plan.pods.iter().zip(templates) {
            debug_assert_eq!(plan.tenant, tenant);
            self.admit(plan.clone(), pod.clone())?;
        }
        self.write_registry()
    }

    /// Registers a host and starts its process supervisor. A host without a process is ready at
    /// once.
    fn settle(
        &self,
        environment: HostEnvironment,
        pod: Option<(PodPlan, PodTemplate)>,
    ) -> Result<()> {
        self.statuses.update(&environment.name, |_| {});
        let orders = match &environment.job {
            Some(job) => Some(ProcessSupervisor::begin(
                environment.clone(),
                job.clone(),
                Arc::clone(&self.statuses),
            )?),
            None => {
                self.statuses
                    .update(&environment.name, |status| status.ready = true);
                None
            }
        };
        self.host_entries().insert(
            environment.name.clone(),
            HostEntry {
                environment,
                orders,
                pod,
            },
        );
        Ok(())
    }

    /// Registers a pod whose network exists. The pod's file is written for its node before its
    /// process starts.
    fn admit(&self, plan: PodPlan, pod: PodTemplate) -> Result<()> {
        let design = self.design();
        let environments = self.environments(&design);
        let environment = environments.pod(&plan, &pod);
        environments.private_files(&environment, &self.services[plan.tenant])?;
        let record = self.record(&plan, &pod, &environment, false);
        registry::write_pod_file(
            &self.paths,
            &record,
            &environment.netns,
            &environment.cgroup,
        )?;
        self.settle(environment, Some((plan, pod)))
    }

    fn record(
        &self,
        plan: &PodPlan,
        pod: &PodTemplate,
        environment: &HostEnvironment,
        ready: bool,
    ) -> PodRecord {
        let design = self.design();
        let has_proxy = design.topology.tenants[plan.tenant].nodes[plan.node]
            .proxy
            .is_some();
        PodRecord {
            plan: plan.clone(),
            pod: pod.clone(),
            az: environment.az.clone(),
            has_proxy,
            ready,
        }
    }

    /// Returns the current state of all hosts.
    pub(crate) fn hosts(&self) -> Vec<HostStatus> {
        let host_entries = self.host_entries();
        let statuses = self.statuses.lock();
        host_entries
            .values()
            .map(|entry| HostStatus {
                environment: entry.environment.clone(),
                process: statuses
                    .get(&entry.environment.name)
                    .cloned()
                    .unwrap_or_default(),
            })
            .collect()
    }

    /// Returns the pods of every tenant in the form in which the registry shows them.
    fn pod_records(&self) -> BTreeMap<String, Vec<PodRecord>> {
        let design = self.design();
        let mut tenants: BTreeMap<String, Vec<PodRecord>> = design
            .topology
            .tenants
            .iter()
            .map(|tenant| (tenant.name.clone(), Vec::new()))
            .collect();
        let host_entries = self.host_entries();
        let statuses = self.statuses.lock();
        for entry in host_entries.values() {
            let (Some((plan, pod)), Some(tenant)) = (&entry.pod, &entry.environment.tenant) else {
                continue;
            };
            let ready = statuses
                .get(&entry.environment.name)
                .is_some_and(|status| status.ready);
            tenants.entry(tenant.clone()).or_default().push(self.record(
                plan,
                pod,
                &entry.environment,
                ready,
            ));
        }
        tenants
    }

    /// Writes the registry files of every tenant.
    pub(crate) fn write_registry(&self) -> Result<()> {
        let _one = self
            .registry
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        for (tenant, pods) in self.pod_records() {
            registry::write_pods(&self.paths, &tenant, &pods)?;
        }
        Ok(())
    }

    /// Returns the part of the status table that the registry depends on. When it changes, the
    /// registry must be written again.
    pub(crate) fn registry_state(
        statuses: &BTreeMap<String, ProcessStatus>,
    ) -> Vec<(String, bool)> {
        statuses
            .iter()
            .filter(|(name, _)| name.contains('/'))
            .map(|(name, status)| (name.clone(), status.ready))
            .collect()
    }

    fn no_host(&self, host: &str) -> Error {
        Error::NoHost {
            world: self.paths.world().to_owned(),
            host: host.to_owned(),
            hint: "; fix: name a host that `canal world list` shows".into(),
        }
    }

    fn refusal(&self, message: String) -> Error {
        Error::Supervisor {
            world: self.paths.world().to_owned(),
            message,
        }
    }

    /// Sends a command to a host's process supervisor and waits until it is carried out.
    pub(crate) fn order(&self, host: &str, order: ProcessCommand) -> Result<()> {
        let waiters = {
            let host_entries = self.host_entries();
            let entry = host_entries.get(host).ok_or_else(|| self.no_host(host))?;
            match &entry.orders {
                Some(orders) => orders.send(order),
                None => {
                    return Err(self.refusal(format!(
                        "host {host:?} has no process; fix: give it a `command` in the topology"
                    )));
                }
            }
        };
        // A closed channel means that the process supervisor has ended, so nothing remains to be
        // done.
        let _ = waiters.recv();
        Ok(())
    }

    /// Creates all replicas of a pod in the running world.
    pub(crate) fn add_pod(&self, tenant: &str, pod: &PodTemplate) -> Result<Vec<String>> {
        let design = self.design();
        let index = design
            .topology
            .tenants
            .iter()
            .position(|owner| owner.name == tenant);
        let index = index.ok_or_else(|| self.refusal(format!("there is no tenant {tenant:?}")))?;
        let _changes = self.lock_changes();
        // All replicas get addresses before any is built, so that a request that does not fit is
        // refused as a whole.
        let mut plans = Vec::new();
        for replica in 0..pod.replicas {
            plans.push(self.plan_pod(index, pod, replica, &plans)?);
        }
        for plan in &plans {
            if let Err(error) = self
                .build_pod(plan)
                .and_then(|()| self.admit(plan.clone(), pod.clone()))
            {
                // A partly built pod must not stay. Parts that were never created cause errors
                // here, which are not reported.
                let _ = registry::remove_pod_file(&self.paths, plan);
                let _ = self.clear_pod(plan);
                return Err(error);
            }
        }
        self.write_registry()?;
        Ok(plans.into_iter().map(|plan| plan.uid).collect())
    }

    /// Chooses a free address on the replica's node, different from those that are only `planned`.
    fn plan_pod(
        &self,
        tenant: usize,
        pod: &PodTemplate,
        replica: u16,
        planned: &[PodPlan],
    ) -> Result<PodPlan> {
        let design = self.design();
        let owner = &design.topology.tenants[tenant];
        let node_name = &pod.nodes[usize::from(replica) % pod.nodes.len()];
        let node = owner.nodes.iter().position(|node| node.name == *node_name);
        let node = node.ok_or_else(|| {
            self.refusal(format!("tenant {:?} has no node {node_name:?}", owner.name))
        })?;
        let host_entries = self.host_entries();
        let there = host_entries
            .values()
            .filter_map(|entry| entry.pod.as_ref())
            .map(|(plan, _)| plan);
        let on_node = there
            .chain(planned)
            .filter(|plan| (plan.tenant, plan.node) == (tenant, node));
        let taken: Vec<u8> = on_node.map(|plan| plan.number).collect();
        let number = (POD_NUMBER_FIRST..=254).find(|number| !taken.contains(number));
        let number = number.ok_or_else(|| {
            self.refusal(format!(
                "node {node_name:?} has the maximum of {PODS_PER_NODE_MAX} pods"
            ))
        })?;
        let plan = design.plan.pod(tenant, node, number, pod, replica);
        if host_entries.contains_key(&plan.uid) {
            return Err(self.refusal(format!(
                "pod {:?} exists already; fix: remove it first or choose another name",
                plan.uid
            )));
        }
        Ok(plan)
    }

    fn node_netns(&self, pod: &PodPlan) -> Result<String> {
        let design = self.design();
        design
            .plan
            .host(&pod.node_name)
            .map(|host| host.netns.clone())
            .ok_or_else(|| self.no_host(&pod.node_name))
    }

    fn in_node(&self, pod: &PodPlan, tool: Tool, lines: Vec<String>) -> Result<ToolBatch> {
        Ok(ToolBatch {
            netns: Some(self.node_netns(pod)?),
            tool,
            lines,
        })
    }

    fn build_pod(&self, pod: &PodPlan) -> Result<()> {
        let design = self.design();
        self.tools.run(&tool_batch::make_spaces(std::iter::once(
            pod.netns.as_str(),
        )))?;
        net::configure_space(&pod.netns, Forwarding::Never)?;
        let mut lines = vec![tool_batch::pod_wire(&design.plan, pod)];
        lines.extend(tool_batch::node_to_pod(&design.plan, pod));
        self.tools.run(&self.in_node(pod, Tool::Ip, lines)?)?;
        if let Some(batch) = tool_batch::shape(
            &self.node_netns(pod)?,
            pod.rate.map(|rate| (pod.node_device(), rate)),
        ) {
            self.tools.run(&batch)?;
        }
        tool_batch::pod_configuration(pod)
            .iter()
            .try_for_each(|batch| self.tools.run(batch))
    }

    fn clear_pod(&self, pod: &PodPlan) -> Result<()> {
        // The node's end of the link is deleted explicitly. Otherwise it disappears only when the
        // kernel has really freed the pod's namespace.
        let device = format!("link delete {}", pod.node_device());
        let unlinked = self.tools.run(&self.in_node(pod, Tool::Ip, vec![device])?);
        let removed = self.tools.run(&tool_batch::remove_spaces(std::iter::once(
            pod.netns.as_str(),
        )));
        unlinked.and(removed)
    }

    /// Removes a pod: first from the registry, then its process, then its node's file and links.
    pub(crate) fn remove_pod(&self, uid: &str) -> Result<()> {
        let _changes = self.lock_changes();
        let entry = {
            let mut host_entries = self.host_entries();
            if host_entries
                .get(uid)
                .is_none_or(|entry| entry.pod.is_none())
            {
                return Err(self.no_host(uid));
            }
            host_entries.remove(uid)
        };
        let Some(HostEntry {
            environment,
            orders,
            pod: Some((plan, _)),
        }) = entry
        else {
            return Err(self.no_host(uid));
        };
        self.write_registry()?;
        if let Some(orders) = orders {
            // A closed channel means that the process supervisor has ended.
            let _ = orders.send(ProcessCommand::Quit).recv();
        }
        self.statuses.forget(uid);
        registry::remove_pod_file(&self.paths, &plan)?;
        cgroup::remove(&environment.cgroup)?;
        self.clear_pod(&plan)?;
        for dir in [&environment.etc, &environment.data] {
            // Leftover directories disappear with the world.
            let _ = std::fs::remove_dir_all(dir);
        }
        Ok(())
    }

    /// Takes the far end of a host's only link down, or brings it up again with its routes.
    pub(crate) fn link(&self, host: &str, up: bool) -> Result<()> {
        let design = self.design();
        let batch = if let Some(plan) = design.plan.host(host) {
            if let Some(relay) = design.plan.relay(plan) {
                // The peer of the host's device is in the relay's namespace. It must go down too,
                // so that the host loses its carrier.
                let lines = vec![tool_batch::relay_device(DEVICES[1], up)];
                self.tools.run(&ToolBatch {
                    netns: Some(relay.netns),
                    tool: Tool::Ip,
                    lines,
                })?;
            }
            let lines = self.link_lines(&design.plan, plan, up);
            ToolBatch {
                netns: Some(design.plan.routers[plan.az].netns.clone()),
                tool: Tool::Ip,
                lines,
            }
        } else {
            let host_entries = self.host_entries();
            let pod = host_entries.get(host).and_then(|entry| entry.pod.as_ref());
            let (plan, _) = pod.ok_or_else(|| self.no_host(host))?;
            let lines = if up {
                tool_batch::node_to_pod(&design.plan, plan)
            } else {
                vec![format!("link set {} down", plan.node_device())]
            };
            self.in_node(plan, Tool::Ip, lines)?
        };
        self.tools.run(&batch)
    }

    /// Returns the router's commands for a host's link. The kernel itself excludes the nexthop of a
    /// link that is down. But it deletes a route with the last of its nexthops, so the routes are
    /// written again.
    fn link_lines(&self, plan: &WorldPlan, host: &HostPlan, up: bool) -> Vec<String> {
        let mut dead = self
            .dead_edges
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !up {
            dead.insert(host.name.clone());
            return vec![format!("link set {} down", host.router_device())];
        }
        dead.remove(&host.name);
        let mut lines = tool_batch::router_to_host(host);
        if host.kind == HostKind::Edge {
            lines.extend(tool_batch::router_to_edges(plan, host.az, &dead));
        }
        lines
    }

    /// Returns the logs that must stay bounded.
    pub(crate) fn logs(&self) -> Vec<PathBuf> {
        let hosts = self
            .host_entries()
            .values()
            .filter(|entry| entry.orders.is_some())
            .map(|entry| entry.environment.log.clone())
            .collect::<Vec<_>>();
        hosts
            .into_iter()
            .chain([self.paths.supervisor_log()])
            .collect()
    }
}

/// Mounts a bpffs for a node proxy's pinned programs that disappears with the world. The machine's
/// own bpffs would preserve them, and nodes of the same name in two worlds would share pins.
fn mount_bpffs(path: &Path) -> Result<()> {
    make_dir(path)?;
    match rustix::mount::mount(
        c"bpf",
        path,
        c"bpf",
        rustix::mount::MountFlags::empty(),
        None,
    ) {
        // A kernel without bpffs captures by other means, and the node proxy reports that.
        Err(rustix::io::Errno::NODEV) => Ok(()),
        other => other.tried("cannot mount a bpffs on", path),
    }
}

/// Spreads a gateway's received packets over cores by receive packet steering. Only a sysfs of the
/// gateway's own network namespace shows its device.
fn steer(paths: &WorldPaths, host: &HostPlan) -> Result<()> {
    if host.receive_cores == 0 {
        return Ok(());
    }
    let path = paths.sysfs(&host.name);
    make_dir(&path)?;
    let mounted = sys::in_netns(&netns_path(&host.netns), || {
        rustix::mount::mount(
            c"sysfs",
            &path,
            c"sysfs",
            rustix::mount::MountFlags::empty(),
            None,
        )
    });
    mounted
        .tried("cannot enter the namespace of", &path)?
        .tried("cannot mount a sysfs on", &path)?;
    let queue = path.join("class/net/eth0/queues/rx-0/rps_cpus");
    std::fs::write(&queue, mask(host.receive_cores)).tried("cannot set", &queue)
}

/// Returns the mask of the first `cores` cores in the format of sysfs: hexadecimal, in groups of 32
/// bits.
fn mask(cores: u16) -> String {
    let words = cores.div_ceil(32).max(1);
    let bits = |word: u16| match cores - word * 32 {
        0..32 => (1u64 << (cores - word * 32)) - 1,
        _ => 0xffff_ffff,
    };
    (0..words)
        .rev()
        .map(|word| format!("{:x}", bits(word)))
        .collect::<Vec<_>>()
        .join(",")
}
