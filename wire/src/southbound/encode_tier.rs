//! Converts the cloud tier's resources to wire messages.

use canal_model::program as p;

use super::encode::key;
use crate::program as w;

impl From<&p::Node> for w::Node {
    fn from(n: &p::Node) -> Self {
        Self {
            tenant: n.tenant.to_string(),
            name: n.name.to_string(),
            az: n.az.to_string(),
            underlay: n.underlay.to_string(),
            mac: n.mac.to_vec(),
            pod_cidrs: n.pod_cidrs.iter().map(ToString::to_string).collect(),
        }
    }
}

impl From<&p::Replica> for w::Replica {
    fn from(r: &p::Replica) -> Self {
        Self {
            name: r.name.to_string(),
            number: r.number.into(),
            backend: r.backend.to_string(),
            az: r.az.to_string(),
            underlay: r.underlay.to_string(),
            up: r.up,
        }
    }
}

impl From<&p::GatewayAddress> for w::GatewayAddress {
    fn from(a: &p::GatewayAddress) -> Self {
        Self {
            service: key(&a.service),
            id: a.id.get(),
            az: a.az.to_string(),
            addresses: a.addresses.iter().map(ToString::to_string).collect(),
            open: a.open,
            network: a.network.map_or(0, |vni| vni.get()),
        }
    }
}

impl From<&p::BucketTable> for w::BucketTable {
    fn from(t: &p::BucketTable) -> Self {
        let mut chains = Vec::with_capacity(p::BUCKETS * p::CHAIN_LENGTH_MAX * 2);
        for chain in &t.chains {
            let numbers = chain.iter().map(|n| n.get()).chain(std::iter::repeat(0));
            chains.extend(numbers.take(p::CHAIN_LENGTH_MAX).flat_map(u16::to_be_bytes));
        }
        Self {
            service: key(&t.service),
            id: t.id.get(),
            az: t.az.to_string(),
            vni: t.vni.get(),
            version: t.version,
            chains,
        }
    }
}

fn rate(r: p::RateLimit) -> Option<w::Rate> {
    Some(w::Rate {
        per_second: r.per_second,
        burst: r.burst,
    })
}

impl From<&p::Throttle> for w::Throttle {
    fn from(t: &p::Throttle) -> Self {
        Self {
            tenant: t.tenant.to_string(),
            vni: t.vni.get(),
            service: t.service.as_ref().and_then(key),
            id: t.id.map_or(0, |id| id.get()),
            sessions: rate(t.sessions),
            packets: rate(t.packets),
            requests: rate(t.requests),
        }
    }
}
