//! Binds VirtualServices to the listeners of Istio's Gateways that they name: those with a host in
//! common, of a server that takes VirtualServices of their namespace. It resolves no rules.

use std::collections::BTreeMap;

use canal_model::diagnostic_code::DiagnosticCode;
use canal_model::ids::{Namespace, ObjectName};
use canal_model::ingress::ListenerProtocol;
use canal_model::program::HostMatch;

use crate::listeners::{COMPARISONS_PER_TENANT_MAX, GatewayListeners, TenantListeners};
use crate::routes::{ATTACHED_HOSTS_PER_ROUTE_MAX, Attachment};
use crate::{hostname, shorten};

/// The name that stands for all clients in the mesh among the gateways of a VirtualService.
pub const MESH: &str = "mesh";

/// Returns the Gateway that a VirtualService in the namespace `own` names: `name`,
/// `namespace/name`, or the host name of the gateway's service, as Istio reads it.
///
/// # Errors
/// Returns the problem, without a full stop, if the text names no object.
pub fn gateway_name(own: &Namespace, written: &str) -> Result<(Namespace, ObjectName), String> {
    let (namespace, name) = match written.split_once('/') {
        Some((".", name)) => (own.as_str(), name),
        Some(both) => both,
        None => match written.split('.').collect::<Vec<_>>().as_slice() {
            [name, namespace, ..] => (*namespace, *name),
            _ => (own.as_str(), written),
        },
    };
    match (Namespace::new(namespace), ObjectName::new(name)) {
        (Ok(namespace), Ok(name)) => Ok((namespace, name)),
        _ => Err(format!(
            "{:?} is not the name of a Gateway",
            shorten(written)
        )),
    }
}

/// The rules of a VirtualService that are put on listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BoundRules {
    /// Those for requests.
    Http,
    /// Those for connections with TLS that passes through.
    Tls,
    /// Those for other connections that are relayed.
    Tcp,
}

impl BoundRules {
    /// Returns whether a listener takes such rules. One that is not served could take any.
    fn are_for(self, protocol: &ListenerProtocol) -> bool {
        match protocol {
            ListenerProtocol::Http | ListenerProtocol::Https => self == Self::Http,
            ListenerProtocol::Tls => self == Self::Tls,
            ListenerProtocol::TerminatedTls | ListenerProtocol::Tcp => self == Self::Tcp,
            ListenerProtocol::Other(_) => true,
        }
    }
}

/// The reason why a VirtualService is on no listener of a Gateway.
#[derive(Debug, PartialEq, Eq)]
pub struct BindingProblem {
    /// Code of the diagnostic. If it is not that of a limit, the object waits for another one.
    pub code: DiagnosticCode,
    /// Sentence without a full stop.
    pub problem: String,
    pub fix: &'static str,
}

impl TenantListeners {
    /// Returns the listeners of a Gateway of Istio on which rules of a VirtualService in the namespace
    /// `from` apply, with those of its hosts that are served there. A listener that redirects to HTTPS
    /// serves none. `parent` is the index of the Gateway in the VirtualService.
    ///
    /// # Errors
    /// Returns the problem if there is no Gateway of Canal's, or it has no such listener.
    pub fn bind(
        &mut self,
        gateway: &(Namespace, ObjectName),
        from: &Namespace,
        (rules, hosts): (BoundRules, &[Option<HostMatch>]),
        parent: usize,
    ) -> Result<Vec<Attachment>, BindingProblem> {
        let refuse = |code, problem: String, fix| Err(BindingProblem { code, problem, fix });
        let (namespace, name) = gateway;
        let found = bindable(&self.istio_gateways, gateway)?;
        // Comparisons are charged before they are made, so that a tenant cannot exceed its limit.
        let cost = found.listeners.len().saturating_mul(hosts.len());
        let Some(left) = self.comparisons_left.checked_sub(cost) else {
            // The objects behind this one must not be bound either.
            self.comparisons_left = 0;
            let problem = format!(
                "with this object the tenant's routes need more than {COMPARISONS_PER_TENANT_MAX} comparisons with listeners; it and those behind it are on no listener"
            );
            return refuse(
                DiagnosticCode::LimitExceeded,
                problem,
                "use fewer hosts and servers",
            );
        };
        self.comparisons_left = left;
        let mut attachments = Vec::new();
        let (mut is_shared, mut hosts_left) = (false, ATTACHED_HOSTS_PER_ROUTE_MAX);
        for (at, placed) in found.listeners.iter().enumerate() {
            let own = placed.listener.host.as_ref();
            let shared = hosts
                .iter()
                .filter(|host| hostname::overlap(own, host.as_ref()));
            let shared: Vec<Option<HostMatch>> = shared.cloned().collect();
            // A listener for TCP takes connections for any host.
            let shared = match placed.listener.protocol {
                ListenerProtocol::Tcp if !shared.is_empty() => vec![None],
                _ => shared,
            };
            let is_allowed = placed.allowed.has(namespace, from, &self.namespaces);
            let are_meant = rules.are_for(&placed.listener.protocol);
            // Other listeners of the Gateway may still take the object.
            if shared.is_empty() || !is_allowed || !are_meant {
                continue;
            }
            is_shared = true;
            // Such a server serves no rule, but the host is not missing from the Gateway.
            if placed.redirects_to_https || placed.listener.closed.is_some() {
                continue;
            }
            // An object beyond the limit is on no listener of this Gateway, rather than on some of
            // them.
            let Some(left) = hosts_left.checked_sub(shared.len()) else {
                let problem = format!(
                    "the object has more than {ATTACHED_HOSTS_PER_ROUTE_MAX} hosts on its listeners together"
                );
                return refuse(DiagnosticCode::LimitExceeded, problem, "split the object");
            };
            hosts_left = left;
            attachments.push(Attachment {
                gateway: found.service.clone(),
                listener: at,
                hosts: shared,
                parent,
            });
        }
        if !is_shared {
            let problem = format!(
                "no server of Gateway {namespace}/{name} has a host of the object for namespace {from}"
            );
            let fix = "correct the hosts of the object or of the server";
            return refuse(DiagnosticCode::NoMatchingListenerHostname, problem, fix);
        }
        Ok(attachments)
    }
}

/// Returns a Gateway of Istio that Canal serves.
fn bindable<'a>(
    gateways: &'a BTreeMap<(Namespace, ObjectName), Option<GatewayListeners>>,
    gateway: &(Namespace, ObjectName),
) -> Result<&'a GatewayListeners, BindingProblem> {
    let (namespace, name) = gateway;
    let (code, problem, fix) = match gateways.get(gateway) {
        Some(Some(found)) => return Ok(found),
        Some(None) => (
            DiagnosticCode::ForeignGatewayClass,
            format!("Gateway {namespace}/{name} is not Canal's"),
            "see what is reported of its selector",
        ),
        None => (
            DiagnosticCode::UnresolvedParent,
            format!("there is no Gateway {namespace}/{name} of Istio's kind"),
            "create it or correct the name",
        ),
    };
    Err(BindingProblem { code, problem, fix })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gateways_are_named_as_in_istio() {
        let own = Namespace::new("shop").unwrap();
        for (written, expected) in [
            ("web", Some("shop/web")),
            ("infra/web", Some("infra/web")),
            ("./web", Some("shop/web")),
            ("web.infra.svc.cluster.local", Some("infra/web")),
            ("infra/", None),
            ("", None),
        ] {
            let found = gateway_name(&own, written).ok();
            let found = found.map(|(namespace, name)| format!("{namespace}/{name}"));
            assert_eq!(found.as_deref(), expected, "{written:?}");
        }
    }
}
