//! The data planes' side of observations: each data plane keeps one stream, on which it receives
//! orders and sends answers. Answers are passed on unread. Start at [`ObservationService`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use canal_access::AuthenticatedClient;
use canal_model::principal::Principal;
use canal_wire::OBSERVE_DATA_BYTES_MAX;
use canal_wire::observe::observation_server::{Observation, ObservationServer};
use canal_wire::observe::{ObserveAnswer, ObserveOrder, Subject};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{ORDERS_MAX, ObservationContext, OrderSender};

/// Time within which a data plane must state what it serves.
/// A data plane sends it at once, so that only a broken one needs longer. Nobody measured this
/// value.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of one answer: its data and the fields around it.
/// The 8 KiB suffice for a reason and some numbers.
const ANSWER_BYTES_MAX: usize = OBSERVE_DATA_BYTES_MAX + (8 << 10);

/// The service on which data planes serve observations.
pub struct ObservationService {
    shared: Arc<ObservationContext>,
}

impl ObservationService {
    /// Returns the service with the limit of its messages.
    pub fn server(shared: &Arc<ObservationContext>) -> ObservationServer<Self> {
        ObservationServer::new(Self {
            shared: shared.clone(),
        })
        .max_decoding_message_size(ANSWER_BYTES_MAX)
    }
}

#[tonic::async_trait]
impl Observation for ObservationService {
    type ServeStream = ReceiverStream<Result<ObserveOrder, Status>>;

    async fn serve(
        &self,
        request: Request<Streaming<ObserveAnswer>>,
    ) -> Result<Response<Self::ServeStream>, Status> {
        let caller = AuthenticatedClient::of(&request)?;
        if matches!(caller.principal, Principal::Operator { .. }) {
            self.shared.metrics.refuse("observe_operator");
            return Err(Status::permission_denied(
                "an operator cannot be observed; fix: use a data plane's token",
            ));
        }
        let (orders, receiver) = mpsc::channel(ORDERS_MAX);
        tokio::spawn(run(
            self.shared.clone(),
            caller,
            request.into_inner(),
            orders,
        ));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

/// Reads answers until the stream ends. The data plane sees that end when the queue of its orders
/// is dropped.
async fn run(
    shared: Arc<ObservationContext>,
    caller: AuthenticatedClient,
    mut answers: Streaming<ObserveAnswer>,
    orders: OrderSender,
) {
    // The first message names what the data plane serves. A data plane that sends none gets no
    // orders.
    let Ok(Ok(Some(hello))) = tokio::time::timeout(HELLO_TIMEOUT, answers.message()).await else {
        return;
    };
    let subjects: BTreeSet<Subject> = hello.subjects().collect();
    let link = shared
        .registry
        .open_link(&caller.principal, subjects, orders);
    let mut principals = shared.clients.principals();
    loop {
        tokio::select! {
            () = shared.stopping.cancelled() => return,
            () = link.superseded.cancelled() => return,
            changed = principals.changed() => {
                if changed.is_err() || !shared.clients.is_current(&caller) {
                    return;
                }
            }
            answer = answers.message() => match answer {
                Ok(Some(answer)) => shared.registry.take_answer(&link.principal, link.number, answer),
                Ok(None) | Err(_) => return,
            },
        }
    }
}
