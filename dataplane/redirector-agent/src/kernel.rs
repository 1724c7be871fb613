//! [`TierPrograms`]: the real maps. It writes entries of the redirector's maps, and the gateway's sockets for socket steering.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use canal_abi::tier::{self as abi, Table, ThrottleKey, address_be, address_of_be};
use canal_model::program::{BucketTable, RateLimit};
use canal_offload::OffloadError;
use canal_offload::receive_hash::ReceiveHash;
use canal_offload::redirector::{
    RedirectorOptions, RedirectorPrograms, ThrottleLimit, ThrottleLimits,
};
use canal_offload::socket_steering::{ServiceListener, SocketSteering};

use canal_wire::tier::TUNNEL_PORT;

use crate::agent::read_orders;
use crate::desired_maps::{RedirectorReplica, ThrottleRates, ThrottleScope};
use crate::map_reconciler::{LeftoverEntries, RedirectorMaps};
use crate::receive::{self, Receive};

/// Time for which a replica that is down still gets the packets of its sessions. Two late answers
/// to a health check do not prove that it is dead, and a reset cannot be undone. Clients of a dead
/// replica wait as long before its sessions are reset. Nobody measured the value.
const SUSPECT_TIME: Duration = Duration::from_secs(3);

/// Parameters for attaching the redirector's programs.
#[derive(Debug, Clone)]
pub struct AttachMode {
    /// Underlay device of the replica, e.g. `eth0`.
    pub device: String,
    /// A sysfs that contains the devices of this process's network namespace.
    pub sysfs: PathBuf,
    /// Directory on a bpffs in which maps are pinned, so that they outlive this process.
    pub pin_dir: PathBuf,
    /// Underlay address of the replica.
    pub address: Ipv4Addr,
    /// Largest inner packet with its IP header that the tier accepts, in bytes.
    pub mtu: u32,
    /// Number of tunnels to the edge; 0: each flow has its own.
    pub tunnels: u16,
}

/// Sockets for socket steering: listening TCP sockets, and a bound UDP socket.
#[derive(Debug, Default)]
pub struct GatewaySockets {
    pub hbone: Option<OwnedFd>,
    pub plain: Option<OwnedFd>,
    pub dns: Option<OwnedFd>,
}

/// The redirector's programs on this process's network namespace.
pub struct TierPrograms {
    redirector: RedirectorPrograms,
    steering: SocketSteering,
    options: RedirectorOptions,
    sockets: GatewaySockets,
    /// Replicas that were up and are not any more, by number, with their address and the time.
    suspects: HashMap<u32, (Ipv4Addr, Instant)>,
    sysfs: PathBuf,
    /// Last receive distribution, with the edge and the number of cores for which it was computed.
    receive: Option<(Ipv4Addr, usize, Receive)>,
}

/// Returns the directory of a replica's pins if none is configured.
pub fn default_pin_dir(replica: &str, data_dir: &Path) -> PathBuf {
    canal_offload::default_tier_pin_dir("canal-gateway", replica, data_dir)
}

impl TierPrograms {
    /// Loads and attaches the programs, and adopts what an earlier process has pinned. Open
    /// sessions continue. `orders` is the agent's file with the number and edge of an earlier
    /// process.
    ///
    /// # Errors
    /// The kernel refuses a program or a map, or the pin directory is unusable.
    pub fn attach(
        attach: &AttachMode,
        orders: &Path,
        sockets: GatewaySockets,
    ) -> Result<Self, OffloadError> {
        let before = read_orders(orders).unwrap_or_default();
        let options = RedirectorOptions {
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
        let steering = SocketSteering::attach(None, Some(&attach.pin_dir))?;
        let redirector = RedirectorPrograms::attach(&options)?;
        if !redirector.is_durable() {
            tracing::warn!(pins = %attach.pin_dir.display(), "redirector: the maps end with this process, because it is in a mount namespace of its own");
        }
        Ok(Self {
            redirector,
            steering,
            options,
            sockets,
            suspects: HashMap::new(),
            sysfs: attach.sysfs.clone(),
            receive: None,
        })
    }

    /// Returns whether a replica that is not up is still a suspect.
    fn suspect(&mut self, number: u32, address: Ipv4Addr) -> Result<bool, OffloadError> {
        if let Some((_, since)) = self.suspects.get(&number).filter(|(at, _)| *at == address) {
            return Ok(since.elapsed() < SUSPECT_TIME);
        }
        // A replica of unknown state may have gone down a moment ago: a new replica takes over its
        // heads while it is only slow.
        let is_down_already =
            self.redirector.replicas().get(&number)? == Some(abi::Replica::new(address, false));
        if !is_down_already {
            self.suspects.insert(number, (address, Instant::now()));
        }
        Ok(!is_down_already)
    }

    /// Marks suspects as down that were not up again in time.
    fn settle_suspects(&mut self) -> Result<(), OffloadError> {
        let late: Vec<(u32, Ipv4Addr)> = self
            .suspects
            .iter()
            .filter(|(_, (_, since))| since.elapsed() >= SUSPECT_TIME)
            .map(|(number, (at, _))| (*number, *at))
            .collect();
        for (number, address) in late {
            self.redirector
                .replicas()
                .put(&number, &abi::Replica::new(address, false))?;
            self.suspects.remove(&number);
        }
        Ok(())
    }
}

fn text<T>(done: Result<T, OffloadError>) -> Result<T, String> {
    done.map_err(|e| e.to_string())
}

fn element(table: &BucketTable) -> Table {
    let mut element = Table {
        vni: table.vni.get(),
        version: table.version,
        ..Table::default()
    };
    for (row, chain) in element.chain.iter_mut().zip(&table.chains) {
        for (place, number) in row.iter_mut().zip(chain) {
            *place = number.get();
        }
    }
    element
}

fn key(scope: ThrottleScope) -> ThrottleKey {
    match scope {
        ThrottleScope::Service(id) => ThrottleKey {
            scope: abi::THROTTLE_SERVICE,
            id,
        },
        ThrottleScope::Tenant(id) => ThrottleKey {
            scope: abi::THROTTLE_TENANT,
            id,
        },
    }
}

fn limits(rates: ThrottleRates) -> ThrottleLimits {
    let limit = |r: RateLimit| {
        (r.per_second > 0).then_some(ThrottleLimit {
            rate: r.per_second.into(),
            burst: r.burst.into(),
        })
    };
    ThrottleLimits {
        sessions: limit(rates.sessions),
        packets: limit(rates.packets),
        part: rates.part,
    }
}

impl RedirectorMaps for TierPrograms {
    fn put_table(&mut self, service: u32, table: Option<&BucketTable>) -> Result<(), String> {
        text(match table {
            Some(table) => self.redirector.tables().put(&service, &element(table)),
            None => self.redirector.tables().remove(&service),
        })
    }

    fn put_replica(&mut self, number: u16, slot: Option<RedirectorReplica>) -> Result<(), String> {
        let number = u32::from(number);
        let state = match slot {
            // A suspect still gets the packets of its sessions.
            Some(slot) if !slot.up && text(self.suspect(number, slot.address))? => {
                Some(abi::Replica::suspect(slot.address))
            }
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
            Some(number) => self
                .redirector
                .hosts()
                .put(&address_be(host), &number.into()),
            None => self.redirector.hosts().remove(&address_be(host)),
        })
    }

    fn put_throttle(
        &mut self,
        scope: ThrottleScope,
        rates: Option<ThrottleRates>,
    ) -> Result<(), String> {
        text(match rates {
            Some(rates) => self.redirector.set_throttle(&key(scope), &limits(rates)),
            None => self.redirector.remove_throttle(&key(scope)),
        })
    }

    fn set_self(&mut self, number: u16, edge: Option<Ipv4Addr>) -> Result<(), String> {
        // Without an edge, responses go on to the last one: sessions may outlive a silent edge
        // agent.
        let edge = edge.unwrap_or(self.options.edge);
        text(self.redirector.set_self(number, edge))?;
        (self.options.number, self.options.edge) = (number, edge);
        Ok(())
    }

    fn leftover_entries(&mut self) -> Result<LeftoverEntries, String> {
        let r = &self.redirector;
        let scope = |k: ThrottleKey| {
            if k.scope == abi::THROTTLE_SERVICE {
                ThrottleScope::Service(k.id)
            } else {
                ThrottleScope::Tenant(k.id)
            }
        };
        let versions: HashMap<u32, u32> = text(r.tables().all())?
            .into_iter()
            .map(|(id, table)| (id, table.version))
            .collect();
        Ok(LeftoverEntries {
            tables: versions.keys().copied().collect(),
            versions,
            replicas: text(r.replicas().all())?
                .into_keys()
                .filter_map(|n| u16::try_from(n).ok())
                .collect(),
            hosts: text(r.hosts().all())?
                .into_keys()
                .map(address_of_be)
                .collect(),
            throttles: text(r.throttles())?.into_keys().map(scope).collect(),
        })
    }

    fn counts(&mut self) -> Result<Vec<(&'static str, &'static str, u64)>, String> {
        let of = |program, counts: Vec<(&'static str, u64)>| {
            counts.into_iter().map(move |(what, n)| (program, what, n))
        };
        let redirector = of("redirector", text(self.redirector.counts())?);
        Ok(redirector
            .chain(of("tunnel", text(self.redirector.tunnel_counts())?))
            .chain(of("socket_steering", text(self.steering.counts())?))
            .collect())
    }

    fn repair(&mut self) -> Result<bool, String> {
        text(self.settle_suspects())?;
        if self.redirector.is_attached() {
            return Ok(false);
        }
        text(self.redirector.go_live(&self.options))?;
        Ok(true)
    }

    fn start_steering(&mut self) -> Result<(), String> {
        let sockets = std::mem::take(&mut self.sockets);
        for (kind, socket) in [
            (ServiceListener::Plain, sockets.plain),
            (ServiceListener::Dns, sockets.dns),
            (ServiceListener::Hbone, sockets.hbone),
        ] {
            if let Some(socket) = socket {
                text(self.steering.set(kind, &socket))?;
            }
        }
        Ok(())
    }

    fn receive(&mut self, edge: Ipv4Addr) -> Result<Receive, String> {
        let steering = receive::steering_cores(&self.sysfs, &self.options.device);
        if steering == 0 {
            // Without receive packet steering only the network card may spread the packets, and its
            // hash is unknown.
            return Ok(Receive {
                cores: canal_net::sys::cores().len(),
                ports: Vec::new(),
            });
        }
        if let Some((of, cores, receive)) = &self.receive
            && (*of, *cores) == (edge, steering)
        {
            return Ok(receive.clone());
        }
        let hash = text(ReceiveHash::load())?;
        let hashes = text(hash.hashes(
            edge,
            self.options.address,
            TUNNEL_PORT,
            receive::candidates(steering),
        ))?;
        let receive = Receive {
            cores: steering,
            ports: receive::decide_ports(TUNNEL_PORT, &hashes, steering),
        };
        self.receive = Some((edge, steering, receive.clone()));
        Ok(receive)
    }

    fn received_by_core(&mut self) -> Result<Vec<u64>, String> {
        text(self.redirector.received_by_core())
    }

    fn stop_steering(&mut self) {
        self.sockets = GatewaySockets::default();
    }
}
