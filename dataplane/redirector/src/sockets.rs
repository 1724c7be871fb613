//! Which sessions this network namespace has, by service and bucket: read from the kernel's tables of TCP sockets as text, one line
//! at a time. Sockets that are not of a service address inside the tier do not count.

use std::collections::BTreeMap;
use std::io::{self, BufRead};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use canal_model::ids::ServiceId;
use canal_wire::tier;

/// `TCP_CLOSE` and `TCP_LISTEN` (include/net/tcp_states.h): no sessions. All others are, also half-open ones and those in TIME_WAIT,
/// which still answer packets.
const NO_SESSION: [u8; 2] = [0x07, 0x0a];
/// The longest line the kernel writes is below 200 bytes.
const LINE_MAX: usize = 512;
/// Lines between two looks at the clock.
const STRIDE: usize = 1024;

/// What a replica owns of one service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OfService {
    /// One bit per bucket, bucket 0 the least significant.
    pub buckets: u128,
    pub sessions: u32,
}

/// All sessions of services.
pub type Owned = BTreeMap<ServiceId, OfService>;

/// Why a look is worth nothing.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    #[error("{0}; is /proc mounted?")]
    Io(#[from] io::Error),
    /// Better no answer than one that forgets sessions.
    #[error("the kernel's socket table was not read to its end in time")]
    Late,
    #[error("the kernel's socket table has a line that is none of its format: {0:?}")]
    Line(String),
}

/// Adds the sessions of one table (`/proc/net/tcp` or `/proc/net/tcp6`) to `owned`. `late` is asked now and then whether to give up.
pub fn read(mut table: impl BufRead, owned: &mut Owned, mut late: impl FnMut() -> bool) -> Result<(), LookError> {
    let mut line = Vec::with_capacity(LINE_MAX);
    let mut lines = 0;
    loop {
        line.clear();
        if io::Read::take(&mut table, LINE_MAX as u64).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        lines += 1;
        // The first is the heading.
        if lines == 1 {
            continue;
        }
        if lines % STRIDE == 0 && late() {
            return Err(LookError::Late);
        }
        let read = decide_line(&line).ok_or_else(|| LookError::Line(String::from_utf8_lossy(&line).into_owned()))?;
        if let Some((service, port, client)) = read {
            let of = owned.entry(service).or_default();
            of.buckets |= 1 << tier::bucket(client, port, service);
            of.sessions = of.sessions.saturating_add(1);
        }
    }
}

/// A line's session: service, service port, client. `Some(None)` is another socket, `None` not a line of this table.
fn decide_line(line: &[u8]) -> Option<Option<(ServiceId, u16, SocketAddr)>> {
    let mut fields = line.split(|b| b.is_ascii_whitespace()).filter(|f| !f.is_empty()).skip(1);
    let (local, remote, state) = (fields.next()?, fields.next()?, fields.next()?);
    let state = u8::from_str_radix(std::str::from_utf8(state).ok()?, 16).ok()?;
    let local = address(local)?;
    if NO_SESSION.contains(&state) {
        return Some(None);
    }
    let Some(service) = tier::service_of(local.ip()) else { return Some(None) };
    let client = address(remote)?;
    Some(Some((service, local.port(), SocketAddr::new(client.ip().to_canonical(), client.port()))))
}

/// `0100007F:1F90`: words of network order printed as numbers of this machine, then the port.
fn address(text: &[u8]) -> Option<SocketAddr> {
    let (ip, port) = std::str::from_utf8(text).ok()?.split_once(':')?;
    if !text.iter().all(|b| b.is_ascii_hexdigit() || *b == b':') || port.len() != 4 {
        return None;
    }
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| Some(u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok()?.to_ne_bytes());
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (at, four) in bytes.chunks_exact_mut(4).enumerate() {
                four.copy_from_slice(&word(at)?);
            }
            IpAddr::V6(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: &str = include_str!("../tests/golden/tcp");
    const TCP6: &str = include_str!("../tests/golden/tcp6");

    fn id(n: u32) -> ServiceId {
        ServiceId::new(n).unwrap()
    }

    fn buckets(port: u16, service: u32, clients: &[&str]) -> u128 {
        clients.iter().fold(0, |all, c| all | 1 << tier::bucket(c.parse().unwrap(), port, id(service)))
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn sessions_of_services_are_found_in_both_tables() {
        let mut owned = Owned::new();
        read(TCP.as_bytes(), &mut owned, || false).unwrap();
        // Established, half-open, and TIME_WAIT; not the listener, not the gateway's own connections, not the closed one.
        let seven = buckets(80, 7, &["10.1.1.9:40000", "10.1.1.9:40001", "10.1.1.10:40002"]);
        assert_eq!(owned, Owned::from([(id(7), OfService { buckets: seven, sessions: 3 })]));
        read(TCP6.as_bytes(), &mut owned, || false).unwrap();
        let seven = OfService { buckets: seven | buckets(80, 7, &["10.1.1.9:40003"]), sessions: 4 };
        let eight = OfService { buckets: buckets(15008, 0x01_0203, &["[fd77::9]:40004"]), sessions: 1 };
        assert_eq!(owned, Owned::from([(id(7), seven), (id(0x01_0203), eight)]));
    }

    #[test]
    fn a_table_that_is_not_read_whole_is_an_error() {
        let heading = "  sl  local_address rem_address   st\n";
        for bad in [
            "x",
            "0: 0100007F:1F90 0100007F:1F90",
            "0: 0100007F:1F9 0100007F:1F90 01",
            "0: 00007F:1F90 0100007F:1F90 01",
            "0: é:1F90 0: 01",
        ] {
            let table = format!("{heading}{bad}\n");
            assert!(matches!(read(table.as_bytes(), &mut Owned::new(), || false), Err(LookError::Line(_))), "{bad}");
        }
        let line = "   0: 070000F0:0050 0901010A:9C40 01 00000000:00000000 00:00000000 00000000     0        0 1 1 0 20 4 30 10 -1\n";
        let long = format!("{heading}{}", line.repeat(3000));
        assert!(matches!(read(long.as_bytes(), &mut Owned::new(), || true), Err(LookError::Late)));
        let endless = "7".repeat(100_000);
        assert!(read(format!("{heading}{endless}").as_bytes(), &mut Owned::new(), || false).is_err());
    }

    #[test]
    fn random_bytes_never_panic() {
        for _ in 0..2000 {
            let bytes: Vec<u8> = (0..rand::random_range(0..300))
                .map(|_| *b"0123456789ABCDEF:: \n\xc3\xa9".get(rand::random_range(0..22)).unwrap())
                .collect();
            let _ = read(bytes.as_slice(), &mut Owned::new(), || false);
        }
    }
}
