//! Converts Gateways for clients outside the mesh between `canal_model::program` and their wire
//! form, with validation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::certificate::CaCertificates;
use canal_model::client_validation::{ClientValidation, ClientValidationMode};
use canal_model::ids::{SecretKey, ServiceId};
use canal_model::ingress::is_gateway_service;
use canal_model::limits::{
    CERTIFICATES_PER_LISTENER_MAX, CLIENT_CA_BYTES_MAX, CLIENT_CA_CERTIFICATES_MAX,
    LISTENERS_PER_GATEWAY_MAX, TRUSTED_PROXIES_MAX,
};
use canal_model::listener_filters::ListenerFilter;
use canal_model::program::{
    IngressGateway, IngressListener, RelayProtocol, RouteObject, VirtualHost, filtering_ports,
};

use super::ResourceDecodeError;
use super::decode::{self, DecodeContext};
use super::{encode, listener_filters};
use crate::program as w;

impl From<&IngressGateway> for w::IngressGateway {
    fn from(gateway: &IngressGateway) -> Self {
        let validations = &gateway.client_validations;
        let listener = |it: &IngressListener| w::IngressListener {
            name: it.name.clone(),
            port: it.port.into(),
            host: it.host.as_ref().map(encode::host),
            open: it.is_open,
            virtual_hosts: it.virtual_hosts.iter().map(virtual_host).collect(),
            relay: it.relay.map(|relay| encode_relay(relay).into()),
            tls: it
                .certificates
                .as_ref()
                .map(|secrets| tls(secrets, is_validated(validations, it.port, &it.name))),
        };
        let terminating = gateway.terminating_ports();
        let filtering = filtering_ports(&gateway.listeners);
        let is_proxied = |it: &&IngressListener| gateway.proxied_ports.contains(&it.port);
        let others = || {
            let all = gateway.listeners.iter();
            all.filter(|it| !filtering.contains(&it.port))
        };
        let of_kind = |is_relaying: bool, is_terminating: bool| {
            let of_kind = others().filter(|it| {
                !is_proxied(it)
                    && it.relay.is_some() == is_relaying
                    && (is_relaying && terminating.contains(&it.port)) == is_terminating
            });
            of_kind.map(listener).collect()
        };
        let filtering_listeners = gateway.listeners.iter();
        let filtering_listeners = filtering_listeners.filter(|it| filtering.contains(&it.port));
        let filtering_listeners = filtering_listeners.map(|it| w::FilteringListener {
            listener: Some(listener(it)),
            filters: it.filters.iter().map(Into::into).collect(),
            proxied: is_proxied(&it),
        });
        Self {
            key: encode::key(&gateway.key),
            id: gateway.id.get(),
            listeners: of_kind(false, false),
            relaying_listeners: of_kind(true, false),
            terminating_listeners: of_kind(true, true),
            proxied_listeners: others().filter(is_proxied).map(listener).collect(),
            filtering_listeners: filtering_listeners.collect(),
            client_validations: gateway.client_validations.iter().map(validation).collect(),
            trusted_proxies: gateway.trusted_proxies.into(),
        }
    }
}

fn encode_relay(relay: RelayProtocol) -> w::RelayProtocol {
    match relay {
        RelayProtocol::TlsPassthrough => w::RelayProtocol::TlsPassthrough,
        RelayProtocol::TerminatedTls => w::RelayProtocol::TerminatedTls,
        RelayProtocol::Tcp => w::RelayProtocol::Tcp,
    }
}

fn decode_relay(at: &DecodeContext<'_>, relay: i32) -> Result<RelayProtocol, ResourceDecodeError> {
    match w::RelayProtocol::try_from(relay) {
        Ok(w::RelayProtocol::TlsPassthrough) => Ok(RelayProtocol::TlsPassthrough),
        Ok(w::RelayProtocol::TerminatedTls) => Ok(RelayProtocol::TerminatedTls),
        Ok(w::RelayProtocol::Tcp) => Ok(RelayProtocol::Tcp),
        Err(_) => at.err("listeners.relay", format!("{relay} is unknown")),
    }
}

fn is_validated(validations: &[ClientValidation], port: u16, listener: &str) -> bool {
    validations.iter().any(|it| it.is_for(port, listener))
}

fn tls(secrets: &[SecretKey], is_validating: bool) -> w::ListenerTls {
    let certificates = secrets.iter().map(secret_ref).collect();
    let (certificates, validating_certificates) = if is_validating {
        (Vec::new(), certificates)
    } else {
        (certificates, Vec::new())
    };
    w::ListenerTls {
        certificates,
        validating_certificates,
    }
}

fn validation(it: &ClientValidation) -> w::ClientValidation {
    let mode = match it.mode {
        ClientValidationMode::AllowValidOnly => w::ClientValidationMode::AllowValidOnly,
        ClientValidationMode::AllowInsecureFallback => {
            w::ClientValidationMode::AllowInsecureFallback
        }
        ClientValidationMode::AllowValidOrNone => w::ClientValidationMode::AllowValidOrNone,
    };
    w::ClientValidation {
        ports: it.ports.iter().map(|port| u32::from(*port)).collect(),
        mode: mode.into(),
        authorities: it.authorities.pem.clone(),
        listeners: it.listeners.iter().cloned().collect(),
    }
}

pub(super) fn secret_ref((namespace, name): &SecretKey) -> w::ObjectRef {
    w::ObjectRef {
        namespace: namespace.to_string(),
        name: name.to_string(),
        kind: String::new(),
    }
}

fn virtual_host(host: &VirtualHost) -> w::VirtualHost {
    let routes = host.routes.iter().map(|route| w::ObjectRef {
        namespace: route.namespace.to_string(),
        name: route.name.to_string(),
        kind: route.kind.clone(),
    });
    w::VirtualHost {
        host: host.host.as_ref().map(encode::host),
        routes: routes.collect(),
    }
}

pub(super) fn decode(
    name: &str,
    mut gateway: w::IngressGateway,
) -> Result<IngressGateway, ResourceDecodeError> {
    let at = DecodeContext(name);
    let ListenerLists {
        listeners,
        proxied_ports,
    } = join_lists(&at, &mut gateway)?;
    let key = at.key("key", gateway.key)?;
    // Another service would lose its own rules to the Gateway's.
    if !is_gateway_service(&key) {
        return at.err("key", format!("{key} does not stand for a Gateway"));
    }
    check_ports(&at, listeners.iter().map(|(it, _)| it))?;
    let client_validations = decode_validations(&at, gateway.client_validations)?;
    let listeners = listeners.into_iter().map(|(it, filters)| {
        let virtual_hosts = it.virtual_hosts.into_iter();
        let name = it.name;
        Ok(IngressListener {
            port: at.port("listeners.port", it.port)?,
            host: it.host.map(|host| decode::host(&at, host)).transpose()?,
            is_open: it.open,
            relay: it.relay.map(|relay| decode_relay(&at, relay)).transpose()?,
            certificates: it
                .tls
                .map(|tls| {
                    let is_validating = u16::try_from(it.port)
                        .is_ok_and(|port| is_validated(&client_validations, port, &name));
                    secrets(&at, &tls, is_validating)
                })
                .transpose()?,
            virtual_hosts: virtual_hosts
                .map(|host| decode_host(&at, host))
                .collect::<Result<_, _>>()?,
            filters,
            name,
        })
    });
    let proxies = u8::try_from(gateway.trusted_proxies).ok();
    let Some(trusted_proxies) = proxies.filter(|it| *it <= TRUSTED_PROXIES_MAX) else {
        return at.err(
            "trusted_proxies",
            format!("is more than {TRUSTED_PROXIES_MAX}"),
        );
    };
    Ok(IngressGateway {
        trusted_proxies,
        proxied_ports,
        id: ServiceId::new(gateway.id).or_else(|e| at.err("id", e))?,
        listeners: listeners.collect::<Result<_, ResourceDecodeError>>()?,
        client_validations,
        key,
    })
}

/// The listeners of a Gateway in one list.
struct ListenerLists {
    listeners: Vec<(w::IngressListener, Vec<ListenerFilter>)>,
    proxied_ports: BTreeSet<u16>,
}

/// Joins the lists of listeners. Each kind of listener has a list of its own: a gateway that does not
/// know a list serves none of its ports.
fn join_lists(
    at: &DecodeContext<'_>,
    received: &mut w::IngressGateway,
) -> Result<ListenerLists, ResourceDecodeError> {
    let relaying = std::mem::take(&mut received.relaying_listeners);
    let terminating = std::mem::take(&mut received.terminating_listeners);
    let proxied = std::mem::take(&mut received.proxied_listeners);
    let filtering = std::mem::take(&mut received.filtering_listeners);
    let mut listeners = std::mem::take(&mut received.listeners);
    let tcp = Some(w::RelayProtocol::Tcp.into());
    let is_misplaced = listeners.iter().any(|it| it.relay.is_some())
        || relaying
            .iter()
            .any(|it| it.relay.is_none() || it.tls.is_some())
        || terminating
            .iter()
            .any(|it| it.relay == tcp || !is_relay_whole(it))
        || proxied
            .iter()
            .any(|it| it.relay.is_some() && !is_relay_whole(it));
    if is_misplaced {
        return at.err("listeners.relay", "is on a listener of another kind");
    }
    listeners.extend(relaying);
    listeners.extend(terminating);
    let others = listeners.iter().chain(&proxied);
    let filtering = listener_filters::decode(at, filtering, others)?;
    let of_filtering = |is_proxied| {
        let some = filtering
            .iter()
            .filter(move |it| it.is_proxied == is_proxied);
        some.map(|it| &it.listener)
    };
    let proxied_ports = proxied_ports(
        at,
        listeners.iter().chain(of_filtering(false)),
        proxied.iter().chain(of_filtering(true)),
    )?;
    listeners.extend(proxied);
    let without = listeners.into_iter().map(|it| (it, Vec::new()));
    let with = filtering.into_iter().map(|it| (it.listener, it.filters));
    let listeners: Vec<_> = without.chain(with).collect();
    let count = listeners.len();
    if count > LISTENERS_PER_GATEWAY_MAX {
        return at.err(
            "listeners",
            format!("has {count} listeners, more than {LISTENERS_PER_GATEWAY_MAX}"),
        );
    }
    Ok(ListenerLists {
        listeners,
        proxied_ports,
    })
}

/// Returns whether a listener that relays has certificates if it terminates TLS, and only then. Without
/// them, it would pass through what is to be terminated.
fn is_relay_whole(listener: &w::IngressListener) -> bool {
    let is_terminated = listener.relay == Some(w::RelayProtocol::TerminatedTls.into());
    listener.relay.is_some() && is_terminated == listener.tls.is_some()
}

/// Returns the ports of the listeners whose connections begin with a header of the PROXY protocol. The
/// others have other ports.
fn proxied_ports<'a>(
    at: &DecodeContext<'_>,
    mut others: impl Iterator<Item = &'a w::IngressListener>,
    proxied: impl Iterator<Item = &'a w::IngressListener>,
) -> Result<BTreeSet<u16>, ResourceDecodeError> {
    let ports = proxied.map(|it| at.port("listeners.port", it.port));
    let ports = ports.collect::<Result<BTreeSet<u16>, _>>()?;
    // A header would be optional there, so that clients could write it themselves.
    match others.find(|it| u16::try_from(it.port).is_ok_and(|port| ports.contains(&port))) {
        Some(it) => at.err(
            "listeners.port",
            format!("{} has listeners with and without a PROXY header", it.port),
        ),
        None => Ok(ports),
    }
}

/// Checks that the listeners of each port are of one protocol. Those for TLS that relay may terminate
/// it or pass it through.
fn check_ports<'a>(
    at: &DecodeContext<'_>,
    listeners: impl Iterator<Item = &'a w::IngressListener>,
) -> Result<(), ResourceDecodeError> {
    let is_relayed_tls = |it: &w::IngressListener| {
        let relay = it
            .relay
            .and_then(|relay| w::RelayProtocol::try_from(relay).ok());
        relay.is_some_and(|relay| relay != w::RelayProtocol::Tcp)
    };
    let mut ports: BTreeMap<u32, (bool, Option<i32>, bool)> = BTreeMap::new();
    for listener in listeners {
        let kind = match is_relayed_tls(listener) {
            true => (true, None, true),
            false => (listener.tls.is_some(), listener.relay, false),
        };
        // Plaintext on a port for HTTPS would bypass the handshake.
        if *ports.entry(listener.port).or_insert(kind) != kind {
            return at.err(
                "listeners.tls",
                format!(
                    "port {} has listeners with and without it, or some that relay",
                    listener.port
                ),
            );
        }
    }
    Ok(())
}

fn decode_validations(
    at: &DecodeContext<'_>,
    written: Vec<w::ClientValidation>,
) -> Result<Vec<ClientValidation>, ResourceDecodeError> {
    // The listeners of each port that have a validation already; `None` means all.
    let mut taken: BTreeMap<u16, Option<BTreeSet<String>>> = BTreeMap::new();
    let mut validations = Vec::new();
    for it in written {
        // A validation that is skipped would admit clients that its author refuses.
        let mode = match w::ClientValidationMode::try_from(it.mode) {
            Ok(w::ClientValidationMode::AllowValidOnly) => ClientValidationMode::AllowValidOnly,
            Ok(w::ClientValidationMode::AllowInsecureFallback) => {
                ClientValidationMode::AllowInsecureFallback
            }
            Ok(w::ClientValidationMode::AllowValidOrNone) => ClientValidationMode::AllowValidOrNone,
            Err(_) => return at.err("client_validations.mode", format!("{} is unknown", it.mode)),
        };
        let count = it.listeners.len();
        at.at_most(
            "client_validations.listeners",
            count,
            LISTENERS_PER_GATEWAY_MAX,
        )?;
        let listeners: BTreeSet<String> = it.listeners.into_iter().collect();
        let mut ports = BTreeSet::new();
        for port in it.ports {
            let port = at.port("client_validations.ports", port)?;
            // A validation without names is of all listeners of the port, so it leaves none to
            // another.
            let is_free = match (taken.get(&port), listeners.is_empty()) {
                (None, _) => true,
                (Some(Some(others)), false) => others.is_disjoint(&listeners),
                (Some(_), _) => false,
            };
            // Of two validations, a gateway would take either.
            if !is_free || !ports.insert(port) {
                return at.err("client_validations.ports", format!("has {port} twice"));
            }
            let named = (!listeners.is_empty()).then(|| listeners.clone());
            match (
                taken.entry(port).or_insert_with(|| Some(BTreeSet::new())),
                named,
            ) {
                (Some(all), Some(named)) => all.extend(named),
                (entry, _) => *entry = None,
            }
        }
        let field = "client_validations.authorities";
        at.at_most(field, it.authorities.len(), CLIENT_CA_BYTES_MAX)?;
        let count = it
            .authorities
            .matches("-----BEGIN CERTIFICATE-----")
            .count();
        at.at_most(field, count, CLIENT_CA_CERTIFICATES_MAX)?;
        // Without an authority no client could be verified, and a gateway must not admit all
        // instead.
        if count == 0 {
            return at.err(field, "contains no certificate in PEM");
        }
        validations.push(ClientValidation {
            ports,
            listeners,
            mode,
            authorities: Arc::new(CaCertificates {
                pem: it.authorities,
                count,
            }),
        });
    }
    Ok(validations)
}

fn secrets(
    at: &DecodeContext<'_>,
    tls: &w::ListenerTls,
    is_validating: bool,
) -> Result<Vec<SecretKey>, ResourceDecodeError> {
    let (own, other) = if is_validating {
        (&tls.validating_certificates, &tls.certificates)
    } else {
        (&tls.certificates, &tls.validating_certificates)
    };
    let field = "listeners.tls.certificates";
    // The two sides disagree about what validates clients.
    if !other.is_empty() {
        return at.err(field, "do not agree with client_validations");
    }
    at.at_most(field, own.len(), CERTIFICATES_PER_LISTENER_MAX)?;
    let secrets = own.iter();
    secrets
        .map(|secret| decode_secret(at, field, secret))
        .collect()
}

pub(super) fn decode_secret(
    at: &DecodeContext<'_>,
    field: &'static str,
    secret: &w::ObjectRef,
) -> Result<SecretKey, ResourceDecodeError> {
    let namespace = at.name(field, &secret.namespace)?;
    Ok((namespace, at.name(field, &secret.name)?))
}

fn decode_host(
    at: &DecodeContext<'_>,
    written: w::VirtualHost,
) -> Result<VirtualHost, ResourceDecodeError> {
    let routes = written.routes.iter().map(|route| {
        Ok(RouteObject {
            namespace: at.name("virtual_hosts.routes", &route.namespace)?,
            name: at.name("virtual_hosts.routes", &route.name)?,
            // Older controllers know one kind of route on listeners.
            kind: if route.kind.is_empty() {
                "HTTPRoute".to_owned()
            } else {
                route.kind.clone()
            },
        })
    });
    Ok(VirtualHost {
        routes: routes.collect::<Result<_, ResourceDecodeError>>()?,
        host: written
            .host
            .map(|host| decode::host(at, host))
            .transpose()?,
    })
}

#[cfg(test)]
pub(super) fn sample() -> IngressGateway {
    use canal_model::program::HostMatch;
    let route = |name: &str, kind: &str| RouteObject {
        namespace: "infra".parse().unwrap(),
        name: name.parse().unwrap(),
        kind: kind.to_owned(),
    };
    let listener = |name: &str, host, virtual_hosts| IngressListener {
        name: name.to_owned(),
        port: 80,
        host,
        is_open: name != "closed",
        certificates: None,
        relay: None,
        filters: Vec::new(),
        virtual_hosts,
    };
    let filters = || {
        let authorizers = super::route_authorizer::samples().map(ListenerFilter::Authorize);
        let mut filters = Vec::from(authorizers);
        filters.push(ListenerFilter::Refuse);
        filters
    };
    let any = VirtualHost {
        host: None,
        routes: [route("a", "HTTPRoute"), route("b", "HTTPRoute")].into(),
    };
    let suffix = VirtualHost {
        host: Some(HostMatch::Suffix(".example.com".into())),
        routes: [route("a", "GRPCRoute")].into(),
    };
    let https = |port, name: &str| IngressListener {
        port,
        certificates: Some(vec![("infra".parse().unwrap(), "cert".parse().unwrap())]),
        ..listener(name, None, Vec::new())
    };
    let plain = |port, name, relay| IngressListener {
        port,
        relay,
        ..listener(name, None, Vec::new())
    };
    let passed = |port, name: &str, host| IngressListener {
        port,
        relay: Some(RelayProtocol::TlsPassthrough),
        ..listener(name, host, Vec::new())
    };
    let exact = Some(HostMatch::Exact("www.example.com".into()));
    IngressGateway {
        key: "alpha/infra/web.gateway".parse().unwrap(),
        id: ServiceId::new(9).unwrap(),
        trusted_proxies: 2,
        proxied_ports: [8080, 6445, 8444].into(),
        listeners: vec![
            listener("http", None, vec![suffix, any]),
            listener("closed", exact, Vec::new()),
            https(443, "https"),
            https(8443, "mutual"),
            https(7443, "of-some"),
            IngressListener {
                host: Some(HostMatch::Exact("a.test".into())),
                ..https(7443, "of-none")
            },
            passed(6443, "tls", None),
            plain(5432, "tcp", Some(RelayProtocol::Tcp)),
            IngressListener {
                relay: Some(RelayProtocol::TerminatedTls),
                ..https(6444, "terminated")
            },
            passed(6444, "passed", Some(HostMatch::Suffix(".test".into()))),
            plain(8080, "proxied", None),
            passed(6445, "proxied-tls", None),
            IngressListener {
                filters: filters(),
                ..plain(81, "filtering", None)
            },
            IngressListener {
                host: Some(HostMatch::Exact("b.test".into())),
                ..plain(81, "beside-filtering", None)
            },
            IngressListener {
                filters: filters(),
                ..https(8444, "filtering-https")
            },
        ],
        client_validations: sample_validations(),
    }
}

#[cfg(test)]
fn sample_validations() -> Vec<ClientValidation> {
    let authorities = || {
        Arc::new(CaCertificates {
            pem: "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_owned(),
            count: 1,
        })
    };
    vec![
        ClientValidation {
            // No listener has 9443: a validation may be for more ports than listeners have.
            ports: [8443, 9443].into(),
            listeners: BTreeSet::new(),
            mode: ClientValidationMode::AllowInsecureFallback,
            authorities: authorities(),
        },
        ClientValidation {
            ports: [7443].into(),
            listeners: ["of-some".to_owned()].into(),
            mode: ClientValidationMode::AllowValidOrNone,
            authorities: authorities(),
        },
    ]
}

#[cfg(test)]
mod tests {
    use canal_model::listener_filters::LISTENER_FILTERS_MAX;

    use super::*;

    #[test]
    fn routes_without_a_kind_are_http_routes() {
        let mut written = w::IngressGateway::from(&sample());
        let hosts = &mut written.listeners[0].virtual_hosts;
        let routes = hosts.iter_mut().flat_map(|host| &mut host.routes);
        routes.for_each(|route| route.kind.clear());
        let decoded = decode("alpha/infra/web.gateway", written).unwrap();
        let hosts = &decoded.listeners[0].virtual_hosts;
        let mut routes = hosts.iter().flat_map(|host| &host.routes);
        assert!(routes.all(|route| route.kind == "HTTPRoute"));
    }

    /// Returns the error of a Gateway after a change to it.
    fn refused(change: &dyn Fn(&mut w::IngressGateway)) -> String {
        let mut gateway = w::IngressGateway::from(&sample());
        change(&mut gateway);
        let decoded = decode("alpha/infra/web.gateway", gateway);
        decoded.unwrap_err().to_string()
    }

    #[test]
    fn what_is_no_gateway_is_refused() {
        let service = refused(&|it| it.key.as_mut().unwrap().name = "web".into());
        assert!(
            service.contains("does not stand for a Gateway"),
            "{service}"
        );
        let many = refused(&|it| {
            let listener = it.listeners[0].clone();
            it.listeners = vec![listener; LISTENERS_PER_GATEWAY_MAX + 1];
        });
        assert!(many.contains("more than 512"), "{many}");
        let mixed = refused(&|it| it.listeners[2].port = 80);
        assert!(mixed.contains("with and without"), "{mixed}");
        let certificates = refused(&|it| {
            let tls = it.listeners[2].tls.as_mut().unwrap();
            tls.certificates = vec![tls.certificates[0].clone(); CERTIFICATES_PER_LISTENER_MAX + 1];
        });
        assert!(certificates.contains("tls.certificates"), "{certificates}");
        let port = refused(&|it| it.listeners[0].port = 0);
        assert!(port.contains("listeners.port"), "{port}");
        let host = refused(&|it| {
            it.listeners[0].virtual_hosts[0].host = Some(w::HostMatch { host: None });
        });
        assert!(host.contains("hosts"), "{host}");
        let route = refused(&|it| {
            it.listeners[0].virtual_hosts[0].routes[0].name = "A B".into();
        });
        assert!(route.contains("virtual_hosts.routes"), "{route}");
    }

    #[test]
    fn filters_that_do_not_fit_are_refused() {
        type Change = fn(&mut w::IngressGateway);
        let cases: [(Change, &str); 6] = [
            (
                |it| it.filtering_listeners[0].filters[0].filter = None,
                "filtering_listeners.filters",
            ),
            (
                |it| {
                    let filter = w::ListenerFilter::from(&ListenerFilter::Refuse);
                    it.filtering_listeners[0].filters = vec![filter; LISTENER_FILTERS_MAX + 1];
                },
                "filtering_listeners.filters",
            ),
            (
                |it| it.filtering_listeners[0].listener = None,
                "filtering_listeners.listener",
            ),
            (
                |it| {
                    let listener = it.filtering_listeners[0].listener.as_mut().unwrap();
                    listener.relay = Some(w::RelayProtocol::Tcp.into());
                },
                "filtering_listeners.relay",
            ),
            (|it| it.listeners[0].port = 81, "in another list"),
            (
                |it| it.filtering_listeners[0].proxied = true,
                "with and without a PROXY header",
            ),
        ];
        for (change, expected) in cases {
            let text = refused(&change);
            assert!(text.contains(expected), "{expected}: {text}");
        }
        // A data plane that does not know the list serves none of these ports.
        let mut older = w::IngressGateway::from(&sample());
        older.filtering_listeners.clear();
        let older = decode("alpha/infra/web.gateway", older).unwrap();
        assert!(
            older
                .listeners
                .iter()
                .all(|it| ![81, 8444].contains(&it.port))
        );
    }

    #[test]
    fn relays_and_validations_that_do_not_fit_are_refused() {
        // No protocol has the number 7, and 0 is TCP. The ports are those of other kinds in `sample`.
        for (change, expected) in [
            (
                (&|it: &mut w::IngressGateway| it.relaying_listeners[0].relay = Some(7))
                    as &dyn Fn(&mut w::IngressGateway),
                "7 is unknown",
            ),
            (
                &|it| it.relaying_listeners[0].relay = None,
                "of another kind",
            ),
            (&|it| it.listeners[0].relay = Some(0), "of another kind"),
            (
                &|it| it.terminating_listeners[0].tls = None,
                "of another kind",
            ),
            (
                &|it| it.terminating_listeners[0].relay = Some(0),
                "of another kind",
            ),
            (
                &|it| it.terminating_listeners[1].port = 443,
                "some that relay",
            ),
            (
                &|it| it.relaying_listeners[0].port = 5432,
                "some that relay",
            ),
            (
                (&|it: &mut w::IngressGateway| it.client_validations[0].mode = 7)
                    as &dyn Fn(&mut w::IngressGateway),
                "client_validations.mode",
            ),
            (
                &|it| it.client_validations[0].ports.push(8443),
                "has 8443 twice",
            ),
            (
                &|it| it.client_validations[0].authorities.clear(),
                "no certificate in PEM",
            ),
            (
                &|it| {
                    let pem = it.client_validations[0].authorities.clone();
                    it.client_validations[0].authorities =
                        pem.repeat(CLIENT_CA_CERTIFICATES_MAX + 1);
                },
                "client_validations.authorities",
            ),
            (&|it| it.proxied_listeners[0].port = 80, "PROXY header"),
            (&|it| it.proxied_listeners[1].port = 8080, "some that relay"),
            (
                &|it| it.proxied_listeners[1].relay = Some(w::RelayProtocol::TerminatedTls.into()),
                "of another kind",
            ),
            // Without its validation, or with one that was not meant for it, a listener is refused.
            (&|it| it.client_validations.clear(), "do not agree"),
            (
                &|it| it.client_validations[0].ports.push(443),
                "do not agree",
            ),
            (
                &|it| it.client_validations[1].listeners.clear(),
                "do not agree",
            ),
            // A listener in two validations, and a port that is in one for all of its listeners.
            (
                &|it| {
                    let again = it.client_validations[1].clone();
                    it.client_validations.push(again);
                },
                "has 7443 twice",
            ),
            (
                &|it| it.client_validations[1].ports.push(8443),
                "has 8443 twice",
            ),
        ] {
            let text = refused(change);
            assert!(text.contains(expected), "{text}");
        }
    }
}
