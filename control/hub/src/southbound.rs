//! The delta xDS service: authenticates a stream, then pumps a [`Session`] until it ends. One task per stream and at most one response
//! in its channel, so a subscriber that does not read holds up nobody but itself.

use std::sync::Arc;
use std::time::Duration;

use canal_model::principal::Principal;
use canal_wire::discovery::aggregated_discovery_service_server::AggregatedDiscoveryService;
use canal_wire::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::catalog::Catalog;
use crate::metrics;
use crate::session::{Heard, Session};
use crate::shared::{Caller, Shared};
use crate::shares::{StreamNames, holder_of};
use crate::subscribers::OpenStream;

/// A subscriber opens its kinds one message after the other. The first batch waits this long for the rest of them, so that it can be
/// ordered as a whole; a subscriber that wants only some kinds pays it once per stream.
const OPENING: Duration = Duration::from_millis(20);

pub(crate) struct Southbound {
    pub(crate) shared: Arc<Shared>,
}

type Sender = mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>;

#[tonic::async_trait]
impl AggregatedDiscoveryService for Southbound {
    type DeltaAggregatedResourcesStream = ReceiverStream<Result<DeltaDiscoveryResponse, Status>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        let caller = self.shared.caller(&request)?;
        if matches!(caller.principal, Principal::Operator { .. }) {
            self.shared.refuse("subscribe_operator");
            return Err(Status::permission_denied("an operator subscribes to nothing; use a node's or a gateway's token"));
        }
        let stream = self.shared.subscribers.open(&caller.principal).map_err(|e| {
            self.shared.refuse("streams");
            Status::resource_exhausted(e.to_string())
        })?;
        let (sender, receiver) = mpsc::channel(1);
        let session = Session::new(caller.principal.clone(), self.shared.limits.session);
        let pump = Pump {
            shared: self.shared.clone(),
            caller,
            stream,
            session,
            names: StreamNames::default(),
            greeted: false,
            is_store_told: false,
        };
        tokio::spawn(pump.run(request.into_inner(), sender));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

struct Pump {
    shared: Arc<Shared>,
    caller: Caller,
    stream: OpenStream,
    session: Session,
    names: StreamNames,
    /// The subscriber has said who it is.
    greeted: bool,
    /// A response of this stream has named the store.
    is_store_told: bool,
}

impl Pump {
    async fn run(mut self, inbound: Streaming<DeltaDiscoveryRequest>, sender: Sender) {
        tracing::info!(subscriber = %self.caller.principal, "connected");
        let why = match self.follow(inbound, &sender).await {
            Ok(why) => why.to_string(),
            Err(status) => {
                let why = status.message().to_string();
                // A subscriber that does not read is not waited for; it sees the end of the connection.
                let _ = sender.try_send(Err(status));
                why
            }
        };
        tracing::info!(subscriber = %self.caller.principal, why, "disconnected");
    }

    /// Moves messages both ways until one side ends; says why it ended.
    async fn follow(&mut self, mut inbound: Streaming<DeltaDiscoveryRequest>, sender: &Sender) -> Result<&'static str, Status> {
        let mut catalogs = self.shared.catalog.subscribe();
        let mut principals = self.shared.principals.clone();
        let superseded = self.stream.superseded.clone();
        let revoked = self.stream.revoked();
        tokio::pin!(revoked);
        let stopping = self.shared.stopping.clone();
        let mut catalog = catalogs.borrow_and_update().clone();
        let mut pending: Option<DeltaDiscoveryResponse> = None;
        let opening = tokio::time::sleep_until(Instant::now() + OPENING);
        tokio::pin!(opening);
        let mut opened = false;
        loop {
            opened |= self.session.is_fully_subscribed();
            if pending.is_none() && opened {
                pending = self.next_response(&catalog);
                self.stream.looked(self.session.progress());
            }
            tokio::select! {
                biased;
                () = stopping.cancelled() => return Err(Status::unavailable("the controller is stopping; connect again")),
                () = superseded.cancelled() => return Err(Status::aborted("newer streams of the same principal took this one's place")),
                () = &mut revoked => {
                    self.shared.refuse("streams_revoked");
                    let tenant = holder_of(&self.caller.principal);
                    return Err(Status::resource_exhausted(format!("{tenant} has the most streams, and another one needs a place")));
                }
                changed = principals.changed() => {
                    if changed.is_err() || !self.shared.is_current(&self.caller) {
                        self.shared.refuse("revoked");
                        return Err(Status::unauthenticated("the token was revoked"));
                    }
                }
                message = inbound.message() => match message {
                    Ok(Some(request)) => self.hear(request, &catalog)?,
                    Ok(None) => return Ok("the subscriber ended the stream"),
                    Err(_) => return Ok("the connection broke"),
                },
                permit = sender.reserve(), if pending.is_some() => {
                    let (Ok(permit), Some(response)) = (permit, pending.take()) else { return Ok("the connection broke") };
                    self.sent(&response);
                    permit.send(Ok(response));
                }
                changed = catalogs.changed(), if pending.is_none() => {
                    if changed.is_err() {
                        return Err(Status::unavailable("the controller is stopping; connect again"));
                    }
                    catalog = catalogs.borrow_and_update().clone();
                }
                () = &mut opening, if !opened => opened = true,
            }
        }
    }

    /// The session's next response; the first of a stream names the store.
    fn next_response(&mut self, catalog: &Catalog) -> Option<DeltaDiscoveryResponse> {
        let mut response = self.session.next_response(catalog)?;
        if !std::mem::replace(&mut self.is_store_told, true) {
            response.control_plane = Some(canal_wire::southbound::control_plane(self.shared.store.id()));
        }
        Some(response)
    }

    fn hear(&mut self, request: DeltaDiscoveryRequest, catalog: &Catalog) -> Result<(), Status> {
        if let Some(node) = request.node.as_ref().filter(|_| !self.greeted) {
            self.greeted = true;
            self.stream.is_build(&node.user_agent_version);
        }
        let url = request.type_url.clone();
        let heard = self.session.hear(request, catalog).map_err(|e| {
            self.shared.refuse(e.reason());
            Status::resource_exhausted(e.to_string())
        })?;
        for _ in 0..self.stream.holds_names(self.session.name_bytes()) {
            self.shared.refuse("principal_name_bytes");
        }
        self.hold_names()?;
        let metrics = &self.shared.metrics;
        match &heard {
            Heard::Subscription => {}
            Heard::Ack => metrics.count(metrics::ACKS, &[]),
            Heard::Nack { reason } => {
                metrics.count(metrics::NACKS, &[("type", type_name(&url))]);
                tracing::warn!(subscriber = %self.caller.principal, r#type = type_name(&url), reason, "refused a response");
            }
            Heard::Stale => metrics.count(metrics::ANSWERS_STALE, &[]),
            Heard::UnknownType => self.shared.refuse("unknown_type"),
        }
        self.stream.heard(self.session.progress(), self.session.is_waiting(), matches!(heard, Heard::Nack { .. }));
        Ok(())
    }

    /// Puts the names that only this stream knows on its tenant's account.
    fn hold_names(&mut self) -> Result<(), Status> {
        let (limit, bytes) = (&self.shared.tenant_limits.subscription_bytes, self.session.name_bytes() as u64);
        self.names.grow_to(bytes, limit, &holder_of(&self.caller.principal)).map_err(|_| {
            self.shared.refuse("subscription_bytes");
            Status::resource_exhausted(
                "the tenant's data planes brought as many bytes of names as its share of subscriptionBytes allows; fix: subscribe by \
                 wildcard, or have the provider set spec.shares.subscriptionBytes of the Tenant",
            )
        })
    }

    fn sent(&self, response: &DeltaDiscoveryResponse) {
        let bytes = response.encoded_len();
        let kind = type_name(&response.type_url);
        self.shared.metrics.count(metrics::RESPONSES, &[("type", kind)]);
        #[allow(clippy::cast_precision_loss, reason = "a response is far below 2^52 bytes")]
        self.shared.metrics.add(metrics::BYTES, &[("type", kind)], bytes as f64);
        self.stream.sent(self.session.progress(), bytes);
    }
}

/// The last part of a known type URL; whatever else a subscriber sends must not become a label.
fn type_name(url: &str) -> &'static str {
    match canal_wire::southbound::kind_of(url) {
        Ok(kind) => crate::kind_name(kind),
        Err(_) => "unknown",
    }
}
