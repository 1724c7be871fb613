//! Gateways of a tier world that come and go while it lives, and AZs that are cut off. Builds and removes; what a host is made of
//! is `script`'s and `seat`'s to say.

use std::sync::{Arc, MutexGuard, PoisonError};

use crate::check::{HOSTS_MAX, gateway_names};
use crate::error::{Result, Tried};
use crate::life::Order;
use crate::net;
use crate::plan::{HostKind, HostPlan, Plan, RouterPlan, router_name};
use crate::problem::Spot;
use crate::registry::Principals;
use crate::script::{self, Batch, Forwarding, Tool};
use crate::topology::{Component, Process, Restart, Topology};

use super::{Design, Post, Stage, mount_bpffs};

impl Stage {
    pub(super) fn principals(&self) -> MutexGuard<'_, Principals> {
        self.principals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_design(&self, design: Design) {
        *self.design.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(design);
    }

    /// Makes a gateway, live.
    pub(crate) fn add_gateway(&self, name: &str, az: &str, backend: &str) -> Result<()> {
        let _alone = self.alone();
        let before = self.design();
        let hosts: Vec<String> = self.posts().keys().cloned().collect();
        decide_join(&before.topology, &hosts, name, az, backend).map_err(|message| self.refusal(message))?;
        let mut design = Design::clone(&before);
        let gateway = like_its_backend(&design.topology, name, az, backend);
        let host = self.number(&mut design.plan, &gateway)?;
        design.topology.gateways.push(gateway);
        // From here on the host exists for whoever looks it up, which those do that make it.
        self.set_design(design);
        let made = self.make_gateway(&host);
        if made.is_err() {
            // Half a gateway must not stay; what of it was never made is no second error.
            let _ = self.unmake_gateway(&host);
        }
        made
    }

    /// Plans the host under a number that was not in use lately.
    fn number(&self, plan: &mut Plan, gateway: &Component) -> Result<HostPlan> {
        let mut numbers = self.last_numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let az = plan.routers.iter().position(|router| router.az == gateway.az).unwrap_or(0);
        let last = numbers.entry(az).or_insert_with(|| plan.last_number(az));
        let host = plan.add_gateway(gateway, *last);
        let host = host.ok_or_else(|| self.refusal(format!("AZ {:?} has no room for it: all its addresses are taken", gateway.az)))?;
        *last = host.number;
        Ok(host)
    }

    fn make_gateway(&self, host: &HostPlan) -> Result<()> {
        let design = self.design();
        self.tools.run(&script::make_spaces(std::iter::once(host.netns.as_str())))?;
        net::configure_space(&host.netns, Forwarding::Tier)?;
        let router = &design.plan.routers[host.az];
        let mut lines = vec![script::host_wire(&design.plan, host)];
        lines.extend(script::router_to_host(host));
        self.tools.run(&in_router(router, lines))?;
        if let Some(batch) = script::shape(&router.netns, host.rate.map(|rate| (host.router_device(), rate))) {
            self.tools.run(&batch)?;
        }
        script::plain_configuration(host).iter().try_for_each(|batch| self.tools.run(batch))?;
        mount_bpffs(&self.paths.bpffs(&host.name))?;
        {
            let mut principals = self.principals();
            principals.admit(&self.paths, &design.plan, host)?;
            principals.write(&self.paths)?;
        }
        let seats = self.seats(&design);
        let seat = seats.host(host);
        seats.furnish(&seat, &[])?;
        self.settle(seat, None)
    }

    /// Removes a gateway: its process first, which may drain, and may use its token for that.
    pub(crate) fn remove_gateway(&self, name: &str) -> Result<()> {
        let host = self.design().plan.host(name).filter(|host| matches!(host.kind, HostKind::Gateway(_))).cloned();
        let host =
            host.filter(|host| host.backend.is_some()).ok_or_else(|| self.refusal(format!("{name:?} is no gateway of a tier world")))?;
        let post = self.posts().remove(name).ok_or_else(|| self.no_host(name))?;
        self.quit(post);
        let _alone = self.alone();
        self.unmake_gateway(&host)
    }

    /// Ends a life. Others may be ended meanwhile, each as slowly as it drains.
    fn quit(&self, post: Post) {
        if let Some(orders) = post.orders {
            // A closed channel means that the life is over.
            let _ = orders.give(Order::Quit).recv();
        }
        self.board.forget(&post.seat.name);
    }

    /// Takes away everything of a gateway. Goes on after an error, and tells the first.
    fn unmake_gateway(&self, host: &HostPlan) -> Result<()> {
        let mut design = Design::clone(&self.design());
        let post = self.posts().remove(&host.name);
        if let Some(post) = post {
            self.quit(post);
        }
        let seat = self.seats(&design).host(host);
        let listed = {
            let mut principals = self.principals();
            principals.dismiss(&self.paths, &host.name);
            principals.write(&self.paths)
        };
        let emptied = crate::cgroup::remove(&seat.cgroup);
        let device = format!("link delete {}", host.router_device());
        let unlinked = self.tools.run(&in_router(&design.plan.routers[host.az], vec![device]));
        let removed = self.tools.run(&script::remove_spaces(std::iter::once(host.netns.as_str())));
        let bpffs = self.paths.bpffs(&host.name);
        let unmounted = match rustix::mount::unmount(&bpffs, rustix::mount::UnmountFlags::DETACH) {
            // Never mounted, on a kernel without it or because something failed before.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => Ok(()),
            other => other.tried("cannot unmount", &bpffs),
        };
        if unmounted.is_ok() {
            for dir in [&seat.etc, &seat.data] {
                // Leftovers vanish with the world.
                let _ = std::fs::remove_dir_all(dir);
            }
        }
        self.fallen().remove(&host.name);
        design.topology.gateways.retain(|gateway| gateway.name != host.name);
        design.plan.hosts.retain(|other| other.name != host.name);
        self.set_design(design);
        listed.and(emptied).and(unlinked).and(removed).and(unmounted)
    }

    fn fallen(&self) -> MutexGuard<'_, std::collections::BTreeSet<String>> {
        self.fallen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn no_az(&self, az: &str, plan: &Plan) -> crate::error::Error {
        let names: Vec<&str> = plan.routers.iter().map(|router| router.az.as_str()).collect();
        self.refusal(format!("there is no AZ {az:?}; use one of: {}", names.join(", ")))
    }

    /// Takes an AZ's links to the others down, and its hosts' processes if they shall die.
    pub(crate) fn cut_az(&self, az: &str, hosts_die: bool) -> Result<()> {
        let design = self.design();
        let router = design.plan.routers.iter().find(|router| router.az == az).ok_or_else(|| self.no_az(az, &design.plan))?;
        let others = design.plan.routers.iter().filter(|other| other.number != router.number);
        let lines = others.map(|other| format!("link set {} down", router.device_to(other))).collect();
        self.tools.run(&in_router(router, lines))?;
        if hosts_die {
            self.fell(az);
        }
        Ok(())
    }

    /// All at once: they do not see each other die.
    fn fell(&self, az: &str) {
        let pulses = self.board.lock().clone();
        let mut heard = Vec::new();
        for (name, post) in self.posts().iter().filter(|(_, post)| post.seat.az == az) {
            let Some(orders) = &post.orders else { continue };
            let lives = pulses
                .get(name)
                .is_some_and(|pulse| !matches!(pulse.phase, crate::life::Phase::Stopped | crate::life::Phase::Ended { .. }));
            if lives {
                self.fallen().insert(name.clone());
                heard.push(orders.give(Order::Fall));
            }
        }
        for fallen in heard {
            // As in `order`.
            let _ = fallen.recv();
        }
    }

    /// Brings an AZ's links back with their routes, then what died with it.
    pub(crate) fn heal_az(&self, az: &str) -> Result<()> {
        let design = self.design();
        let plan = &design.plan;
        let router = plan.routers.iter().find(|router| router.az == az).ok_or_else(|| self.no_az(az, plan))?;
        for other in plan.routers.iter().filter(|other| other.number != router.number) {
            self.tools.run(&in_router(router, script::router_to_az(router, other)))?;
            self.tools.run(&in_router(other, script::router_to_az(other, router)))?;
        }
        let posts = self.posts();
        let risen: Vec<_> = posts.iter().filter(|(name, post)| post.seat.az == az && self.fallen().remove(*name)).collect();
        let heard: Vec<_> = risen.iter().filter_map(|(_, post)| Some(post.orders.as_ref()?.give(Order::Start))).collect();
        drop(posts);
        for started in heard {
            // As in `order`.
            let _ = started.recv();
        }
        Ok(())
    }
}

/// Whether a gateway can join the `hosts` that are there. Errors: why not.
fn decide_join(topology: &Topology, hosts: &[String], name: &str, az: &str, backend: &str) -> std::result::Result<(), String> {
    if !topology.is_tier() {
        return Err("this world has no edges: its gateways are those of its file; add `edges` to it".into());
    }
    gateway_names(name, backend).map_err(|(what, mend)| format!("{what}; {mend}"))?;
    if !topology.edges.iter().any(|edge| edge.az == az) {
        let azs: Vec<&str> = topology.edges.iter().map(|edge| edge.az.as_str()).collect();
        return Err(format!("there is no AZ {az:?} with an edge; use one of: {}", azs.join(", ")));
    }
    // The topology still has a gateway that is being removed.
    if hosts.iter().any(|host| host == name) || topology.gateways.iter().any(|gateway| gateway.name == name) {
        return Err(format!("the name {name:?} is already taken; give it another name"));
    }
    if hosts.len() >= HOSTS_MAX {
        return Err(format!("the world has {} hosts, and {HOSTS_MAX} are the limit; remove some", hosts.len()));
    }
    Ok(())
}

fn in_router(router: &RouterPlan, lines: Vec<String>) -> Batch {
    debug_assert_eq!(router.name, router_name(&router.az));
    Batch { netns: Some(router.netns.clone()), tool: Tool::Ip, lines }
}

/// One more of a backend: as its others are, or as any gateway of the world, or as the mesh's own by default.
fn like_its_backend(topology: &Topology, name: &str, az: &str, backend: &str) -> Component {
    let same = |gateway: &&Component| gateway.backend.as_deref() == Some(backend);
    let model = topology.gateways.iter().find(same).or(topology.gateways.first());
    let own = Process {
        command: Vec::new(),
        args: Vec::new(),
        env: Default::default(),
        restart: Restart::Always,
        readiness: None,
        spot: Spot::default(),
    };
    Component {
        name: name.to_owned(),
        az: az.to_owned(),
        process: model.map_or(Some(own), |model| model.process.clone()),
        rate: model.and_then(|model| model.rate),
        mtu: model.and_then(|model| model.mtu),
        workers: model.map_or(1, |model| model.workers),
        backend: Some(backend.to_owned()),
        outside: false,
        tenant: None,
        tls_dir: None,
        spot: Spot::default(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn who_may_join() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/tier.yaml");
        let tier = Topology::parse(&file, include_str!("../../topologies/tier.yaml")).expect("right");
        let few = ["edge-1".to_owned(), "alpha/shop/web-0".to_owned()];
        let many = vec![String::new(); HOSTS_MAX];
        let good = ("gw-9", "az1", "b1");
        for (what, hosts, (name, az, backend), expected) in [
            ("one of its kind", &few[..], good, Ok(())),
            ("one of a new backend", &few, ("gw-9", "az2", "b9"), Ok(())),
            ("a name of the file, being removed", &few, ("gw-1a", "az1", "b1"), Err("is already taken")),
            ("a name in use", &few, ("edge-1", "az1", "b1"), Err("is already taken")),
            ("no name", &few, ("gw/9", "az1", "b1"), Err("is not a name")),
            ("no backend", &few, ("gw-9", "az1", ""), Err("backend: \"\" is not a name")),
            ("no AZ", &few, ("gw-9", "az3", "b1"), Err("there is no AZ \"az3\" with an edge")),
            ("no room", &many, good, Err("2000 are the limit")),
        ] {
            match (decide_join(&tier, hosts, name, az, backend), expected) {
                (Ok(()), Ok(())) => {}
                (Err(said), Err(expected)) if said.contains(expected) => {}
                (other, _) => panic!("{what}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_gateway_is_as_the_others_of_its_backend() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/reference.yaml");
        let topology = Topology::load(&file).expect("right");
        for (backend, workers, mtu, restart) in
            [("b1", 1, None, Restart::Always), ("b2", 2, Some(1600), Restart::Never), ("b3", 1, None, Restart::Always)]
        {
            let gateway = like_its_backend(&topology, "gw9", "az1", backend);
            let process = gateway.process.expect("a process");
            assert_eq!((gateway.workers, gateway.mtu, process.restart), (workers, mtu, restart), "{backend}");
        }
        let mut empty = topology.clone();
        empty.gateways.clear();
        let first = like_its_backend(&empty, "gw9", "az1", "b1");
        assert_eq!((first.workers, first.process.map(|process| process.restart)), (1, Some(Restart::Always)));
    }
}
