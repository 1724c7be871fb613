//! A world under construction and in use: builds the namespaces, furnishes and starts the hosts,
//! adds and removes pods. Owned by the supervisor; who asks is not its business.

mod fleet;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::control::Host;
use crate::error::{Error, Result, Tried};
use crate::life::{Board, Life, Order, Orders, Pulse};
use crate::net::Tools;
use crate::plan::{HostKind, POD_NUMBER_FIRST, PODS_PER_NODE_MAX, Plan, PodPlan};
use crate::registry::{self, PodRecord, Principals};
use crate::script::{self, Batch, Forwarding, Tool};
use crate::seat::{Seat, Seats};
use crate::services::{self, Service};
use crate::state::{Paths, Record, make_dir};
use crate::topology::{Pod, Topology, tls_files};
use crate::{cgroup, net};

/// Everything a supervisor holds.
pub(crate) struct Stage {
    pub(crate) paths: Paths,
    pub(crate) board: Arc<Board>,
    design: Mutex<Arc<Design>>,
    cgroup: PathBuf,
    tools: Tools,
    bin_dirs: Vec<PathBuf>,
    services: Vec<Vec<Service>>,
    posts: Mutex<BTreeMap<String, Post>>,
    principals: Mutex<Principals>,
    /// The number given last in each AZ, by index: numbers of removed gateways are not given again at once.
    last_numbers: Mutex<BTreeMap<usize, u16>>,
    /// What died with its AZ, and starts again with it.
    fallen: Mutex<BTreeSet<String>>,
    /// Held while pods or gateways are added or removed: one at a time, so that no address is given twice.
    changes: Mutex<()>,
    /// One writer of the registry's files at a time, and the last one writes the newest.
    registry: Mutex<()>,
}

/// What a world shall be, and its addresses. Replaced as a whole when gateways come and go.
#[derive(Clone)]
struct Design {
    topology: Topology,
    plan: Plan,
}

/// A host that is there.
struct Post {
    seat: Seat,
    orders: Option<Orders>,
    pod: Option<(PodPlan, Pod)>,
}

impl Stage {
    pub(crate) fn of(paths: Paths, topology: Topology, record: Record) -> Result<Self> {
        let services = topology.tenants.iter().map(|tenant| services::in_files(&tenant.config)).collect();
        let cgroup = cgroup::of_world(paths.world())?;
        let tools = cgroup.join("_tools");
        cgroup::make(&tools)?;
        Ok(Self {
            cgroup,
            tools: Tools { cgroup: Some(tools) },
            paths,
            board: Arc::default(),
            design: Mutex::new(Arc::new(Design { plan: Plan::of(&topology), topology })),
            bin_dirs: record.bin_dirs,
            services,
            posts: Mutex::default(),
            principals: Mutex::default(),
            last_numbers: Mutex::default(),
            fallen: Mutex::default(),
            changes: Mutex::default(),
            registry: Mutex::default(),
        })
    }

    fn posts(&self) -> MutexGuard<'_, BTreeMap<String, Post>> {
        // A panic in between leaves a host that `down` removes like any other.
        self.posts.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn alone(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The world as it shall be now.
    fn design(&self) -> Arc<Design> {
        Arc::clone(&self.design.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    fn seats<'s>(&'s self, design: &'s Design) -> Seats<'s> {
        Seats { topology: &design.topology, plan: &design.plan, paths: &self.paths, cgroup: &self.cgroup, bin_dirs: &self.bin_dirs }
    }

    /// Makes namespaces, links, addresses, routes, tunnels, rates. Starts nothing.
    pub(crate) fn build_network(&self, go_on: impl Fn() -> Result<()>) -> Result<()> {
        let design = self.design();
        let spaces = script::spaces(&design.plan);
        self.tools.run(&script::make_spaces(spaces.iter().map(|(name, _)| *name)))?;
        go_on()?;
        net::each(&spaces, |(name, forwarding)| net::configure_space(name, *forwarding))?;
        go_on()?;
        net::each(&script::wires(&design.plan), |batch| self.tools.run(batch))?;
        go_on()?;
        self.tools.run_all(&script::configuration(&design.plan))
    }

    /// Writes everything that processes read at their start.
    pub(crate) fn furnish(&self) -> Result<()> {
        let design = self.design();
        make_dir(&self.paths.infra())?;
        make_dir(&self.paths.config())?;
        *self.principals() = Principals::of(&self.paths, &design.plan)?;
        for host in design.plan.hosts.iter().filter(|host| host.kind == HostKind::Edge || host.backend.is_some()) {
            mount_bpffs(&self.paths.bpffs(&host.name))?;
        }
        for key_server in design.topology.key_servers.iter().filter(|key_server| key_server.tenant.is_some()) {
            let to = self.paths.tls(&key_server.name);
            make_dir(&to)?;
            let Some(from) = &key_server.tls_dir else { continue };
            for file in tls_files(from).tried("cannot read", from)? {
                // Files of a directory have names.
                std::fs::copy(&file, to.join(file.file_name().unwrap_or_default())).tried("cannot copy", &file)?;
            }
        }
        for (tenant, plan) in design.topology.tenants.iter().zip(&design.plan.tenants) {
            registry::write_tenant(&self.paths, tenant, plan, &design.plan)?;
            registry::write_pods(&self.paths, &tenant.name, &[])?;
            for node in &tenant.nodes {
                make_dir(&self.paths.node_pods(&node.name))?;
                if node.proxy.is_some() {
                    mount_bpffs(&self.paths.bpffs(&node.name))?;
                }
            }
        }
        Ok(())
    }

    /// Takes every planned host into use and starts what it runs.
    pub(crate) fn open(&self) -> Result<()> {
        let design = self.design();
        let seats = self.seats(&design);
        for seat in seats.fixed() {
            seats.furnish(&seat, &[])?;
            self.settle(seat, None)?;
        }
        let templates = design
            .topology
            .tenants
            .iter()
            .enumerate()
            .flat_map(|(index, tenant)| tenant.pods.iter().flat_map(move |pod| (0..pod.replicas).map(move |_| (index, pod))));
        // The plan lists pods in the same order.
        for (plan, (tenant, pod)) in design.plan.pods.iter().zip(templates) {
            debug_assert_eq!(plan.tenant, tenant);
            self.admit(plan.clone(), pod.clone())?;
        }
        self.write_registry()
    }

    /// Takes a host into use.
    fn settle(&self, seat: Seat, pod: Option<(PodPlan, Pod)>) -> Result<()> {
        self.board.update(&seat.name, |_| {});
        let orders = match &seat.job {
            Some(job) => Some(Life::begin(seat.clone(), job.clone(), Arc::clone(&self.board))?),
            None => {
                self.board.update(&seat.name, |pulse| pulse.ready = true);
                None
            }
        };
        self.posts().insert(seat.name.clone(), Post { seat, orders, pod });
        Ok(())
    }

    /// Takes a pod whose network is there into use: its node learns of it before it starts.
    fn admit(&self, plan: PodPlan, pod: Pod) -> Result<()> {
        let design = self.design();
        let seats = self.seats(&design);
        let seat = seats.pod(&plan, &pod);
        seats.furnish(&seat, &self.services[plan.tenant])?;
        let record = self.record(&plan, &pod, &seat, false);
        registry::write_pod_file(&self.paths, &record, &seat.netns, &seat.cgroup)?;
        self.settle(seat, Some((plan, pod)))
    }

    fn record(&self, plan: &PodPlan, pod: &Pod, seat: &Seat, ready: bool) -> PodRecord {
        let design = self.design();
        let has_proxy = design.topology.tenants[plan.tenant].nodes[plan.node].proxy.is_some();
        PodRecord { plan: plan.clone(), pod: pod.clone(), az: seat.az.clone(), has_proxy, ready }
    }

    /// All hosts, as they are now.
    pub(crate) fn hosts(&self) -> Vec<Host> {
        let posts = self.posts();
        let pulses = self.board.lock();
        posts
            .values()
            .map(|post| Host { seat: post.seat.clone(), pulse: pulses.get(&post.seat.name).cloned().unwrap_or_default() })
            .collect()
    }

    /// The pods of every tenant, as the registry shows them.
    fn pod_records(&self) -> BTreeMap<String, Vec<PodRecord>> {
        let design = self.design();
        let mut tenants: BTreeMap<String, Vec<PodRecord>> =
            design.topology.tenants.iter().map(|tenant| (tenant.name.clone(), Vec::new())).collect();
        let posts = self.posts();
        let pulses = self.board.lock();
        for post in posts.values() {
            let (Some((plan, pod)), Some(tenant)) = (&post.pod, &post.seat.tenant) else { continue };
            let ready = pulses.get(&post.seat.name).is_some_and(|pulse| pulse.ready);
            tenants.entry(tenant.clone()).or_default().push(self.record(plan, pod, &post.seat, ready));
        }
        tenants
    }

    /// Writes every tenant's pods.
    pub(crate) fn write_registry(&self) -> Result<()> {
        let _one = self.registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (tenant, pods) in self.pod_records() {
            registry::write_pods(&self.paths, &tenant, &pods)?;
        }
        Ok(())
    }

    /// What the registry depends on: changes when it must be written again.
    pub(crate) fn registry_state(pulses: &BTreeMap<String, Pulse>) -> Vec<(String, bool)> {
        pulses.iter().filter(|(name, _)| name.contains('/')).map(|(name, pulse)| (name.clone(), pulse.ready)).collect()
    }

    fn no_host(&self, host: &str) -> Error {
        Error::NoHost { world: self.paths.world().to_owned(), host: host.to_owned(), hint: String::new() }
    }

    fn refusal(&self, message: String) -> Error {
        Error::Supervisor { world: self.paths.world().to_owned(), message }
    }

    /// Gives an order to a host's life and waits until it is carried out.
    pub(crate) fn order(&self, host: &str, order: Order) -> Result<()> {
        let heard = {
            let posts = self.posts();
            let post = posts.get(host).ok_or_else(|| self.no_host(host))?;
            match &post.orders {
                Some(orders) => orders.give(order),
                None => return Err(self.refusal(format!("host {host:?} has no process; give it a `command` in the topology"))),
            }
        };
        // A closed channel means that the life is over: nothing is left to be done.
        let _ = heard.recv();
        Ok(())
    }

    /// Makes all replicas of a pod, live.
    pub(crate) fn add_pod(&self, tenant: &str, pod: &Pod) -> Result<Vec<String>> {
        let design = self.design();
        let index = design.topology.tenants.iter().position(|owner| owner.name == tenant);
        let index = index.ok_or_else(|| self.refusal(format!("there is no tenant {tenant:?}")))?;
        let _alone = self.alone();
        // All are placed before any is built: what does not fit is refused whole.
        let mut plans = Vec::new();
        for replica in 0..pod.replicas {
            plans.push(self.place(index, pod, replica, &plans)?);
        }
        for plan in &plans {
            if let Err(error) = self.build_pod(plan).and_then(|()| self.admit(plan.clone(), pod.clone())) {
                // Half a pod must not stay; what of it was never made is no second error.
                let _ = registry::remove_pod_file(&self.paths, plan);
                let _ = self.clear_pod(plan);
                return Err(error);
            }
        }
        self.write_registry()?;
        Ok(plans.into_iter().map(|plan| plan.uid).collect())
    }

    /// A free address on the replica's node, beside those that are `planned` but not yet there.
    fn place(&self, tenant: usize, pod: &Pod, replica: u16, planned: &[PodPlan]) -> Result<PodPlan> {
        let design = self.design();
        let owner = &design.topology.tenants[tenant];
        let node_name = &pod.nodes[usize::from(replica) % pod.nodes.len()];
        let node = owner.nodes.iter().position(|node| node.name == *node_name);
        let node = node.ok_or_else(|| self.refusal(format!("tenant {:?} has no node {node_name:?}", owner.name)))?;
        let posts = self.posts();
        let there = posts.values().filter_map(|post| post.pod.as_ref()).map(|(plan, _)| plan);
        let on_node = there.chain(planned).filter(|plan| (plan.tenant, plan.node) == (tenant, node));
        let taken: Vec<u8> = on_node.map(|plan| plan.number).collect();
        let number = (POD_NUMBER_FIRST..=254).find(|number| !taken.contains(number));
        let number =
            number.ok_or_else(|| self.refusal(format!("node {node_name:?} has no room for it: {PODS_PER_NODE_MAX} pods are the limit")))?;
        let plan = design.plan.pod(tenant, node, number, pod, replica);
        if posts.contains_key(&plan.uid) {
            return Err(self.refusal(format!("pod {:?} is there already; remove it first or choose another name", plan.uid)));
        }
        Ok(plan)
    }

    fn node_netns(&self, pod: &PodPlan) -> Result<String> {
        let design = self.design();
        design.plan.host(&pod.node_name).map(|host| host.netns.clone()).ok_or_else(|| self.no_host(&pod.node_name))
    }

    fn in_node(&self, pod: &PodPlan, tool: Tool, lines: Vec<String>) -> Result<Batch> {
        Ok(Batch { netns: Some(self.node_netns(pod)?), tool, lines })
    }

    fn build_pod(&self, pod: &PodPlan) -> Result<()> {
        let design = self.design();
        self.tools.run(&script::make_spaces(std::iter::once(pod.netns.as_str())))?;
        net::configure_space(&pod.netns, Forwarding::Never)?;
        let mut lines = vec![script::pod_wire(&design.plan, pod)];
        lines.extend(script::node_to_pod(&design.plan, pod));
        self.tools.run(&self.in_node(pod, Tool::Ip, lines)?)?;
        if let Some(batch) = script::shape(&self.node_netns(pod)?, pod.rate.map(|rate| (pod.node_device(), rate))) {
            self.tools.run(&batch)?;
        }
        script::pod_configuration(pod).iter().try_for_each(|batch| self.tools.run(batch))
    }

    fn clear_pod(&self, pod: &PodPlan) -> Result<()> {
        // The node's end of the link goes with the pod's, once the namespace is really gone.
        let device = format!("link delete {}", pod.node_device());
        let unlinked = self.tools.run(&self.in_node(pod, Tool::Ip, vec![device])?);
        let removed = self.tools.run(&script::remove_spaces(std::iter::once(pod.netns.as_str())));
        unlinked.and(removed)
    }

    /// Removes a pod: out of the registry first, then its process, then what the node knows of it.
    pub(crate) fn remove_pod(&self, uid: &str) -> Result<()> {
        let _alone = self.alone();
        let post = {
            let mut posts = self.posts();
            if posts.get(uid).is_none_or(|post| post.pod.is_none()) {
                return Err(self.no_host(uid));
            }
            posts.remove(uid)
        };
        let Some(Post { seat, orders, pod: Some((plan, _)) }) = post else { return Err(self.no_host(uid)) };
        self.write_registry()?;
        if let Some(orders) = orders {
            // As in `order`.
            let _ = orders.give(Order::Quit).recv();
        }
        self.board.forget(uid);
        registry::remove_pod_file(&self.paths, &plan)?;
        cgroup::remove(&seat.cgroup)?;
        self.clear_pod(&plan)?;
        for dir in [&seat.etc, &seat.data] {
            // Leftovers vanish with the world.
            let _ = std::fs::remove_dir_all(dir);
        }
        Ok(())
    }

    /// Takes the far end of a host's only link down, or brings it back with its routes.
    pub(crate) fn link(&self, host: &str, up: bool) -> Result<()> {
        let design = self.design();
        let batch = if let Some(plan) = design.plan.host(host) {
            let lines = if up { script::router_to_host(plan) } else { vec![format!("link set {} down", plan.router_device())] };
            Batch { netns: Some(design.plan.routers[plan.az].netns.clone()), tool: Tool::Ip, lines }
        } else {
            let posts = self.posts();
            let pod = posts.get(host).and_then(|post| post.pod.as_ref());
            let (plan, _) = pod.ok_or_else(|| self.no_host(host))?;
            let lines = if up { script::node_to_pod(&design.plan, plan) } else { vec![format!("link set {} down", plan.node_device())] };
            self.in_node(plan, Tool::Ip, lines)?
        };
        self.tools.run(&batch)
    }

    /// Logs that must stay bounded.
    pub(crate) fn logs(&self) -> Vec<PathBuf> {
        let hosts = self.posts().values().filter(|post| post.orders.is_some()).map(|post| post.seat.log.clone()).collect::<Vec<_>>();
        hosts.into_iter().chain([self.paths.supervisor_log()]).collect()
    }
}

/// A place for a node proxy's pinned programs that goes with the world: the machine's own bpffs
/// would keep them for ever, and two worlds' nodes of one name apart by luck only.
fn mount_bpffs(path: &Path) -> Result<()> {
    make_dir(path)?;
    match rustix::mount::mount(c"bpf", path, c"bpf", rustix::mount::MountFlags::empty(), None) {
        // A kernel without it captures by other means, and the node proxy says so.
        Err(rustix::io::Errno::NODEV) => Ok(()),
        other => other.tried("cannot mount a bpffs on", path),
    }
}
