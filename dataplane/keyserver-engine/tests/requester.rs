//! The requester of nodes and gateways (`canal_keyserver_client`) with a real key server. The keys
//! of both ends are in it, and so are keyless ones.

use std::sync::Arc;
use std::time::Duration;

use crate::fixture::*;
use canal_identity::{ClientIdentityFactory, TerminationTerms, Terminator};
use canal_keyserver_client::{KeyClient, KeyClientConfig, RemoteKey, ServerAddress};
use canal_model::identity::Identity;
use canal_model::trust::{ClientCertificates, KeyAlgorithm, KeyLocation, KeyPolicy, KeyServer};
use canal_runtime::metrics::Registry;
use canal_testing::identity;
use canal_tls::TrustStore;
use canal_wire::keyrpc::KeyName;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio_rustls::TlsConnector;

fn requester(fixture: &KeyServerFixture, component: &str) -> KeyClient {
    let server = ServerAddress {
        az: "az1".parse().unwrap(),
        name: "ks-1".parse().unwrap(),
        address: fixture.address,
    };
    let config = KeyClientConfig {
        az: "az1".parse().unwrap(),
        servers: vec![server],
        me: identity(component),
        // Debug builds on a busy machine are slow.
        trip: Duration::from_secs(5),
    };
    KeyClient::start(
        config,
        fixture.authorities.infra.credential(&identity(component)),
        &store(fixture),
        &Registry::new(),
    )
}

fn store(fixture: &KeyServerFixture) -> TrustStore {
    let store = TrustStore::new(&Registry::new());
    store.replace(fixture.usual()).unwrap();
    store
}

#[tokio::test(flavor = "multi_thread")]
async fn two_peers_with_remote_keys_connect() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    for (component, tenant, near, far, algorithm) in [
        (NODE, "alpha", WEB, API, KeyAlgorithm::EcdsaP256),
        (RSA_NODE, "rsa", SLOW, SLOW, KeyAlgorithm::Rsa2048),
    ] {
        let no_local = Arc::new(|id: &Identity| panic!("{id} has no local key"));
        let keyring = ClientIdentityFactory::of(
            no_local,
            Some(requester(&fixture, component)),
            store(&fixture),
        );
        let policy = KeyPolicy {
            location: KeyLocation::KeyServer,
            algorithm,
            local_fallback: false,
        };
        let pair = |id: &str| keyring.pair(&tenant.parse().unwrap(), &policy, &identity(id));
        let (client, server) = (pair(near).1, pair(far).0);
        let expected: Arc<[Identity]> = [identity(far)].into();
        // Later connections reuse the channel and the certificates of the first.
        for _ in 0..5 {
            let (a, b) = duplex(64 << 10);
            let (c, s) = tokio::join!(client.connect(a, &expected), server.accept(b));
            let ((mut c, to), (mut s, from)) = (c.unwrap(), s.unwrap());
            assert_eq!((to, from.identity), (identity(far), identity(near)));
            // More than the duplex's buffer, so that both sides write and read at the same time.
            let large = vec![7; 100_000];
            let (sent, got) = tokio::join!(
                async {
                    c.write_all(&large).await.unwrap();
                    c.shutdown().await
                },
                async {
                    let mut got = Vec::new();
                    s.read_to_end(&mut got).await.map(|_| got)
                }
            );
            assert!(sent.is_ok() && got.unwrap() == large);
        }
        // The client rejects a server that it does not expect.
        let (a, b) = duplex(64 << 10);
        let other: Arc<[Identity]> = [identity(GATE)].into();
        let (c, s) = tokio::join!(client.connect(a, &other), server.accept(b));
        assert_eq!(c.unwrap_err().reason(), "wrong_identity");
        assert!(s.is_err());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenants_tls_terminates_while_its_list_allows_it() {
    let dir = tempfile::tempdir().unwrap();
    let ca = canal_testing::TestCa::new("public");
    let shop = ca.server("shop.example");
    std::fs::write(dir.path().join("shop.web.crt"), &shop.chain).unwrap();
    std::fs::write(dir.path().join("shop.web.key"), &shop.key).unwrap();
    let allow = |text: &str| std::fs::write(dir.path().join("allow.yaml"), text).unwrap();
    allow("allow: {shop/web: [gateway/g1]}");
    let fixture = KeyServerFixture::start(ServerSetup {
        tls_dir: Some(dir.path().into()),
        ..ServerSetup::default()
    })
    .await;
    fixture.publish(&fixture.usual());
    let requester = requester(&fixture, GATEWAY);
    let own = KeyServer {
        tenant: "alpha".parse().unwrap(),
        name: "ks-1".parse().unwrap(),
        addresses: vec![fixture.address],
    };
    let terms = TerminationTerms {
        tenant: "alpha".parse().unwrap(),
        trust_domain: "alpha.example".parse().unwrap(),
        clients: ClientCertificates::None,
        alpn: vec![b"http/1.1".to_vec()],
        tls12: true,
    };
    let signed = RemoteKey::by_tenant(
        &requester,
        &own,
        KeyName::File("alpha/shop/web".parse().unwrap()),
    );
    let terminator = Terminator::signed(
        terms,
        signed,
        store(&fixture).view(&"alpha".parse().unwrap()),
    );
    let mut roots = RootCertStore::empty();
    roots.add(ders(&ca.root_pem()).remove(0)).unwrap();
    let visit = async |version: &'static rustls::SupportedProtocolVersion| {
        let config = ClientConfig::builder_with_provider(
            rustls::crypto::aws_lc_rs::default_provider().into(),
        )
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots.clone())
        .with_no_client_auth();
        // Larger than a handshake, so that neither end waits for the other's reads.
        let (a, b) = duplex(64 << 10);
        let name = ServerName::try_from("shop.example").unwrap();
        let client = TlsConnector::from(Arc::new(config));
        let (c, s) = tokio::join!(client.connect(name, a), terminator.accept(b, || {}));
        (c.is_ok(), s.map(drop).map_err(|e| e.reason()))
    };
    for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
        assert_eq!(visit(version).await, (true, Ok(())), "{version:?}");
        allow("allow: {}");
        assert_eq!(
            visit(version).await,
            (false, Err("key_server")),
            "{version:?}: at once"
        );
        allow("allow: {shop/web: [gateway/g1]}");
        assert_eq!(
            visit(version).await,
            (true, Ok(())),
            "{version:?}: and back"
        );
    }
}
