//! `canal-samples ROLE`: parses the role and runs it. Servers run until SIGTERM, which also ends
//! `load` and `sessions` early. Clients print one JSON object and exit with 0 if all was right, 1
//! if something failed, 2 on a usage error.

#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use canal_samples::authz::{AuthzArgs, SampleAuthorizer};
use canal_samples::blob_client::BlobClientArgs;
use canal_samples::bookinfo::{details, productpage::ProductPage, ratings, reviews::Reviews};
use canal_samples::connections::ConnectionsArgs;
use canal_samples::echo_rpc::EchoService;
use canal_samples::grpc_client::GrpcClientArgs;
use canal_samples::issuer::{IssuerArgs, SampleIssuer};
use canal_samples::listen::{bind, serve, stop_signal};
use canal_samples::load::LoadArgs;
use canal_samples::pod::PodName;
use canal_samples::sessions::HeldSessionsArgs;
use canal_samples::tcp_client::TcpClientArgs;
use canal_samples::tls_client::TlsClientArgs;
use canal_samples::workload_client::WorkloadClientArgs;
use canal_samples::ws_client::WsClientArgs;
use canal_samples::{
    blob, blob_client, connections, grpc_client, load, sessions, tcp, tcp_client, tls_client,
    workload_client, ws, ws_client,
};
use clap::{Args, Parser, Subcommand};
use serde_json::Value;

#[derive(Debug, Parser)]
#[command(
    name = "canal-samples",
    version,
    about = "Applications and clients for Canal's demo, tests and benches"
)]
struct SampleCli {
    #[command(subcommand)]
    role: SampleRole,
}

#[derive(Debug, Args)]
struct Port {
    /// Port to listen on, IPv4 and IPv6
    #[arg(long, env = "PORT", default_value_t = 9080)]
    port: u16,
}

#[derive(Debug, Subcommand)]
enum SampleRole {
    /// bookinfo: the page; needs $DETAILS_URL and $REVIEWS_URL
    Productpage(Port),
    /// bookinfo: facts about a book
    Details(Port),
    /// bookinfo: reviews; $SERVICE_VERSION v2 and v3 need $RATINGS_URL
    Reviews(Port),
    /// bookinfo: stars
    Ratings(Port),
    /// gRPC echo service
    Grpc(Port),
    /// WebSocket echo server
    Ws(Port),
    /// Web server for byte-exact bodies and mirrors
    Blob(Port),
    /// TCP servers; each --listen is mode=port
    Tcp {
        /// e.g. echo=7000; modes: echo, drain, greet, source, reset, stall
        #[arg(long, required = true)]
        listen: Vec<tcp::TcpListenArg>,
    },
    /// External authorizer (ext_authz gRPC)
    Authz(AuthzArgs),
    /// Identity provider: keys, JWKS, tokens, forgeries
    Issuer(IssuerArgs),
    /// Calls the gRPC echo service
    GrpcClient(GrpcClientArgs),
    /// Exchanges messages with the WebSocket echo server
    WsClient(WsClientArgs),
    /// Moves bodies to and from the blob server, checking every byte
    BlobClient(BlobClientArgs),
    /// Drives one mode of the TCP servers
    TcpClient(TcpClientArgs),
    /// Makes HTTP load and counts every failure
    Load(LoadArgs),
    /// Opens new TCP connections to an echo server, one exchange each
    Connections(ConnectionsArgs),
    /// Keeps many TCP sessions open with an echo server and counts those that break
    Sessions(HeldSessionsArgs),
    /// Requests a page over TLS and reports what was negotiated
    TlsClient(TlsClientArgs),
    /// Requests its SVID from the SPIFFE Workload API
    WorkloadClient(WorkloadClientArgs),
}

fn main() -> ExitCode {
    let typed = SampleCli::parse();
    let mut builder = match workers() {
        // With one thread no request has to wake another thread, which is the largest cost of a
        // small request.
        1 => tokio::runtime::Builder::new_current_thread(),
        more => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(more);
            builder
        }
    };
    let runtime = match builder.enable_all().build() {
        Ok(runtime) => runtime,
        Err(problem) => {
            eprintln!("canal-samples: cannot start: {problem}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run(typed.role)) {
        Ok(code) => code,
        Err(problem) => {
            eprintln!("canal-samples: {problem:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns `$SAMPLE_THREADS`, else 1: a world runs dozens of these programs on one machine, and
/// none of them needs two cores.
fn workers() -> usize {
    std::env::var("SAMPLE_THREADS")
        .ok()
        .and_then(|n| n.parse().ok())
        .filter(|n| (1..=64).contains(n))
        .unwrap_or(1)
}

async fn run(role: SampleRole) -> anyhow::Result<ExitCode> {
    match role {
        SampleRole::GrpcClient(args) => Ok(print(&grpc_client::run(&args).await?)),
        SampleRole::WsClient(args) => Ok(print(&ws_client::run(&args).await?)),
        SampleRole::BlobClient(args) => Ok(print(&blob_client::run(&args).await?)),
        SampleRole::TcpClient(args) => Ok(print(&tcp_client::run(&args).await?)),
        SampleRole::Load(args) => Ok(print(&load::run_until(&args, stop_signal()?).await?)),
        SampleRole::Connections(args) => Ok(print(&connections::run(&args).await?)),
        SampleRole::Sessions(args) => Ok(print(&sessions::run(&args, stop_signal()?).await?)),
        SampleRole::TlsClient(args) => Ok(print(&tls_client::run(&args).await?)),
        SampleRole::WorkloadClient(args) => Ok(print(&workload_client::run(&args).await?)),
        server => run_server(server).await.map(|()| ExitCode::SUCCESS),
    }
}

fn print(report: &Value) -> ExitCode {
    // A reader that has read enough closes the pipe. The exit code still reports the result.
    let _ = writeln!(std::io::stdout(), "{report:#}");
    if report["ok"] == true {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

async fn run_server(role: SampleRole) -> anyhow::Result<()> {
    let stop = stop_signal()?;
    match role {
        SampleRole::Productpage(Port { port }) => {
            let page = ProductPage::from_env(PodName::from_env("productpage"))?;
            let (listener, pod) = (bind(port)?, page.pod.clone());
            serve(listener, stop, move |request, _| {
                let (page, pod) = (page.clone(), pod.clone());
                async move { pod.signed(page.answer(request).await) }
            })
            .await
        }
        SampleRole::Reviews(Port { port }) => {
            let pod = PodName::from_env("reviews");
            let reviews = Reviews::from_env(pod.clone())?;
            serve(bind(port)?, stop, move |request, _| {
                let (reviews, pod) = (reviews.clone(), pod.clone());
                async move { pod.signed(reviews.answer(request).await) }
            })
            .await
        }
        SampleRole::Details(Port { port }) => {
            let pod = PodName::from_env("details");
            serve(bind(port)?, stop, move |request, _| {
                std::future::ready(pod.signed(details::answer(&pod, &request)))
            })
            .await
        }
        SampleRole::Ratings(Port { port }) => {
            let pod = PodName::from_env("ratings");
            serve(bind(port)?, stop, move |request, _| {
                std::future::ready(pod.signed(ratings::answer(&pod, &request)))
            })
            .await
        }
        SampleRole::Grpc(Port { port }) => {
            let service = EchoService::new(PodName::from_env("echo"));
            serve(bind(port)?, stop, move |request, _| {
                service.clone().answer(request)
            })
            .await
        }
        SampleRole::Authz(args) => {
            let authorizer = SampleAuthorizer::new(&args);
            serve(bind(args.port)?, stop, move |request, _| {
                authorizer.clone().answer(request)
            })
            .await
        }
        SampleRole::Issuer(args) => {
            let issuer = SampleIssuer::new(&args)?;
            serve(bind(args.port)?, stop, move |request, _| {
                issuer.clone().answer(request)
            })
            .await
        }
        SampleRole::Ws(Port { port }) => {
            let pod = PodName::from_env("ws");
            serve(bind(port)?, stop, move |request, _| {
                ws::answer(pod.clone(), request)
            })
            .await
        }
        SampleRole::Blob(Port { port }) => {
            let pod = PodName::from_env("blob");
            serve(bind(port)?, stop, move |request, peer| {
                blob::answer(pod.clone(), request, peer)
            })
            .await
        }
        // One role serves several ports, each with its own behaviour.
        SampleRole::Tcp { listen } => {
            let mut servers = tokio::task::JoinSet::new();
            for one in listen {
                servers.spawn(tcp::serve(bind(one.port)?, one.mode, stop.clone()));
            }
            while let Some(server) = servers.join_next().await {
                server.context("a server's task failed")?;
            }
            Ok(())
        }
        client => anyhow::bail!("{client:?} is a client role"),
    }
}
