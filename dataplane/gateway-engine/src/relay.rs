//! Relays bytes: TCP ports, ports whose protocol is not HTTP, and upgraded HTTP/1.1 connections.
//!
//! `canal_net::copy` transfers half-closes and resets. This module connects, authorizes, counts and
//! logs; the phases and the retries are in `pipeline`. Start with [`tcp`], [`tunnel`] and
//! [`upgraded`].

use std::pin::pin;
use std::rc::Rc;

use bytes::Bytes;
use canal_gateway_config::{hash_of, jwt};
use canal_gateway_http::proxy_error::{ProxyError, ResponseFlag};
use canal_gateway_io::buffer::Inbox;
use canal_gateway_io::io::Io;
use canal_gateway_limits::tenant_usage::TenantUsage;
use canal_hbone::IncomingConnect;
use canal_model::load_balancing::HashKey;
use canal_net::copy::{self, CopyEnd, CopySide, Meter, Prefixed};
use canal_wire::hbone::{STATUS_DENIED, STATUS_UNAVAILABLE};
use http::HeaderMap;

use crate::authorize::reauthorize::OngoingAuthorization;
use crate::authorize::{
    self, AuthorizationInterrupt, AuthorizationState, DestinationPolicies, ExtAuthzGrant, ext_authz,
};
use crate::balance::{self, TriedEndpoints};
use crate::endpoints::{RequestTarget, SelectedEndpoint};
use crate::finish::ConnectionRecord;
use crate::pipeline::{self, Attempt, ClientTraffic, FailedAttempt, ReplayConditions};
use crate::route::{self, RoutedRequest};
use crate::session::ClientSession;
use crate::upstream::{self, TunnelMetadata};
use crate::worker::Worker;

/// A client whose bytes are relayed: a connection, or a CONNECT that is answered once an endpoint
/// is connected.
enum RelayClient {
    Connection(Io),
    Connect(IncomingConnect),
}

/// A connection whose bytes are not requests, on its way through the phases.
struct RelayedConnection {
    worker: Rc<Worker>,
    session: Rc<ClientSession>,
    record: ConnectionRecord,
    client: Option<RelayClient>,
    /// Bytes that were already read from the client; they are sent first.
    inbox: Option<Inbox>,
    target: RequestTarget,
}

/// Result of a relay. `None` means that the client was gone before its CONNECT was answered.
type RelayEnd = Option<(Result<ResponseFlag, ProxyError>, (u64, u64))>;

/// Relays a client's connection to an endpoint. Bytes that were already read from the client are
/// sent first.
pub(crate) async fn tcp(
    worker: &Rc<Worker>,
    session: &Rc<ClientSession>,
    client: Io,
    inbox: Inbox,
) {
    let client = RelayClient::Connection(client);
    let mut traffic = RelayedConnection::new(worker, session, client, inbox);
    pipeline::serve(&mut traffic).await;
}

/// Relays a CONNECT tunnel to an endpoint. The response to CONNECT shows whether the endpoint could
/// be connected.
pub(crate) async fn tunnel(
    worker: &Rc<Worker>,
    session: &Rc<ClientSession>,
    incoming: IncomingConnect,
    inbox: Inbox,
) {
    let client = RelayClient::Connect(incoming);
    let mut traffic = RelayedConnection::new(worker, session, client, inbox);
    pipeline::serve(&mut traffic).await;
}

impl RelayedConnection {
    fn new(
        worker: &Rc<Worker>,
        session: &Rc<ClientSession>,
        client: RelayClient,
        inbox: Inbox,
    ) -> Self {
        let record = ConnectionRecord::begin(worker, session);
        Self {
            worker: worker.clone(),
            session: session.clone(),
            record,
            client: Some(client),
            inbox: Some(inbox),
            target: None,
        }
    }

    /// Relays until both sides have ended.
    async fn run(
        &mut self,
        client: Io,
        mut io: Io,
        selected: &SelectedEndpoint,
        version: u64,
    ) -> (Result<ResponseFlag, ProxyError>, (u64, u64)) {
        let series = self.record.count_opened(&self.target);
        let meter = Meter::with(series.received, series.sent);
        let prefix = self
            .inbox
            .take()
            .map(|mut inbox| inbox.take_all())
            .unwrap_or_default();
        let mut client = Prefixed {
            prefix,
            leg: client,
        };
        let again = || {
            // The listener or its routes may be gone.
            if !route::is_relayed(&self.worker, &self.session) {
                return Err(AuthorizationInterrupt::Fault(ProxyError::NoRoute));
            }
            OngoingAuthorization::without_request(&self.session, selected)
                .reauthorize_connection(&self.worker)
        };
        let watch = RelayReauthorization {
            account: &self.session.account,
            version,
            again: &again,
        };
        let end = copied(&self.worker, &watch, &mut client, &mut io, &meter).await;
        (end, (meter.a_to_b(), meter.b_to_a()))
    }
}

impl ClientTraffic for RelayedConnection {
    type Done = RelayEnd;
    type End = ();

    fn worker(&self) -> &Worker {
        &self.worker
    }

    fn session(&self) -> &ClientSession {
        &self.session
    }

    fn decode(&mut self) -> Result<(), ProxyError> {
        Ok(())
    }

    fn route(&mut self) -> Result<RoutedRequest, ProxyError> {
        route::connection(&self.worker, &self.session).map_err(|(error, target)| {
            self.target = target;
            error
        })
    }

    /// Bytes that are not requests have no body to buffer.
    async fn filter(&mut self, _routed: &RoutedRequest) -> Result<(), ProxyError> {
        Ok(())
    }

    fn balance(
        &mut self,
        routed: &RoutedRequest,
        tried: &TriedEndpoints,
    ) -> Result<SelectedEndpoint, ProxyError> {
        let (worker, client) = (&self.worker, self.session.client.ip());
        self.target = Some((routed.view.clone(), None));
        let selected = balance::endpoint(
            &routed.view,
            tried,
            Some(client),
            worker.clock.now(),
            || worker.random(),
            // Other keys are parts of HTTP requests.
            |key| (*key == HashKey::SourceIp).then(|| hash_of(self.session.client_ip.as_bytes())),
        )?;
        self.target = Some((routed.view.clone(), Some(selected.at)));
        Ok(selected)
    }

    /// Authorizes by the attributes of the connection.
    async fn authorize(
        &mut self,
        _routed: &RoutedRequest,
        policies: &DestinationPolicies<'_>,
        selected: &SelectedEndpoint,
        _earlier: Option<Box<AuthorizationState>>,
    ) -> Result<Option<Box<AuthorizationState>>, ProxyError> {
        let (worker, session, to) = (&self.worker, &self.session, selected.address);
        let record = &mut self.record.authorization;
        let mut consent = ExtAuthzGrant::default();
        while let authorize::AuthorizationStep::CallAuthorizer(check) =
            authorize::connection(worker, session, policies, to, &consent, Some(&mut *record))?
        {
            // Header mutations by the authorizer do not apply to bytes that are not requests.
            let _ = Box::pin(ext_authz::check(worker, session, &check, |_| {
                ext_authz::connection(session, Some(to))
            }))
            .await?;
            consent = ExtAuthzGrant::To(check);
        }
        Ok(None)
    }

    async fn forward(
        &mut self,
        routed: &RoutedRequest,
        selected: SelectedEndpoint,
        _attempt: Attempt<'_>,
    ) -> Result<RelayEnd, FailedAttempt> {
        let headers = self.session.introduction(routed.resolved.hostname());
        let io = match upstream::connect(
            &self.worker,
            &selected,
            TunnelMetadata {
                tls: routed.tls.as_ref(),
                headers,
            },
        )
        .await
        {
            Ok(io) => io,
            // No byte was sent yet, so another endpoint can be tried.
            Err(error) => {
                let replay = ReplayConditions {
                    is_untouched: true,
                    is_repeatable: false,
                };
                return Err(FailedAttempt {
                    error,
                    endpoint: selected.at,
                    replay,
                    resumable: None,
                });
            }
        };
        // Only a failed connect, which leaves the client here, is followed by another attempt.
        let client = match self.client.take() {
            Some(RelayClient::Connection(client)) => client,
            Some(RelayClient::Connect(incoming)) => match incoming.accept(HeaderMap::new()) {
                Ok(stream) => Io::Tunnel(Box::new(stream)),
                // The client has closed the stream, so no reply can reach it.
                Err(_) => return Ok(None),
            },
            None => return Ok(None),
        };
        Ok(Some(self.run(client, io, &selected, routed.version).await))
    }

    async fn finish(&mut self, _: Option<&RoutedRequest>, ended: Result<RelayEnd, ProxyError>) {
        let counts = &self.worker.counts;
        let (flag, bytes) = match ended {
            // The record reports a connection that was dropped.
            Ok(None) => return,
            Ok(Some((Ok(flag), bytes))) => (flag, bytes),
            Ok(Some((Err(error), bytes))) => {
                counts.refused_connection(error.name());
                self.record.detail = error.detail().to_string();
                (error.flag(), bytes)
            }
            Err(error) => {
                self.record.detail = error.detail().to_string();
                match self.client.take() {
                    Some(RelayClient::Connect(incoming)) => {
                        counts.refused_connect(error.name());
                        let forbidden = matches!(
                            error,
                            ProxyError::Denied(_)
                                | ProxyError::Rejected(_)
                                | ProxyError::ExtAuthzFailed(_)
                        );
                        incoming.refuse(if forbidden {
                            STATUS_DENIED
                        } else {
                            STATUS_UNAVAILABLE
                        });
                    }
                    client => {
                        counts.refused_connection(error.name());
                        if let Some(RelayClient::Connection(mut client)) = client {
                            client.abort();
                        }
                    }
                }
                (error.flag(), (0, 0))
            }
        };
        self.record.end(self.target.take(), flag, bytes);
    }

    /// Endpoints that could not be connected are not tried again.
    fn attempts_max(&self, routed: &RoutedRequest) -> usize {
        pipeline::ATTEMPTS_MAX.min(routed.view.states.len())
    }
}

/// Relays an upgraded connection. Bytes that either side sent after its head are sent first.
/// Returns the bytes from the client and those to it, and the error if a policy change ended the
/// relay.
pub(crate) async fn upgraded(
    worker: &Worker,
    watch: &RelayReauthorization<'_>,
    client: (Io, Bytes),
    up: (Io, Bytes),
) -> ((u64, u64), Option<ProxyError>) {
    let meter = Meter::default();
    let mut client = Prefixed {
        prefix: client.1,
        leg: client.0,
    };
    let mut up = Prefixed {
        prefix: up.1,
        leg: up.0,
    };
    let end = copied(worker, watch, &mut client, &mut up, &meter).await;
    ((meter.a_to_b(), meter.b_to_a()), end.err())
}

/// Describes how a relay is authorized again when its tenant's policies change.
pub(crate) struct RelayReauthorization<'a> {
    pub(crate) account: &'a TenantUsage,
    pub(crate) version: u64,
    pub(crate) again: &'a dyn Fn() -> Result<(), AuthorizationInterrupt>,
}

impl RelayReauthorization<'_> {
    /// Resolves once the policies deny the relay.
    async fn denied(&self, worker: &Worker) -> ProxyError {
        let mut authorized_with = self.version;
        loop {
            // Registered before the version is read, so that a change in between is not missed.
            let mut changed = pin!(self.account.changed.notified());
            changed.as_mut().enable();
            let newest = self.account.policy_version.get();
            if newest != authorized_with {
                authorized_with = newest;
                let work = jwt::VerificationBudget::default();
                while let Err(stop) = (self.again)() {
                    match stop {
                        AuthorizationInterrupt::Fault(fault) => return fault,
                        AuthorizationInterrupt::Verify(todo) => {
                            authorize::verify(worker, self.account, &work, todo).await
                        }
                    }
                }
                continue;
            }
            changed.await;
        }
    }
}

async fn copied<A: copy::Leg, B: copy::Leg>(
    worker: &Worker,
    watch: &RelayReauthorization<'_>,
    a: &mut A,
    b: &mut B,
    meter: &Meter,
) -> Result<ResponseFlag, ProxyError> {
    let end = tokio::select! {
        end = copy::both(&mut *a, &mut *b, meter, Some(worker.shared.config.times.relay)) => return Ok(decide_flag(&end)),
        () = worker.drain.forced() => Ok(ResponseFlag::Overload),
        fault = watch.denied(worker) => Err(fault),
    };
    // The peers could not distinguish an orderly close from the regular end of the stream.
    a.abort();
    b.abort();
    end
}

fn decide_flag(end: &CopyEnd) -> ResponseFlag {
    match end {
        CopyEnd::Complete => ResponseFlag::None,
        CopyEnd::Broken {
            side: CopySide::A, ..
        } => ResponseFlag::DownstreamGone,
        CopyEnd::Broken {
            side: CopySide::B, ..
        } => ResponseFlag::UpstreamClosed,
        CopyEnd::Idle(_) => ResponseFlag::StreamIdle,
    }
}
