//! Reads the names and VIPs of the Service objects in a tenant's own YAML, for `/etc/hosts`, and
//! writes `/etc/resolv.conf` for pods with a DNS server. It skips unreadable files; the controller
//! reports them.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use serde_json::Value;

use crate::check::is_vip;

/// Names and VIPs of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServiceVips {
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) addresses: Vec<IpAddr>,
}

/// Returns all services in these files that have at least one VIP.
pub(crate) fn in_files(files: &[PathBuf]) -> Vec<ServiceVips> {
    let texts = files
        .iter()
        .filter_map(|file| std::fs::read_to_string(file).ok());
    texts.flat_map(|text| in_text(&text)).collect()
}

fn in_text(text: &str) -> Vec<ServiceVips> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap_or_default();
    let listed = documents
        .iter()
        .flat_map(|document| match document["kind"].as_str() {
            Some("List" | "ServiceList") => {
                document["items"].as_array().cloned().unwrap_or_default()
            }
            _ => vec![document.clone()],
        });
    listed.filter_map(|object| service(&object)).collect()
}

fn service(object: &Value) -> Option<ServiceVips> {
    if object["kind"] != "Service" || object["apiVersion"] != "v1" {
        return None;
    }
    let spec = &object["spec"];
    let one = spec["clusterIP"].as_str().into_iter();
    let many = spec["clusterIPs"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str);
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in one.chain(many).filter_map(|text| text.parse().ok()) {
        if is_vip(&address) && !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.is_empty() {
        return None;
    }
    let metadata = &object["metadata"];
    Some(ServiceVips {
        name: metadata["name"].as_str()?.to_owned(),
        namespace: metadata["namespace"]
            .as_str()
            .unwrap_or("default")
            .to_owned(),
        addresses,
    })
}

/// Returns `/etc/hosts` of a pod in `namespace`: the pod itself, then every service of its tenant.
/// Only services of the pod's own namespace have their bare name there, as with a cluster's DNS
/// search list.
pub(crate) fn hosts_file(
    own_names: &str,
    own_addresses: &[IpAddr],
    namespace: &str,
    services: &[ServiceVips],
) -> String {
    let mut text = String::from("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n");
    for address in own_addresses {
        text.push_str(&format!("{address} {own_names}\n"));
    }
    for service in services {
        let ServiceVips {
            name,
            namespace: home,
            ..
        } = service;
        let bare = if home == namespace {
            format!("{name} ")
        } else {
            String::new()
        };
        for address in &service.addresses {
            text.push_str(&format!(
                "{address} {bare}{name}.{home} {name}.{home}.svc {name}.{home}.svc.cluster.local\n"
            ));
        }
    }
    text
}

/// Maximum number of name servers that the C library's resolver uses (`MAXNS` of resolv.conf(5)).
const SERVERS_MAX: usize = 3;

/// Returns `/etc/resolv.conf` of a pod in `namespace`. It is like a kubelet's, but with a timeout
/// of one second, after which the next AZ's server is queried.
pub(crate) fn resolver_file(namespace: &str, servers: &[Ipv4Addr]) -> String {
    if servers.is_empty() {
        return "# A world has no name server: names are in /etc/hosts.\n".to_owned();
    }
    let servers: String = servers
        .iter()
        .take(SERVERS_MAX)
        .map(|server| format!("nameserver {server}\n"))
        .collect();
    format!(
        "{servers}search {namespace}.svc.cluster.local svc.cluster.local\noptions timeout:1 attempts:3 ndots:2\n"
    )
}
