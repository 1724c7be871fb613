//! Authorities, badges, and the one `check` of each side: what the side under test must say of a hostile peer, within which bounds.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
use canal_kit::metrics::Registry;
use canal_kit::testing::{Issued, TestCa, identity};
use canal_kit::tls::{ClientIdentity, Credential, HANDSHAKE_TIMEOUT, Refusal, ServerIdentity, TlsError, Transport, TrustStore, TrustView};
use canal_model::identity::Identity;
use canal_model::ids::TenantName;
use rcgen::CertificateParams;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::time::Instant;

use super::craft::*;
use super::foe::{Opening, Script, Seen, ambush, attack};
use super::keys::Keys;

pub(crate) const ALICE: &str = "spiffe://alpha.example/ns/shop/sa/alice";
pub(crate) const BOB: &str = "spiffe://alpha.example/ns/shop/sa/bob";
pub(crate) const MALLORY: &str = "spiffe://beta.example/ns/shop/sa/alice";
/// The serial number that the revocation list names.
pub(crate) const REVOKED_SERIAL: u64 = 77;
/// Most bytes of a hostile peer that are taken before it is refused: a message of 64 KiB and what lies in buffers.
const TAKEN_MAX: usize = 256 << 10;
/// Most real time of one case; those that time out do so in the tests' own time.
const REAL_TIME_MAX: Duration = Duration::from_secs(20);

/// A chain and the key of its leaf.
pub(crate) struct Badge {
    pub(crate) chain: Vec<Vec<u8>>,
    key: EcdsaKeyPair,
}

impl Badge {
    pub(crate) fn of(issued: &Issued) -> Self {
        let chain = CertificateDer::pem_slice_iter(issued.chain.as_bytes()).map(|c| c.unwrap().to_vec()).collect();
        let key = PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).unwrap();
        Self { chain, key: EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, key.secret_der()).unwrap() }
    }
    pub(crate) fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.key.sign(&SystemRandom::new(), message).unwrap().as_ref().to_vec()
    }
}

pub(crate) struct Rig {
    pub(crate) keys: Keys,
    pub(crate) ca: TestCa,
    pub(crate) foreign: TestCa,
    pub(crate) alice: Badge,
    pub(crate) bob: Badge,
    server: Credential,
    client: Credential,
}

pub(crate) static RIG: LazyLock<Rig> = LazyLock::new(|| {
    let ca = TestCa::new("alpha");
    let badge = |who| Badge::of(&ca.issue_with(&identity(who), |_| {}));
    Rig {
        keys: Keys::new(),
        foreign: TestCa::new("beta"),
        alice: badge(ALICE),
        bob: badge(BOB),
        server: ca.credential(&identity(BOB)),
        client: ca.credential(&identity(ALICE)),
        ca,
    }
});

impl Rig {
    pub(crate) fn badge(&self, who: &str, change: impl FnOnce(&mut CertificateParams)) -> Badge {
        Badge::of(&self.ca.issue_with(&identity(who), change))
    }

    /// What an honest client that is not this project's would say.
    pub(crate) fn hello(&self) -> Hello {
        Hello {
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

    fn told(&self) -> (Registry, TrustView) {
        let registry = Registry::new();
        let store = TrustStore::new(&registry);
        store.replace([self.ca.bundle("alpha", "alpha.example", false, vec![self.ca.revocations(&[REVOKED_SERIAL])])]).unwrap();
        let view = store.view(&tenant());
        (registry, view)
    }

    pub(crate) fn server(&self, trust: TrustView) -> ServerIdentity {
        ServerIdentity::new(tenant(), self.server.clone()).trusting(trust)
    }

    pub(crate) fn client(&self, trust: TrustView) -> ClientIdentity {
        ClientIdentity::new(self.client.clone()).trusting(trust)
    }

    /// Both honest sides over one trust, for those in the middle.
    pub(crate) fn pair(&self) -> (ServerIdentity, ClientIdentity) {
        let (_, view) = self.told();
        (self.server(view.clone()), self.client(view))
    }
}

fn tenant() -> TenantName {
    TenantName::new("alpha").unwrap()
}

/// Those that the client under test wants.
pub(crate) fn expected() -> Arc<[Identity]> {
    Arc::new([identity(BOB)])
}

/// A runtime whose clock jumps to the next timer whenever all wait.
pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

/// What must come of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expect {
    /// No handshake, for this reason; the peer sees this alert.
    Refused(Refusal, Option<u8>),
    /// A handshake; then what is read until the end, or why reading fails, and the alert that the peer sees.
    Up(Result<&'static [u8], Refusal>, Option<u8>),
}

/// A handshake, a word and a proper close.
pub(crate) const fn up() -> Expect {
    Expect::Up(Ok(b"ping"), None)
}

/// A handshake that is regretted.
pub(crate) const fn up_then(refusal: Refusal, alert: u8) -> Expect {
    Expect::Up(Err(refusal), Some(alert))
}

pub(crate) const fn refused(refusal: Refusal, alert: u8) -> Expect {
    Expect::Refused(refusal, Some(alert))
}

/// Without a word.
pub(crate) const fn dropped(refusal: Refusal) -> Expect {
    Expect::Refused(refusal, None)
}

type Came = Result<Result<Vec<u8>, Refusal>, Refusal>;

/// Says a word and reads to the end.
async fn used(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> Result<Vec<u8>, Refusal> {
    let mut got = Vec::new();
    let done = async {
        stream.write_all(b"pong").await?;
        stream.flush().await?;
        stream.read_to_end(&mut got).await
    };
    done.await.map_err(|e| TlsError::from(e).refusal())?;
    Ok(got)
}

pub(crate) async fn serve(server: ServerIdentity, io: impl Transport) -> Came {
    let (stream, peer) = server.accept(io).await.map_err(|e| e.refusal())?;
    assert_eq!((peer.tenant, peer.identity), (tenant(), identity(ALICE)), "nobody else may be accepted");
    Ok(used(stream).await)
}

pub(crate) async fn call(client: ClientIdentity, io: impl Transport) -> Came {
    let (stream, peer) = client.connect(io, &expected()).await.map_err(|e| e.refusal())?;
    assert_eq!(peer, identity(BOB), "nobody else may be believed");
    Ok(used(stream).await)
}

/// Runs both sides, and holds the outcome against `expect`. The text says what is wrong.
fn judge<F, A>(
    side: &str,
    name: &str,
    registry: &Registry,
    expect: &Expect,
    honest: impl FnOnce(DuplexStream) -> F,
    foe: A,
) -> Result<(), String>
where
    F: Future<Output = Came> + Send + 'static,
    A: AsyncFnOnce(DuplexStream) -> Seen,
{
    let real = std::time::Instant::now();
    let (came, seen, took) = runtime().block_on(async {
        let began = Instant::now();
        let (near, far) = tokio::io::duplex(64 << 10);
        let task = tokio::spawn(honest(far));
        let both = async { (foe(near).await, task.await) };
        let (seen, came) = tokio::time::timeout(Duration::from_secs(60), both).await.map_err(|_| format!("{name}: hangs"))?;
        Ok::<_, String>((came.map_err(|e| format!("{name}: {e}"))?, seen, began.elapsed()))
    })?;
    let same = match (&came, expect) {
        (Err(refusal), Expect::Refused(wanted, alert)) => refusal == wanted && seen.alert == *alert,
        (Ok(read), Expect::Up(wanted, alert)) => read.as_deref() == wanted.as_deref() && seen.alert == *alert,
        _ => false,
    };
    if !same {
        return Err(format!("{name}: expected {expect:?}, came {came:?} and alert {:?}", seen.alert));
    }
    if let Err(refusal) = came {
        let line = format!("canal_tls_refused_total{{side=\"{side}\",reason=\"{}\"}} 1", refusal.name());
        if !registry.render().lines().any(|l| l == line) {
            return Err(format!("{name}: not counted: {line}"));
        }
        if seen.sent > TAKEN_MAX || !seen.data.is_empty() {
            return Err(format!("{name}: refused, but took {} bytes and said {:?}", seen.sent, seen.data));
        }
    }
    let limit = HANDSHAKE_TIMEOUT + Duration::from_millis(10);
    if took > limit || real.elapsed() > REAL_TIME_MAX {
        return Err(format!("{name}: took {took:?}, {:?} in reality", real.elapsed()));
    }
    Ok(())
}

/// A hostile client.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) opening: Opening,
    pub(crate) script: Script,
    pub(crate) expect: Expect,
}

/// A peer that is hostile by what it says in one go: a client after an honest hello, or a server.
pub(crate) struct Flight {
    pub(crate) name: &'static str,
    pub(crate) script: Script,
    pub(crate) expect: Expect,
}

/// Every case at once, so that a failure shows all that differ.
pub(crate) fn check(cases: &[Case]) {
    let wrong = cases.iter().filter_map(|case| {
        let (registry, view) = RIG.told();
        let server = RIG.server(view);
        let foe = async |io| attack(&RIG, io, &case.opening, case.script).await;
        judge("server", case.name, &registry, &case.expect, |io| serve(server, io), foe).err()
    });
    none(wrong);
}

/// Clients with an honest hello.
pub(crate) fn check_flights(flights: &[Flight]) {
    let case = |f: &Flight| Case { name: f.name, opening: Opening::of(&RIG.hello()), script: f.script, expect: f.expect };
    check(&flights.iter().map(case).collect::<Vec<_>>());
}

/// Servers.
pub(crate) fn check_traps(traps: &[Flight]) {
    let wrong = traps.iter().filter_map(|trap| {
        let (registry, view) = RIG.told();
        let client = RIG.client(view);
        let foe = async |io| ambush(&RIG, io, trap.script).await;
        judge("client", trap.name, &registry, &trap.expect, |io| call(client, io), foe).err()
    });
    none(wrong);
}

fn none(wrong: impl Iterator<Item = String>) {
    let wrong: Vec<_> = wrong.collect();
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
}
