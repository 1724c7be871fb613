//! Annotations of Gateways about what is before them: proxies that append to `x-forwarded-for`, and
//! load balancers that speak the PROXY protocol. A value that cannot be read closes all listeners.

use std::collections::BTreeSet;
use std::sync::Arc;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ingress::{ListenerFault, ListenerFaultReason};
use canal_model::limits::{LISTENERS_PER_GATEWAY_MAX, TRUSTED_PROXIES_MAX};
use canal_model::policy::Metadata;
use canal_model::policy::listeners::{PROXY_PROTOCOL_ANNOTATION, TRUSTED_PROXIES_ANNOTATION};

use crate::faults::fault;
use crate::{DocumentReport, shorten};

/// What the annotations of a Gateway say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct GatewayAnnotations {
    /// Number of proxies between clients and the Gateway that append to `x-forwarded-for`.
    pub(crate) trusted_proxies: u8,
    pub(crate) proxied: ProxiedPorts,
}

/// Ports at which connections begin with a header of the PROXY protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ProxiedPorts {
    All,
    Listed(BTreeSet<u16>),
}

impl Default for ProxiedPorts {
    fn default() -> Self {
        Self::Listed(BTreeSet::new())
    }
}

impl ProxiedPorts {
    pub(crate) fn has(&self, port: u16) -> bool {
        match self {
            Self::All => true,
            Self::Listed(ports) => ports.contains(&port),
        }
    }

    /// Parses `*`, or ports that are separated by commas.
    fn parse(written: &str) -> Option<Self> {
        if written.trim() == "*" {
            return Some(Self::All);
        }
        // A Gateway has no more ports than listeners.
        let ports = written.split(',').take(LISTENERS_PER_GATEWAY_MAX + 1);
        let ports = ports.map(|port| port.trim().parse().ok().filter(|port| *port != 0));
        let ports = ports.collect::<Option<BTreeSet<u16>>>()?;
        (ports.len() <= LISTENERS_PER_GATEWAY_MAX).then_some(Self::Listed(ports))
    }
}

impl GatewayAnnotations {
    /// Reads the annotations of a Gateway. One that cannot be read becomes its fault.
    pub(crate) fn read(
        metadata: &Metadata,
        object_fault: &mut Option<Arc<ListenerFault>>,
        report: &mut DocumentReport<'_>,
    ) -> Self {
        let mut refuse = |annotation: &str, problem: String, fix: &str| {
            let field = format!("metadata.annotations[{annotation:?}]");
            report.error(Code::InvalidAnnotation, field, problem.clone(), fix);
            object_fault.get_or_insert(fault(ListenerFaultReason::Invalid, problem));
        };
        let mut read = Self::default();
        if let Some(written) = metadata.annotations.get(TRUSTED_PROXIES_ANNOTATION) {
            match written.parse() {
                Ok(number) if number <= TRUSTED_PROXIES_MAX => read.trusted_proxies = number,
                _ => {
                    let problem = format!("{:?} is no number of proxies", shorten(written));
                    let fix = format!("write a number from \"0\" to \"{TRUSTED_PROXIES_MAX}\"");
                    refuse(TRUSTED_PROXIES_ANNOTATION, problem, &fix);
                }
            }
        }
        if let Some(written) = metadata.annotations.get(PROXY_PROTOCOL_ANNOTATION) {
            match ProxiedPorts::parse(written) {
                Some(ports) => read.proxied = ports,
                None => {
                    let problem = format!("{:?} is no list of ports", shorten(written));
                    let fix = "write \"*\", or ports such as \"80,443\"";
                    refuse(PROXY_PROTOCOL_ANNOTATION, problem, fix);
                }
            }
        }
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxied_ports_are_all_or_listed() {
        let listed = |ports: &[u16]| Some(ProxiedPorts::Listed(ports.iter().copied().collect()));
        let many: Vec<String> = (1..=LISTENERS_PER_GATEWAY_MAX + 1)
            .map(|port| port.to_string())
            .collect();
        for (written, expected) in [
            ("*", Some(ProxiedPorts::All)),
            ("443", listed(&[443])),
            (" 80, 443 ,80", listed(&[80, 443])),
            ("", None),
            ("true", None),
            ("80,", None),
            ("0", None),
            ("65536", None),
            ("*,80", None),
            (&many.join(","), None),
        ] {
            assert_eq!(ProxiedPorts::parse(written), expected, "{written:?}");
        }
    }
}
