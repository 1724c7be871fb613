//! Finds the client's address in `x-forwarded-for`, to which each trusted proxy before a Gateway has
//! appended the address of its own client. It does not decide which proxies are trusted.

use std::net::{IpAddr, SocketAddr};

/// The client of a request that has passed a number of trusted proxies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForwardedClient {
    Address(IpAddr),
    /// The header has fewer addresses than there are proxies, so the request has not passed all of
    /// them.
    Direct,
    /// A proxy wrote something that is no address.
    Invalid,
}

/// Passes each line of the header `x-forwarded-for` of a request to its argument, in order.
pub type ForwardedLines<'a> = dyn Fn(&mut dyn FnMut(&[u8])) + 'a;

/// Returns the client of a request that has passed `proxies` trusted proxies. As with Envoy's
/// `xff_num_trusted_hops`, its address is the one at that place from the right.
pub fn forwarded_client(lines: &ForwardedLines<'_>, proxies: usize) -> ForwardedClient {
    let mut count = 0usize;
    visit_elements(lines, &mut |_| count += 1);
    let Some(wanted) = count.checked_sub(proxies) else {
        return ForwardedClient::Direct;
    };
    // A client may send a long header, so only one element of it is parsed.
    let (mut place, mut client) = (0, ForwardedClient::Invalid);
    visit_elements(lines, &mut |element| {
        if place == wanted {
            client = parse(element).map_or(ForwardedClient::Invalid, ForwardedClient::Address);
        }
        place += 1;
    });
    client
}

/// Passes the elements of the header to `each` in order. Empty ones count for nothing (RFC 9110
/// §5.6.1).
fn visit_elements(lines: &ForwardedLines<'_>, each: &mut dyn FnMut(&[u8])) {
    lines(&mut |line| {
        let elements = line.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        elements.filter(|it| !it.is_empty()).for_each(&mut *each);
    });
}

/// Parses an address. Some load balancers append the port too.
fn parse(element: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(element).ok()?;
    let without_port = || text.parse::<SocketAddr>().map(|socket| socket.ip());
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    let address = bare.parse().or_else(|_| without_port()).ok()?;
    Some(IpAddr::to_canonical(&address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_is_at_its_place_from_the_right() {
        let address = |text: &str| ForwardedClient::Address(text.parse().unwrap());
        for (lines, proxies, want) in [
            (&["192.0.2.1"][..], 1, address("192.0.2.1")),
            // The client wrote the first address itself.
            (&["10.0.0.1, 192.0.2.1"], 1, address("192.0.2.1")),
            (&["10.0.0.1, 192.0.2.1"], 2, address("10.0.0.1")),
            (&["10.0.0.1", "192.0.2.1"], 2, address("10.0.0.1")),
            (&["10.0.0.1, , 192.0.2.1,"], 2, address("10.0.0.1")),
            (&["192.0.2.1"], 2, ForwardedClient::Direct),
            (&[], 1, ForwardedClient::Direct),
            (&["192.0.2.1:4711"], 1, address("192.0.2.1")),
            (&["[2001:db8::1]:4711"], 1, address("2001:db8::1")),
            (&["[2001:db8::1]"], 1, address("2001:db8::1")),
            (&["::ffff:192.0.2.1"], 1, address("192.0.2.1")),
            (&["192.0.2.1, unknown"], 1, ForwardedClient::Invalid),
        ] {
            let visit = |each: &mut dyn FnMut(&[u8])| {
                lines.iter().for_each(|line| each(line.as_bytes()));
            };
            let found = forwarded_client(&visit, proxies);
            assert_eq!(found, want, "{lines:?} behind {proxies}");
        }
    }
}
