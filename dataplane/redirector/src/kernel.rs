//! The real maps: the keeper's words as elements of the redirector's maps, and the gateway's sockets in its doors.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use canal_abi::tier::{self as abi, Table, ThrottleKey, address_be, address_of_be};
use canal_model::program::{BucketTable, Rate};
use canal_offload::OffloadError;
use canal_offload::doors::{Door, Doors};
use canal_offload::redirector::{Limit, Limits, Options, Redirector};

use canal_wire::tier::TUNNEL_PORT;

use crate::agent::read_orders;
use crate::content::{Rates, Scope, Slot};
use crate::keeper::{Found, Kernel};

/// A replica that is down keeps getting the packets of its sessions for so long: two late answers to a health check are no proof that it
/// is dead, and a reset cannot be taken back.
const SUSPECT: Duration = Duration::from_secs(3);

/// How to attach.
#[derive(Debug, Clone)]
pub struct Attach {
    /// The replica's underlay device, e.g. `eth0`.
    pub device: String,
    /// For maps, on a bpffs, so that they outlive this process.
    pub pin_dir: PathBuf,
    /// The replica's underlay address.
    pub address: Ipv4Addr,
    /// Bytes: the largest inner packet, with its IP header, that the tier takes.
    pub mtu: u32,
    /// Tunnels to the edge; 0: each flow its own.
    pub tunnels: u16,
}

/// What goes into the doors: listening TCP sockets and a bound UDP one.
#[derive(Debug, Default)]
pub struct Sockets {
    pub hbone: Option<OwnedFd>,
    pub plain: Option<OwnedFd>,
    pub dns: Option<OwnedFd>,
}

/// The redirector's programs on this process's network namespace.
pub struct Programs {
    redirector: Redirector,
    doors: Doors,
    options: Options,
    sockets: Sockets,
    /// Replicas that were up and are not, since when, by number.
    suspects: HashMap<u32, (Ipv4Addr, Instant)>,
}

/// Where a replica's pins go if nobody says.
pub fn default_pin_dir(replica: &str, data_dir: &Path) -> PathBuf {
    canal_offload::default_tier_pin_dir("canal-gateway", replica, data_dir)
}

impl Programs {
    /// Loads, takes over what an earlier process left, and puts the programs in place. Sessions that are open go on. `orders` is the
    /// agent's file: which number and edge an earlier process was given.
    pub fn attach(attach: &Attach, orders: &Path, sockets: Sockets) -> Result<Self, OffloadError> {
        let before = read_orders(orders).unwrap_or_default();
        let options = Options {
            netns: None,
            device: attach.device.clone(),
            pin_dir: Some(attach.pin_dir.clone()),
            address: attach.address,
            number: before.number,
            edge: before.edge.unwrap_or(Ipv4Addr::UNSPECIFIED),
            mtu: attach.mtu,
            tunnel_port: TUNNEL_PORT,
            tunnels: attach.tunnels,
        };
        let doors = Doors::attach(None, Some(&attach.pin_dir))?;
        let redirector = Redirector::attach(&options)?;
        if !redirector.is_durable() {
            tracing::warn!(pins = %attach.pin_dir.display(), "the redirector's maps go with this process: it is in a mount namespace of its own");
        }
        Ok(Self { redirector, doors, options, sockets, suspects: HashMap::new() })
    }

    /// Of a replica that is not up: whether it is a suspect still.
    fn suspect(&mut self, number: u32, address: Ipv4Addr) -> Result<bool, OffloadError> {
        if let Some((_, since)) = self.suspects.get(&number).filter(|(at, _)| *at == address) {
            return Ok(since.elapsed() < SUSPECT);
        }
        // One that nothing was known of may have gone down a moment ago: a new replica takes heads from it while it is only slow.
        let is_down_already = self.redirector.replicas().get(&number)? == Some(abi::Replica::new(address, false));
        if !is_down_already {
            self.suspects.insert(number, (address, Instant::now()));
        }
        Ok(!is_down_already)
    }

    /// Suspects that were not up again in time are down.
    fn settle_suspects(&mut self) -> Result<(), OffloadError> {
        let late: Vec<(u32, Ipv4Addr)> =
            self.suspects.iter().filter(|(_, (_, since))| since.elapsed() >= SUSPECT).map(|(number, (at, _))| (*number, *at)).collect();
        for (number, address) in late {
            self.redirector.replicas().put(&number, &abi::Replica::new(address, false))?;
            self.suspects.remove(&number);
        }
        Ok(())
    }
}

fn text<T>(done: Result<T, OffloadError>) -> Result<T, String> {
    done.map_err(|e| e.to_string())
}

fn element(table: &BucketTable) -> Table {
    let mut element = Table { vni: table.vni.get(), version: table.version, ..Table::default() };
    for (row, chain) in element.chain.iter_mut().zip(&table.chains) {
        for (place, number) in row.iter_mut().zip(chain) {
            *place = number.get();
        }
    }
    element
}

fn key(scope: Scope) -> ThrottleKey {
    match scope {
        Scope::Service(id) => ThrottleKey { scope: abi::THROTTLE_SERVICE, id },
        Scope::Tenant(id) => ThrottleKey { scope: abi::THROTTLE_TENANT, id },
    }
}

fn limits(rates: Rates) -> Limits {
    let limit = |r: Rate| (r.per_second > 0).then_some(Limit { rate: r.per_second.into(), burst: r.burst.into() });
    Limits { sessions: limit(rates.sessions), packets: limit(rates.packets), part: rates.part }
}

impl Kernel for Programs {
    fn put_table(&mut self, service: u32, table: Option<&BucketTable>) -> Result<(), String> {
        text(match table {
            Some(table) => self.redirector.tables().put(&service, &element(table)),
            None => self.redirector.tables().remove(&service),
        })
    }

    fn put_replica(&mut self, number: u16, slot: Option<Slot>) -> Result<(), String> {
        let number = u32::from(number);
        let state = match slot {
            Some(slot) if !slot.up && text(self.suspect(number, slot.address))? => Some(abi::Replica::suspect(slot.address)),
            other => {
                self.suspects.remove(&number);
                other.map(|slot| abi::Replica::new(slot.address, slot.up))
            }
        };
        text(match state {
            Some(state) => self.redirector.replicas().put(&number, &state),
            None => self.redirector.replicas().remove(&number),
        })
    }

    fn put_host(&mut self, host: Ipv4Addr, number: Option<u16>) -> Result<(), String> {
        text(match number {
            Some(number) => self.redirector.hosts().put(&address_be(host), &number.into()),
            None => self.redirector.hosts().remove(&address_be(host)),
        })
    }

    fn put_throttle(&mut self, scope: Scope, rates: Option<Rates>) -> Result<(), String> {
        text(match rates {
            Some(rates) => self.redirector.set_throttle(&key(scope), &limits(rates)),
            None => self.redirector.remove_throttle(&key(scope)),
        })
    }

    fn put_own(&mut self, number: u16, edge: Option<Ipv4Addr>) -> Result<(), String> {
        // An edge that is gone stays where answers go until there is another: sessions may outlive its agent's silence.
        let edge = edge.unwrap_or(self.options.edge);
        text(self.redirector.set_self(number, edge))?;
        (self.options.number, self.options.edge) = (number, edge);
        Ok(())
    }

    fn found(&mut self) -> Result<Found, String> {
        let r = &self.redirector;
        let scope = |k: ThrottleKey| if k.scope == abi::THROTTLE_SERVICE { Scope::Service(k.id) } else { Scope::Tenant(k.id) };
        let versions: HashMap<u32, u32> = text(r.tables().all())?.into_iter().map(|(id, table)| (id, table.version)).collect();
        Ok(Found {
            tables: versions.keys().copied().collect(),
            versions,
            replicas: text(r.replicas().all())?.into_keys().filter_map(|n| u16::try_from(n).ok()).collect(),
            hosts: text(r.hosts().all())?.into_keys().map(address_of_be).collect(),
            throttles: text(r.throttles())?.into_keys().map(scope).collect(),
        })
    }

    fn counts(&mut self) -> Result<Vec<(&'static str, &'static str, u64)>, String> {
        let of = |program, counts: Vec<(&'static str, u64)>| counts.into_iter().map(move |(what, n)| (program, what, n));
        let redirector = of("redirector", text(self.redirector.counts())?);
        Ok(redirector.chain(of("tunnel", text(self.redirector.tunnel_counts())?)).chain(of("doors", text(self.doors.counts())?)).collect())
    }

    fn repair(&mut self) -> Result<bool, String> {
        text(self.settle_suspects())?;
        if self.redirector.is_attached() {
            return Ok(false);
        }
        text(self.redirector.go_live(&self.options))?;
        Ok(true)
    }

    fn open_doors(&mut self) -> Result<(), String> {
        let sockets = std::mem::take(&mut self.sockets);
        for (door, socket) in [(Door::Plain, sockets.plain), (Door::Dns, sockets.dns), (Door::Hbone, sockets.hbone)] {
            if let Some(socket) = socket {
                text(self.doors.set(door, &socket))?;
            }
        }
        Ok(())
    }

    fn forget_doors(&mut self) {
        self.sockets = Sockets::default();
    }
}
