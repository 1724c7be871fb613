//! The header of the PROXY protocol, versions 1 and 2, by which a load balancer passes the address of
//! its client on. No IO is done here. Start at [`parse`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Maximum length of a header, in bytes. The addresses take 52; load balancers add up to some hundred
/// bytes about themselves and the client's certificate.
pub const PROXY_HEADER_BYTES_MAX: usize = 4 << 10;
/// Maximum length of a header of version 1, with its end of line (the specification's section 2.1).
const TEXT_BYTES_MAX: usize = 107;

/// First bytes of a header of version 1.
const TEXT: &[u8] = b"PROXY ";
/// First bytes of a header of version 2.
const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";
/// Length of what precedes the addresses in version 2.
const FIXED_BYTES: usize = SIGNATURE.len() + 4;

/// What a header says of the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxiedClient {
    Address(SocketAddr),
    /// The connection is the load balancer's own, such as a check of health, or its client is not
    /// known.
    Unknown,
}

/// The reason why bytes are not the beginning of a connection with a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyHeaderError {
    /// They are no header, or one for something else than TCP.
    Malformed,
    TooLong,
}

/// Parses the header at the beginning of a connection's bytes. Returns the client and the length of
/// the header; `None` if it is not complete yet.
///
/// # Errors
/// The bytes cannot become a header that is accepted.
pub fn parse(bytes: &[u8]) -> Result<Option<(ProxiedClient, usize)>, ProxyHeaderError> {
    let begins = |with: &[u8]| bytes.iter().zip(with).all(|(a, b)| a == b);
    if begins(TEXT) {
        parse_text(bytes)
    } else if begins(SIGNATURE) {
        parse_binary(bytes)
    } else {
        Err(ProxyHeaderError::Malformed)
    }
}

fn parse_text(bytes: &[u8]) -> Result<Option<(ProxiedClient, usize)>, ProxyHeaderError> {
    let within = &bytes[..bytes.len().min(TEXT_BYTES_MAX)];
    let Some(end) = within.windows(2).position(|pair| pair == b"\r\n") else {
        return match bytes.len() < TEXT_BYTES_MAX {
            true => Ok(None),
            false => Err(ProxyHeaderError::TooLong),
        };
    };
    let line = std::str::from_utf8(&within[..end]).map_err(|_| ProxyHeaderError::Malformed)?;
    let client = text_client(line).ok_or(ProxyHeaderError::Malformed)?;
    Ok(Some((client, end + 2)))
}

/// Returns the client in a line such as `PROXY TCP4 203.0.113.7 198.51.100.1 40000 443`.
fn text_client(line: &str) -> Option<ProxiedClient> {
    let words: Vec<&str> = line.split(' ').collect();
    match *words.as_slice() {
        // Whatever follows is to be ignored.
        ["PROXY", "UNKNOWN", ..] => Some(ProxiedClient::Unknown),
        [
            "PROXY",
            family @ ("TCP4" | "TCP6"),
            source,
            destination,
            from,
            to,
        ] => {
            let is_of_family = |address: &IpAddr| address.is_ipv4() == (family == "TCP4");
            let address = |text: &str| text.parse::<IpAddr>().ok().filter(is_of_family);
            let port = |text: &str| {
                let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
                text.parse::<u16>().ok().filter(|_| is_number)
            };
            let (source, from) = (address(source)?, port(from)?);
            address(destination).zip(port(to))?;
            Some(ProxiedClient::Address(canonical(source, from)))
        }
        _ => None,
    }
}

fn parse_binary(bytes: &[u8]) -> Result<Option<(ProxiedClient, usize)>, ProxyHeaderError> {
    let Some((fixed, rest)) = bytes.split_at_checked(FIXED_BYTES) else {
        return Ok(None);
    };
    let (command, family) = (fixed[SIGNATURE.len()], fixed[SIGNATURE.len() + 1]);
    let length = u16::from_be_bytes([fixed[FIXED_BYTES - 2], fixed[FIXED_BYTES - 1]]).into();
    if !matches!(command, 0x20 | 0x21) {
        return Err(ProxyHeaderError::Malformed);
    }
    if FIXED_BYTES + length > PROXY_HEADER_BYTES_MAX {
        return Err(ProxyHeaderError::TooLong);
    }
    let Some(rest) = rest.get(..length) else {
        return Ok(None);
    };
    let client = match (command, family) {
        (0x20, _) => Some(ProxiedClient::Unknown),
        // TCP over IPv4 and IPv6: both addresses, then both ports.
        (_, 0x11) => rest.first_chunk::<12>().map(|it| {
            let source = Ipv4Addr::new(it[0], it[1], it[2], it[3]);
            let port = u16::from_be_bytes([it[8], it[9]]);
            ProxiedClient::Address(canonical(source.into(), port))
        }),
        (_, 0x21) => rest.first_chunk::<36>().and_then(|it| {
            let source = Ipv6Addr::from(*it.first_chunk::<16>()?);
            let port = u16::from_be_bytes([it[32], it[33]]);
            Some(ProxiedClient::Address(canonical(source.into(), port)))
        }),
        _ => None,
    };
    let client = client.ok_or(ProxyHeaderError::Malformed)?;
    Ok(Some((client, FIXED_BYTES + length)))
}

/// An IPv4 address in its IPv6 form is the same client, and policies name it by the former.
fn canonical(address: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(address.to_canonical(), port)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a header of version 2.
    fn binary(command: u8, family: u8, content: &[u8]) -> Vec<u8> {
        let mut bytes = [SIGNATURE, &[command, family]].concat();
        bytes.extend(u16::try_from(content.len()).unwrap().to_be_bytes());
        bytes.extend(content);
        bytes
    }

    fn address(text: &str) -> ProxiedClient {
        ProxiedClient::Address(text.parse().unwrap())
    }

    fn headers() -> Vec<(Vec<u8>, ProxiedClient)> {
        let v4 = [203, 0, 113, 7, 10, 0, 0, 1, 0x9c, 0x40, 1, 187];
        let mut v6 = "2001:db8::7".parse::<Ipv6Addr>().unwrap().octets().to_vec();
        v6.extend([0; 16]);
        v6.extend([0x9c, 0x40, 1, 187]);
        // A value that the load balancer adds: its type, its length and its bytes.
        let with_value = [&v4[..], &[0xee, 0, 2, 1, 2]].concat();
        let mapped = "::ffff:203.0.113.7".parse::<Ipv6Addr>().unwrap().octets();
        let mapped = [&mapped[..], &v6[16..]].concat();
        let text = |line: &str| format!("PROXY {line}\r\n").into_bytes();
        vec![
            (
                text("TCP4 203.0.113.7 10.0.0.1 40000 443"),
                address("203.0.113.7:40000"),
            ),
            (
                text("TCP6 2001:db8::7 2001:db8::1 40000 443"),
                address("[2001:db8::7]:40000"),
            ),
            (text("UNKNOWN"), ProxiedClient::Unknown),
            (text("UNKNOWN ffff::1 ffff::2 1 2"), ProxiedClient::Unknown),
            (binary(0x21, 0x11, &v4), address("203.0.113.7:40000")),
            (
                binary(0x21, 0x11, &with_value),
                address("203.0.113.7:40000"),
            ),
            (binary(0x21, 0x21, &v6), address("[2001:db8::7]:40000")),
            (binary(0x21, 0x21, &mapped), address("203.0.113.7:40000")),
            (binary(0x20, 0, &[]), ProxiedClient::Unknown),
            (binary(0x20, 0x11, &v4), ProxiedClient::Unknown),
        ]
    }

    #[test]
    fn a_header_is_read_whatever_its_parts_and_no_byte_behind_it() {
        for (header, client) in headers() {
            for end in 0..header.len() {
                assert_eq!(parse(&header[..end]), Ok(None), "{header:?} {end}");
            }
            let behind = [&header[..], b"PROXY GET / HTTP/1.1\r\n"].concat();
            for bytes in [&header, &behind] {
                assert_eq!(parse(bytes), Ok(Some((client, header.len()))));
            }
        }
    }

    #[test]
    fn what_is_no_header_for_tcp_is_refused() {
        let v4 = [203, 0, 113, 7, 10, 0, 0, 1, 0x9c, 0x40, 1, 187];
        let mut all = vec![
            b"GET / HTTP/1.1\r\n".to_vec(),
            b"\x16\x03\x01".to_vec(),
            b"PROXX".to_vec(),
            b"\r\n\r\n\0\r\nQUIX".to_vec(),
            // Commands, versions and families that do not exist or are not for TCP.
            binary(0x22, 0x11, &v4),
            binary(0x11, 0x11, &v4),
            binary(0x21, 0x00, &v4),
            binary(0x21, 0x12, &v4),
            binary(0x21, 0x31, &[0; 216]),
            // Too short for the addresses.
            binary(0x21, 0x11, &v4[..11]),
            binary(0x21, 0x21, &[0; 35]),
        ];
        for line in [
            "",
            "TCP4",
            "TCP4 203.0.113.7 10.0.0.1 40000",
            "TCP4 203.0.113.7 10.0.0.1 40000 443 1",
            "TCP4  203.0.113.7 10.0.0.1 40000 443",
            "TCP4 203.0.113.7 10.0.0.1 +4000 443",
            "TCP4 203.0.113.7 10.0.0.1 65536 443",
            "TCP4 2001:db8::7 10.0.0.1 40000 443",
            "TCP6 203.0.113.7 10.0.0.1 40000 443",
            "TCP4 203.0.113.7 shop 40000 443",
            "UDP4 203.0.113.7 10.0.0.1 40000 443",
            "unknown",
        ] {
            all.push(format!("PROXY {line}\r\n").into_bytes());
        }
        for bytes in all {
            assert_eq!(parse(&bytes), Err(ProxyHeaderError::Malformed), "{bytes:?}");
        }
    }

    #[test]
    fn a_header_beyond_the_limits_is_refused_before_it_is_complete() {
        let long = "PROXY UNKNOWN ".to_owned() + &"x".repeat(TEXT_BYTES_MAX);
        for (end, expected) in [
            (TEXT_BYTES_MAX - 1, Ok(None)),
            (TEXT_BYTES_MAX, Err(ProxyHeaderError::TooLong)),
        ] {
            assert_eq!(parse(&long.as_bytes()[..end]), expected);
        }
        let most = vec![0; PROXY_HEADER_BYTES_MAX - FIXED_BYTES];
        let whole = binary(0x20, 0, &most);
        let complete = Ok(Some((ProxiedClient::Unknown, PROXY_HEADER_BYTES_MAX)));
        assert_eq!(parse(&whole), complete);
        let more = binary(0x20, 0, &[&most[..], &[0]].concat());
        assert_eq!(parse(&more[..FIXED_BYTES]), Err(ProxyHeaderError::TooLong));
    }

    #[test]
    fn changed_headers_never_panic_and_never_end_behind_their_bytes() {
        let mut seed = 1_u64;
        let mut random = |end: usize| {
            // A linear congruential generator (Knuth's MMIX) is enough to vary bytes.
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as usize % end
        };
        for _ in 0..20_000 {
            let all = headers();
            let mut bytes = all[random(all.len())].0.clone();
            for _ in 0..1 + random(4) {
                let at = random(bytes.len());
                bytes[at] = u8::try_from(random(256)).unwrap();
            }
            bytes.truncate(random(bytes.len() + 1));
            if let Ok(Some((_, length))) = parse(&bytes) {
                assert!(length <= bytes.len());
            }
        }
    }
}
