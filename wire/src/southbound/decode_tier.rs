//! Converts wire messages of the cloud tier to `canal_model::program`, with validation.

use std::net::Ipv4Addr;

use canal_model::ids::{ReplicaNumber, ServiceId, Vni};
use canal_model::program as p;

use super::ResourceDecodeError;
use super::decode::DecodeContext;
use crate::program as w;
use crate::tier;

fn underlay(at: &DecodeContext<'_>, text: &str) -> Result<Ipv4Addr, ResourceDecodeError> {
    text.parse()
        .or_else(|_| at.err("underlay", format!("{text:?} is not an IPv4 address")))
}

fn vni(at: &DecodeContext<'_>, n: u32) -> Result<Vni, ResourceDecodeError> {
    match Vni::new(n) {
        Ok(vni) if vni.get() != tier::TIER_VNI => Ok(vni),
        Ok(_) => at.err("vni", "is reserved for the tier"),
        Err(e) => at.err("vni", e),
    }
}

fn id(at: &DecodeContext<'_>, n: u32) -> Result<ServiceId, ResourceDecodeError> {
    ServiceId::new(n).or_else(|e| at.err("id", e))
}

pub(super) fn node(name: &str, n: w::Node) -> Result<p::Node, ResourceDecodeError> {
    let at = DecodeContext(name);
    Ok(p::Node {
        tenant: at.name("tenant", &n.tenant)?,
        name: at.name("name", &n.name)?,
        az: at.name("az", &n.az)?,
        underlay: underlay(&at, &n.underlay)?,
        mac: n
            .mac
            .as_slice()
            .try_into()
            .or_else(|_| at.err("mac", "is not six bytes"))?,
        pod_cidrs: at.cidrs("pod_cidrs", &n.pod_cidrs)?,
    })
}

pub(super) fn replica(name: &str, r: w::Replica) -> Result<p::Replica, ResourceDecodeError> {
    let at = DecodeContext(name);
    Ok(p::Replica {
        name: at.name("name", &r.name)?,
        number: ReplicaNumber::new(r.number).or_else(|e| at.err("number", e))?,
        backend: at.name("backend", &r.backend)?,
        az: at.name("az", &r.az)?,
        underlay: underlay(&at, &r.underlay)?,
        up: r.up,
    })
}

pub(super) fn address(
    name: &str,
    a: w::GatewayAddress,
) -> Result<p::GatewayAddress, ResourceDecodeError> {
    let at = DecodeContext(name);
    Ok(p::GatewayAddress {
        id: id(&at, a.id)?,
        az: at.name("az", &a.az)?,
        addresses: at.addresses("addresses", &a.addresses)?,
        open: a.open,
        network: match a.network {
            0 => None,
            network => Some(vni(&at, network)?),
        },
        service: at.key("service", a.service)?,
    })
}

pub(super) fn table(name: &str, t: w::BucketTable) -> Result<p::BucketTable, ResourceDecodeError> {
    let at = DecodeContext(name);
    const ROW: usize = p::CHAIN_LENGTH_MAX * 2;
    if t.chains.len() != p::BUCKETS * ROW {
        return at.err(
            "chains",
            format!("{} bytes, not {}", t.chains.len(), p::BUCKETS * ROW),
        );
    }
    let number = |pair: &[u8]| u16::from_be_bytes([pair[0], pair[1]]);
    let chain = |row: &[u8]| {
        // Replica number 0 ends a chain; the rest of the row is unused.
        let taken = row.chunks_exact(2).map(number).take_while(|n| *n != 0);
        taken
            .map(|n| ReplicaNumber::new(n.into()).or_else(|e| at.err("chains", e)))
            .collect::<Result<p::ReplicaChain, _>>()
    };
    Ok(p::BucketTable {
        id: id(&at, t.id)?,
        az: at.name("az", &t.az)?,
        vni: vni(&at, t.vni)?,
        version: t.version,
        chains: t
            .chains
            .chunks_exact(ROW)
            .map(chain)
            .collect::<Result<_, _>>()?,
        service: at.key("service", t.service)?,
    })
}

fn rate(r: Option<w::Rate>) -> p::RateLimit {
    r.map_or_else(p::RateLimit::default, |r| p::RateLimit {
        per_second: r.per_second,
        burst: r.burst,
    })
}

pub(super) fn throttle(name: &str, t: w::Throttle) -> Result<p::Throttle, ResourceDecodeError> {
    let at = DecodeContext(name);
    let service = t
        .service
        .map(|key| at.key("service", Some(key)))
        .transpose()?;
    // A throttle must not limit another tenant's service.
    if let Some(other) = service.as_ref().filter(|s| s.tenant.as_str() != t.tenant) {
        return at.err("service", format!("{other} belongs to another tenant"));
    }
    Ok(p::Throttle {
        tenant: at.name("tenant", &t.tenant)?,
        vni: vni(&at, t.vni)?,
        id: service.is_some().then(|| id(&at, t.id)).transpose()?,
        service,
        sessions: rate(t.sessions),
        packets: rate(t.packets),
        requests: rate(t.requests),
    })
}
