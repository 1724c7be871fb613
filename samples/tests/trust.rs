//! Tests the zero-trust roles against their counterparts on loopback: authorizer, Workload API
//! client, TLS client.

use std::pin::Pin;
use std::sync::Arc;

use canal_samples::authz::{AuthzArgs, SampleAuthorizer};
use canal_samples::ext_authz::authorization_client::AuthorizationClient;
use canal_samples::ext_authz::check_response::HttpResponse;
use canal_samples::ext_authz::{AttributeContext, CheckRequest, HttpRequest, Request as Asked};
use canal_samples::listen::{bind, serve};
use canal_samples::workload::spiffe_workload_api_server::{
    SpiffeWorkloadApi, SpiffeWorkloadApiServer,
};
use canal_samples::workload::{
    X509BundlesRequest, X509BundlesResponse, X509svid, X509svidRequest, X509svidResponse,
};
use canal_samples::{tls_client, workload_client};
use clap::{Args, FromArgMatches};
use futures::Stream;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tonic::{Response, Status};

/// Parses a role's arguments as the command line does.
fn args<A: Args + FromArgMatches>(line: &str) -> A {
    let command = A::augment_args(clap::Command::new("role")).no_binary_name(true);
    A::from_arg_matches(&command.get_matches_from(line.split_whitespace())).unwrap()
}

#[tokio::test]
async fn the_authorizer_follows_the_request() {
    let stop = watch::channel(false).0;
    let authorizer = SampleAuthorizer::new(&args::<AuthzArgs>("--strict"));
    let listener = bind(0).unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(serve(listener, stop.subscribe(), move |request, _| {
        authorizer.clone().answer(request)
    }));
    let mut client = AuthorizationClient::connect(format!("http://127.0.0.1:{port}"))
        .await
        .unwrap();
    for (word, status) in [
        ("allow", None),
        ("deny", Some(403)),
        ("teapot", Some(418)),
        ("anything", Some(403)),
    ] {
        let http = HttpRequest {
            headers: [("x-authz".to_owned(), word.to_owned())].into(),
            ..HttpRequest::default()
        };
        let request = Some(Asked { http: Some(http) });
        let grpc_request = CheckRequest {
            attributes: Some(AttributeContext {
                request,
                ..AttributeContext::default()
            }),
        };
        let answer = client.check(grpc_request).await.unwrap().into_inner();
        let denied = match answer.http_response {
            Some(HttpResponse::DeniedResponse(denied)) => denied.status.map(|status| status.code),
            _ => None,
        };
        assert_eq!(
            (denied, answer.status.unwrap().code == 0),
            (status, status.is_none()),
            "{word}"
        );
    }
}

/// A Workload API that sends two answers to clients with the security header.
struct Api(Vec<X509svidResponse>);

type TrustReplies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl SpiffeWorkloadApi for Api {
    type FetchX509SVIDStream = TrustReplies<X509svidResponse>;
    async fn fetch_x509svid(
        &self,
        request: tonic::Request<X509svidRequest>,
    ) -> Result<Response<Self::FetchX509SVIDStream>, Status> {
        if request.metadata().get("workload.spiffe.io").is_none() {
            return Err(Status::invalid_argument("no header"));
        }
        Ok(Response::new(Box::pin(futures::stream::iter(
            self.0.clone().into_iter().map(Ok),
        ))))
    }
    type FetchX509BundlesStream = TrustReplies<X509BundlesResponse>;
    async fn fetch_x509_bundles(
        &self,
        _: tonic::Request<X509BundlesRequest>,
    ) -> Result<Response<Self::FetchX509BundlesStream>, Status> {
        Err(Status::unimplemented("not here"))
    }
}

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

#[tokio::test]
async fn svids_are_fetched_and_left_as_files() {
    let (authority, key) = (authority(), KeyPair::generate().unwrap());
    let leaf = CertificateParams::new(vec!["localhost".into()])
        .unwrap()
        .signed_by(&key, &authority)
        .unwrap();
    let svid = X509svid {
        spiffe_id: "spiffe://a.example/ns/x/sa/y".into(),
        x509_svid: [leaf.der().as_ref(), authority.der().as_ref()].concat(),
        x509_svid_key: key.serialize_der(),
        bundle: authority.der().to_vec(),
        ..X509svid::default()
    };
    let answer = X509svidResponse {
        svids: vec![svid],
        ..X509svidResponse::default()
    };
    // Two answers: the first SVID and its renewal.
    let server = SpiffeWorkloadApiServer::new(Api(vec![answer.clone(), answer]));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let socket = format!("tcp://{}", listener.local_addr().unwrap());
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(server)
            .serve_with_incoming(incoming),
    );
    let out = tempfile::tempdir().unwrap();
    let line = format!("--socket {socket} -n 2 --out {}", out.path().display());
    let report = workload_client::run(&args(&line)).await.unwrap();
    assert!(
        // The chain is the leaf and its CA.
        report["ok"] == true && report["answers"][1]["svids"][0]["chain"] == 2,
        "{report:#}"
    );
    KeyPair::from_pem(&std::fs::read_to_string(out.path().join("key.pem")).unwrap())
        .expect("a key that can be read");
    // The Workload API of SPIFFE refuses a call without its security header with this code.
    let refused = workload_client::run(&args(&format!("--socket {socket} --without-header")))
        .await
        .unwrap();
    assert_eq!(
        (&refused["ok"], &refused["code"]),
        (&false.into(), &"InvalidArgument".into()),
        "{refused:#}"
    );
}

#[tokio::test]
async fn tls_is_checked_and_reported() {
    let (authority, key) = (authority(), KeyPair::generate().unwrap());
    let leaf = CertificateParams::new(vec!["page.example".into()])
        .unwrap()
        .signed_by(&key, &authority)
        .unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = config
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone(), authority.der().clone()], key)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            // Handshakes of clients that refuse the server end here.
            let Ok(mut stream) = acceptor.accept(tcp).await else {
                continue;
            };
            // An error of the server shows in the client's report, which is checked.
            let _ = stream.read(&mut [0; 1024]).await;
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
                .await;
            let _ = stream.shutdown().await;
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let roots = dir.path().join("roots.pem");
    std::fs::write(&roots, authority.pem()).unwrap();
    // The certificate has only the first name.
    for (name, good) in [("page.example", true), ("other.example", false)] {
        let report = tls_client::run(&args(&format!(
            "{address} --name {name} --roots {} -n 2",
            roots.display()
        )))
        .await
        .unwrap();
        assert_eq!(report["ok"], good, "{name}: {report:#}");
        if good {
            assert!(
                report["version"] == "TLSv1_3"
                    && report["chain"][0]["names"][0] == "DNS:page.example",
                "{report:#}"
            );
        }
    }
}
