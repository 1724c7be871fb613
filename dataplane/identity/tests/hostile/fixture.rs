//! Fixture of the hostile tests: CAs, credentials, and one `check` per side, which compares the
//! result of the side under test with the expected one, within limits.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
use canal_identity::{ClientIdentity, ServerIdentity};
use canal_model::identity::Identity;
use canal_model::ids::TenantName;
use canal_runtime::metrics::Registry;
use canal_testing::{TestCa, TestCertificate, identity};
use canal_tls::{
    Credential, HANDSHAKE_TIMEOUT, HandshakeFailure, TlsError, Transport, TrustStore, TrustView,
};
use rcgen::CertificateParams;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::time::Instant;

use super::attacker::{AttackScript, AttackerView, Opening, ambush, attack};
use super::craft::*;
use super::keys::Keys;

pub(crate) const ALICE: &str = "spiffe://alpha.example/ns/shop/sa/alice";
pub(crate) const BOB: &str = "spiffe://alpha.example/ns/shop/sa/bob";
pub(crate) const MALLORY: &str = "spiffe://beta.example/ns/shop/sa/alice";
/// Serial number in the revocation list.
pub(crate) const REVOKED_SERIAL: u64 = 77;
/// Maximum number of bytes of a hostile peer that are read before it is refused: a message of 64
/// KiB and the content of buffers.
const TAKEN_MAX: usize = 256 << 10;
/// Maximum real time of one case. Cases that time out do so in the tests' own time. It only ends a
/// hang.
const REAL_TIME_MAX: Duration = Duration::from_secs(20);

/// A chain and the key of its leaf.
pub(crate) struct TestCredential {
    pub(crate) chain: Vec<Vec<u8>>,
    key: EcdsaKeyPair,
}

impl TestCredential {
    pub(crate) fn of(issued: &TestCertificate) -> Self {
        let chain = CertificateDer::pem_slice_iter(issued.chain.as_bytes())
            .map(|c| c.unwrap().to_vec())
            .collect();
        let key = PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).unwrap();
        Self {
            chain,
            key: EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, key.secret_der())
                .unwrap(),
        }
    }
    pub(crate) fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.key
            .sign(&SystemRandom::new(), message)
            .unwrap()
            .as_ref()
            .to_vec()
    }
}

pub(crate) struct HandshakeFixture {
    pub(crate) keys: Keys,
    pub(crate) ca: TestCa,
    pub(crate) foreign: TestCa,
    pub(crate) alice: TestCredential,
    pub(crate) bob: TestCredential,
    server: Credential,
    client: Credential,
}

pub(crate) static FIXTURE: LazyLock<HandshakeFixture> = LazyLock::new(|| {
    let ca = TestCa::new("alpha");
    let credential = |who| TestCredential::of(&ca.issue_with(&identity(who), |_| {}));
    HandshakeFixture {
        keys: Keys::new(),
        foreign: TestCa::new("beta"),
        alice: credential(ALICE),
        bob: credential(BOB),
        server: ca.credential(&identity(BOB)),
        client: ca.credential(&identity(ALICE)),
        ca,
    }
});

impl HandshakeFixture {
    pub(crate) fn credential(
        &self,
        who: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> TestCredential {
        TestCredential::of(&self.ca.issue_with(&identity(who), change))
    }

    /// Returns the ClientHello of an honest client of another implementation.
    pub(crate) fn hello(&self) -> CraftedHello {
        CraftedHello {
            kind: CLIENT_HELLO,
            version: 0x0303,
            random: [3; 32],
            session: vec![5; 32],
            suites: vec![AES128],
            compressions: vec![0],
            extensions: vec![
                (VERSIONS, vec![2, 3, 4]),
                (GROUPS, vec16(&list16(&[X25519]))),
                (KEY_SHARE, vec16(&self.keys.share(X25519))),
                (SIGNATURES, vec16(&list16(&[ECDSA, 0x0804]))),
                (ALPN, protocols(&[b"h2"])),
            ],
        }
    }

    fn trust(&self) -> (Registry, TrustView) {
        let registry = Registry::new();
        let store = TrustStore::new(&registry);
        store
            .replace([self.ca.bundle(
                "alpha",
                "alpha.example",
                false,
                vec![self.ca.revocations(&[REVOKED_SERIAL])],
            )])
            .unwrap();
        let view = store.view(&tenant());
        (registry, view)
    }

    pub(crate) fn server(&self, trust: TrustView) -> ServerIdentity {
        ServerIdentity::new(tenant(), self.server.clone()).trusting(trust)
    }

    pub(crate) fn client(&self, trust: TrustView) -> ClientIdentity {
        ClientIdentity::new(self.client.clone()).trusting(trust)
    }

    /// Returns both honest sides with the same trust, for a man in the middle.
    pub(crate) fn pair(&self) -> (ServerIdentity, ClientIdentity) {
        let (_, view) = self.trust();
        (self.server(view.clone()), self.client(view))
    }
}

fn tenant() -> TenantName {
    TenantName::new("alpha").unwrap()
}

/// Returns the identities that the client under test expects.
pub(crate) fn expected() -> Arc<[Identity]> {
    Arc::new([identity(BOB)])
}

/// Returns a runtime whose clock jumps to the next timer whenever all tasks wait.
pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap()
}

/// Expected result of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expect {
    /// The handshake fails with this reason, and the peer gets this alert.
    Refused(HandshakeFailure, Option<u8>),
    /// The handshake succeeds. Then follow the data read until the end, or the reason why reading
    /// fails, and the alert that the peer gets.
    Up(Result<&'static [u8], HandshakeFailure>, Option<u8>),
}

/// Expects a handshake, some data and close_notify.
pub(crate) const fn up() -> Expect {
    Expect::Up(Ok(b"ping"), None)
}

/// Expects a handshake after which reading fails.
pub(crate) const fn up_then(refusal: HandshakeFailure, alert: u8) -> Expect {
    Expect::Up(Err(refusal), Some(alert))
}

pub(crate) const fn refused(refusal: HandshakeFailure, alert: u8) -> Expect {
    Expect::Refused(refusal, Some(alert))
}

/// Expects a failure without an alert.
pub(crate) const fn dropped(refusal: HandshakeFailure) -> Expect {
    Expect::Refused(refusal, None)
}

type ObservedOutcome = Result<Result<Vec<u8>, HandshakeFailure>, HandshakeFailure>;

/// Sends some data and reads to the end.
async fn used(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
) -> Result<Vec<u8>, HandshakeFailure> {
    let mut got = Vec::new();
    let done = async {
        stream.write_all(b"pong").await?;
        stream.flush().await?;
        stream.read_to_end(&mut got).await
    };
    done.await.map_err(|e| TlsError::from(e).refusal())?;
    Ok(got)
}

pub(crate) async fn serve(server: ServerIdentity, io: impl Transport) -> ObservedOutcome {
    let (stream, peer) = server.accept(io).await.map_err(|e| e.refusal())?;
    assert_eq!(
        (peer.tenant, peer.identity),
        (tenant(), identity(ALICE)),
        "no other peer may be accepted"
    );
    Ok(used(stream).await)
}

pub(crate) async fn call(client: ClientIdentity, io: impl Transport) -> ObservedOutcome {
    let (stream, peer) = client
        .connect(io, &expected())
        .await
        .map_err(|e| e.refusal())?;
    assert_eq!(peer, identity(BOB), "no other peer may be trusted");
    Ok(used(stream).await)
}

/// Runs both sides and compares the result with `expect`. The error text describes the difference.
fn check_case<F, A>(
    side: &str,
    name: &str,
    registry: &Registry,
    expect: &Expect,
    honest: impl FnOnce(DuplexStream) -> F,
    attacker: A,
) -> Result<(), String>
where
    F: Future<Output = ObservedOutcome> + Send + 'static,
    A: AsyncFnOnce(DuplexStream) -> AttackerView,
{
    let real = std::time::Instant::now();
    let (came, seen, took) = runtime().block_on(async {
        let began = Instant::now();
        // Larger than a flight of either side, so that a case does not depend on the buffer.
        let (near, far) = tokio::io::duplex(64 << 10);
        let task = tokio::spawn(honest(far));
        let both = async { (attacker(near).await, task.await) };
        // A multiple of the handshake timeout; on the paused clock it costs no time.
        let (seen, came) = tokio::time::timeout(Duration::from_secs(60), both)
            .await
            .map_err(|_| format!("{name}: hangs"))?;
        Ok::<_, String>((
            came.map_err(|e| format!("{name}: {e}"))?,
            seen,
            began.elapsed(),
        ))
    })?;
    let same = match (&came, expect) {
        (Err(refusal), Expect::Refused(wanted, alert)) => refusal == wanted && seen.alert == *alert,
        (Ok(read), Expect::Up(wanted, alert)) => {
            read.as_deref() == wanted.as_deref() && seen.alert == *alert
        }
        // One of the two is a refusal, and the other is not.
        _ => false,
    };
    if !same {
        return Err(format!(
            "{name}: expected {expect:?}, came {came:?} and alert {:?}",
            seen.alert
        ));
    }
    if let Err(refusal) = came {
        let line = format!(
            "canal_tls_refused_total{{side=\"{side}\",reason=\"{}\"}} 1",
            refusal.name()
        );
        if !registry.render().lines().any(|l| l == line) {
            return Err(format!("{name}: not counted: {line}"));
        }
        if seen.sent > TAKEN_MAX || !seen.data.is_empty() {
            return Err(format!(
                "{name}: refused, but took {} bytes and said {:?}",
                seen.sent, seen.data
            ));
        }
    }
    // `took` is of the paused clock, which only timers move. Work that never ends shows in `real`.
    // Tokio rounds timers up to the next millisecond.
    let limit = HANDSHAKE_TIMEOUT + Duration::from_millis(10);
    let real = real.elapsed();
    if took > limit || real > canal_timing::deadline(REAL_TIME_MAX) {
        return Err(format!("{name}: took {took:?}, {real:?} in reality"));
    }
    Ok(())
}

/// A hostile client and the expected result.
pub(crate) struct HostileCase {
    pub(crate) name: &'static str,
    pub(crate) opening: Opening,
    pub(crate) script: AttackScript,
    pub(crate) expect: Expect,
}

/// A peer that is hostile in one flight: a client after an honest ClientHello, or a server.
pub(crate) struct Flight {
    pub(crate) name: &'static str,
    pub(crate) script: AttackScript,
    pub(crate) expect: Expect,
}

/// Runs all cases before it fails, so that a failure shows every case that differs.
pub(crate) fn check(cases: &[HostileCase]) {
    let wrong = cases.iter().filter_map(|case| {
        let (registry, view) = FIXTURE.trust();
        let server = FIXTURE.server(view);
        let attacker = async |io| attack(&FIXTURE, io, &case.opening, case.script).await;
        check_case(
            "server",
            case.name,
            &registry,
            &case.expect,
            |io| serve(server, io),
            attacker,
        )
        .err()
    });
    none(wrong);
}

/// Runs clients with an honest ClientHello.
pub(crate) fn check_flights(flights: &[Flight]) {
    let case = |f: &Flight| HostileCase {
        name: f.name,
        opening: Opening::of(&FIXTURE.hello()),
        script: f.script,
        expect: f.expect,
    };
    check(&flights.iter().map(case).collect::<Vec<_>>());
}

/// Runs hostile servers against the client under test.
pub(crate) fn check_traps(traps: &[Flight]) {
    let wrong = traps.iter().filter_map(|trap| {
        let (registry, view) = FIXTURE.trust();
        let client = FIXTURE.client(view);
        let attacker = async |io| ambush(&FIXTURE, io, trap.script).await;
        check_case(
            "client",
            trap.name,
            &registry,
            &trap.expect,
            |io| call(client, io),
            attacker,
        )
        .err()
    });
    none(wrong);
}

fn none(wrong: impl Iterator<Item = String>) {
    let wrong: Vec<_> = wrong.collect();
    assert!(
        wrong.is_empty(),
        "{} cases:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
