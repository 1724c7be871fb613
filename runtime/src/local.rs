//! Names of this host that do not depend on a name server. Only they are valid in the `Host` of a
//! request to a loopback address. A web page in a browser on the host can send a request to that
//! address under any other name (DNS rebinding).

use std::net::IpAddr;

/// Returns whether `host` is an IP address or `localhost`, with or without a port.
pub(crate) fn is_local_name(host: &str) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.split_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_localhost_are_local() {
        for host in [
            "localhost",
            "LOCALHOST:15000",
            "127.0.0.1:15000",
            "[::1]:15000",
            "10.0.0.7",
        ] {
            assert!(is_local_name(host), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:15000",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "",
            "[::1",
        ] {
            assert!(!is_local_name(host), "{host}");
        }
    }
}
