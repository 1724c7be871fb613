//! Converts Gateways for clients outside the mesh between `canal_model::program` and their wire
//! form, with validation.

use std::collections::BTreeMap;

use canal_model::ids::{SecretKey, ServiceId};
use canal_model::ingress::is_gateway_service;
use canal_model::limits::{
    CERTIFICATES_PER_LISTENER_MAX, LISTENERS_PER_GATEWAY_MAX, TRUSTED_PROXIES_MAX,
};
use canal_model::program::{IngressGateway, IngressListener, RouteObject, VirtualHost};

use super::ResourceDecodeError;
use super::decode::{self, DecodeContext};
use super::encode;
use crate::program as w;

impl From<&IngressGateway> for w::IngressGateway {
    fn from(gateway: &IngressGateway) -> Self {
        let listener = |it: &IngressListener| w::IngressListener {
            name: it.name.clone(),
            port: it.port.into(),
            host: it.host.as_ref().map(encode::host),
            open: it.is_open,
            virtual_hosts: it.virtual_hosts.iter().map(virtual_host).collect(),
            tls: it.certificates.as_ref().map(|secrets| w::ListenerTls {
                certificates: secrets.iter().map(secret_ref).collect(),
            }),
        };
        Self {
            key: encode::key(&gateway.key),
            id: gateway.id.get(),
            listeners: gateway.listeners.iter().map(listener).collect(),
            trusted_proxies: gateway.trusted_proxies.into(),
        }
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
    gateway: w::IngressGateway,
) -> Result<IngressGateway, ResourceDecodeError> {
    let at = DecodeContext(name);
    let count = gateway.listeners.len();
    if count > LISTENERS_PER_GATEWAY_MAX {
        return at.err(
            "listeners",
            format!("has {count} listeners, more than {LISTENERS_PER_GATEWAY_MAX}"),
        );
    }
    let key = at.key("key", gateway.key)?;
    // Another service would lose its own rules to the Gateway's.
    if !is_gateway_service(&key) {
        return at.err("key", format!("{key} does not stand for a Gateway"));
    }
    let mut tls_ports: BTreeMap<u32, bool> = BTreeMap::new();
    for listener in &gateway.listeners {
        let is_tls = listener.tls.is_some();
        // Plaintext on a port for HTTPS would bypass the handshake.
        if *tls_ports.entry(listener.port).or_insert(is_tls) != is_tls {
            return at.err(
                "listeners.tls",
                format!("port {} has listeners with and without it", listener.port),
            );
        }
    }
    let listeners = gateway.listeners.into_iter().map(|it| {
        let virtual_hosts = it.virtual_hosts.into_iter();
        Ok(IngressListener {
            name: it.name,
            port: at.port("listeners.port", it.port)?,
            host: it.host.map(|host| decode::host(&at, host)).transpose()?,
            is_open: it.open,
            certificates: it.tls.map(|tls| secrets(&at, &tls)).transpose()?,
            virtual_hosts: virtual_hosts
                .map(|host| decode_host(&at, host))
                .collect::<Result<_, _>>()?,
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
        id: ServiceId::new(gateway.id).or_else(|e| at.err("id", e))?,
        listeners: listeners.collect::<Result<_, ResourceDecodeError>>()?,
        key,
    })
}

fn secrets(
    at: &DecodeContext<'_>,
    tls: &w::ListenerTls,
) -> Result<Vec<SecretKey>, ResourceDecodeError> {
    let (field, count) = ("listeners.tls.certificates", tls.certificates.len());
    at.at_most(field, count, CERTIFICATES_PER_LISTENER_MAX)?;
    let secrets = tls.certificates.iter();
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
        virtual_hosts,
    };
    let any = VirtualHost {
        host: None,
        routes: [route("a", "HTTPRoute"), route("b", "HTTPRoute")].into(),
    };
    let suffix = VirtualHost {
        host: Some(HostMatch::Suffix(".example.com".into())),
        routes: [route("a", "GRPCRoute")].into(),
    };
    let exact = Some(HostMatch::Exact("www.example.com".into()));
    IngressGateway {
        key: "alpha/infra/web.gateway".parse().unwrap(),
        id: ServiceId::new(9).unwrap(),
        trusted_proxies: 2,
        listeners: vec![
            listener("http", None, vec![suffix, any]),
            listener("closed", exact, Vec::new()),
            IngressListener {
                port: 443,
                certificates: Some(vec![("infra".parse().unwrap(), "cert".parse().unwrap())]),
                ..listener("https", None, Vec::new())
            },
        ],
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn what_is_no_gateway_is_refused() {
        let refused = |change: &dyn Fn(&mut w::IngressGateway)| {
            let mut gateway = w::IngressGateway::from(&sample());
            change(&mut gateway);
            decode("alpha/infra/web.gateway", gateway)
                .unwrap_err()
                .to_string()
        };
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
}
