//! Access control on TCP: a web page in a browser on the host must not use the admin pages. The
//! decision uses the head of the request only.

use crate::local::is_local_name;
use http::header::{HOST, ORIGIN};
use http::{HeaderMap, Uri};

/// Reasons to refuse a request by its head. Each is a value of the metric label `reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadRefusal {
    /// The script of a web page sent the request.
    Origin,
    /// The host name resolves to loopback and is not `localhost`: DNS rebinding.
    Host,
}

impl HeadRefusal {
    /// Returns the label value of `reason`.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Origin => "origin",
            Self::Host => "host",
        }
    }
}

/// Decides whether a request over TCP is served. `is_loopback` is true if it came to a loopback
/// address, where only names of this host are valid.
///
/// # Errors
/// A web page's script may have sent the request.
pub fn decide_head(uri: &Uri, headers: &HeaderMap, is_loopback: bool) -> Result<(), HeadRefusal> {
    if headers.contains_key(ORIGIN) {
        return Err(HeadRefusal::Origin);
    }
    if !is_loopback {
        return Ok(());
    }
    let named = headers
        .get_all(HOST)
        .iter()
        .map(|h| h.to_str().unwrap_or_default());
    let all_local = uri
        .authority()
        .map(http::uri::Authority::as_str)
        .into_iter()
        .chain(named)
        .all(is_local_name);
    if all_local {
        Ok(())
    } else {
        Err(HeadRefusal::Host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_no_name_server_decides_are_answered_on_loopback() {
        let decide = |host: Option<&str>, origin: bool, is_loopback| {
            let mut headers = HeaderMap::new();
            if let Some(host) = host {
                headers.insert(HOST, host.parse().unwrap());
            }
            if origin {
                headers.insert(ORIGIN, "http://evil.example".parse().unwrap());
            }
            decide_head(&Uri::from_static("/metrics"), &headers, is_loopback)
        };
        for host in [
            "localhost",
            "LOCALHOST:15000",
            "127.0.0.1:15000",
            "[::1]:15000",
            "10.0.0.7",
        ] {
            assert_eq!(decide(Some(host), false, true), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:15000",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            // An empty host, and an IPv6 address without its closing bracket.
            "",
            "[::1",
        ] {
            assert_eq!(
                decide(Some(host), false, true),
                Err(HeadRefusal::Host),
                "{host}"
            );
        }
        // Only a web page is refused here, and a browser always sends a Host.
        assert_eq!(decide(None, false, true), Ok(()));
        // A listener on another address has names that this process does not know.
        assert_eq!(decide(Some("gw-1.example:15020"), false, false), Ok(()));
        assert_eq!(
            decide(Some("localhost"), true, true),
            Err(HeadRefusal::Origin)
        );
        assert_eq!(
            decide(Some("gw-1.example"), true, false),
            Err(HeadRefusal::Origin)
        );
    }
}
