//! Gateways of a tier world that are added and removed while it runs, and AZs that are cut off.
//! This module builds and removes; `tool_batch` and `host_environment` define what a host consists
//! of. Start at [`SupervisorState::add_gateway`].

use std::sync::{Arc, MutexGuard, PoisonError};

use crate::check::{HOSTS_MAX, gateway_names};
use crate::error::{IoContext, Result};
use crate::host_environment::HostEnvironment;
use crate::net;
use crate::plan::{HostKind, HostPlan, RelayPlan, RouterPlan, WorldPlan, router_name};
use crate::problem::FilePosition;
use crate::process_supervisor::ProcessCommand;
use crate::registry::PrincipalFiles;
use crate::tool_batch::{self, Forwarding, Tool, ToolBatch};
use crate::topology::{Component, ProcessTemplate, Restart, Topology};

use super::{HostEntry, SupervisorState, WorldDesign, mount_bpffs, steer};

impl SupervisorState {
    pub(super) fn principals(&self) -> MutexGuard<'_, PrincipalFiles> {
        self.principals
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn set_design(&self, design: WorldDesign) {
        *self.design.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(design);
    }

    /// Creates a gateway in the running world.
    pub(crate) fn add_gateway(&self, name: &str, az: &str, backend: &str) -> Result<()> {
        let _changes = self.lock_changes();
        let before = self.design();
        let hosts: Vec<String> = self.host_entries().keys().cloned().collect();
        decide_join(&before.topology, &hosts, name, az, backend)
            .map_err(|message| self.refusal(message))?;
        let mut design = WorldDesign::clone(&before);
        let gateway = like_its_backend(&design.topology, name, az, backend);
        let host = self.number(&mut design.plan, &gateway)?;
        design.topology.gateways.push(gateway);
        // The steps of `make_gateway` find the host in the design, so it is published first.
        self.set_design(design);
        let made = self.make_gateway(&host);
        if made.is_err() {
            // A partly built gateway must not stay. Parts that were never created cause errors
            // here, which are not reported.
            let _ = self.unmake_gateway(&host);
        }
        made
    }

    /// Plans the host under a number that was not in use recently.
    fn number(&self, plan: &mut WorldPlan, gateway: &Component) -> Result<HostPlan> {
        let mut numbers = self
            .last_numbers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let az = plan
            .routers
            .iter()
            .position(|router| router.az == gateway.az)
            .unwrap_or(0);
        let last = numbers.entry(az).or_insert_with(|| plan.last_number(az));
        let host = plan.add_gateway(gateway, *last);
        let host = host.ok_or_else(|| {
            self.refusal(format!("AZ {:?} has no free address for it", gateway.az))
        })?;
        *last = host.number;
        Ok(host)
    }

    fn make_gateway(&self, host: &HostPlan) -> Result<()> {
        let design = self.design();
        self.tools.run(&tool_batch::make_spaces(std::iter::once(
            host.netns.as_str(),
        )))?;
        net::configure_space(&host.netns, Forwarding::Tier)?;
        let router = &design.plan.routers[host.az];
        let wire = tool_batch::host_wire(&design.plan, host);
        let relay = design.plan.relay(host);
        // The relay's namespace must exist before the link that ends in it.
        if let Some(relay) = &relay {
            self.tools.run(&tool_batch::make_spaces(std::iter::once(
                relay.netns.as_str(),
            )))?;
            net::configure_space(&relay.netns, Forwarding::Never)?;
        }
        let lines = std::iter::once(wire.near)
            .chain(tool_batch::router_to_host(host))
            .collect();
        self.tools.run(&in_router(router, lines))?;
        if let (Some(relay), Some(far)) = (&relay, &wire.far) {
            self.tools.run(far)?;
            self.tools.run(&tool_batch::relay_configuration(relay))?;
        }
        if let Some(batch) = tool_batch::shape(
            &router.netns,
            host.rate.map(|rate| (host.router_device(), rate)),
        ) {
            self.tools.run(&batch)?;
        }
        tool_batch::plain_configuration(host)
            .iter()
            .try_for_each(|batch| self.tools.run(batch))?;
        mount_bpffs(&self.paths.bpffs(&host.name))?;
        steer(&self.paths, host)?;
        {
            let mut principals = self.principals();
            // The token must exist before the gateway's process starts.
            principals.admit(&self.paths, &design.plan, host)?;
            principals.write(&self.paths)?;
        }
        // The relay comes first, because the host's link carries nothing without it.
        let environments = self.environments(&design);
        for environment in relay
            .iter()
            .map(|relay| environments.relay(relay))
            .chain([environments.host(host)])
        {
            environments.private_files(&environment, &[])?;
            self.settle(environment, None)?;
        }
        Ok(())
    }

    /// Removes a gateway. Its process ends first, because it may drain and needs its token for
    /// that.
    pub(crate) fn remove_gateway(&self, name: &str) -> Result<()> {
        let host = self
            .design()
            .plan
            .host(name)
            .filter(|host| matches!(host.kind, HostKind::Gateway(_)))
            .cloned();
        let host = host.filter(|host| host.backend.is_some()).ok_or_else(|| {
            self.refusal(format!("{name:?} is not a gateway of a world with edges"))
        })?;
        let entry = self
            .host_entries()
            .remove(name)
            .ok_or_else(|| self.no_host(name))?;
        self.quit(entry);
        let _changes = self.lock_changes();
        self.unmake_gateway(&host)
    }

    /// Ends a process supervisor. Others can end at the same time, each as slowly as its process
    /// drains.
    fn quit(&self, entry: HostEntry) {
        if let Some(orders) = entry.orders {
            // A closed channel means that the process supervisor has ended.
            let _ = orders.send(ProcessCommand::Quit).recv();
        }
        self.statuses.forget(&entry.environment.name);
    }

    /// Removes everything of a gateway. Continues after an error and returns the first one.
    fn unmake_gateway(&self, host: &HostPlan) -> Result<()> {
        let mut design = WorldDesign::clone(&self.design());
        // The process ends first, so that nothing uses what is removed below.
        let entry = self.host_entries().remove(&host.name);
        if let Some(entry) = entry {
            self.quit(entry);
        }
        let environment = self.environments(&design).host(host);
        let listed = {
            let mut principals = self.principals();
            principals.dismiss(&self.paths, &host.name);
            principals.write(&self.paths)
        };
        let emptied = crate::cgroup::remove(&environment.cgroup);
        let device = format!("link delete {}", host.router_device());
        let unlinked = self
            .tools
            .run(&in_router(&design.plan.routers[host.az], vec![device]));
        let removed = self.tools.run(&tool_batch::remove_spaces(std::iter::once(
            host.netns.as_str(),
        )));
        // Only a link with an impairment has a relay.
        let unrelayed = design.plan.relay(host).map_or(Ok(()), |relay| {
            self.unmake_relay(&self.environments(&design).relay(&relay), &relay)
        });
        let unmounted =
            unmount(&self.paths.bpffs(&host.name)).and(unmount(&self.paths.sysfs(&host.name)));
        // The data directory contains the mount points, so it can be removed only after they are
        // unmounted.
        if unmounted.is_ok() {
            for dir in [&environment.etc, &environment.data] {
                // Leftover directories disappear with the world.
                let _ = std::fs::remove_dir_all(dir);
            }
        }
        self.exited().remove(&host.name);
        design
            .topology
            .gateways
            .retain(|gateway| gateway.name != host.name);
        design.plan.hosts.retain(|other| other.name != host.name);
        self.set_design(design);
        // A step that fails does not stop the later ones, so that as little as possible is left.
        listed
            .and(emptied)
            .and(unlinked)
            .and(removed)
            .and(unmounted)
            .and(unrelayed)
    }

    /// Removes a relay with its ends of the link.
    fn unmake_relay(&self, environment: &HostEnvironment, relay: &RelayPlan) -> Result<()> {
        let entry = self.host_entries().remove(&environment.name);
        if let Some(entry) = entry {
            self.quit(entry);
        }
        self.exited().remove(&environment.name);
        let emptied = crate::cgroup::remove(&environment.cgroup);
        let removed = self.tools.run(&tool_batch::remove_spaces(std::iter::once(
            relay.netns.as_str(),
        )));
        for dir in [&environment.etc, &environment.data] {
            // Leftover directories disappear with the world.
            let _ = std::fs::remove_dir_all(dir);
        }
        emptied.and(removed)
    }

    fn exited(&self) -> MutexGuard<'_, std::collections::BTreeSet<String>> {
        self.stopped_with_az
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn no_az(&self, az: &str, plan: &WorldPlan) -> crate::error::Error {
        let names: Vec<&str> = plan
            .routers
            .iter()
            .map(|router| router.az.as_str())
            .collect();
        self.refusal(format!(
            "there is no AZ {az:?}; fix: use one of: {}",
            names.join(", ")
        ))
    }

    /// Takes an AZ's links to the other AZs down. With `hosts_die` it also kills the processes of
    /// the AZ's hosts.
    pub(crate) fn cut_az(&self, az: &str, hosts_die: bool) -> Result<()> {
        let design = self.design();
        let router = design
            .plan
            .routers
            .iter()
            .find(|router| router.az == az)
            .ok_or_else(|| self.no_az(az, &design.plan))?;
        let others = design
            .plan
            .routers
            .iter()
            .filter(|other| other.number != router.number);
        let lines = others
            .map(|other| format!("link set {} down", router.device_to(other)))
            .collect();
        self.tools.run(&in_router(router, lines))?;
        if hosts_die {
            self.fell(az);
        }
        Ok(())
    }

    /// Kills all processes of an AZ at once, so that none sees another one end.
    fn fell(&self, az: &str) {
        let statuses = self.statuses.lock().clone();
        let mut waiters = Vec::new();
        for (name, entry) in self
            .host_entries()
            .iter()
            .filter(|(_, entry)| entry.environment.az == az)
        {
            let Some(orders) = &entry.orders else {
                continue;
            };
            let lives = statuses.get(name).is_some_and(|status| {
                !matches!(
                    status.phase,
                    crate::process_supervisor::ProcessPhase::Stopped
                        | crate::process_supervisor::ProcessPhase::Ended { .. }
                )
            });
            // Processes that had ended or been stopped before do not start again when the AZ heals.
            if lives {
                self.exited().insert(name.clone());
                waiters.push(orders.send(ProcessCommand::Kill));
            }
        }
        for exited in waiters {
            // A closed channel means that the process supervisor has ended.
            let _ = exited.recv();
        }
    }

    /// Brings an AZ's links up with their routes, then starts the processes that were stopped with
    /// the AZ.
    pub(crate) fn heal_az(&self, az: &str) -> Result<()> {
        let design = self.design();
        let plan = &design.plan;
        let router = plan
            .routers
            .iter()
            .find(|router| router.az == az)
            .ok_or_else(|| self.no_az(az, plan))?;
        for other in plan
            .routers
            .iter()
            .filter(|other| other.number != router.number)
        {
            self.tools
                .run(&in_router(router, tool_batch::router_to_az(router, other)))?;
            self.tools
                .run(&in_router(other, tool_batch::router_to_az(other, router)))?;
        }
        let host_entries = self.host_entries();
        let risen: Vec<_> = host_entries
            .iter()
            .filter(|(name, entry)| entry.environment.az == az && self.exited().remove(*name))
            .collect();
        let waiters: Vec<_> = risen
            .iter()
            .filter_map(|(_, entry)| Some(entry.orders.as_ref()?.send(ProcessCommand::Start)))
            .collect();
        drop(host_entries);
        for started in waiters {
            // A closed channel means that the process supervisor has ended.
            let _ = started.recv();
        }
        Ok(())
    }
}

/// Decides whether a gateway can join the existing `hosts`. The error is the reason why not.
fn decide_join(
    topology: &Topology,
    hosts: &[String],
    name: &str,
    az: &str,
    backend: &str,
) -> std::result::Result<(), String> {
    if !topology.is_tier() {
        return Err(
            "this world has no edges: its gateways are those of its file; fix: add `edges` to it"
                .into(),
        );
    }
    gateway_names(name, backend).map_err(|(what, fix)| format!("{what}; fix: {fix}"))?;
    if !topology.edges.iter().any(|edge| edge.az == az) {
        let azs: Vec<&str> = topology.edges.iter().map(|edge| edge.az.as_str()).collect();
        return Err(format!(
            "there is no AZ {az:?} with an edge; fix: use one of: {}",
            azs.join(", ")
        ));
    }
    // The topology still contains a gateway that is being removed.
    if hosts.iter().any(|host| host == name)
        || topology.gateways.iter().any(|gateway| gateway.name == name)
    {
        return Err(format!(
            "the name {name:?} is already taken; fix: give it another name"
        ));
    }
    if hosts.len() >= HOSTS_MAX {
        return Err(format!(
            "the world has {} hosts, and {HOSTS_MAX} are the limit; fix: remove some",
            hosts.len()
        ));
    }
    Ok(())
}

fn in_router(router: &RouterPlan, lines: Vec<String>) -> ToolBatch {
    debug_assert_eq!(router.name, router_name(&router.az));
    ToolBatch {
        netns: Some(router.netns.clone()),
        tool: Tool::Ip,
        lines,
    }
}

/// Returns the settings of one more gateway of a backend: a copy of another gateway of that
/// backend, else of the world's first gateway, else the defaults.
fn like_its_backend(topology: &Topology, name: &str, az: &str, backend: &str) -> Component {
    let same = |gateway: &&Component| gateway.backend.as_deref() == Some(backend);
    let model = topology
        .gateways
        .iter()
        .find(same)
        .or(topology.gateways.first());
    let own = ProcessTemplate {
        command: Vec::new(),
        args: Vec::new(),
        env: Default::default(),
        restart: Restart::Always,
        readiness: None,
        spot: FilePosition::default(),
    };
    Component {
        name: name.to_owned(),
        az: az.to_owned(),
        process: model.map_or(Some(own), |model| model.process.clone()),
        rate: model.and_then(|model| model.rate),
        impairment: model.and_then(|model| model.impairment),
        mtu: model.and_then(|model| model.mtu),
        workers: model.map_or(1, |model| model.workers),
        receive_cores: model.map_or(0, |model| model.receive_cores),
        backend: Some(backend.to_owned()),
        outside: false,
        tenant: None,
        tls_dir: None,
        spot: FilePosition::default(),
    }
}

/// Unmounts a gateway's directory if it is a mount point.
fn unmount(path: &std::path::Path) -> Result<()> {
    match rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH) {
        // It was never mounted: the kernel has no bpffs, the gateway steers no packets, or an
        // earlier step failed.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => Ok(()),
        other => other.tried("cannot unmount", path),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn joining_replicas_are_validated() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/tier.yaml");
        let tier =
            Topology::parse(&file, include_str!("../../topologies/tier.yaml")).expect("right");
        // The limit counts all hosts of the world, so the list is filled to it.
        let few = ["edge-1".to_owned(), "alpha/shop/web-0".to_owned()];
        let many = vec![String::new(); HOSTS_MAX];
        let good = ("gw-9", "az1", "b1");
        for (what, hosts, (name, az, backend), expected) in [
            ("one of its kind", &few[..], good, Ok(())),
            ("one of a new backend", &few, ("gw-9", "az2", "b9"), Ok(())),
            (
                "a name of the file, being removed",
                &few,
                ("gw-1a", "az1", "b1"),
                Err("is already taken"),
            ),
            (
                "a name in use",
                &few,
                ("edge-1", "az1", "b1"),
                Err("is already taken"),
            ),
            ("no name", &few, ("gw/9", "az1", "b1"), Err("is not a name")),
            (
                "no backend",
                &few,
                ("gw-9", "az1", ""),
                Err("backend: \"\" is not a name"),
            ),
            (
                "no AZ",
                &few,
                ("gw-9", "az3", "b1"),
                Err("there is no AZ \"az3\" with an edge"),
            ),
            ("no capacity", &many, good, Err("2000 are the limit")),
        ] {
            match (decide_join(&tier, hosts, name, az, backend), expected) {
                (Ok(()), Ok(())) => {}
                (Err(problem_text), Err(expected)) if problem_text.contains(expected) => {}
                (other, _) => panic!("{what}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_gateway_is_as_the_others_of_its_backend() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/reference.yaml");
        let topology = Topology::load(&file).expect("right");
        for (backend, workers, mtu, restart) in [
            ("b1", 1, None, Restart::Always),
            ("b2", 2, Some(1600), Restart::Never),
            ("b3", 1, None, Restart::Always),
        ] {
            let gateway = like_its_backend(&topology, "gw9", "az1", backend);
            let process = gateway.process.expect("a process");
            assert_eq!(
                (gateway.workers, gateway.mtu, process.restart),
                (workers, mtu, restart),
                "{backend}"
            );
        }
        let mut empty = topology.clone();
        empty.gateways.clear();
        let first = like_its_backend(&empty, "gw9", "az1", "b1");
        assert_eq!(
            (first.workers, first.process.map(|process| process.restart)),
            (1, Some(Restart::Always))
        );
    }
}
