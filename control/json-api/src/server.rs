//! [`JsonApi`]: the HTTP service. It authenticates a request before it reads the body, calls the
//! operators' API as the same operator, and answers with a view. It does not decide what an
//! operator may see or do; the operators' API does. Start at [`JsonApi`]'s `call`.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use canal_wire::api;
use canal_wire::api::admin_server::Admin;
use http::{Extensions, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::metadata::MetadataMap;
use tonic::server::NamedService;
use tonic::service::Interceptor;
use tonic::{Code, Status};

use crate::error_view::{ErrorView, http_status};
use crate::query::{flag, parameters};
use crate::routes::{
    Operation, ReadOperation, ReplicaOperation, RouteRefusal, WriteOperation, decide_operation,
};
use crate::v1::{
    ApplyBody, DeleteBody, DiffView, FleetView, ObjectListView, ReplicaOrderView, RevokeBody,
    RotateRootBody, ServicePlacementView, SessionListView, StatusView, TrustDomainListView,
    VersionedView, WriteResultView,
};

/// Bytes of object texts that one response converts to JSON, at most. Conversion costs the
/// controller about ten times as much as sending.
/// It equals the bytes of changes in one answer (`CHANGES_BYTES_MAX`). Nobody measured the value
/// itself.
pub const OBJECT_TEXT_BYTES_MAX: usize = 4 << 20;

/// Limits of one request and its response.
#[derive(Debug, Clone, Copy)]
pub struct JsonApiLimits {
    /// Largest body of a request.
    pub request_bytes: usize,
    /// Largest body of a response.
    pub response_bytes: usize,
}

/// A refusal that the operators' API itself does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JsonRefusal {
    /// There is no such path.
    Path,
    /// The path does not exist for this method.
    Method,
    /// The body or a parameter is not what the operation takes.
    Form,
    /// The request is larger than may be read.
    RequestBytes,
    /// The response is larger than may be sent.
    ResponseBytes,
}

impl JsonRefusal {
    /// Returns the value of the counter's label `reason`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Path => "json_path",
            Self::Method => "json_method",
            Self::Form => "json_form",
            Self::RequestBytes => "json_request_bytes",
            Self::ResponseBytes => "json_response_bytes",
        }
    }
}

/// Counts a refusal.
type RefusalFn = Arc<dyn Fn(JsonRefusal) + Send + Sync>;

/// The HTTP/JSON service over an implementation of the operators' API.
pub struct JsonApi<A, F> {
    admin: Arc<A>,
    authenticate: F,
    limits: JsonApiLimits,
    on_refusal: RefusalFn,
}

impl<A, F: Clone> Clone for JsonApi<A, F> {
    fn clone(&self) -> Self {
        Self {
            admin: self.admin.clone(),
            authenticate: self.authenticate.clone(),
            limits: self.limits,
            on_refusal: self.on_refusal.clone(),
        }
    }
}

impl<A: Admin, F: Interceptor> JsonApi<A, F> {
    /// Creates the service. `authenticate` is the interceptor of the gRPC service; `on_refusal`
    /// counts.
    pub fn new(
        admin: Arc<A>,
        authenticate: F,
        limits: JsonApiLimits,
        on_refusal: impl Fn(JsonRefusal) + Send + Sync + 'static,
    ) -> Self {
        Self {
            admin,
            authenticate,
            limits,
            on_refusal: Arc::new(on_refusal),
        }
    }
}

impl<A, F> NamedService for JsonApi<A, F> {
    const NAME: &'static str = "api";
}

impl<A, F> Service<Request<Body>> for JsonApi<A, F>
where
    A: Admin,
    F: Interceptor + Clone + Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let metadata = MetadataMap::from_headers(parts.headers);
        let authenticated =
            self.authenticate
                .call(tonic::Request::from_parts(metadata, parts.extensions, ()));
        let method = parts.method;
        let uri = parts.uri;
        let admin = self.admin.clone();
        let limits = self.limits;
        let on_refusal = self.on_refusal.clone();
        Box::pin(async move {
            let mut of_request = Extensions::new();
            let outcome = match authenticated {
                Ok(request) => {
                    let (metadata, extensions, ()) = request.into_parts();
                    of_request = extensions.clone();
                    let operator = RequestContext {
                        metadata,
                        extensions,
                        limits,
                    };
                    match decide_operation(&method, uri.path()) {
                        Ok(operation) => {
                            operator
                                .answer(&*admin, operation, uri.query().unwrap_or_default(), body)
                                .await
                        }
                        Err(refusal) => Err(refusal.into()),
                    }
                }
                Err(status) => Err(status.into()),
            };
            let mut response = outcome.unwrap_or_else(|error| {
                if let Some(refusal) = error.refusal {
                    on_refusal(refusal);
                }
                error.response()
            });
            // The layer around this service counts the answer for the client that the interceptor put
            // there.
            response.extensions_mut().extend(of_request);
            Ok(response)
        })
    }
}

/// A request that is answered with an error.
struct RequestError {
    status: Status,
    http_status: StatusCode,
    /// Set if the API did not see the request, so that the refusal is counted here.
    refusal: Option<JsonRefusal>,
    /// Method for which the path exists.
    allow: Option<&'static str>,
}

impl From<Status> for RequestError {
    fn from(status: Status) -> Self {
        Self {
            http_status: http_status(status.code()),
            status,
            refusal: None,
            allow: None,
        }
    }
}

impl From<RouteRefusal> for RequestError {
    fn from(refusal: RouteRefusal) -> Self {
        match refusal {
            RouteRefusal::Path => {
                let status = Status::not_found(
                    "the API has no such path; fix: see docs/operations/json-api.md",
                );
                Self {
                    refusal: Some(JsonRefusal::Path),
                    ..status.into()
                }
            }
            RouteRefusal::Method(only) => {
                let status = Status::unimplemented(format!(
                    "this path accepts only {only}; fix: send {only}"
                ));
                let http_status = StatusCode::METHOD_NOT_ALLOWED;
                Self {
                    refusal: Some(JsonRefusal::Method),
                    http_status,
                    allow: Some(only),
                    ..status.into()
                }
            }
        }
    }
}

impl RequestError {
    fn form(status: Status) -> Self {
        Self {
            refusal: Some(JsonRefusal::Form),
            ..status.into()
        }
    }

    fn response(&self) -> Response<Body> {
        let view = VersionedView::new(ErrorView::from(&self.status));
        // An error view contains only texts, which always have a JSON form.
        let mut response = json_response(
            self.http_status,
            serde_json::to_vec(&view).unwrap_or_default(),
        );
        if self.status.code() == Code::Unauthenticated {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(only) = self.allow {
            response
                .headers_mut()
                .insert(header::ALLOW, HeaderValue::from_static(only));
        }
        response
    }
}

fn json_response(status: StatusCode, mut body: Vec<u8>) -> Response<Body> {
    body.push(b'\n');
    let mut response = Response::new(Body::new(Full::new(Bytes::from(body))));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    // What an operator sees belongs in no cache, and a browser is not to guess another type.
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    response
}

/// An authenticated request: what a gRPC call of the same operator carries, and the limits.
struct RequestContext {
    metadata: MetadataMap,
    extensions: Extensions,
    limits: JsonApiLimits,
}

impl RequestContext {
    /// Returns the gRPC form of the request.
    fn call<M>(&self, message: M) -> tonic::Request<M> {
        tonic::Request::from_parts(self.metadata.clone(), self.extensions.clone(), message)
    }

    async fn answer<A: Admin>(
        &self,
        admin: &A,
        operation: Operation,
        query: &str,
        body: Body,
    ) -> Result<Response<Body>, RequestError> {
        match operation {
            Operation::Read(read) => self.read(admin, read, query).await,
            Operation::Write(write) => {
                // Its arguments are in the body, so a parameter in the query is a mistake.
                parameters(query, []).map_err(RequestError::form)?;
                self.write(admin, write, body).await
            }
            Operation::Replica(command, name) => self.order_replica(admin, command, &name).await,
        }
    }

    /// Answers a command for a gateway replica.
    async fn order_replica<A: Admin>(
        &self,
        admin: &A,
        command: ReplicaOperation,
        name: &str,
    ) -> Result<Response<Body>, RequestError> {
        let request = self.call(api::ReplicaRequest {
            name: name.to_owned(),
        });
        let answered = match command {
            ReplicaOperation::Drain => admin.drain_replica(request).await,
            ReplicaOperation::Undrain => admin.undrain_replica(request).await,
            ReplicaOperation::Forget => admin.forget_replica(request).await,
        };
        self.view(ReplicaOrderView::new(
            name,
            answered?.get_ref().replica.as_ref(),
        ))
    }

    /// Answers an operation that changes nothing.
    async fn read<A: Admin>(
        &self,
        admin: &A,
        operation: ReadOperation,
        query: &str,
    ) -> Result<Response<Body>, RequestError> {
        match operation {
            ReadOperation::Status => {
                // Every operation refuses parameters that it does not know, so that none is
                // silently ignored.
                parameters(query, []).map_err(RequestError::form)?;
                self.view(StatusView::from(
                    admin
                        .status(self.call(api::StatusRequest {}))
                        .await?
                        .get_ref(),
                ))
            }
            ReadOperation::Objects => {
                let names = ["tenant", "kind", "namespace", "name"];
                let [tenant, kind, namespace, name] =
                    parameters(query, names).map_err(RequestError::form)?;
                let found = admin
                    .get(self.call(api::GetRequest {
                        tenant,
                        kind,
                        namespace,
                        name,
                    }))
                    .await?
                    .into_inner();
                self.objects(found).await
            }
            ReadOperation::Fleet => {
                parameters(query, []).map_err(RequestError::form)?;
                self.view(FleetView::from(
                    admin
                        .fleet(self.call(api::FleetRequest {}))
                        .await?
                        .get_ref(),
                ))
            }
            ReadOperation::Placement(service) => {
                parameters(query, []).map_err(RequestError::form)?;
                let explained = admin
                    .explain_service(self.call(api::ExplainRequest { service }))
                    .await?;
                self.view(ServicePlacementView::from(explained.get_ref()))
            }
            ReadOperation::Sessions => {
                let [tenant, client] =
                    parameters(query, ["tenant", "client"]).map_err(RequestError::form)?;
                let found = admin
                    .find_sessions(self.call(api::SessionsRequest { tenant, client }))
                    .await?;
                self.view(SessionListView::from(found.get_ref()))
            }
            ReadOperation::TrustDomains => {
                let [tenant, certificates] =
                    parameters(query, ["tenant", "certificates"]).map_err(RequestError::form)?;
                let certificates =
                    flag("certificates", &certificates).map_err(RequestError::form)?;
                self.view(TrustDomainListView::from(
                    admin
                        .trust(self.call(api::TrustRequest {
                            tenant,
                            certificates,
                        }))
                        .await?
                        .get_ref(),
                ))
            }
        }
    }

    /// Answers an operation whose arguments are in the body.
    async fn write<A: Admin>(
        &self,
        admin: &A,
        operation: WriteOperation,
        body: Body,
    ) -> Result<Response<Body>, RequestError> {
        match operation {
            WriteOperation::Apply => {
                let body: ApplyBody = self.body(body).await?;
                let dry_run = body.dry_run;
                let applied = admin.apply(self.call(body.into())).await?;
                self.view(WriteResultView::of_apply(applied.get_ref(), dry_run))
            }
            WriteOperation::Diff => {
                let body: ApplyBody = self.body(body).await?;
                self.view(DiffView::from(
                    admin.diff(self.call(body.into())).await?.get_ref(),
                ))
            }
            WriteOperation::Delete => {
                let body: DeleteBody = self.body(body).await?;
                self.view(WriteResultView::from(
                    admin.delete(self.call(body.into())).await?.get_ref(),
                ))
            }
            WriteOperation::RotateRoot => {
                let body: RotateRootBody = self.body(body).await?;
                self.view(TrustDomainListView::from(
                    admin.rotate_root(self.call(body.into())).await?.get_ref(),
                ))
            }
            WriteOperation::Revoke => {
                let body: RevokeBody = self.body(body).await?;
                self.view(TrustDomainListView::from(
                    admin.revoke(self.call(body.into())).await?.get_ref(),
                ))
            }
            WriteOperation::Restore => {
                // A restore names an identity as a revocation does, so both have one body.
                let body: RevokeBody = self.body(body).await?;
                self.view(TrustDomainListView::from(
                    admin.restore(self.call(body.into())).await?.get_ref(),
                ))
            }
        }
    }

    /// Reads and parses the body of a request.
    async fn body<T: DeserializeOwned>(&self, body: Body) -> Result<T, RequestError> {
        let limit = self.limits.request_bytes;
        let bytes = match Limited::new(body, limit).collect().await {
            Ok(collected) => collected.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => {
                let status = Status::resource_exhausted(format!(
                    "the body has more than {limit} bytes; fix: send less at a time"
                ));
                let http_status = StatusCode::PAYLOAD_TOO_LARGE;
                return Err(RequestError {
                    refusal: Some(JsonRefusal::RequestBytes),
                    http_status,
                    ..status.into()
                });
            }
            Err(error) => {
                return Err(RequestError::form(Status::invalid_argument(format!(
                    "the body cannot be read: {error}; fix: send the request again"
                ))));
            }
        };
        let form = |error| {
            RequestError::form(Status::invalid_argument(format!(
                "the body is not valid for this path: {error}; fix: send what docs/operations/json-api.md shows"
            )))
        };
        serde_json::from_slice(&bytes).map_err(form)
    }

    /// Converts objects on a thread that may block, because parsing their texts takes time.
    async fn objects(&self, found: api::GetResponse) -> Result<Response<Body>, RequestError> {
        let bytes: usize = found.objects.iter().map(|object| object.yaml.len()).sum();
        if bytes > OBJECT_TEXT_BYTES_MAX {
            return Err(too_large(format!(
                "the objects have {bytes} bytes, more than {OBJECT_TEXT_BYTES_MAX}"
            )));
        }
        let converted = tokio::task::spawn_blocking(move || ObjectListView::from(&found)).await;
        self.view(converted.map_err(|_| {
            Status::internal("the objects could not be converted, which is a bug in the controller")
        })?)
    }

    fn view(&self, view: impl Serialize) -> Result<Response<Body>, RequestError> {
        let failed = |error| {
            Status::internal(format!(
                "the response has no JSON form, which is a bug in the controller: {error}"
            ))
        };
        let body = serde_json::to_vec(&VersionedView::new(view)).map_err(failed)?;
        if body.len() > self.limits.response_bytes {
            return Err(too_large(format!(
                "the response has more than {} bytes",
                self.limits.response_bytes
            )));
        }
        Ok(json_response(StatusCode::OK, body))
    }
}

fn too_large(problem: String) -> RequestError {
    let status = Status::out_of_range(format!(
        "{problem}; fix: request less, e.g. one kind or one namespace"
    ));
    RequestError {
        refusal: Some(JsonRefusal::ResponseBytes),
        ..status.into()
    }
}
