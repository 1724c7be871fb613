//! The controller's API for operators (`canal.api.v1.Admin`). It connects with the world's (or the
//! given) root CA and token, and turns gRPC errors into [`VerbError`] with a fix. In a world the
//! connection is made inside the controller's network namespace. Start at [`connect`].

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

use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::running_world::{self, RunningWorld};

/// Timeout for a connection to the controller.
/// Nobody measured this value; it allows for two lost SYNs, which Linux repeats after 1 s and 3 s.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for a call: the largest apply compiles for a few seconds.
/// Nobody measured this value; it has to exceed that by far, because a busy controller lets tenants
/// wait in turn.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// The mesh of a verb. Without any of these options it is the only world that is up.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct MeshArgs {
    /// World of the controller to use [default: the only one that is up]
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

/// Everything that is needed to reach one controller.
#[derive(Debug, Clone)]
struct ControllerAddress {
    /// Name of the controller in messages.
    label: String,
    url: String,
    root_ca: PathBuf,
    token: String,
    running: Option<Arc<RunningWorld>>,
}

/// Client of the controller's API, which the verbs use.
pub(crate) type Admin = AdminClient<InterceptedService<Channel, Bearer>>;

/// Adds the token to every call.
#[derive(Clone)]
pub(crate) struct Bearer(MetadataValue<Ascii>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request
            .metadata_mut()
            .insert("authorization", self.0.clone());
        request.set_timeout(CALL_TIMEOUT);
        Ok(request)
    }
}

/// Connects to the controller that `args` name.
pub(crate) async fn connect(args: &MeshArgs) -> VerbResult<Admin> {
    let controller = match (&args.server, &args.root_ca, &args.token_file) {
        (Some(url), Some(root_ca), Some(token_file)) => {
            let token = read(token_file)?;
            ControllerAddress {
                label: url.clone(),
                url: url.clone(),
                root_ca: root_ca.clone(),
                token,
                running: None,
            }
        }
        _ => of_world(RunningWorld::open(args.world.as_deref())?)?,
    };
    connect_to(controller).await
}

/// Connects to the controller of an open world.
pub(crate) async fn connect_in(running: Arc<RunningWorld>) -> VerbResult<Admin> {
    connect_to(of_world(running)?).await
}

fn of_world(running: Arc<RunningWorld>) -> VerbResult<ControllerAddress> {
    Ok(ControllerAddress {
        label: format!("controller of world {}", running.name()),
        url: format!("https://127.0.0.1:{}", canal_wire::CONTROLLER_PORT),
        root_ca: running.root_ca(),
        token: running.operator_token()?,
        running: Some(running),
    })
}

fn read(path: &Path) -> VerbResult<String> {
    std::fs::read_to_string(path).map_err(|problem| {
        let fix =
            "check that the controller is running (`canal world list`, `canal logs controller`)";
        VerbError::new(
            ExitStatus::Unreachable,
            path.display().to_string(),
            problem.to_string(),
            fix,
        )
    })
}

async fn connect_to(controller: ControllerAddress) -> VerbResult<Admin> {
    let place = controller.label.clone();
    let wrong = |what: String| {
        VerbError::failed(
            place.clone(),
            what,
            "give --server like https://192.0.2.10:15012",
        )
    };
    let token = format!("Bearer {}", controller.token.trim());
    let mut token: MetadataValue<Ascii> = token
        .parse()
        .map_err(|_| wrong("the token is not a valid value of a header".to_owned()))?;
    token.set_sensitive(true);
    let tls = ClientTlsConfig::new()
        .domain_name(CONTROLLER_NAME)
        .ca_certificate(Certificate::from_pem(read(&controller.root_ca)?));
    let endpoint = Endpoint::from_shared(controller.url.clone())
        .and_then(|endpoint| endpoint.connect_timeout(CONNECT_TIMEOUT).tls_config(tls))
        .map_err(|problem| wrong(chain(&problem)))?;
    let connected = match controller.running {
        Some(running) => endpoint.connect_with_connector(WorldDialer(running)).await,
        None => endpoint.connect().await,
    };
    let channel = connected.map_err(|problem| {
        VerbError::new(
            ExitStatus::Unreachable,
            place,
            chain(&problem),
            "check that it is running (`canal world list`, `canal logs controller`)",
        )
    })?;
    let client = AdminClient::with_interceptor(channel, Bearer(token));
    Ok(client
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX))
}

/// Connects to loopback inside the controller's namespace.
#[derive(Clone)]
struct WorldDialer(Arc<RunningWorld>);

impl tonic::codegen::Service<Uri> for WorldDialer {
    type Response = TokioIo<TcpStream>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let running = self.0.clone();
        Box::pin(async move {
            let port = canal_wire::CONTROLLER_PORT;
            running
                .dial(running_world::CONTROLLER, ([127, 0, 0, 1], port).into())
                .await
                .map(TokioIo::new)
        })
    }
}

/// Converts the controller's refusal of a call.
pub(crate) fn refused(status: &Status) -> VerbError {
    let (exit, fix) = match status.code() {
        Code::Unavailable | Code::DeadlineExceeded => (
            ExitStatus::Unreachable,
            "check that it is running (`canal world list`, `canal logs controller`)",
        ),
        Code::Unauthenticated => (
            ExitStatus::Failed,
            "use a token that is in the controller's principals file",
        ),
        Code::PermissionDenied => (
            ExitStatus::Failed,
            "use an operator's token that may see this tenant",
        ),
        Code::NotFound => (
            ExitStatus::Missing,
            "name one that `canal get` or `canal status` lists",
        ),
        _ => (ExitStatus::Failed, ""),
    };
    // The controller's text may already contain the fix.
    let fix = if status.message().contains("fix: ") {
        ""
    } else {
        fix
    };
    VerbError::new(exit, "controller", status.message().to_owned(), fix)
}

/// Returns an error with its causes on one line.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_that_answered_is_never_called_absent() {
        for code in [
            Code::Internal,
            Code::ResourceExhausted,
            Code::Aborted,
            Code::FailedPrecondition,
        ] {
            let failure = refused(&Status::new(code, "the disk refused"));
            assert!(
                failure.exit == ExitStatus::Failed && !failure.fix.contains("running"),
                "{code:?} {failure}"
            );
        }
        assert_eq!(
            refused(&Status::unavailable("")).exit,
            ExitStatus::Unreachable
        );
    }
}
