//! Finds the client's address in `x-forwarded-for`, to which each trusted proxy before a Gateway has
//! appended the address of its own client. It does not decide which proxies are trusted.

use std::net::{IpAddr, SocketAddr};

use canal_h1::FieldName;

use super::gateway_attributes::RequestAttributes;

/// The client of a request that has passed a number of trusted proxies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ForwardedClient {
    Address(IpAddr),
    /// The header has fewer addresses than there are proxies, so the request has not passed all of
    /// them.
    Direct,
    /// A proxy wrote something that is no address.
    Invalid,
}

/// Returns the client of a request that has passed `proxies` trusted proxies. As with Envoy's
/// `xff_num_trusted_hops`, its address is the one at that place from the right.
pub(super) fn forwarded_client(request: &dyn RequestAttributes, proxies: usize) -> ForwardedClient {
    let mut count = 0usize;
    visit_elements(request, &mut |_| count += 1);
    let Some(wanted) = count.checked_sub(proxies) else {
        return ForwardedClient::Direct;
    };
    // A client may send a long header, so only one element of it is parsed.
    let (mut place, mut client) = (0, ForwardedClient::Invalid);
    visit_elements(request, &mut |element| {
        if place == wanted {
            client = parse(element).map_or(ForwardedClient::Invalid, ForwardedClient::Address);
        }
        place += 1;
    });
    client
}

/// Passes the elements of the header to `each` in order. Empty ones count for nothing (RFC 9110
/// §5.6.1).
fn visit_elements(request: &dyn RequestAttributes, each: &mut dyn FnMut(&[u8])) {
    request.header(FieldName::XForwardedFor.text(), &mut |line| {
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

    struct HeaderLines(&'static [&'static str]);

    impl RequestAttributes for HeaderLines {
        fn method(&self) -> &[u8] {
            b"GET"
        }
        fn path(&self) -> &[u8] {
            b"/"
        }
        fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
            assert_eq!(name, "x-forwarded-for");
            self.0.iter().for_each(|line| visit(line.as_bytes()));
        }
    }

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
            let found = forwarded_client(&HeaderLines(lines), proxies);
            assert_eq!(found, want, "{lines:?} behind {proxies}");
        }
    }
}
