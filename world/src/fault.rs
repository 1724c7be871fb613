//! Faults in a running world: partitions, losses, links down, and stopped threads. [`World::heal`]
//! reverts network faults, and they disappear with the world. Delay is injected by relays
//! ([`World::delay`]), because not all kernels have netem. Start at [`World::cut`].

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::cgroup;
use crate::control::{HostStatus, WorldRequest};
use crate::error::{Error, IoContext, Result};
use crate::net::Tools;
use crate::sys::threads::StoppedThreads;
use crate::tool_batch::{Tool, ToolBatch};
use crate::world::World;

/// nftables table with the faults of a namespace.
const TABLE: &str = "inet canal_fault";

/// Loss of the packets that arrive from a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PacketLoss {
    All,
    Percent(u8),
}

impl World {
    /// Partitions two hosts: no packet of one reaches the other. Two routers mean their whole AZs.
    /// A node means everything behind it, because its tunnels are cut.
    ///
    /// # Errors
    ///
    /// A host does not exist, or nft refuses the rules.
    pub fn cut(&self, one: &str, other: &str) -> Result<()> {
        self.cut_one_way(one, other)?;
        self.cut_one_way(other, one)
    }

    /// Partitions in one direction: packets of `from` never arrive at `to`, but those of `to`
    /// arrive at `from`.
    ///
    /// # Errors
    ///
    /// A host does not exist, or nft refuses the rules.
    pub fn cut_one_way(&self, from: &str, to: &str) -> Result<()> {
        self.inject_fault(from, to, PacketLoss::All)
    }

    /// Drops `percent` of the packets from `from` that arrive at `to`, at random.
    ///
    /// # Errors
    ///
    /// A host does not exist, or nft refuses the rules.
    pub fn lose(&self, from: &str, to: &str, percent: u8) -> Result<()> {
        self.inject_fault(from, to, PacketLoss::Percent(percent))
    }

    /// Ends partitions and losses between two hosts, in both directions.
    ///
    /// # Errors
    ///
    /// A host does not exist, or nft refuses the rules.
    pub fn heal(&self, one: &str, other: &str) -> Result<()> {
        for (from, to) in [(one, other), (other, one)] {
            let (from, to) = (self.host(from)?, self.host(to)?);
            let (place, chain, _) = self.drop_location(&from, to)?;
            let lines = [
                format!("add table {TABLE}"),
                format!("add chain {TABLE} {chain}"),
                format!("flush chain {TABLE} {chain}"),
                format!("delete chain {TABLE} {chain}"),
            ];
            self.nft(&place, lines.into())?;
        }
        Ok(())
    }

    /// Ends all partitions and losses in the world. Links that are down stay down.
    ///
    /// # Errors
    ///
    /// The supervisor does not answer, or nft refuses the rules.
    pub fn heal_all(&self) -> Result<()> {
        for host in self.hosts()? {
            self.nft(
                &host,
                vec![
                    format!("add table {TABLE}"),
                    format!("delete table {TABLE}"),
                ],
            )?;
        }
        Ok(())
    }

    /// Takes a host's or pod's link down at its far end, so that the host loses its carrier.
    ///
    /// # Errors
    ///
    /// The host does not exist, or its router or node refuses the change.
    pub fn link_down(&self, host: &str) -> Result<()> {
        let host = self.host(host)?.environment.name;
        self.send_request(&WorldRequest::Link { host, up: false })
            .map(drop)
    }

    /// Brings a link up again, with the routes over it.
    ///
    /// # Errors
    ///
    /// The host does not exist, or its router or node refuses the change.
    pub fn link_up(&self, host: &str) -> Result<()> {
        let host = self.host(host)?.environment.name;
        self.send_request(&WorldRequest::Link { host, up: true })
            .map(drop)
    }

    /// Cuts an AZ off. Every link between its router and the others goes down at its own end, so
    /// that packets of the other AZs disappear in a black hole. With `hosts_die` all processes in
    /// the AZ, including pods', are killed too and stay ended until [`World::heal_az`].
    ///
    /// # Errors
    ///
    /// The AZ does not exist, or its router refuses the change.
    pub fn cut_az(&self, az: &str, hosts_die: bool) -> Result<()> {
        self.send_request(&WorldRequest::CutAz {
            az: az.into(),
            hosts_die,
        })
        .map(drop)
    }

    /// Brings an AZ's links up again, and starts the processes that [`World::cut_az`] killed.
    ///
    /// # Errors
    ///
    /// The AZ does not exist, or a router refuses the change.
    pub fn heal_az(&self, az: &str) -> Result<()> {
        self.send_request(&WorldRequest::HealAz { az: az.into() })
            .map(drop)
    }

    /// Sets the MTU of a host's or pod's link, in bytes, at both ends and at once: the path becomes
    /// narrow, or wide again. The MTU of tunnels over the link does not change.
    ///
    /// # Errors
    ///
    /// The host does not exist, or it is a router, which has many links.
    pub fn set_mtu(&self, host: &str, mtu: u32) -> Result<()> {
        let near = self.host(host)?;
        let (far, device) = self.far_end(&near)?;
        for (host, device) in [(near, "eth0".to_owned()), (far, device)] {
            self.run(
                &host,
                Tool::Ip,
                vec![format!("link set {device} mtu {mtu}")],
            )?;
        }
        Ok(())
    }

    /// Returns the host at the other end of a host's only link, and the device there.
    fn far_end(&self, host: &HostStatus) -> Result<(HostStatus, String)> {
        if let Some(device) = &host.environment.router_device {
            return Ok((
                self.host(&crate::plan::router_name(&host.environment.az))?,
                device.clone(),
            ));
        }
        match (&host.environment.node, host.environment.ip4) {
            (Some(node), Some(address)) => Ok((
                self.host(node)?,
                crate::plan::node_device(address.octets()[3]),
            )),
            _ => Err(Error::Supervisor {
                world: self.name().into(),
                message: format!(
                    "{} does not have exactly one link; fix: name a host that has one",
                    host.environment.name
                ),
            }),
        }
    }

    /// Stops the threads of a host's processes whose names begin with `prefix`, and no others. This
    /// is a gray failure: the process answers its probes while its data path hangs. A gateway's
    /// workers are named `gateway-0`, `gateway-1` and so on. The threads continue when the result
    /// is dropped.
    ///
    /// # Errors
    ///
    /// The host or thread does not exist, or the kernel refuses to trace.
    pub fn stop_threads(&self, host: &str, prefix: &str) -> Result<StoppedThreads> {
        let environment = self.host(host)?.environment;
        StoppedThreads::stop(&cgroup::pids(&environment.cgroup), prefix)
            .tried("cannot stop threads of", host)
    }

    fn inject_fault(&self, from: &str, to: &str, loss: PacketLoss) -> Result<()> {
        let (from, to) = (self.host(from)?, self.host(to)?);
        let packets = matches(&from, &to);
        let (place, chain, device) = self.drop_location(&from, to)?;
        let hook = if device.is_empty() {
            "prerouting"
        } else {
            "postrouting"
        };
        let mut lines = vec![
            format!("add table {TABLE}"),
            format!("add chain {TABLE} {chain} {{ type filter hook {hook} priority -350; }}"),
            format!("flush chain {TABLE} {chain}"),
        ];
        let verdict = match loss {
            // nft rejects "less than 100 of 100".
            PacketLoss::All | PacketLoss::Percent(100..) => "counter drop".to_owned(),
            PacketLoss::Percent(percent) => {
                format!("numgen random mod 100 < {percent} counter drop")
            }
        };
        lines.extend(
            packets
                .into_iter()
                .map(|packets| format!("add rule {TABLE} {chain} {device}{packets} {verdict}")),
        );
        self.nft(&place, lines)
    }

    /// Returns where packets from `from` to `to` are dropped: the host, the chain there, and a
    /// match of the device if the host is the last hop before `to`. The programs of an edge or tier
    /// replica process packets before nft sees them, so their packets are dropped at the router.
    fn drop_location(
        &self,
        from: &HostStatus,
        to: HostStatus,
    ) -> Result<(HostStatus, String, String)> {
        let has_programs = to.environment.kind == "edge"
            || (to.environment.kind == "gateway" && to.environment.overlay.is_empty());
        match (&to.environment.router_device, has_programs) {
            (Some(device), true) => {
                let router = self.host(&crate::plan::router_name(&to.environment.az))?;
                Ok((
                    router,
                    format!("{}_{}", chain(from), plain(&to.environment.name)),
                    format!("oifname \"{device}\" "),
                ))
            }
            _ => Ok((to, chain(from), String::new())),
        }
    }

    fn nft(&self, host: &HostStatus, lines: Vec<String>) -> Result<()> {
        self.run(host, Tool::Nft, lines)
    }

    fn run(&self, host: &HostStatus, tool: Tool, lines: Vec<String>) -> Result<()> {
        let netns = host
            .environment
            .netns
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        Tools::default().run(&ToolBatch { netns, tool, lines })
    }
}

/// Returns the name of the chain. Each sender has its own, so that each fault can be healed alone.
fn chain(from: &HostStatus) -> String {
    format!("from_{}", plain(&from.environment.name))
}

fn plain(name: &str) -> String {
    name.chars()
        .map(|letter| {
            if letter.is_ascii_alphanumeric() {
                letter
            } else {
                '_'
            }
        })
        .collect()
}

/// Returns the nft matches for packets that come from `from`, as they arrive at `to`.
fn matches(from: &HostStatus, to: &HostStatus) -> Vec<String> {
    if from.environment.kind == "router" && to.environment.kind == "router" {
        return vec![format!("iifname \"x{}\"", from.environment.az)];
    }
    let own = from
        .environment
        .ip4
        .map(IpAddr::V4)
        .into_iter()
        .chain(from.environment.ip6.map(IpAddr::V6));
    let overlay = from
        .environment
        .overlay
        .values()
        .flat_map(|(four, six)| [IpAddr::V4(*four), IpAddr::V6(*six)]);
    let addresses: BTreeSet<IpAddr> = own.chain(overlay).collect();
    addresses
        .iter()
        .map(|address| match address {
            IpAddr::V4(address) => format!("ip saddr {address}"),
            IpAddr::V6(address) => format!("ip6 saddr {address}"),
        })
        .collect()
}
