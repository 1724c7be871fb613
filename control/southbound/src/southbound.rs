//! The delta xDS service: authenticates a stream, then runs a [`SubscriberStream`] until it ends.
//! Each stream has its own task, and at most one response in its channel. A subscriber that does
//! not read therefore delays only itself. Start at [`StreamTask::follow`].

use std::sync::Arc;
use std::time::Duration;

use canal_access::shares::StreamNames;
use canal_access::{AuthenticatedClient, Authenticator, holder_of};
use canal_catalog::Catalog;
use canal_controller_metrics::{self as metrics, ControllerMetrics};
use canal_model::ids::StoreId;
use canal_model::principal::Principal;
use canal_runtime::TenantLimit;
use canal_wire::discovery::aggregated_discovery_service_server::AggregatedDiscoveryService;
use canal_wire::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::subscriber_stream::{SessionLimits, SubscriberMessage, SubscriberStream};
use crate::subscribers::{OpenStream, Subscribers};

/// Time that the first batch waits for further subscriptions. A subscriber subscribes to its kinds
/// one message after the other, and the batch must be ordered as a whole. A subscriber that wants
/// only some kinds waits this long once per stream.
const OPENING: Duration = Duration::from_millis(20);

/// Handles of the controller that the service uses.
pub struct DiscoveryContext {
    pub catalog: watch::Receiver<Arc<Catalog>>,
    pub clients: Authenticator,
    pub subscribers: Arc<Subscribers>,
    pub metrics: Arc<ControllerMetrics>,
    /// Limit on the bytes that streams are charged for names that the catalog does not have.
    pub subscription_bytes: TenantLimit,
    /// Limits that each stream has for itself.
    pub session: SessionLimits,
    /// Store whose numbers the resources contain.
    pub store: StoreId,
    /// Canceled when the controller is to stop.
    pub stopping: CancellationToken,
}

/// The service that data planes subscribe to.
pub struct DiscoveryService {
    pub shared: Arc<DiscoveryContext>,
}

type Sender = mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>;

#[tonic::async_trait]
impl AggregatedDiscoveryService for DiscoveryService {
    type DeltaAggregatedResourcesStream = ReceiverStream<Result<DeltaDiscoveryResponse, Status>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        let caller = AuthenticatedClient::of(&request)?;
        if matches!(caller.principal, Principal::Operator { .. }) {
            self.shared.metrics.refuse("subscribe_operator");
            return Err(Status::permission_denied(
                "an operator subscribes to nothing; fix: use a node's or a gateway's token",
            ));
        }
        let stream = self
            .shared
            .subscribers
            .open(&caller.principal)
            .map_err(|e| {
                self.shared.metrics.refuse("streams");
                Status::resource_exhausted(e.to_string())
            })?;
        // One response at a time: the next is formed when this one has been taken.
        let (sender, receiver) = mpsc::channel(1);
        let session = SubscriberStream::new(caller.principal.clone(), self.shared.session);
        let pump = StreamTask {
            shared: self.shared.clone(),
            caller,
            stream,
            session,
            names: StreamNames::default(),
            node_info_received: false,
            has_named_store: false,
        };
        tokio::spawn(pump.run(request.into_inner(), sender));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

/// The task of one subscriber stream.
struct StreamTask {
    shared: Arc<DiscoveryContext>,
    caller: AuthenticatedClient,
    stream: OpenStream,
    session: SubscriberStream,
    names: StreamNames,
    /// True once the subscriber has sent its node information.
    node_info_received: bool,
    /// True once a response of this stream has named the store.
    has_named_store: bool,
}

impl StreamTask {
    /// Serves the stream and logs why it ended.
    async fn run(mut self, inbound: Streaming<DeltaDiscoveryRequest>, sender: Sender) {
        tracing::info!(subscriber = %self.caller.principal, "southbound: a subscriber connected");
        let why = match self.follow(inbound, &sender).await {
            Ok(why) => why.to_string(),
            Err(status) => {
                let why = status.message().to_string();
                // The task does not wait for a subscriber that does not read; it sees the end of
                // the connection.
                let _ = sender.try_send(Err(status));
                why
            }
        };
        tracing::info!(subscriber = %self.caller.principal, why, "southbound: a subscriber disconnected");
    }

    /// Moves messages in both directions until one side ends; returns the reason.
    async fn follow(
        &mut self,
        mut inbound: Streaming<DeltaDiscoveryRequest>,
        sender: &Sender,
    ) -> Result<&'static str, Status> {
        let mut catalogs = self.shared.catalog.clone();
        let mut principals = self.shared.clients.principals();
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
            // At most one response waits: newer catalogs are compared only when it has been sent.
            if pending.is_none() && opened {
                pending = self.next_response(&catalog);
                self.stream.record_progress(self.session.progress());
            }
            tokio::select! {
                // The reasons to end the stream come before its messages.
                biased;
                () = stopping.cancelled() => return Err(Status::unavailable("the controller is stopping; fix: connect again")),
                () = superseded.cancelled() => return Err(Status::aborted("newer streams of the same principal replaced this one")),
                () = &mut revoked => {
                    self.shared.metrics.refuse("streams_revoked");
                    let tenant = holder_of(&self.caller.principal);
                    return Err(Status::resource_exhausted(format!("{tenant} has the most streams, and the limit of streams is reached; fix: stop data planes of the tenant that are not needed")));
                }
                changed = principals.changed() => {
                    if changed.is_err() {
                        return Err(Status::unavailable("the controller is stopping; fix: connect again"));
                    }
                    if !self.shared.clients.is_current(&self.caller) {
                        self.shared.metrics.refuse("revoked");
                        return Err(Status::unauthenticated("the token was revoked; fix: request another one from the provider"));
                    }
                }
                message = inbound.message() => match message {
                    Ok(Some(request)) => {
                        self.handle_message(request, &catalog)?;
                        // A list of held resources may take several requests.
                        if !opened {
                            opening.as_mut().reset(Instant::now() + OPENING);
                        }
                    }
                    Ok(None) => return Ok("the subscriber ended the stream"),
                    // The subscriber connects again, whatever the transport's error was.
                    Err(_) => return Ok("the connection broke"),
                },
                permit = sender.reserve(), if pending.is_some() => {
                    // A response is there, by the branch's condition, so the receiver must have
                    // gone.
                    let (Ok(permit), Some(response)) = (permit, pending.take()) else { return Ok("the connection broke") };
                    self.sent(&response);
                    permit.send(Ok(response));
                }
                changed = catalogs.changed(), if pending.is_none() => {
                    if changed.is_err() {
                        return Err(Status::unavailable("the controller is stopping; fix: connect again"));
                    }
                    catalog = catalogs.borrow_and_update().clone();
                }
                // A subscriber that wants only some kinds never subscribes to all of them.
                () = &mut opening, if !opened => opened = true,
            }
        }
    }

    /// Returns the next response; the first of a stream names the store.
    fn next_response(&mut self, catalog: &Catalog) -> Option<DeltaDiscoveryResponse> {
        let response = self.session.next_response(catalog);
        for _ in 0..self.session.take_behind_log() {
            self.shared.metrics.count(metrics::BEHIND_LOG, &[]);
        }
        let mut response = response?;
        if !std::mem::replace(&mut self.has_named_store, true) {
            response.control_plane = Some(canal_wire::southbound::control_plane(self.shared.store));
        }
        Some(response)
    }

    /// Applies a message of the subscriber, and counts it by its kind.
    fn handle_message(
        &mut self,
        request: DeltaDiscoveryRequest,
        catalog: &Catalog,
    ) -> Result<(), Status> {
        // The first request of a stream describes the data plane; later ones may repeat it.
        if let Some(node) = request.node.as_ref().filter(|_| !self.node_info_received) {
            self.node_info_received = true;
            self.stream.record_build(&node.user_agent_version);
        }
        let url = request.type_url.clone();
        let message = self.session.handle_request(request, catalog).map_err(|e| {
            self.shared.metrics.refuse(e.reason());
            Status::resource_exhausted(e.to_string())
        })?;
        // Names that are listed as held never refuse the request, but those outside the scope are
        // counted.
        let out_of_scope = self.session.take_names_out_of_scope();
        if out_of_scope > 0 {
            #[allow(
                clippy::cast_precision_loss,
                reason = "a request has far fewer than 2^52 names"
            )]
            self.shared.metrics.add(
                metrics::REFUSED,
                &[("reason", "names_out_of_scope")],
                out_of_scope as f64,
            );
        }
        // Each count is an older stream of the principal that was ended because of its names.
        for _ in 0..self.stream.holds_names(self.session.name_bytes()) {
            self.shared.metrics.refuse("principal_name_bytes");
        }
        self.hold_names()?;
        let metrics = &self.shared.metrics;
        match &message {
            SubscriberMessage::Subscription => {}
            SubscriberMessage::Ack => metrics.count(metrics::ACKS, &[]),
            SubscriberMessage::Nack { reason } => {
                metrics.count(metrics::NACKS, &[("type", type_name(&url))]);
                tracing::warn!(subscriber = %self.caller.principal, r#type = type_name(&url), reason, "southbound: a subscriber refused a response; it keeps its previous resources");
            }
            SubscriberMessage::Stale => metrics.count(metrics::ANSWERS_STALE, &[]),
            SubscriberMessage::UnknownType => self.shared.metrics.refuse("unknown_type"),
        }
        self.stream.record_message(
            self.session.progress(),
            self.session.is_waiting(),
            matches!(message, SubscriberMessage::Nack { .. }),
        );
        Ok(())
    }

    /// Counts the bytes that this stream is charged for names against its tenant's share.
    fn hold_names(&mut self) -> Result<(), Status> {
        let (limit, bytes) = (
            &self.shared.subscription_bytes,
            self.session.name_bytes() as u64,
        );
        self.names.set(bytes, limit, &holder_of(&self.caller.principal)).map_err(|_| {
            self.shared.metrics.refuse("subscription_bytes");
            Status::resource_exhausted(
                "the tenant's data planes are charged as many bytes of names as its share of subscriptionBytes allows; fix: subscribe by \
                 wildcard and list no resources as held, or have the provider set spec.shares.subscriptionBytes of the Tenant",
            )
        })
    }

    /// Counts a response, or a part of one, that is handed to the connection.
    fn sent(&self, response: &DeltaDiscoveryResponse) {
        let bytes = response.encoded_len();
        let kind = type_name(&response.type_url);
        // The parts of a response count as one.
        if !response.more_parts {
            self.shared
                .metrics
                .count(metrics::RESPONSES, &[("type", kind)]);
        }
        #[allow(
            clippy::cast_precision_loss,
            reason = "a response is far below 2^52 bytes"
        )]
        self.shared
            .metrics
            .add(metrics::BYTES, &[("type", kind)], bytes as f64);
        let progress = self.session.progress();
        self.stream.sent(progress, bytes, !response.more_parts);
    }
}

/// Returns the label of a known type URL. Any other text that a subscriber sends must not become a
/// label value.
fn type_name(url: &str) -> &'static str {
    match canal_wire::southbound::kind_of(url) {
        Ok(kind) => kind.label(),
        Err(_) => "unknown",
    }
}
