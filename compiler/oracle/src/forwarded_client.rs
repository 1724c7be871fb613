//! Defines which address a Gateway takes for the client's if trusted proxies are before it. It is slow
//! and simple, and shares no code with data planes.
//!
//! The rules, which every faster implementation must follow:
//! - Each proxy appends the address of its own client to `x-forwarded-for`. Behind `n` trusted
//!   proxies the client's address is the n-th from the right (Envoy's `xff_num_trusted_hops`).
//!   Elements to the left of it are the client's own and prove nothing.
//! - Lines of the header are one list (RFC 9110 §5.3). Empty elements count for nothing.
//! - With fewer elements than proxies, the request has not passed all of them: the address is that of
//!   the connection.
//! - An element that is no address, with or without a port, makes the address unknown.

use std::net::{IpAddr, SocketAddr};

/// Returns the address of a client whose connection has the address `connection`, behind a number of
/// trusted proxies; `None` means that it is unknown. Names of headers are compared without case.
pub fn remote_address(
    headers: &[(String, String)],
    connection: IpAddr,
    proxies: u8,
) -> Option<IpAddr> {
    let lines = headers
        .iter()
        .filter(|(name, _)| name.eq_ignore_ascii_case("x-forwarded-for"));
    let elements: Vec<&str> = lines
        .flat_map(|(_, line)| line.split(','))
        .map(str::trim)
        .filter(|element| !element.is_empty())
        .collect();
    let proxies = usize::from(proxies);
    if proxies == 0 || elements.len() < proxies {
        return Some(connection);
    }
    parse(elements[elements.len() - proxies])
}

fn parse(element: &str) -> Option<IpAddr> {
    let with_port = element.parse::<SocketAddr>().map(|socket| socket.ip());
    let bare = element.trim_start_matches('[').trim_end_matches(']');
    let address: IpAddr = bare.parse().or(with_port).ok()?;
    Some(address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_is_at_its_place_from_the_right() {
        let connection = "10.0.0.9".parse().unwrap();
        for (lines, proxies, expected) in [
            (&["192.0.2.1"][..], 0, Some("10.0.0.9")),
            (&["192.0.2.1"], 1, Some("192.0.2.1")),
            (&["10.0.0.1, 192.0.2.1"], 1, Some("192.0.2.1")),
            (&["10.0.0.1", "192.0.2.1"], 2, Some("10.0.0.1")),
            (&["10.0.0.1, , 192.0.2.1,"], 2, Some("10.0.0.1")),
            (&["192.0.2.1"], 2, Some("10.0.0.9")),
            (&[], 1, Some("10.0.0.9")),
            (&["192.0.2.1:4711"], 1, Some("192.0.2.1")),
            (&["[2001:db8::1]:4711"], 1, Some("2001:db8::1")),
            (&["[2001:db8::1]"], 1, Some("2001:db8::1")),
            (&["::ffff:192.0.2.1"], 1, Some("192.0.2.1")),
            (&["192.0.2.1, unknown"], 1, None),
        ] {
            let headers: Vec<_> = lines
                .iter()
                .map(|line| ("X-Forwarded-For".to_owned(), (*line).to_owned()))
                .collect();
            let expected = expected.map(|address| address.parse().unwrap());
            let found = remote_address(&headers, connection, proxies);
            assert_eq!(found, expected, "{lines:?} behind {proxies}");
        }
    }
}
