//! A client's connection (or tunnel) as the phases know it: whose it is, who is at its other end, what was dialled, and what that is in the
//! newest snapshot. It is made in `greet`; no bytes are moved here.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use canal_wire::hbone::{BAGGAGE, Baggage, FORWARDED, SOURCE, forwarded};
use http::{HeaderMap, HeaderValue};
use smallvec::SmallVec;

use crate::account::{Account, Held};
use crate::destination::{Destination, Resolved};
use crate::fault::Fault;
use crate::permit::ConnectionPermit;
use crate::snapshot::{Party, RequestThrottle, TenantView, admit_all};
use crate::source::Source;
use crate::worker::{Snap, Worker};

/// What is known of a client's connection (or tunnel) for as long as it lives.
pub(crate) struct Session {
    pub(crate) account: Rc<Account>,
    pub(crate) destination: Destination,
    pub(crate) source: Rc<Source>,
    /// The source's pod, for logs.
    pub(crate) pod: String,
    /// Where the client is, as the authenticated hop before us says, else as seen.
    pub(crate) client: SocketAddr,
    /// [`Session::client`]'s address as text, for `x-forwarded-for`.
    pub(crate) client_ip: String,
    /// The source proved its identity.
    pub(crate) secured: bool,
    /// The client itself speaks TLS with the gateway.
    pub(crate) tls: bool,
    /// The source as policies see it.
    pub(crate) who: Who,
    /// Its tenant had policies when it was resolved last.
    policed: Cell<bool>,
    resolved: RefCell<Option<(u64, Rc<Resolved>)>>,
    /// What limits its requests: the destination's throttle, then the tenant's.
    throttles: RefCell<SmallVec<[Arc<RequestThrottle>; 2]>>,
    seat: ConnectionSeat,
}

/// What a session holds of its tenant's share of connections.
pub(crate) enum ConnectionSeat {
    /// A connection that took it at accept.
    Accepted(Rc<ConnectionPermit>),
    /// A tunnel inside such a connection.
    Tunnel { _held: Held },
}

/// Who is at the other end.
pub(crate) struct Caller {
    pub(crate) party: Party,
    /// Where it is, as the authenticated hop before us says, else as seen.
    pub(crate) address: SocketAddr,
    /// It proved its identity.
    pub(crate) secured: bool,
    /// It speaks TLS with the gateway itself.
    pub(crate) tls: bool,
    /// As policies see it.
    pub(crate) who: Who,
}

impl Session {
    /// A tunnel's session; `None` if the tenant has as many as it may.
    pub(crate) fn of_tunnel(worker: &Worker, tenant: &TenantView, destination: Destination, caller: Caller) -> Option<Self> {
        let held = worker.limits.tunnel(&worker.accounts.of(tenant, &worker.limits))?;
        Some(Self::begin(worker, tenant, destination, caller, ConnectionSeat::Tunnel { _held: held }))
    }

    pub(crate) fn begin(worker: &Worker, tenant: &TenantView, destination: Destination, caller: Caller, seat: ConnectionSeat) -> Self {
        let account = worker.accounts.of(tenant, &worker.limits);
        let mut party = caller.party;
        let pod = std::mem::take(&mut party.pod);
        Self {
            account,
            destination,
            source: worker.sources.of(&party),
            pod,
            client: caller.address,
            client_ip: caller.address.ip().to_string(),
            secured: caller.secured,
            tls: caller.tls,
            who: caller.who,
            policed: Cell::new(!tenant.policies.is_empty()),
            resolved: RefCell::new(None),
            throttles: RefCell::default(),
            seat,
        }
    }

    /// Counts a request against what limits requests, to be called once it is resolved.
    #[inline]
    pub(crate) fn throttle(&self, worker: &Worker) -> Result<(), Fault> {
        let throttles = self.throttles.borrow();
        if throttles.is_empty() {
            return Ok(());
        }
        let now = u64::try_from(worker.shared.begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let all = throttles.iter().map(|throttle| &**throttle);
        if admit_all(all, now) { Ok(()) } else { Err(Fault::Throttled) }
    }

    /// A request or relay begins: the connection proved that it is at work.
    #[inline]
    pub(crate) fn establish(&self) {
        if let ConnectionSeat::Accepted(permit) = &self.seat {
            permit.establish();
        }
    }

    /// Its tenant has policies, whoever they are for.
    pub(crate) fn is_policed(&self) -> bool {
        self.policed.get()
    }

    /// What the client itself speaks.
    pub(crate) fn scheme(&self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }

    /// The newest snapshot, and the destination in it. Looked up once per snapshot.
    pub(crate) fn resolve(&self, worker: &Worker) -> Result<(Snap, Rc<Resolved>), Fault> {
        let snapshot = worker.snapshot();
        if let Some((sequence, resolved)) = &*self.resolved.borrow()
            && *sequence == snapshot.sequence
        {
            return Ok((snapshot, resolved.clone()));
        }
        let tenant = snapshot.tenant(self.account.tenant.as_str()).ok_or(Fault::NoService)?;
        if tenant.closed {
            return Err(Fault::TenantClosed);
        }
        let resolved = Rc::new(Resolved::find(&worker.upstreams, tenant, &self.destination).ok_or(Fault::NoService)?);
        self.policed.set(!tenant.policies.is_empty());
        *self.throttles.borrow_mut() = resolved.throttle().into_iter().chain(tenant.throttle.clone()).collect();
        *self.resolved.borrow_mut() = Some((snapshot.sequence, resolved.clone()));
        Ok((snapshot, resolved))
    }

    /// What the destination's node is told of this client, where a tunnel carries its bytes alone.
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
        let principal = self.who.spiffe_id();
        for (name, value) in [(FORWARDED, forwarded(self.client, host)), (BAGGAGE, baggage.encode()), (SOURCE, principal)] {
            if let (Ok(value), false) = (HeaderValue::from_str(&value), value.is_empty()) {
                headers.insert(name, value);
            }
        }
        headers
    }
}

/// Who a client is, for policies. Made once per connection.
#[derive(Debug, Default)]
pub(crate) struct Who {
    /// `trust.domain/ns/x/sa/y`.
    pub(crate) principal: Option<String>,
    pub(crate) namespace: String,
    /// `namespace/service account`.
    pub(crate) account: String,
    /// Of another tenant, with which this one federates.
    pub(crate) foreign: bool,
    /// The server name of TLS that ended here.
    pub(crate) server_name: Option<String>,
}

impl Who {
    /// One who proved an identity; `own` is the tenant's trust domain.
    pub(crate) fn proved(identity: &Identity, own: Option<&TrustDomain>) -> Self {
        let text = identity.to_string();
        Self {
            principal: Some(text.strip_prefix("spiffe://").unwrap_or(&text).to_string()),
            namespace: identity.namespace.to_string(),
            account: format!("{}/{}", identity.namespace, identity.service_account),
            foreign: own != Some(&identity.trust_domain),
            server_name: None,
        }
    }

    /// With its scheme; empty if no identity was proved.
    pub(crate) fn spiffe_id(&self) -> String {
        self.principal.as_ref().map_or_else(String::new, |principal| format!("spiffe://{principal}"))
    }

    /// The tenant still federates with its trust domain.
    pub(crate) fn is_federated(&self, tenant: &TenantView) -> bool {
        let domain = self.principal.as_deref().and_then(|principal| principal.split('/').next());
        domain.is_some_and(|domain| tenant.federated.iter().any(|known| known.as_str() == domain))
    }

    pub(crate) fn named(mut self, server_name: Option<String>) -> Self {
        self.server_name = server_name;
        self
    }
}
