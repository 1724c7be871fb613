//! The listeners that Gateways of Istio make: one for each host of a server. What Canal does not
//! serve closes its own server. Which VirtualServices bind to them is in `bindings`. Start at
//! [`resolve`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::certificate::CaCertificates;
use canal_model::client_validation::{ClientValidation, ClientValidationMode};
use canal_model::diagnostic::Diagnostic;
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName, SecretKey, TenantName};
use canal_model::ingress::{
    GatewayCertificates, ISTIO_INGRESS_LABELS, Listener, ListenerFault, ListenerFaultReason,
    ListenerProtocol, istio_gateway_service,
};
use canal_model::limits::{CERTIFICATES_PER_LISTENER_MAX, LISTENERS_PER_GATEWAY_MAX};
use canal_model::policy::RejectedField;
use canal_model::policy::istio_gateway::{GatewayServer, IstioGateway, ServerTls};
use canal_model::policy::listeners::SecretReference;
use canal_model::program::HostMatch;

use crate::allowed::AllowedNamespaces;
use crate::annotations::GatewayAnnotations;
use crate::certificates::{CertificateIndex, ReferenceProblem, SecretTypes};
use crate::faults::{fault, fault_of};
use crate::listeners::{
    GatewayListeners, HBONE_PORT, LISTENERS_PER_TENANT_MAX, ListenerObjects, PlacedListener,
    TenantListeners, TenantQuota,
};
use crate::{DocumentReport, Written, hostname, listeners, shorten};

/// Resolves the listeners of a tenant, and reports what is wrong with the objects.
pub fn resolve(
    tenant: &TenantName,
    objects: &ListenerObjects<'_>,
    sink: &mut dyn FnMut(Diagnostic),
) -> TenantListeners {
    let (mut resolved, mut left) = listeners::resolve(tenant, objects, sink);
    for gateway in &objects.istio_gateways {
        let mut report = DocumentReport {
            document: gateway.document,
            sink: &mut *sink,
        };
        let listeners = accept(tenant, gateway, &mut left, &mut report);
        let metadata = &gateway.object.metadata;
        let key = (metadata.namespace.clone(), metadata.name.clone());
        resolved.istio_gateways.insert(key, listeners);
    }
    resolved
}

/// Reads the servers of a Gateway of Istio. Returns `None` if its selector does not select Canal's
/// ingress.
fn accept(
    tenant: &TenantName,
    gateway: &Written<'_, IstioGateway>,
    left: &mut TenantQuota<'_>,
    report: &mut DocumentReport<'_>,
) -> Option<GatewayListeners> {
    let (metadata, spec) = (&gateway.object.metadata, &gateway.object.spec);
    let is_label = |(name, value): (&String, &String)| {
        ISTIO_INGRESS_LABELS.contains(&(name.as_str(), value.as_str()))
    };
    // An empty selector selects every ingress, as in Istio.
    if !spec.selector.iter().all(is_label) {
        let problem = "the selector selects no ingress of Canal's, so Canal ignores the Gateway";
        let fix = "write istio: ingressgateway to have Canal serve it";
        report.warning(Code::ForeignGatewayClass, "spec.selector", problem, fix);
        return None;
    }
    let Some(service) = istio_gateway_service(tenant, &metadata.namespace, &metadata.name) else {
        // A name has 253 characters at most, and the service's name adds a suffix of 14.
        let fix = "use at most 239 characters";
        let problem = "the name is too long for a Gateway";
        report.error(Code::LimitExceeded, "metadata.name", problem, fix);
        return None;
    };
    let faults = &gateway.document.faults;
    let mut object_fault = fault_of_whole(faults).map(fault_of);
    let annotations = GatewayAnnotations::read(metadata, &mut object_fault, report);
    // A Gateway that is closed as a whole has a diagnostic already.
    if spec.servers.is_empty() && object_fault.is_none() {
        let fix = "write at least one server";
        let problem = "the Gateway has no server";
        report.warning(Code::GatewayWithoutListener, "spec.servers", problem, fix);
    }
    let mut reading = ServerReader {
        namespace: &metadata.namespace,
        faults,
        object_fault: object_fault.as_ref(),
        names: BTreeSet::new(),
        listeners: Vec::new(),
        certificates: GatewayCertificates::new(),
        validations: Vec::new(),
        left,
        report,
    };
    for (at, server) in spec.servers.iter().enumerate() {
        reading.read(at, server);
    }
    let ServerReader {
        listeners,
        certificates,
        validations,
        ..
    } = reading;
    Some(GatewayListeners {
        service,
        class: None,
        trusted_proxies: annotations.trusted_proxies,
        proxied: annotations.proxied,
        // Servers have validations of their own; Gateways of Istio request no address and take no
        // sets.
        validation: Arc::default(),
        server_validations: validations,
        addresses: Vec::new(),
        listeners,
        certificates,
        closed: object_fault,
        allowed_sets: AllowedNamespaces::None,
    })
}

/// Returns the first fault that concerns more than one server.
fn fault_of_whole(faults: &[RejectedField]) -> Option<&RejectedField> {
    faults.iter().find(|fault| {
        let is_own = fault
            .field
            .strip_prefix("spec.servers[")
            .and_then(|rest| rest.split_once(']'))
            .is_some_and(|(_, rest)| !rest.is_empty());
        (fault.field.is_empty() || fault.field.starts_with("spec")) && !is_own
    })
}

/// Reads the servers of one Gateway, the first one first: in a conflict, it keeps what it has.
struct ServerReader<'r, 'a, 's> {
    namespace: &'r Namespace,
    faults: &'r [RejectedField],
    /// Closes all servers.
    object_fault: Option<&'r Arc<ListenerFault>>,
    /// Names of the servers so far.
    names: BTreeSet<String>,
    listeners: Vec<PlacedListener>,
    certificates: GatewayCertificates,
    validations: Vec<ClientValidation>,
    left: &'r mut TenantQuota<'a>,
    report: &'r mut DocumentReport<'s>,
}

/// The properties that all listeners of one server have in common.
struct ServerProperties {
    name: String,
    port: u16,
    protocol: ListenerProtocol,
    certificates: Vec<SecretKey>,
    /// How clients' certificates are validated, if they are asked for one.
    validation: Option<ServerValidation>,
    redirects_to_https: bool,
    closed: Option<Arc<ListenerFault>>,
}

type ServerValidation = (ClientValidationMode, Arc<CaCertificates>);

impl ServerReader<'_, '_, '_> {
    fn read(&mut self, at: usize, server: &GatewayServer) {
        let field = format!("spec.servers[{at}]");
        let prefix = format!("{field}.");
        let own = self
            .faults
            .iter()
            .find(|fault| fault.field.starts_with(&prefix));
        let mut closed = self.object_fault.cloned();
        // A server is closed for one reason: the object's, or else the first of its own.
        if let Some(rejected) = own {
            closed.get_or_insert_with(|| fault_of(rejected));
        }
        // Without a port there is nothing to close.
        let Some(port) = server.port.number.map(std::num::NonZeroU16::get) else {
            // A port that was rejected has a diagnostic already.
            if own.is_none() {
                let fix = "write the number of the port";
                self.report.error(
                    Code::MissingField,
                    format!("{field}.port.number"),
                    "there is no port",
                    fix,
                );
            }
            return;
        };
        // Diagnostics name listeners, so a port without a name gets one.
        let name = match server.port.name.as_str() {
            "" => format!("{}-{port}", shorten(&server.port.protocol).to_lowercase()),
            name => shorten(name),
        };
        // Listeners are named after the port's name, so a second one would be ambiguous.
        if !self.names.insert(name.clone()) {
            let problem = format!(
                "an earlier server has the port name {name:?} too, so this one is left out"
            );
            let fix = "give the ports of the servers different names";
            self.report.error(
                Code::ListenerConflict,
                format!("{field}.port.name"),
                problem,
                fix,
            );
            return;
        }
        if port == HBONE_PORT {
            let problem = format!("port {HBONE_PORT} is that of Canal's own connections");
            let field = format!("{field}.port.number");
            self.close(&mut closed, field, problem, "use another port");
        }
        let protocol = self.protocol(&field, server, &mut closed);
        let redirects_to_https = self.redirects(&field, &protocol, server, &mut closed);
        let (certificates, validation) = match &server.tls {
            // No key is sent for a closed server.
            Some(tls) if protocol.terminates_tls() && closed.is_none() => {
                let field = format!("{field}.tls");
                let certificates = self.certificates(&field, tls, &mut closed);
                (certificates, self.validation(&field, tls, &mut closed))
            }
            _ => (Vec::new(), None),
        };
        // The validation may have closed the server after its certificates were found.
        let certificates = match closed {
            Some(_) => Vec::new(),
            None => certificates,
        };
        let properties = ServerProperties {
            name,
            port,
            protocol,
            certificates,
            validation,
            redirects_to_https,
            closed,
        };
        self.add_hosts(&field, &server.hosts, &properties);
    }

    /// Reports a problem that closes the server.
    fn close(
        &mut self,
        closed: &mut Option<Arc<ListenerFault>>,
        field: String,
        problem: impl Into<String>,
        fix: &str,
    ) {
        let problem: String = problem.into();
        self.report
            .error(Code::InvalidListener, field, problem.clone(), fix);
        closed.get_or_insert_with(|| fault(ListenerFaultReason::Invalid, problem));
    }

    fn protocol(
        &mut self,
        field: &str,
        server: &GatewayServer,
        closed: &mut Option<Arc<ListenerFault>>,
    ) -> ListenerProtocol {
        let written = server.port.protocol.as_str();
        let mode = server.tls.as_ref().map(mode_of);
        // Istio compares the names of protocols in any case.
        match (written.to_ascii_uppercase().as_str(), mode) {
            ("HTTP" | "HTTP2" | "GRPC" | "GRPC-WEB", _) => return ListenerProtocol::Http,
            // TLS that passes through is not known to have HTTP inside.
            ("HTTPS" | "TLS", Some("PASSTHROUGH")) => return ListenerProtocol::Tls,
            ("HTTPS", _) => return ListenerProtocol::Https,
            ("TLS", _) => return ListenerProtocol::TerminatedTls,
            ("TCP" | "MONGO" | "MYSQL" | "REDIS", _) => return ListenerProtocol::Tcp,
            _ => {}
        }
        let short = shorten(written);
        let problem = format!("servers of protocol {short:?} are not served in this version");
        let fix = "use protocol: HTTP, HTTPS, TLS or TCP, or remove the server";
        self.report.error(
            Code::UnsupportedProtocol,
            format!("{field}.port.protocol"),
            problem.clone(),
            fix,
        );
        closed.get_or_insert_with(|| fault(ListenerFaultReason::UnsupportedProtocol, problem));
        ListenerProtocol::Other(short)
    }

    /// Returns whether the server sends its clients to HTTPS, and closes it if its protocol and its
    /// TLS settings do not belong together.
    fn redirects(
        &mut self,
        field: &str,
        protocol: &ListenerProtocol,
        server: &GatewayServer,
        closed: &mut Option<Arc<ListenerFault>>,
    ) -> bool {
        let settings = server.tls.as_ref();
        match (protocol, settings) {
            // Serving it without the settings would send plaintext where the author wanted TLS.
            (ListenerProtocol::Tcp, Some(_)) => {
                let problem = "a server for TCP has no TLS settings";
                let fix = "use protocol: TLS, or remove the settings";
                self.close(closed, format!("{field}.tls"), problem, fix);
                false
            }
            (ListenerProtocol::Https | ListenerProtocol::TerminatedTls, None) => {
                let problem = "a server for HTTPS or TLS needs TLS settings";
                let fix = "write mode: SIMPLE and credentialName";
                self.close(closed, format!("{field}.tls"), problem, fix);
                false
            }
            (ListenerProtocol::Http, Some(tls)) => {
                let is_bare = tls.mode.is_none()
                    && tls.credential_name.is_none()
                    && tls.credential_names.is_empty();
                if !is_bare {
                    let problem = "a server for HTTP has no TLS settings but httpsRedirect";
                    let fix = "use protocol: HTTPS, or remove the settings";
                    self.close(closed, format!("{field}.tls"), problem, fix);
                }
                tls.https_redirect
            }
            // The server works without it, so a warning is enough.
            (protocol, Some(tls)) if *protocol != ListenerProtocol::Http && tls.https_redirect => {
                let problem = "only a server for HTTP redirects to HTTPS";
                let field = format!("{field}.tls.httpsRedirect");
                self.report
                    .warning(Code::IneffectiveField, field, problem, "remove the field");
                false
            }
            // The other combinations are valid, and redirect nobody.
            _ => false,
        }
    }

    /// Returns the Secrets with the certificates of a server that terminates TLS. Without any, the
    /// server is closed.
    fn certificates(
        &mut self,
        field: &str,
        tls: &ServerTls,
        closed: &mut Option<Arc<ListenerFault>>,
    ) -> Vec<SecretKey> {
        let mode = mode_of(tls);
        if !matches!(mode, "SIMPLE" | "MUTUAL" | "OPTIONAL_MUTUAL") {
            let problem = format!(
                "TLS of mode {:?} is not served in this version",
                shorten(mode)
            );
            let fix = "write mode: SIMPLE or MUTUAL, or remove the server";
            self.close(closed, format!("{field}.mode"), problem, fix);
            return Vec::new();
        }
        let (name, names) = (tls.credential_name.as_ref(), &tls.credential_names);
        // Either could be what the author wants to serve.
        if name.is_some() && !names.is_empty() {
            let problem = "only one of credentialName and credentialNames may be set";
            let field = format!("{field}.credentialNames");
            self.close(closed, field, problem, "remove one of them");
            return Vec::new();
        }
        let field = match name {
            Some(_) => format!("{field}.credentialName"),
            None => format!("{field}.credentialNames"),
        };
        if names.len() > CERTIFICATES_PER_LISTENER_MAX {
            let count = names.len();
            let problem = format!(
                "the server has {count} certificates, more than {CERTIFICATES_PER_LISTENER_MAX}"
            );
            self.close(closed, field, problem, "use several servers");
            return Vec::new();
        }
        let mut found: Vec<SecretKey> = Vec::new();
        let mut first_fault = None;
        for name in name.into_iter().chain(names) {
            match self.certificate(&field, name) {
                // A Secret that is named twice is sent once.
                Ok(key) if found.contains(&key) => {}
                Ok(key) => found.push(key),
                Err(fault) => drop(first_fault.get_or_insert(fault)),
            }
        }
        match first_fault {
            // One usable certificate keeps the server open.
            _ if !found.is_empty() => {}
            Some(fault) => drop(closed.get_or_insert(fault)),
            None => {
                let problem = "a server that terminates TLS needs a certificate";
                let fix = "write the name of a Secret as credentialName";
                self.close(closed, field, problem, fix);
            }
        }
        found
    }

    /// Returns how a server that terminates TLS validates clients, if it does. What cannot be
    /// resolved closes the server.
    fn validation(
        &mut self,
        field: &str,
        tls: &ServerTls,
        closed: &mut Option<Arc<ListenerFault>>,
    ) -> Option<ServerValidation> {
        let named = tls.ca_cert_credential_name.as_deref();
        let mode = match mode_of(tls) {
            "MUTUAL" => ClientValidationMode::AllowValidOnly,
            "OPTIONAL_MUTUAL" => ClientValidationMode::AllowValidOrNone,
            _ if named.is_some() => {
                let problem = "only a server of mode MUTUAL or OPTIONAL_MUTUAL validates clients";
                let fix = "write mode: MUTUAL, or remove the field";
                self.close(
                    closed,
                    format!("{field}.caCertCredentialName"),
                    problem,
                    fix,
                );
                return None;
            }
            // Mode SIMPLE validates no clients, and `certificates` has closed a server of any other
            // mode.
            _ => return None,
        };
        // A server without a certificate is closed already.
        // Of several credentials, the first names the authorities.
        let credentials = tls.credential_name.iter().chain(&tls.credential_names);
        let credential = credentials
            .into_iter()
            .next()
            .filter(|_| closed.is_none())?;
        let authorities = &mut self.left.authorities;
        match authorities.of_server(self.namespace, named, credential) {
            Ok(authorities) => Some((mode, authorities)),
            Err(found) => {
                let field = match (named, &tls.credential_name) {
                    (Some(_), _) => format!("{field}.caCertCredentialName"),
                    (None, Some(_)) => format!("{field}.credentialName"),
                    (None, None) => format!("{field}.credentialNames"),
                };
                closed.get_or_insert(self.reference(&field, found));
                None
            }
        }
    }

    /// Reports a reference that leads to nothing usable. Returns the fault that closes what needs it.
    fn reference(&mut self, field: &str, found: ReferenceProblem) -> Arc<ListenerFault> {
        self.report.reference(field.to_owned(), &found);
        fault(found.reason, found.problem)
    }

    /// Returns the Secret that a server names, whose certificate is then one of the Gateway's.
    fn certificate(&mut self, field: &str, name: &str) -> Result<SecretKey, Arc<ListenerFault>> {
        let Ok(name) = ObjectName::new(name) else {
            let problem = format!("{:?} is not the name of a Secret", shorten(name));
            let fix = "write the name of a Secret in the Gateway's namespace";
            self.report
                .error(Code::InvalidCertificate, field, problem.clone(), fix);
            return Err(fault(ListenerFaultReason::InvalidCertificateRef, problem));
        };
        let reference = SecretReference {
            group: String::new(),
            kind: "Secret".to_owned(),
            name,
            namespace: None,
        };
        let index: &mut CertificateIndex<'_> = &mut self.left.certificates;
        let found = index.find(
            ("Gateway", self.namespace),
            &reference,
            SecretTypes::TlsOrGeneric,
            &mut self.certificates,
        );
        found.map_err(|found| self.reference(field, found))
    }

    /// Adds a listener for each host of a server, unless an earlier server has the host.
    fn add_hosts(&mut self, field: &str, written: &[String], server: &ServerProperties) {
        if written.is_empty() {
            let problem = "the server names no host, so it serves none";
            let fix = "write a host such as www.example.com, or \"*\"";
            self.report
                .error(Code::MissingField, format!("{field}.hosts"), problem, fix);
            return;
        }
        let port = server.port;
        let has_other_protocol = |it: &PlacedListener| {
            it.listener.port == port && !it.listener.protocol.shares_port_with(&server.protocol)
        };
        // A port has one protocol, which is that of the first server.
        if let Some(other) = self.listeners.iter().find(|it| has_other_protocol(it)) {
            let problem = format!(
                "listener {} has another protocol on port {port}, so this server is left out",
                other.listener.name
            );
            let fix = "give the servers different ports";
            self.report.error(
                Code::ListenerConflict,
                format!("{field}.port.protocol"),
                problem,
                fix,
            );
            return;
        }
        let mut hosts: BTreeMap<Option<HostMatch>, (usize, AllowedNamespaces)> = BTreeMap::new();
        for (at, written) in written.iter().enumerate() {
            // Connections without TLS have no host: all hosts of such a server mean the port.
            let is_tcp = server.protocol == ListenerProtocol::Tcp;
            let found = host_of(self.namespace, written);
            match found.map(|(host, allowed)| (host.filter(|_| !is_tcp), allowed)) {
                // A host that is written for several namespaces is served for all of them.
                Ok((host, allowed)) => match hosts.get_mut(&host) {
                    Some((_, known)) => known.widen(allowed),
                    None => drop(hosts.insert(host, (at, allowed))),
                },
                Err(problem) => {
                    let fix = "write a name such as www.example.com, *.example.com or shop/*";
                    self.report.error(
                        Code::InvalidHostname,
                        format!("{field}.hosts[{at}]"),
                        problem,
                        fix,
                    );
                }
            }
        }
        let count = hosts.len();
        for (host, (at, allowed)) in hosts {
            self.add_host(
                &format!("{field}.hosts[{at}]"),
                server,
                (host, count),
                allowed,
            );
        }
    }

    /// Adds the listener of one host of a server, which has `count` hosts.
    fn add_host(
        &mut self,
        field: &str,
        server: &ServerProperties,
        (host, count): (Option<HostMatch>, usize),
        allowed: AllowedNamespaces,
    ) {
        let is_same =
            |it: &&mut PlacedListener| it.listener.port == server.port && it.listener.host == host;
        if let Some(other) = self.listeners.iter_mut().find(is_same) {
            // Two open servers for plain HTTP differ in the namespaces that they allow, and in
            // nothing else.
            let is_plain = |closed: &Option<Arc<ListenerFault>>, redirects: bool| {
                server.protocol == ListenerProtocol::Http && closed.is_none() && !redirects
            };
            if is_plain(&server.closed, server.redirects_to_https)
                && is_plain(&other.listener.closed, other.redirects_to_https)
            {
                other.allowed.widen(allowed);
                return;
            }
            let problem = format!(
                "listener {} has the same host on port {}, and keeps it",
                other.listener.name, server.port
            );
            let fix = "give the servers different hosts or ports";
            self.report
                .error(Code::ListenerConflict, field, problem, fix);
            return;
        }
        if self.listeners.len() >= LISTENERS_PER_GATEWAY_MAX || self.left.listeners == 0 {
            let problem = format!(
                "with this host the Gateway has more than {LISTENERS_PER_GATEWAY_MAX} listeners, or the tenant more than {LISTENERS_PER_TENANT_MAX}; the host is left out"
            );
            let fix = "use wildcards, or a further Gateway";
            self.report.error(Code::LimitExceeded, field, problem, fix);
            return;
        }
        self.left.listeners -= 1;
        let name = match (count, &host) {
            // Each host has a listener of its own, so only a single one can have the server's name.
            (1, _) => server.name.clone(),
            (_, None) => format!("{}/*", server.name),
            (_, Some(HostMatch::Exact(host))) => format!("{}/{host}", server.name),
            (_, Some(HostMatch::Suffix(domain))) => format!("{}/*{domain}", server.name),
        };
        // A closed server completes no handshake, so it validates no client.
        if let Some((mode, authorities)) = server.validation.clone()
            && server.closed.is_none()
        {
            self.add_validation(server.port, &name, mode, authorities);
        }
        self.listeners.push(PlacedListener {
            listener: Listener {
                name,
                port: server.port,
                protocol: server.protocol.clone(),
                host,
                certificates: server.certificates.clone(),
                filters: Vec::new(),
                closed: server.closed.clone(),
            },
            section: None,
            listener_set: None,
            namespace: self.namespace.clone(),
            allowed,
            // VirtualServices bind by hosts and namespaces; only routes of Gateway API name kinds.
            route_kinds: Vec::new(),
            is_host_broken: false,
            redirects_to_https: server.redirects_to_https,
        });
    }
}

impl ServerReader<'_, '_, '_> {
    /// Has a listener validate clients. Listeners with the same authorities have one validation.
    fn add_validation(
        &mut self,
        port: u16,
        name: &str,
        mode: ClientValidationMode,
        authorities: Arc<CaCertificates>,
    ) {
        let known = self
            .validations
            .iter_mut()
            .find(|it| it.mode == mode && it.authorities == authorities);
        match known {
            Some(known) => {
                known.ports.insert(port);
                known.listeners.insert(name.to_owned());
            }
            None => self.validations.push(ClientValidation {
                ports: [port].into(),
                listeners: [name.to_owned()].into(),
                mode,
                authorities,
            }),
        }
    }
}

/// Returns the mode of TLS settings; Istio's default is the first value of the enumeration.
fn mode_of(tls: &ServerTls) -> &str {
    tls.mode.as_deref().unwrap_or("PASSTHROUGH")
}

/// Parses a host of a server in a Gateway of the namespace `own`: the host, and the namespaces whose
/// VirtualServices it takes. The error is the problem, without a full stop.
fn host_of(
    own: &Namespace,
    written: &str,
) -> Result<(Option<HostMatch>, AllowedNamespaces), String> {
    let (allowed, host) = match written.split_once('/') {
        None | Some(("*", _)) => {
            let host = written.strip_prefix("*/").unwrap_or(written);
            (AllowedNamespaces::All, host)
        }
        Some((".", host)) => (AllowedNamespaces::Listed([own.clone()].into()), host),
        Some((namespace, host)) => {
            let namespace = Namespace::new(namespace)
                .map_err(|_| format!("{:?} is not a namespace", shorten(namespace)))?;
            (AllowedNamespaces::Listed([namespace].into()), host)
        }
    };
    let host = match host {
        "*" => None,
        host => Some(hostname::parse(host)?),
    };
    Ok((host, allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_namespace_of_a_host_limits_its_virtual_services() {
        let own = Namespace::new("infra").unwrap();
        let listed = |name: &str| AllowedNamespaces::Listed([Namespace::new(name).unwrap()].into());
        let exact = Some(HostMatch::Exact("a.example".to_owned()));
        let suffix = Some(HostMatch::Suffix(".example".to_owned()));
        for (written, expected) in [
            ("*", Some((None, AllowedNamespaces::All))),
            ("a.example", Some((exact.clone(), AllowedNamespaces::All))),
            ("*/a.example", Some((exact.clone(), AllowedNamespaces::All))),
            ("./*.example", Some((suffix, listed("infra")))),
            ("shop/*", Some((None, listed("shop")))),
            ("shop/a.example", Some((exact, listed("shop")))),
            ("Shop/a.example", None),
            ("a.*.example", None),
            ("*a.example", None),
            ("", None),
            ("shop/", None),
        ] {
            assert_eq!(host_of(&own, written).ok(), expected, "{written:?}");
        }
    }
}
