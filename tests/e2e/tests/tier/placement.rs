//! Where the controller has placed services, and which replicas their tables name. The module reads
//! the fleet and changes nothing.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{FIRST, MESHED, PROXYLESS, is_timed, mesh};

/// Returns the names of all replicas of the test.
pub(super) fn gateways() -> impl Iterator<Item = String> {
    let of = |first: &str| {
        [
            Some(first.to_owned()),
            is_timed().then(|| format!("{first}b")),
        ]
    };
    FIRST.into_iter().flat_map(of).flatten()
}

/// Returns the number of starts of each replica after the first.
pub(super) fn restarts() -> Vec<(String, u32)> {
    let starts = |name: String| {
        let starts = mesh().world.host(&name).unwrap().process.restarts;
        (name, starts)
    };
    gateways().map(starts).collect()
}

/// Returns the replicas of the backends in the clients' AZ on which a service is placed.
pub(super) fn shard(placed: &Value, service: &str) -> Vec<String> {
    let services = placed["services"].as_array().unwrap();
    let of = services
        .iter()
        .find(|s| s["service"] == service)
        .unwrap_or_else(|| panic!("{service}: {placed}"));
    // Backend names contain the AZ: `az1/b1`.
    let backends: Vec<&str> = of["backends"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let name = |r: &Value| {
        format!(
            "{}/{}",
            r["az"].as_str().unwrap_or_default(),
            r["backend"].as_str().unwrap_or_default()
        )
    };
    let is_there = |r: &&Value| backends.contains(&name(r).as_str()) && r["az"] == "az1";
    let replicas = placed["replicas"]
        .as_array()
        .unwrap()
        .iter()
        .filter(is_there);
    replicas
        .map(|r| r["name"].as_str().unwrap().to_owned())
        .collect()
}

/// Returns the replicas in a service's tables. Those of an earlier placement stay while they may
/// own sessions, and packets reach them when all before them are dead.
pub(super) fn members(service: &str) -> BTreeSet<String> {
    let output = mesh()
        .canal(&["gateway", "status", service, "-o", "json"])
        .json();
    let tables = output["tables"].as_array().into_iter().flatten();
    let members = tables.flat_map(|table| table["members"].as_array().into_iter().flatten());
    members
        .map(|member| member["replica"].as_str().unwrap().to_owned())
        .collect()
}

/// A service, its client, and the number in its name.
pub(super) struct WatchedService {
    pub(super) name: String,
    pub(super) client: &'static str,
    pub(super) n: u32,
}

/// Returns all HTTP services, of both tenants.
pub(super) fn services() -> Vec<WatchedService> {
    let of = |(client, tenant)| {
        (0..4).map(move |n| WatchedService {
            name: format!("{tenant}/default/web-{n}"),
            client,
            n,
        })
    };
    [(MESHED, "alpha"), (PROXYLESS, "beta")]
        .into_iter()
        .flat_map(of)
        .collect()
}

/// Returns the service whose failure is most distinct: others share no replica with it, and all
/// others keep one in the clients' AZ if possible. `None` if every other service shares a replica
/// with each.
pub(super) fn find_victim<'a>(
    placed: &Value,
    services: &'a [WatchedService],
    tables: &[BTreeSet<String>],
) -> Option<&'a WatchedService> {
    let rank = |service: &WatchedService, own: &BTreeSet<String>| {
        let others = || {
            services
                .iter()
                .zip(tables)
                .filter(|(other, _)| other.name != service.name)
        };
        let apart = others()
            .filter(|(_, members)| members.is_disjoint(own))
            .count();
        let is_apart_nearby = |other: &WatchedService| {
            shard(placed, &other.name)
                .iter()
                .all(|replica| !own.contains(replica))
        };
        let apart_nearby = others().filter(|(other, _)| is_apart_nearby(other)).count();
        let twins = others()
            .filter(|(other, _)| is_twin(placed, &other.name, own))
            .count();
        (apart > 0).then_some((apart_nearby > 0, std::cmp::Reverse(twins), apart))
    };
    let ranked = services
        .iter()
        .zip(tables)
        .filter_map(|(service, own)| Some((rank(service, own)?, service)));
    ranked
        .max_by_key(|(rank, _)| *rank)
        .map(|(_, service)| service)
}

/// Returns whether all replicas of a service in the clients' AZ are among these.
pub(super) fn is_twin(placed: &Value, name: &str, replicas: &BTreeSet<String>) -> bool {
    shard(placed, name)
        .iter()
        .all(|replica| replicas.contains(replica))
}
