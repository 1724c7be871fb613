//! The controller's operators' API (`canal.api.v1.Admin`): connect with the world's (or the given) root CA and token, call, and turn
//! what gRPC says into a failure with its mend. The connection is made inside the controller's network namespace where there is a world.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use canal_wire::api::admin_client::AdminClient;
use canal_wire::{CONTROLLER_NAME, MESSAGE_BYTES_MAX};
use clap::Args;
use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};

use crate::exit::{Exit, Failure, Outcome};
use crate::realm::{self, Realm};

/// A connection must be up in this time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A call must end in this time: the largest apply compiles for a few seconds.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Which mesh a verb talks to. Without any of these: the only world that is up.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct MeshArgs {
    /// World whose controller to talk to [default: the only one that is up]
    #[arg(long, env = "CANAL_WORLD", value_name = "NAME")]
    pub(crate) world: Option<String>,
    /// Controller outside a world, e.g. https://192.0.2.10:15012; needs --root-ca and --token-file
    #[arg(long, env = "CANAL_SERVER", value_name = "URL", requires_all = ["root_ca", "token_file"], conflicts_with = "world")]
    pub(crate) server: Option<String>,
    /// PEM file with the root certificate of --server
    #[arg(long, env = "CANAL_ROOT_CA", value_name = "FILE")]
    pub(crate) root_ca: Option<PathBuf>,
    /// File with the bearer token for --server
    #[arg(long, env = "CANAL_TOKEN_FILE", value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
}

/// Everything needed to reach one controller.
#[derive(Debug, Clone)]
struct Controller {
    /// For messages.
    place: String,
    url: String,
    root_ca: PathBuf,
    token: String,
    realm: Option<Arc<Realm>>,
}

/// The client verbs use.
pub(crate) type Admin = AdminClient<InterceptedService<Channel, Bearer>>;

/// Puts the token on every call.
#[derive(Clone)]
pub(crate) struct Bearer(MetadataValue<Ascii>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("authorization", self.0.clone());
        request.set_timeout(CALL_TIMEOUT);
        Ok(request)
    }
}

/// Connects to the controller that `args` name.
pub(crate) async fn connect(args: &MeshArgs) -> Outcome<Admin> {
    let controller = match (&args.server, &args.root_ca, &args.token_file) {
        (Some(url), Some(root_ca), Some(token_file)) => {
            let token = read(token_file)?;
            Controller { place: url.clone(), url: url.clone(), root_ca: root_ca.clone(), token, realm: None }
        }
        _ => of_world(Realm::open(args.world.as_deref())?)?,
    };
    connect_to(controller).await
}

/// Connects to the controller of an open world.
pub(crate) async fn connect_in(realm: Arc<Realm>) -> Outcome<Admin> {
    connect_to(of_world(realm)?).await
}

fn of_world(realm: Arc<Realm>) -> Outcome<Controller> {
    Ok(Controller {
        place: format!("controller of world {}", realm.name()),
        url: format!("https://127.0.0.1:{}", canal_wire::CONTROLLER_PORT),
        root_ca: realm.root_ca(),
        token: realm.operator_token()?,
        realm: Some(realm),
    })
}

fn read(path: &Path) -> Outcome<String> {
    std::fs::read_to_string(path).map_err(|problem| {
        let mend = "is the controller running? `canal world list` and `canal logs controller` tell";
        Failure::new(Exit::Unreachable, path.display().to_string(), problem.to_string(), mend)
    })
}

async fn connect_to(controller: Controller) -> Outcome<Admin> {
    let place = controller.place.clone();
    let wrong = |what: String| Failure::failed(place.clone(), what, "give --server like https://192.0.2.10:15012");
    let token = format!("Bearer {}", controller.token.trim());
    let mut token: MetadataValue<Ascii> = token.parse().map_err(|_| wrong("the token is no header value".to_owned()))?;
    token.set_sensitive(true);
    let tls = ClientTlsConfig::new().domain_name(CONTROLLER_NAME).ca_certificate(Certificate::from_pem(read(&controller.root_ca)?));
    let endpoint = Endpoint::from_shared(controller.url.clone())
        .and_then(|endpoint| endpoint.connect_timeout(CONNECT_TIMEOUT).tls_config(tls))
        .map_err(|problem| wrong(chain(&problem)))?;
    let connected = match controller.realm {
        Some(realm) => endpoint.connect_with_connector(Dialer(realm)).await,
        None => endpoint.connect().await,
    };
    let channel = connected.map_err(|problem| {
        Failure::new(Exit::Unreachable, place, chain(&problem), "is it running? `canal world list` and `canal logs controller` tell")
    })?;
    let client = AdminClient::with_interceptor(channel, Bearer(token));
    Ok(client.max_decoding_message_size(MESSAGE_BYTES_MAX).max_encoding_message_size(MESSAGE_BYTES_MAX))
}

/// Dials loopback inside the controller's namespace.
#[derive(Clone)]
struct Dialer(Arc<Realm>);

impl tonic::codegen::Service<Uri> for Dialer {
    type Response = TokioIo<TcpStream>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let realm = self.0.clone();
        Box::pin(async move {
            let port = canal_wire::CONTROLLER_PORT;
            realm.dial(realm::CONTROLLER, ([127, 0, 0, 1], port).into()).await.map(TokioIo::new)
        })
    }
}

/// What the controller's refusal of a call means here.
pub(crate) fn refused(status: &Status) -> Failure {
    let (exit, mend) = match status.code() {
        Code::Unavailable | Code::DeadlineExceeded => {
            (Exit::Unreachable, "is it running? `canal world list` and `canal logs controller` tell")
        }
        Code::Unauthenticated => (Exit::Failed, "the token is not in the controller's principals file"),
        Code::PermissionDenied => (Exit::Failed, "use an operator's token that may see this tenant"),
        Code::NotFound => (Exit::Missing, "`canal get` and `canal status` list what exists"),
        _ => (Exit::Failed, ""),
    };
    Failure::new(exit, "controller", status.message().to_owned(), mend)
}

/// An error with its causes on one line.
pub(crate) fn chain(problem: &dyn std::error::Error) -> String {
    let mut text = problem.to_string();
    let mut cause = problem.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some libraries repeat the cause in their own text.
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
