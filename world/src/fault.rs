//! Faults on the network of a living world: partitions, loss, links down; and threads that stand still. Those of the network are undone
//! by [`World::heal`], and vanish with the world. Delay is a relay's, at one port of one host, because kernels without netem have none.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::net::IpAddr;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::cgroup;
use crate::control::{Host, Request};
use crate::error::{Error, Result, Tried};
use crate::net::Tools;
use crate::script::{Batch, Tool};
use crate::sys::threads::StoppedThreads;
use crate::world::World;

/// nftables table that holds the faults of a namespace.
const TABLE: &str = "inet canal_fault";
/// nftables table that leads a port to its relay.
const SLOW_TABLE: &str = "inet canal_slow";
/// Port of a relay: that of the port which it stands for, plus this.
const RELAY_OFFSET: u16 = 20_000;

/// What happens to packets that arrive from somebody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    All,
    Percent(u8),
}

impl World {
    /// Partitions two hosts: nothing that one sends reaches the other. Two routers stand for their
    /// AZs; a node stands for everything behind it, because its tunnels are cut.
    pub fn cut(&self, one: &str, other: &str) -> Result<()> {
        self.cut_one_way(one, other)?;
        self.cut_one_way(other, one)
    }

    /// Partitions in one direction: what `from` sends never arrives at `to`; answers do arrive.
    pub fn cut_one_way(&self, from: &str, to: &str) -> Result<()> {
        self.disturb(from, to, Loss::All)
    }

    /// Drops this share of the packets from `from` that arrive at `to`, at random.
    pub fn lose(&self, from: &str, to: &str, percent: u8) -> Result<()> {
        self.disturb(from, to, Loss::Percent(percent))
    }

    /// Ends cuts and losses between two hosts, in both directions.
    pub fn heal(&self, one: &str, other: &str) -> Result<()> {
        for (from, to) in [(one, other), (other, one)] {
            let (from, to) = (self.host(from)?, self.host(to)?);
            let (place, chain, _) = self.place(&from, to)?;
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

    /// Makes every answer of a host's TCP port late by twice this time, once on the way in and once on the way out: connections that
    /// are open end, and new ones go by a relay beside it. It ends with what this returns, and so do the connections. IPv4 only.
    pub fn slow(&self, host: &str, port: u16, late: Duration) -> Result<Slow<'_>> {
        let host = self.host(host)?;
        let relay = port.wrapping_add(RELAY_OFFSET);
        let address = host.seat.ip4.map(|address| format!("{address}:{port}")).unwrap_or_default();
        let (relay_text, late_text) = (relay.to_string(), late.as_millis().to_string());
        let mut command = self.exec(&host.seat.name, &["canal-world-peer", "delay", &relay_text, &address, &late_text])?;
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().tried("cannot start", "canal-world-peer")?;
        // It says one line when it is ready; an end without one shows as connections that are refused.
        let mut line = String::new();
        let _ = child.stdout.take().map(|out| BufReader::new(out).read_line(&mut line));
        let slow = Slow { world: self, host, relay: child };
        self.nft(&slow.host, slow_lines(port, relay))?;
        Ok(slow)
    }

    /// Ends all cuts and losses in the world (not links that are down).
    pub fn heal_all(&self) -> Result<()> {
        for host in self.hosts()? {
            self.nft(
                &host,
                [TABLE, SLOW_TABLE].iter().flat_map(|table| [format!("add table {table}"), format!("delete table {table}")]).collect(),
            )?;
        }
        Ok(())
    }

    /// Takes a host's or pod's link down at its far end: the host sees its carrier go.
    pub fn link_down(&self, host: &str) -> Result<()> {
        let host = self.host(host)?.seat.name;
        self.ask(&Request::Link { host, up: false }).map(drop)
    }

    /// Brings a link back, with the routes over it.
    pub fn link_up(&self, host: &str) -> Result<()> {
        let host = self.host(host)?.seat.name;
        self.ask(&Request::Link { host, up: true }).map(drop)
    }

    /// Cuts an AZ off: every link between its router and the others' goes down at its own end, so that the other AZs send into a black
    /// hole. With `hosts_die` every process in it is killed too, pods' included, and stays dead until [`World::heal_az`].
    pub fn cut_az(&self, az: &str, hosts_die: bool) -> Result<()> {
        self.ask(&Request::CutAz { az: az.into(), hosts_die }).map(drop)
    }

    /// Brings an AZ's links back, and starts what died by [`World::cut_az`].
    pub fn heal_az(&self, az: &str) -> Result<()> {
        self.ask(&Request::HealAz { az: az.into() }).map(drop)
    }

    /// Gives a host's or pod's link another MTU, in bytes, at both ends and at once: a path that becomes narrow, or wide again. Tunnels
    /// that run through it keep theirs. Errors: a router, which has many links.
    pub fn set_mtu(&self, host: &str, mtu: u32) -> Result<()> {
        let near = self.host(host)?;
        let (far, device) = self.far_end(&near)?;
        for (host, device) in [(near, "eth0".to_owned()), (far, device)] {
            self.run(&host, Tool::Ip, vec![format!("link set {device} mtu {mtu}")])?;
        }
        Ok(())
    }

    /// The host at the other end of a host's only link, and the device there.
    fn far_end(&self, host: &Host) -> Result<(Host, String)> {
        if let Some(device) = &host.seat.router_device {
            return Ok((self.host(&crate::plan::router_name(&host.seat.az))?, device.clone()));
        }
        match (&host.seat.node, host.seat.ip4) {
            (Some(node), Some(address)) => Ok((self.host(node)?, crate::plan::node_device(address.octets()[3]))),
            _ => Err(Error::Supervisor { world: self.name().into(), message: format!("{} has not one link", host.seat.name) }),
        }
    }

    /// Stops the threads of a host's processes whose names begin with `prefix`, and only those: a grey failure, in which the process
    /// answers whoever asks how it is and its data path stands still. A gateway's workers are named `gateway-0`, `gateway-1` and so on.
    /// They run on when the result is dropped.
    ///
    /// Errors: no such host or thread, or the kernel refuses to trace.
    pub fn stop_threads(&self, host: &str, prefix: &str) -> Result<StoppedThreads> {
        let seat = self.host(host)?.seat;
        StoppedThreads::stop(&cgroup::pids(&seat.cgroup), prefix).tried("cannot stop threads of", host)
    }

    fn disturb(&self, from: &str, to: &str, loss: Loss) -> Result<()> {
        let (from, to) = (self.host(from)?, self.host(to)?);
        let packets = matches(&from, &to);
        let (place, chain, device) = self.place(&from, to)?;
        let hook = if device.is_empty() { "prerouting" } else { "postrouting" };
        let mut lines = vec![
            format!("add table {TABLE}"),
            format!("add chain {TABLE} {chain} {{ type filter hook {hook} priority -350; }}"),
            format!("flush chain {TABLE} {chain}"),
        ];
        let verdict = match loss {
            // nft knows no "less than 100 of 100".
            Loss::All | Loss::Percent(100..) => "counter drop".to_owned(),
            Loss::Percent(percent) => format!("numgen random mod 100 < {percent} counter drop"),
        };
        lines.extend(packets.into_iter().map(|packets| format!("add rule {TABLE} {chain} {device}{packets} {verdict}")));
        self.nft(&place, lines)
    }

    /// Where packets on their way from `from` to `to` are caught: the host and the chain there, and for the last hop before `to` a
    /// match of the device. An edge's or tier replica's programs take packets before nft sees them, so theirs are caught at the router.
    fn place(&self, from: &Host, to: Host) -> Result<(Host, String, String)> {
        let has_programs = to.seat.kind == "edge" || (to.seat.kind == "gateway" && to.seat.overlay.is_empty());
        match (&to.seat.router_device, has_programs) {
            (Some(device), true) => {
                let router = self.host(&crate::plan::router_name(&to.seat.az))?;
                Ok((router, format!("{}_{}", chain(from), plain(&to.seat.name)), format!("oifname \"{device}\" ")))
            }
            _ => Ok((to, chain(from), String::new())),
        }
    }

    fn nft(&self, host: &Host, lines: Vec<String>) -> Result<()> {
        self.run(host, Tool::Nft, lines)
    }

    fn run(&self, host: &Host, tool: Tool, lines: Vec<String>) -> Result<()> {
        let netns = host.seat.netns.file_name().map(|name| name.to_string_lossy().into_owned());
        Tools::default().run(&Batch { netns, tool, lines })
    }
}

/// A port that answers late, for as long as this lives.
#[derive(Debug)]
pub struct Slow<'w> {
    world: &'w World,
    host: Host,
    relay: Child,
}

impl Drop for Slow<'_> {
    fn drop(&mut self) {
        // The world may be gone already, and the relay with it.
        let _ = self.world.nft(&self.host, vec![format!("add table {SLOW_TABLE}"), format!("delete table {SLOW_TABLE}")]);
        let _ = self.relay.kill();
        let _ = self.relay.wait();
    }
}

/// New connections go to the relay; those from before are reset, or they would stay fast.
fn slow_lines(port: u16, relay: u16) -> Vec<String> {
    vec![
        format!("add table {SLOW_TABLE}"),
        format!("add chain {SLOW_TABLE} lead {{ type nat hook prerouting priority dstnat; }}"),
        format!("add rule {SLOW_TABLE} lead tcp dport {port} redirect to :{relay}"),
        format!("add chain {SLOW_TABLE} end {{ type filter hook input priority filter; }}"),
        format!("add rule {SLOW_TABLE} end iifname != \"lo\" tcp dport {port} reject with tcp reset"),
    ]
}

/// One chain per sender, so that each can be healed alone.
fn chain(from: &Host) -> String {
    format!("from_{}", plain(&from.seat.name))
}

fn plain(name: &str) -> String {
    name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '_' }).collect()
}

/// Which packets, at `to`, come from `from`.
fn matches(from: &Host, to: &Host) -> Vec<String> {
    if from.seat.kind == "router" && to.seat.kind == "router" {
        return vec![format!("iifname \"x{}\"", from.seat.az)];
    }
    let own = from.seat.ip4.map(IpAddr::V4).into_iter().chain(from.seat.ip6.map(IpAddr::V6));
    let overlay = from.seat.overlay.values().flat_map(|(four, six)| [IpAddr::V4(*four), IpAddr::V6(*six)]);
    let addresses: BTreeSet<IpAddr> = own.chain(overlay).collect();
    addresses
        .iter()
        .map(|address| match address {
            IpAddr::V4(address) => format!("ip saddr {address}"),
            IpAddr::V6(address) => format!("ip6 saddr {address}"),
        })
        .collect()
}
