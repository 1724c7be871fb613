//! Key servers: the provider's from flags, a tenant's from its KeyServer resource. This module does
//! not connect to them.

use std::net::SocketAddr;
use std::str::FromStr;

use canal_model::identity::{Identity, component_identity};
use canal_model::ids::{AzName, ObjectName, TenantName};
use canal_model::principal::Principal;
use canal_model::trust::KeyServer;

/// A key server of the provider, in the form of `--key-server`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAddress {
    pub az: AzName,
    pub name: ObjectName,
    pub address: SocketAddr,
}

/// Parses `AZ=NAME@IP:PORT`.
///
/// # Errors
/// The text has another form; the error names the mistake and the right form.
pub fn parse_key_server(text: &str) -> Result<ServerAddress, String> {
    let wrong = |what: &str| {
        format!(
            "key server {text:?}: {what}; fix: write AZ=NAME@IP:PORT, as in az1=ks1@10.0.0.13:15013"
        )
    };
    let (az, rest) = text
        .split_once('=')
        .ok_or_else(|| wrong("there is no '='"))?;
    let (name, address) = rest
        .split_once('@')
        .ok_or_else(|| wrong("there is no '@'"))?;
    let az = az.parse().map_err(|e| wrong(&format!("the AZ: {e}")))?;
    let name = name.parse().map_err(|e| wrong(&format!("the name: {e}")))?;
    let address: SocketAddr = address
        .parse()
        .map_err(|_| wrong(&format!("{address:?} is not IP:PORT")))?;
    if address.port() == 0 {
        return Err(wrong("port 0 is not valid"));
    }
    Ok(ServerAddress { az, name, address })
}

impl FromStr for ServerAddress {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        parse_key_server(s)
    }
}

/// A key server that can be tried: its address and the identity it must have.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct KeyServerTarget {
    /// Name of the server in counters and errors.
    pub(super) name: String,
    pub(super) address: SocketAddr,
    pub(super) identity: Identity,
}

fn key_server_target(
    name: &ObjectName,
    az: AzName,
    tenant: Option<TenantName>,
    address: SocketAddr,
) -> Option<KeyServerTarget> {
    let shown = match &tenant {
        Some(tenant) => format!("{tenant}/{name}"),
        None => name.to_string(),
    };
    let identity = component_identity(&Principal::KeyServer {
        name: name.clone(),
        az,
        tenant,
    })?;
    Some(KeyServerTarget {
        name: shown,
        address,
        identity,
    })
}

/// Returns the servers in the order in which they are tried: those of the `own` AZ first, otherwise
/// as given.
pub(super) fn order(own: &AzName, mut servers: Vec<ServerAddress>) -> Vec<KeyServerTarget> {
    servers.sort_by_key(|s| s.az != *own);
    servers
        .iter()
        .filter_map(|s| key_server_target(&s.name, s.az.clone(), None, s.address))
        .collect()
}

/// Returns the targets of a tenant's own key server; all its addresses belong to one server.
pub(super) fn of_tenant(own: &AzName, server: &KeyServer) -> Vec<KeyServerTarget> {
    let at = |address: &SocketAddr| {
        key_server_target(
            &server.name,
            own.clone(),
            Some(server.tenant.clone()),
            *address,
        )
    };
    server.addresses.iter().filter_map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_server_flags_are_parsed_and_mistakes_have_a_fix() {
        let good = parse_key_server("az1=ks1@10.0.0.13:15013").unwrap();
        assert_eq!(
            (
                good.az.as_str(),
                good.name.as_str(),
                good.address.to_string().as_str()
            ),
            ("az1", "ks1", "10.0.0.13:15013")
        );
        assert!(parse_key_server("az1=ks1@[fd00::1]:15013").is_ok());
        for (text, what) in [
            ("", "no '='"),
            ("ks1@10.0.0.13:15013", "no '='"),
            ("az1=10.0.0.13:15013", "no '@'"),
            ("=ks1@10.0.0.13:15013", "the AZ"),
            ("az1=@10.0.0.13:15013", "the name"),
            ("az1=ks1@host:15013", "is not IP:PORT"),
            ("az1=ks1@10.0.0.13", "is not IP:PORT"),
            ("az1=ks1@10.0.0.13:0", "port 0"),
        ] {
            let error = parse_key_server(text).unwrap_err();
            assert!(
                error.contains(what) && error.contains("AZ=NAME@IP:PORT"),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn the_local_az_is_tried_first() {
        let all = [
            "az2=b@127.0.0.2:1",
            "az1=a@127.0.0.1:1",
            "az3=c@127.0.0.3:1",
            "az1=d@127.0.0.4:1",
        ];
        let all = all.iter().map(|s| parse_key_server(s).unwrap()).collect();
        let names: Vec<_> = order(&"az1".parse().unwrap(), all)
            .into_iter()
            .map(|p| p.name)
            .collect();
        assert_eq!(names, ["a", "d", "b", "c"]);
        let own = KeyServer {
            tenant: "alpha".parse().unwrap(),
            name: "own".parse().unwrap(),
            addresses: vec!["127.0.0.9:1".parse().unwrap()],
        };
        let place = of_tenant(&"az1".parse().unwrap(), &own).remove(0);
        assert_eq!(
            (place.name.as_str(), place.identity.to_string().as_str()),
            (
                "alpha/own",
                "spiffe://components.canal/ns/alpha/sa/keyserver.own"
            )
        );
    }
}
