//! A client's connection or tunnel as the phases see it: tenant, client, dialled destination, and
//! that destination in the newest snapshot.
//!
//! `establish` creates it. No bytes are moved here. Start with [`ClientSession::resolve`].

use std::cell::{Cell, OnceCell, RefCell};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;

use canal_gateway_config::{
    ListenerClients, RequestThrottle, TenantView, TerminationView, WorkloadLabels, admit_all,
};
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_limits::tenant_usage::{CountGuard, TenantUsage};
use canal_identity::ClientCertificate;
use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use canal_wire::hbone::{BAGGAGE, Baggage, FORWARDED, SOURCE, forwarded};
use http::{HeaderMap, HeaderValue};
use smallvec::SmallVec;

use crate::destination::{Destination, ResolvedDestination};
use crate::endpoints::PoolClient;
use crate::permit::ConnectionPermit;
use crate::rebalance::ConnectionDrain;
use crate::source_workload::SourceWorkload;
use crate::worker::{SnapshotRef, Worker};

/// State of a client's connection (or tunnel) for as long as it lives.
pub(crate) struct ClientSession {
    pub(crate) account: Rc<TenantUsage>,
    pub(crate) destination: Destination,
    pub(crate) source: Rc<SourceWorkload>,
    /// Pod of the source, for logs.
    pub(crate) pod: String,
    /// Client address that the authenticated previous hop, or the load balancer of a Gateway,
    /// reported, otherwise the peer address.
    pub(crate) client: SocketAddr,
    /// Address of the load balancer, if the connection began with a header of the PROXY protocol.
    pub(crate) balancer: Option<IpAddr>,
    /// The address of [`ClientSession::client`] as text, for `x-forwarded-for`.
    pub(crate) client_ip: String,
    /// True if the source proved its identity.
    pub(crate) secured: bool,
    /// True if the client itself uses TLS with the gateway.
    pub(crate) tls: bool,
    /// The source as policies see it.
    pub(crate) principal: ClientPrincipal,
    /// True if the tenant had policies when the destination was last resolved.
    had_policies: Cell<bool>,
    /// Sequence of a snapshot, and the destination resolved in it.
    resolved: RefCell<Option<(u64, Rc<ResolvedDestination>)>>,
    pool_client: OnceCell<Rc<PoolClient>>,
    /// True once the client has received a whole response on this connection.
    answered: Cell<bool>,
    /// Throttles of its requests: the destination's, then the tenant's.
    throttles: RefCell<SmallVec<[Arc<RequestThrottle>; 2]>>,
    admission: SessionAdmission,
}

/// A session's permit in its tenant's share of connections.
pub(crate) enum SessionAdmission {
    /// A connection that took the permit at accept.
    Accepted(Rc<ConnectionPermit>),
    /// A tunnel inside such a connection.
    Tunnel {
        _permit: CountGuard,
        drain: Rc<ConnectionDrain>,
    },
}

/// Description of a client, from which its session is created.
pub(crate) struct ClientInfo {
    pub(crate) party: WorkloadLabels,
    /// Client address that the authenticated previous hop, or the load balancer of a Gateway,
    /// reported, otherwise the peer address.
    pub(crate) address: SocketAddr,
    /// Address of that load balancer.
    pub(crate) balancer: Option<IpAddr>,
    /// True if the client proved its identity.
    pub(crate) secured: bool,
    /// True if the client uses TLS with the gateway itself.
    pub(crate) tls: bool,
    /// The client as policies see it.
    pub(crate) principal: ClientPrincipal,
}

impl ClientSession {
    /// Creates a tunnel's session; `None` if the tenant has reached its limit. `drain` belongs to
    /// the connection that carries the tunnel.
    pub(crate) fn of_tunnel(
        worker: &Worker,
        tenant: &TenantView,
        destination: Destination,
        caller: ClientInfo,
        drain: &Rc<ConnectionDrain>,
    ) -> Option<Self> {
        let permit = worker
            .limits
            .tunnel(&worker.accounts.of(tenant, &worker.limits))?;
        Some(Self::begin(
            worker,
            tenant,
            destination,
            caller,
            SessionAdmission::Tunnel {
                _permit: permit,
                drain: drain.clone(),
            },
        ))
    }

    pub(crate) fn begin(
        worker: &Worker,
        tenant: &TenantView,
        destination: Destination,
        caller: ClientInfo,
        admission: SessionAdmission,
    ) -> Self {
        let account = worker.accounts.of(tenant, &worker.limits);
        let mut party = caller.party;
        let pod = std::mem::take(&mut party.pod);
        Self {
            account,
            destination,
            source: worker.sources.of(&party),
            pod,
            client: caller.address,
            balancer: caller.balancer,
            client_ip: caller.address.ip().to_string(),
            secured: caller.secured,
            tls: caller.tls,
            principal: caller.principal,
            had_policies: Cell::new(!tenant.policies.is_empty()),
            resolved: RefCell::new(None),
            pool_client: OnceCell::new(),
            answered: Cell::new(false),
            throttles: RefCell::default(),
            admission,
        }
    }

    /// Counts a request against its throttles. Call it after the destination is resolved.
    ///
    /// # Errors
    /// A throttle admits no more requests now.
    #[inline]
    pub(crate) fn throttle(&self, worker: &Worker) -> Result<(), ProxyError> {
        let throttles = self.throttles.borrow();
        if throttles.is_empty() {
            return Ok(());
        }
        let now = u64::try_from(worker.shared.begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let all = throttles.iter().map(|throttle| &**throttle);
        if admit_all(all, now) {
            Ok(())
        } else {
            Err(ProxyError::Throttled)
        }
    }

    /// Marks the connection as busy, because a request or relay begins.
    #[inline]
    pub(crate) fn establish(&self) {
        if let SessionAdmission::Accepted(permit) = &self.admission {
            permit.establish();
        }
    }

    /// Returns the soft drain of the connection, which asks the client to go to another replica.
    #[inline]
    pub(crate) fn drain(&self) -> &Rc<ConnectionDrain> {
        match &self.admission {
            SessionAdmission::Accepted(permit) => &permit.drain,
            SessionAdmission::Tunnel { drain, .. } => drain,
        }
    }

    /// Returns whether a Termination that is as it is now keeps the session's connection. It does not
    /// concern clients with a node proxy, whose tunnels have proved an identity.
    pub(crate) fn is_kept_by(&self, termination: &TerminationView) -> bool {
        let is_tunnel = matches!(self.admission, SessionAdmission::Tunnel { .. });
        is_tunnel || termination.keeps(self.tls, self.secured)
    }

    /// True if the tenant has policies for any destination.
    pub(crate) fn is_policed(&self) -> bool {
        self.had_policies.get()
    }

    /// Returns the URI scheme that the client itself uses.
    pub(crate) fn scheme(&self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }

    /// Returns the newest snapshot and the destination in it. The lookup is done once per snapshot.
    ///
    /// # Errors
    /// The tenant or the destination does not exist, or nothing of the tenant is served.
    pub(crate) fn resolve(
        &self,
        worker: &Worker,
    ) -> Result<(SnapshotRef, Rc<ResolvedDestination>), ProxyError> {
        let snapshot = worker.snapshot();
        if let Some((sequence, resolved)) = &*self.resolved.borrow()
            && *sequence == snapshot.sequence
        {
            return Ok((snapshot, resolved.clone()));
        }
        let tenant = snapshot
            .tenant(self.account.tenant.as_str())
            .ok_or(ProxyError::NoService)?;
        if tenant.closed {
            return Err(ProxyError::TenantClosed);
        }
        let resolved = Rc::new(
            ResolvedDestination::find(&worker.upstreams, tenant, &self.destination)
                .ok_or(ProxyError::NoService)?,
        );
        self.had_policies.set(!tenant.policies.is_empty());
        *self.throttles.borrow_mut() = resolved
            .throttle()
            .into_iter()
            .chain(tenant.throttle.clone())
            .collect();
        *self.resolved.borrow_mut() = Some((snapshot.sequence, resolved.clone()));
        Ok((snapshot, resolved))
    }

    /// Notes that the client has received a whole response.
    pub(crate) fn note_answer(&self) {
        self.answered.set(true);
    }

    pub(crate) fn is_answered(&self) -> bool {
        self.answered.get()
    }

    /// Returns the owner of this client's connections to endpoints, where clients share none.
    pub(crate) fn pool_client(&self) -> Rc<PoolClient> {
        let made = || {
            Rc::new(PoolClient {
                principal: self.principal.principal.clone(),
                address: self.client.ip(),
            })
        };
        self.pool_client.get_or_init(made).clone()
    }

    /// Returns the headers that describe this client to the destination's node, for a tunnel that
    /// carries only its bytes.
    pub(crate) fn introduction(&self, host: Option<&str>) -> HeaderMap {
        let source = &self.source.party;
        let baggage = Baggage {
            namespace: source.namespace.clone(),
            pod: self.pod.clone(),
            service: source.service.clone(),
            version: source.version.clone(),
            ..Baggage::default()
        };
        let mut headers = HeaderMap::new();
        let principal = self.principal.spiffe_id();
        for (name, value) in [
            (FORWARDED, forwarded(self.client, host)),
            (BAGGAGE, baggage.encode()),
            (SOURCE, principal),
        ] {
            if let (Ok(value), false) = (HeaderValue::from_str(&value), value.is_empty()) {
                headers.insert(name, value);
            }
        }
        headers
    }
}

/// Identity of a client for policies, created once per connection.
#[derive(Debug)]
pub(crate) struct ClientPrincipal {
    /// `trust.domain/ns/x/sa/y`; `None` if no identity was proved.
    pub(crate) principal: Option<String>,
    pub(crate) namespace: String,
    /// Namespace and service account, as `namespace/account`.
    pub(crate) account: String,
    /// True if the identity belongs to another tenant, with which this one federates.
    pub(crate) foreign: bool,
    /// Server name of TLS that terminated at the gateway.
    pub(crate) server_name: Option<String>,
    /// The certificate that a listener validated. It proves no identity.
    pub(crate) certificate: Option<ClientCertificate>,
    /// How the client's listener validated clients when that was last looked at, and whether the client
    /// may stay.
    pub(crate) validated: RefCell<(ListenerClients, bool)>,
}

impl Default for ClientPrincipal {
    fn default() -> Self {
        Self {
            principal: None,
            namespace: String::new(),
            account: String::new(),
            foreign: false,
            server_name: None,
            certificate: None,
            validated: RefCell::new((ListenerClients::Unasked, true)),
        }
    }
}

impl ClientPrincipal {
    /// Describes a client that proved `identity`; `own` is the tenant's trust domain.
    pub(crate) fn with_verified_peer(identity: &Identity, own: Option<&TrustDomain>) -> Self {
        let text = identity.to_string();
        Self {
            principal: Some(text.strip_prefix("spiffe://").unwrap_or(&text).to_string()),
            namespace: identity.namespace.to_string(),
            account: format!("{}/{}", identity.namespace, identity.service_account),
            foreign: own != Some(&identity.trust_domain),
            ..Self::default()
        }
    }

    /// Returns whether the client may stay at a listener that validates clients in this way now. What it
    /// presented in its handshake is validated once more if the validation changed.
    pub(crate) fn is_kept_by(&self, clients: &ListenerClients) -> bool {
        let mut last = self.validated.borrow_mut();
        let is_same = match (&last.0, clients) {
            (ListenerClients::Validated(old), ListenerClients::Validated(new)) => {
                Arc::ptr_eq(old, new)
            }
            (ListenerClients::Unasked, ListenerClients::Unasked) => true,
            _ => false,
        };
        if !is_same {
            let is_kept = match clients {
                ListenerClients::Unasked => true,
                ListenerClients::Validated(verifier) => verifier.keeps(self.certificate.as_ref()),
                ListenerClients::Refused => false,
            };
            *last = (clients.clone(), is_kept);
        }
        last.1
    }

    /// Returns the namespace of the identity that the client proved, if it is one of the tenant.
    pub(crate) fn own_namespace(&self) -> Option<&str> {
        (self.principal.is_some() && !self.foreign).then_some(self.namespace.as_str())
    }

    /// Returns the identity with its scheme; empty if no identity was proved.
    pub(crate) fn spiffe_id(&self) -> String {
        self.principal
            .as_ref()
            .map_or_else(String::new, |principal| format!("spiffe://{principal}"))
    }

    /// Returns the value of `x-forwarded-client-cert`; `None` if the client proved nothing.
    pub(crate) fn forwarded_certificate(&self) -> Option<String> {
        match &self.principal {
            Some(_) => Some(format!("URI={}", self.spiffe_id())),
            None => self.certificate.as_ref().map(|it| it.forwarded.clone()),
        }
    }

    /// True if the tenant still federates with the client's trust domain.
    pub(crate) fn is_federated(&self, tenant: &TenantView) -> bool {
        let domain = self
            .principal
            .as_deref()
            .and_then(|principal| principal.split('/').next());
        domain.is_some_and(|domain| {
            tenant
                .federated
                .iter()
                .any(|known| known.as_str() == domain)
        })
    }

    pub(crate) fn named(mut self, server_name: Option<String>) -> Self {
        self.server_name = server_name;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_of_another_tenant_is_none_of_the_own() {
        let identity: Identity = "spiffe://beta.example/ns/shop/sa/web".parse().unwrap();
        let of = |own: &str| {
            let own: TrustDomain = own.parse().unwrap();
            let principal = ClientPrincipal::with_verified_peer(&identity, Some(&own));
            principal.own_namespace().map(str::to_owned)
        };
        assert_eq!(of("beta.example").as_deref(), Some("shop"));
        assert_eq!(of("alpha.example"), None);
        assert_eq!(ClientPrincipal::default().own_namespace(), None);
    }
}
