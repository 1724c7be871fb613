//! Bounds the bytes of answers that a tenant's operators request and do not read: a connection has
//! many streams, and each answer can have all objects of the tenant. It does not know what the
//! answers are. Start at [`UnreadAnswers`].

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use canal_controller_metrics::ControllerMetrics;
use canal_model::ids::TenantName;
use canal_runtime::ShareHolder;
use tonic::body::Body;
use tonic::codegen::{Body as HttpBody, BoxFuture, Service, http};
use tonic::server::NamedService;
use tonic::service::Interceptor;
use tonic::{Request, Status};

use crate::authentication::AuthenticatedClient;
use crate::shares::holder_of;

/// Bytes of answers that the operators of one tenant may leave unread before further requests are
/// refused. A single answer may have more.
/// It is four times the default share of configuration, so that a few operators may list all objects
/// at the same time. Nobody measured this value.
pub const UNREAD_ANSWER_BYTES_MAX: usize = 32 << 20;

/// The bytes of unread answers of each tenant's operators. Clones share them. The provider's operators
/// have no limit.
#[derive(Clone)]
pub struct UnreadAnswers {
    bytes: Arc<Mutex<BTreeMap<TenantName, usize>>>,
    metrics: Arc<ControllerMetrics>,
}

impl UnreadAnswers {
    /// Creates the count, in which nothing is unread.
    pub fn new(metrics: Arc<ControllerMetrics>) -> Self {
        Self {
            bytes: Arc::default(),
            metrics,
        }
    }

    /// Returns an interceptor that refuses the requests of tenants with too many unread answers, after
    /// `authenticate` let them through.
    pub fn interceptor<I: Interceptor + Clone>(
        &self,
        mut authenticate: I,
    ) -> impl Interceptor + Clone + use<I> {
        let answers = self.clone();
        move |request: Request<()>| {
            let request = authenticate.call(request)?;
            let tenant = tenant_of(request.extensions().get());
            tenant.map_or(Ok(()), |tenant| answers.check(&tenant))?;
            Ok(request)
        }
    }

    /// Returns a service whose answers are counted until they are read. The client is that of the
    /// request, or one that the inner service adds to the extensions of its answer.
    pub fn counted<S>(&self, inner: S) -> CountedAnswers<S> {
        CountedAnswers {
            inner,
            answers: self.clone(),
        }
    }

    fn check(&self, tenant: &TenantName) -> Result<(), Status> {
        if self.bytes().get(tenant).copied().unwrap_or_default() <= UNREAD_ANSWER_BYTES_MAX {
            return Ok(());
        }
        self.metrics.refuse("unread_answers");
        Err(Status::resource_exhausted(format!(
            "the operators of tenant {tenant} have more than {UNREAD_ANSWER_BYTES_MAX} bytes of answers that they do not read; fix: read them, or close their connections"
        )))
    }

    fn bytes(&self) -> MutexGuard<'_, BTreeMap<TenantName, usize>> {
        // No code panics between two writes to the map.
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn tenant_of(client: Option<&AuthenticatedClient>) -> Option<TenantName> {
    match holder_of(&client?.principal) {
        ShareHolder::Tenant(tenant) => Some(tenant),
        _ => None,
    }
}

/// A service whose answers are counted.
#[derive(Clone)]
pub struct CountedAnswers<S> {
    inner: S,
    answers: UnreadAnswers,
}

impl<S: NamedService> NamedService for CountedAnswers<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for CountedAnswers<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Self::Response, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let of_request = tenant_of(request.extensions().get());
        let answered = self.inner.call(request);
        let answers = self.answers.clone();
        Box::pin(async move {
            let response = answered.await?;
            let tenant = of_request.or_else(|| tenant_of(response.extensions().get()));
            let Some(tenant) = tenant else {
                return Ok(response);
            };
            Ok(response.map(|inner| {
                Body::new(UnreadBody {
                    inner,
                    counted_bytes: 0,
                    tenant,
                    answers,
                })
            }))
        })
    }
}

/// The body of an answer. It counts what the server took of it last: the server takes more only when
/// the client has room for it.
struct UnreadBody {
    inner: Body,
    /// Bytes of the body that the tenant's count has.
    counted_bytes: usize,
    tenant: TenantName,
    answers: UnreadAnswers,
}

impl UnreadBody {
    fn hold(&mut self, bytes: usize) {
        let mut all = self.answers.bytes();
        let mut own = match all.entry(self.tenant.clone()) {
            Entry::Occupied(own) => own,
            Entry::Vacant(own) => own.insert_entry(0),
        };
        *own.get_mut() += bytes;
        *own.get_mut() -= self.counted_bytes;
        if *own.get() == 0 {
            own.remove();
        }
        self.counted_bytes = bytes;
    }
}

impl Drop for UnreadBody {
    fn drop(&mut self) {
        self.hold(0);
    }
}

impl HttpBody for UnreadBody {
    type Data = <Body as HttpBody>::Data;
    type Error = <Body as HttpBody>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Self::Data>, Self::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(context);
        if let Poll::Ready(frame) = &polled {
            let frame = frame.as_ref().and_then(|frame| frame.as_ref().ok());
            let data = frame.and_then(http_body::Frame::data_ref);
            self.hold(data.map_or(0, |data| data.len()));
        }
        polled
    }

    /// Returns false after the last frame with data, so that the server keeps the body until the client
    /// has room for its end: it would drop the body, and keep the frame. An empty body ends with the
    /// head, as gRPC's answers with an error must.
    fn is_end_stream(&self) -> bool {
        self.counted_bytes == 0 && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use canal_controller_metrics::GaugeValues;
    use canal_model::principal::Principal;

    use super::*;

    const CHUNK: usize = 20 << 20;

    fn client(tenant: Option<&str>) -> AuthenticatedClient {
        AuthenticatedClient::new(Principal::Operator {
            name: "ann".parse().unwrap(),
            tenant: tenant.map(|tenant| tenant.parse().unwrap()),
        })
    }

    /// Answers each request with [`CHUNK`] bytes. It adds the client to the answer.
    #[derive(Clone)]
    struct LargeAnswers(AuthenticatedClient);

    impl Service<http::Request<Body>> for LargeAnswers {
        type Response = http::Response<Body>;
        type Error = std::convert::Infallible;
        type Future = std::future::Ready<Result<Self::Response, Self::Error>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: http::Request<Body>) -> Self::Future {
            let chunk = tonic::codegen::Bytes::from(vec![0_u8; CHUNK]);
            let body = http_body_util::Full::new(chunk);
            let mut response = http::Response::new(Body::new(body));
            response.extensions_mut().insert(self.0.clone());
            std::future::ready(Ok(response))
        }
    }

    #[tokio::test]
    async fn answers_that_are_not_read_refuse_further_requests_of_the_tenant() {
        let metrics = Arc::new(ControllerMetrics::default());
        let answers = UnreadAnswers::new(metrics.clone());
        let ask = async |tenant: Option<&str>| {
            let client = client(tenant);
            let authenticate = |mut request: Request<()>| {
                request.extensions_mut().insert(client.clone());
                Ok::<_, Status>(request)
            };
            answers.interceptor(authenticate).call(Request::new(()))?;
            let mut service = answers.counted(LargeAnswers(client.clone()));
            let Ok(answer) = service.call(http::Request::new(Body::empty())).await;
            let mut body = answer.into_body();
            // The server takes the first frame, for which the client has no room.
            let mut context = Context::from_waker(std::task::Waker::noop());
            let frame = Pin::new(&mut body).poll_frame(&mut context);
            assert!(matches!(frame, Poll::Ready(Some(Ok(_)))));
            // The provider's answers are not kept.
            assert_eq!(body.is_end_stream(), tenant.is_none());
            Ok::<_, Status>(body)
        };
        let mut first = ask(Some("alpha")).await.unwrap();
        let second = ask(Some("alpha")).await.unwrap();
        // Two answers of 20 MiB exceed UNREAD_ANSWER_BYTES_MAX (32 MiB); one does not.
        let refused = ask(Some("alpha")).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        let text = metrics.render(&GaugeValues::default());
        let line = "canal_controller_refused_total{reason=\"unread_answers\"} 1\n";
        assert!(text.contains(line), "{text}");
        // Others are not refused, and the provider's operators have no limit.
        ask(Some("beta")).await.unwrap();
        for _ in 0..3 {
            ask(None).await.unwrap();
        }
        // The client reads the whole answer.
        let mut context = Context::from_waker(std::task::Waker::noop());
        let end = Pin::new(&mut first).poll_frame(&mut context);
        assert!(matches!(end, Poll::Ready(None)));
        let third = ask(Some("alpha")).await.unwrap();
        let empty = UnreadBody {
            inner: Body::empty(),
            counted_bytes: 0,
            tenant: "alpha".parse().unwrap(),
            answers: answers.clone(),
        };
        assert!(empty.is_end_stream());
        // The client resets the streams.
        drop((first, second, third, empty));
        assert!(answers.bytes().is_empty());
    }
}
