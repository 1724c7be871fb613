//! Tests of the record layer against rustls, in both roles, and against a peer that violates the
//! protocol.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::aws_lc_rs::cipher_suite;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::{
    ClientConfig, DigitallySignedStruct, Error, KeyLog, ServerConfig, SignatureScheme,
    SupportedCipherSuite,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use super::codec::{self, PLAINTEXT_MAX};
use super::*;
use Says::{Raw, Sealed};

#[derive(Debug, Default)]
struct Log(Mutex<Vec<(String, Vec<u8>)>>);

impl KeyLog for Log {
    fn log(&self, label: &str, _client_random: &[u8], secret: &[u8]) {
        self.0.lock().unwrap().push((label.into(), secret.into()));
    }
}

impl Log {
    fn secret(&self, label: &str) -> Vec<u8> {
        self.0
            .lock()
            .unwrap()
            .iter()
            .find(|(l, _)| l == label)
            .unwrap()
            .1
            .clone()
    }
}

#[derive(Debug)]
struct Anyone;

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }
    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        aws_lc_rs::default_provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

pub(super) const SUITES: [SupportedCipherSuite; 2] = [
    cipher_suite::TLS13_AES_128_GCM_SHA256,
    cipher_suite::TLS13_AES_256_GCM_SHA384,
];

type Ends<IO> = (client::TlsStream<IO>, server::TlsStream<IO>);

async fn handshake(
    suite: SupportedCipherSuite,
    tickets: usize,
) -> (Ends<DuplexStream>, u16, Vec<u8>, Vec<u8>) {
    handshake_over(suite, tickets, tokio::io::duplex(256 << 10)).await
}

/// Returns two rustls ends after their handshake, and the secrets. The server has sent tickets,
/// which the client has not read.
pub(super) async fn handshake_over<IO: AsyncRead + AsyncWrite + Unpin>(
    suite: SupportedCipherSuite,
    tickets: usize,
    (near, far): (IO, IO),
) -> (Ends<IO>, u16, Vec<u8>, Vec<u8>) {
    let made = rcgen::generate_simple_self_signed(["record".to_string()]).unwrap();
    let (chain, key) = (
        vec![made.cert.der().clone()],
        PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap(),
    );
    let log = Arc::new(Log::default());
    let provider = Arc::new(CryptoProvider {
        cipher_suites: vec![suite],
        ..aws_lc_rs::default_provider()
    });
    let versions = [&rustls::version::TLS13];
    let mut srv = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&versions)
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    (srv.key_log, srv.send_tls13_tickets) = (log.clone(), tickets);
    let cl = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions)
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anyone))
        .with_no_client_auth();
    let name = ServerName::try_from("record").unwrap();
    let (connector, acceptor) = (
        TlsConnector::from(Arc::new(cl)),
        TlsAcceptor::from(Arc::new(srv)),
    );
    let (c, s) = tokio::join!(connector.connect(name, near), acceptor.accept(far));
    let mut s = s.unwrap();
    s.flush().await.unwrap();
    let number = suite.suite().into();
    let secrets = ["CLIENT_TRAFFIC_SECRET_0", "SERVER_TRAFFIC_SECRET_0"]
        .map(|label| of(number, &log.secret(label)));
    let [client, server] = secrets;
    ((c.unwrap(), s), number, client, server)
}

pub(super) fn of(suite: u16, secret: &[u8]) -> Vec<u8> {
    traffic(suite, secret).unwrap().to_vec()
}

/// Returns two connected ends of this record layer.
fn own_pair() -> (RecordStream<DuplexStream>, RecordStream<DuplexStream>) {
    let (near, far) = tokio::io::duplex(256 << 10);
    let (client, server) = (of(0x1302, &[1; 48]), of(0x1302, &[2; 48]));
    let end = |io, side| {
        RecordStream::new(
            io,
            &TrafficSecrets {
                suite: 0x1302,
                side,
                client: &client,
                server: &server,
            },
            &[],
        )
        .unwrap()
    };
    (
        end(near, EndpointRole::Client),
        end(far, EndpointRole::Server),
    )
}

/// Sends data in both directions, in pieces of many sizes, and then closes both.
pub(super) async fn converse<
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
>(
    a: &mut A,
    b: &mut B,
) {
    // The period of 251 divides no record's length, so data that is out of place is noticed.
    // 200,000 bytes are twelve full records and a part.
    let data: Vec<u8> = (0..200_000u32).map(|n| (n * 7 % 251) as u8).collect();
    for (from, to) in [(0, 1), (1, 0)] {
        let (x, y): (&mut dyn AsyncDuplex, &mut dyn AsyncDuplex) = if (from, to) == (0, 1) {
            (&mut *a, &mut *b)
        } else {
            (&mut *b, &mut *a)
        };
        let mut got = vec![0; data.len()];
        let send = async {
            // Pieces that are a part of a record, a whole one, and more than one.
            for piece in [1, 2, 100, PLAINTEXT_MAX, PLAINTEXT_MAX + 1, 60_000] {
                x.write_all(&data[..piece]).await.unwrap();
            }
            x.write_all(&data).await.unwrap();
            x.flush().await.unwrap();
        };
        let receive = async {
            for piece in [1, 2, 100, PLAINTEXT_MAX, PLAINTEXT_MAX + 1, 60_000] {
                y.read_exact(&mut got[..piece]).await.unwrap();
                assert_eq!(got[..piece], data[..piece]);
            }
            y.read_exact(&mut got).await.unwrap();
            assert!(got == data);
        };
        tokio::join!(send, receive);
    }
    a.shutdown().await.unwrap();
    assert_eq!(
        b.read(&mut [0; 10]).await.unwrap(),
        0,
        "close_notify is an end, not an error"
    );
    b.shutdown().await.unwrap();
    assert_eq!(a.read(&mut [0; 10]).await.unwrap(), 0);
}

trait AsyncDuplex: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> AsyncDuplex for T {}

#[tokio::test]
async fn rustls_understands_it_and_is_understood() {
    for suite in SUITES {
        let ((c, mut s), number, client, server) = handshake(suite, 3).await;
        let secrets = TrafficSecrets {
            suite: number,
            side: EndpointRole::Client,
            client: &client,
            server: &server,
        };
        // The server's tickets are still in the pipe and must be skipped.
        let mut ours = RecordStream::new(c.into_inner().0, &secrets, &[]).unwrap();
        converse(&mut ours, &mut s).await;

        let ((mut c, s), number, client, server) = handshake(suite, 0).await;
        let secrets = TrafficSecrets {
            suite: number,
            side: EndpointRole::Server,
            client: &client,
            server: &server,
        };
        let mut ours = RecordStream::new(s.into_inner().0, &secrets, &[]).unwrap();
        converse(&mut ours, &mut c).await;
    }
}

#[tokio::test]
async fn key_updates_interoperate_with_rustls() {
    for suite in SUITES {
        let ((c, mut s), number, client, server) = handshake(suite, 3).await;
        let secrets = TrafficSecrets {
            suite: number,
            side: EndpointRole::Client,
            client: &client,
            server: &server,
        };
        let mut ours = RecordStream::new(c.into_inner().0, &secrets, &[]).unwrap();
        for round in 0..3u8 {
            // This side renews its keys at their limit.
            ours.sealer.exhaust();
            ours.write_all(&[round; 10]).await.unwrap();
            let mut got = [0; 10];
            s.read_exact(&mut got).await.unwrap();
            assert_eq!(got, [round; 10]);
            // The peer renews its keys, and requests the same of this side.
            s.get_mut().1.refresh_traffic_keys().unwrap();
            s.write_all(&[round + 100; 20_000]).await.unwrap();
            s.flush().await.unwrap();
            let mut got = vec![0; 20_000];
            ours.read_exact(&mut got).await.unwrap();
            assert!(got.iter().all(|b| *b == round + 100));
        }
        converse(&mut ours, &mut s).await;
    }
}

#[tokio::test]
async fn bytes_read_with_the_handshake_come_first() {
    let ((mut c, s), number, client, server) = handshake(SUITES[1], 0).await;
    c.write_all(b"early, whole").await.unwrap();
    c.flush().await.unwrap();
    let (mut io, _) = s.into_inner();
    let mut early = vec![0; 20];
    io.read_exact(&mut early).await.unwrap();
    let secrets = TrafficSecrets {
        suite: number,
        side: EndpointRole::Server,
        client: &client,
        server: &server,
    };
    let mut ours = RecordStream::new(io, &secrets, &early).unwrap();
    let mut got = [0; 12];
    ours.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"early, whole");
}

/// Bytes that a peer sends, with or without the right keys.
pub(super) enum Says {
    Raw(Vec<u8>),
    /// A record with this content, content type and number of padding zeros.
    Sealed(Vec<u8>, u8, usize),
}

async fn read_from_peer(says: Vec<Says>) -> Result<Vec<u8>, String> {
    let (near, far) = tokio::io::duplex(4 << 20);
    let (client, server) = (of(0x1302, &[1; 48]), of(0x1302, &[2; 48]));
    let secrets = TrafficSecrets {
        suite: 0x1302,
        side: EndpointRole::Client,
        client: &client,
        server: &server,
    };
    read_with(RecordStream::new(near, &secrets, &[]).unwrap(), far, says).await
}

/// Sends all items as the server (client secret of ones, server secret of twos), then ends, and
/// returns the reader's result.
pub(super) async fn read_with(
    mut reader: impl AsyncRead + Unpin,
    mut far: impl AsyncWrite + Unpin,
    says: Vec<Says>,
) -> Result<Vec<u8>, String> {
    let (mut sealer, _) = codec::pair(
        0x1302,
        EndpointRole::Server,
        &of(0x1302, &[1; 48]),
        &of(0x1302, &[2; 48]),
    )
    .unwrap();
    let mut out = Vec::new();
    for one in says {
        match one {
            Says::Raw(bytes) => out.extend(bytes),
            Says::Sealed(content, kind, zeros) => sealer.any(&content, kind, zeros, &mut out),
        }
    }
    far.write_all(&out).await.unwrap();
    far.shutdown().await.unwrap();
    let mut got = Vec::new();
    match reader.read_to_end(&mut got).await {
        Ok(_) => Ok(got),
        Err(e) => Err(e
            .get_ref()
            .and_then(|e| e.downcast_ref::<RecordError>())
            .map_or(e.to_string(), |e| e.name().to_string())),
    }
}

/// Name of a peer's behavior, the bytes it sends, and the expected result: data, or an error by
/// name.
pub(super) type RecordCase = (&'static str, Vec<Says>, Result<&'static str, &'static str>);

fn data(text: &str) -> Says {
    Sealed(text.into(), 23, 0)
}

fn close() -> Says {
    Sealed(vec![1, 0], 21, 0)
}

/// Returns a record as it is on the wire, which nobody sealed.
fn bare_record(kind: u8, length: u16, fill: u8) -> Says {
    let mut r = vec![kind, 3, 3];
    r.extend(length.to_be_bytes());
    r.extend(vec![fill; length.into()]);
    Raw(r)
}

fn ticket(n: usize) -> Vec<u8> {
    [&[4, 0, (n >> 8) as u8, n as u8][..], &vec![0; n]].concat()
}

fn data_and_length_cases() -> Vec<RecordCase> {
    let record = bare_record;
    // `Sealed` is the content, its type (21: alert, 22: handshake, 23: data) and the length of
    // the padding.
    vec![
        (
            "data and an end",
            vec![data("a"), data("b"), close()],
            Ok("ab"),
        ),
        (
            "padding",
            vec![Sealed("a".into(), 23, 1000), close()],
            Ok("a"),
        ),
        (
            "empty records",
            vec![data(""), data(""), data("a"), close()],
            Ok("a"),
        ),
        (
            "user_canceled is no end",
            vec![Sealed(vec![1, 90], 21, 0), data("a"), close()],
            Ok("a"),
        ),
        (
            "tickets",
            vec![Sealed(ticket(300), 22, 0), data("a"), close()],
            Ok("a"),
        ),
        (
            "a ticket in two records",
            vec![
                Sealed(ticket(300)[..9].into(), 22, 0),
                Sealed(ticket(300)[9..].into(), 22, 0),
                data("a"),
                close(),
            ],
            Ok("a"),
        ),
        ("no end", vec![data("a")], Err("truncated")),
        (
            "half a record",
            vec![data("a"), Raw(vec![23, 3, 3, 0])],
            Err("truncated"),
        ),
        (
            "bytes that were never sealed",
            vec![record(23, 100, 7)],
            Err("bad_record"),
        ),
        (
            // The tag alone has 16 bytes.
            "a record without a tag",
            vec![record(23, 15, 7)],
            Err("bad_record"),
        ),
        ("an empty record", vec![record(23, 0, 7)], Err("bad_record")),
        // A record may have 2^14 + 256 bytes (RFC 8446 section 5.2), its content 2^14.
        (
            "longer than a record may be",
            vec![record(23, 16641, 7)],
            Err("record_overflow"),
        ),
        (
            "more plaintext than a record may have",
            vec![Sealed(vec![7; 16385], 23, 0)],
            Err("record_overflow"),
        ),
        (
            // `check` accepts any data for an empty text.
            "as much as it may have",
            vec![Sealed(vec![7; 16384], 23, 0), close()],
            Ok(""),
        ),
    ]
}

fn content_type_cases() -> Vec<RecordCase> {
    // Content types are 20 for ChangeCipherSpec, 21 for alerts and 22 for handshake messages, whose
    // own type is their first byte (RFC 8446, appendix B).
    let record = bare_record;
    vec![
        (
            "plain alert",
            vec![record(21, 2, 0)],
            Err("unexpected_message"),
        ),
        (
            "ChangeCipherSpec",
            vec![record(20, 1, 1)],
            Err("unexpected_message"),
        ),
        (
            "HTTP",
            vec![Raw(b"GET / HTTP/1.1\r\n\r\n".into())],
            Err("unexpected_message"),
        ),
        (
            "nothing but zeros",
            vec![Sealed(vec![], 0, 50)],
            Err("unexpected_message"),
        ),
        (
            "unknown type",
            vec![Sealed(vec![1], 99, 0)],
            Err("unexpected_message"),
        ),
        (
            "sealed ChangeCipherSpec",
            vec![Sealed(vec![1], 20, 0)],
            Err("unexpected_message"),
        ),
        (
            "fatal alert",
            vec![Sealed(vec![2, 42], 21, 0)],
            Err("alert"),
        ),
        (
            "alert of one byte",
            vec![Sealed(vec![2], 21, 0)],
            Err("decode_error"),
        ),
        (
            "alert of three bytes",
            vec![Sealed(vec![1, 0, 0], 21, 0)],
            Err("decode_error"),
        ),
        (
            "empty handshake",
            vec![Sealed(vec![], 22, 0)],
            Err("unexpected_message"),
        ),
        (
            "second ServerHello",
            vec![Sealed(vec![2, 0, 0, 0], 22, 0)],
            Err("unexpected_message"),
        ),
        (
            "certificate request",
            vec![Sealed(vec![13, 0, 0, 0], 22, 0)],
            Err("unexpected_message"),
        ),
    ]
}

fn handshake_message_cases() -> Vec<RecordCase> {
    // Type 24 is KeyUpdate; it asks for an update of the other side with 1, and does not with 0.
    let update = |asked: u8| vec![24, 0, 0, 1, asked];
    vec![
        (
            "key update to nothing",
            vec![Sealed(update(2), 22, 0)],
            Err("decode_error"),
        ),
        (
            "key update of two bytes",
            vec![Sealed(vec![24, 0, 0, 2, 0, 0], 22, 0)],
            Err("decode_error"),
        ),
        (
            "a message behind a key update",
            vec![Sealed([update(0), ticket(1)].concat(), 22, 0)],
            Err("unexpected_message"),
        ),
        (
            "data inside a message",
            vec![Sealed(ticket(300)[..9].into(), 22, 0), data("a")],
            Err("unexpected_message"),
        ),
        (
            // It announces 16 MiB, and only tickets of up to 16 KiB (`MESSAGE_MAX`) are read.
            "a huge message",
            vec![Sealed(vec![4, 0xff, 0xff, 0xff], 22, 0)],
            Err("decode_error"),
        ),
        (
            "old keys after a key update",
            vec![Sealed(update(0), 22, 0), data("a")],
            Err("bad_record"),
        ),
        // 64 records in a row may be without data.
        (
            "empty records without end",
            (0..65).map(|_| data("")).collect(),
            Err("idle_records"),
        ),
        (
            "tickets without end",
            (0..65).map(|_| Sealed(ticket(1), 22, 0)).collect(),
            Err("idle_records"),
        ),
    ]
}

pub(super) fn cases() -> Vec<RecordCase> {
    let cases = [
        data_and_length_cases(),
        content_type_cases(),
        handshake_message_cases(),
    ];
    cases.into_iter().flatten().collect()
}

pub(super) fn check(name: &str, got: Result<Vec<u8>, String>, want: Result<&str, &str>) {
    match want {
        Ok("") => assert!(got.is_ok(), "{name}: {got:?}"),
        Ok(text) => assert_eq!(got.as_deref(), Ok(text.as_bytes()), "{name}"),
        Err(why) => assert_eq!(got, Err(why.to_string()), "{name}"),
    }
}

#[tokio::test]
async fn a_peer_that_breaks_the_rules_is_refused_by_name() {
    for (name, says, want) in cases() {
        check(name, read_from_peer(says).await, want);
    }
}

#[tokio::test]
async fn the_peer_gets_an_alert_and_nothing_is_written_after_the_end() {
    let (mut a, b) = own_pair();
    let mut far = b.io;
    far.write_all(&[23, 3, 3, 0, 20]).await.unwrap();
    far.write_all(&[9; 20]).await.unwrap();
    assert!(a.read_u8().await.is_err());
    let (_, mut opener) = codec::pair(
        0x1302,
        EndpointRole::Server,
        &of(0x1302, &[1; 48]),
        &of(0x1302, &[2; 48]),
    )
    .unwrap();
    let mut said = vec![0; 24];
    far.read_exact(&mut said).await.unwrap();
    assert_eq!(
        opener.open(&mut said),
        Err(RecordError::Alert(20)),
        "bad_record_mac"
    );
    assert!(a.write_all(b"x").await.is_err());
    assert!(a.read_u8().await.is_err(), "it stays broken");
}

#[tokio::test]
async fn key_update_requests_without_reads_cost_no_memory() {
    let (mut a, b) = own_pair();
    let (mut sealer, mut far) = (b.sealer, b.io);
    let mut out = Vec::new();
    for _ in 0..60 {
        sealer.asking_update(&mut out);
    }
    sealer.data([&b"x"[..]].into_iter(), &mut out).unwrap();
    far.write_all(&out).await.unwrap();
    assert_eq!(a.read_u8().await.unwrap(), b'x');
    assert!(a.out.len() < 4096, "{}", a.out.len());
}

#[tokio::test]
async fn a_writer_waits_while_the_transport_is_full() {
    let (near, mut far) = tokio::io::duplex(1024);
    let secrets = TrafficSecrets {
        suite: 0x1301,
        side: EndpointRole::Client,
        client: &of(0x1301, &[1; 32]),
        server: &of(0x1301, &[2; 32]),
    };
    let mut a = RecordStream::new(near, &secrets, &[]).unwrap();
    let chunk = vec![5; 16 << 10];
    let wrote = tokio::time::timeout(std::time::Duration::from_millis(50), async {
        for _ in 0..100 {
            a.write_all(&chunk).await.unwrap();
        }
    });
    assert!(wrote.await.is_err(), "nobody reads");
    assert!(a.out.len() <= OUT_MAX + RECORD_MAX, "{}", a.out.len());
    let mut sink = vec![0; 1 << 20];
    let drain = async { while far.read(&mut sink).await.unwrap() > 0 {} };
    tokio::select! {
        () = drain => unreachable!("the writer is still there"),
        done = a.flush() => done.unwrap(),
    }
    assert!(a.out.capacity() <= OUT_MAX);
}

#[test]
fn secrets_must_fit_their_suite() {
    let server = of(0x1302, &[2; 48]);
    let make = |suite, n: usize| {
        RecordStream::new(
            (),
            &TrafficSecrets {
                suite,
                side: EndpointRole::Client,
                client: &vec![1; n],
                server: &server,
            },
            &[],
        )
    };
    assert_eq!(make(0x1303, 92).err(), Some(RecordError::Keys));
    assert_eq!(
        make(0x1302, 48).err(),
        Some(RecordError::Keys),
        "the secret alone"
    );
    assert_eq!(
        make(0x1301, 60).err(),
        Some(RecordError::Keys),
        "the server's is of another suite"
    );
    assert!(make(0x1302, 92).is_ok());
}

proptest! {
    /// However the bytes of a conversation are cut or damaged, a message arrives whole or not at
    /// all.
    #[test]
    fn cut_anywhere_it_is_whole_and_damaged_anywhere_it_ends(
        messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..600), 1..8),
        cut in 1usize..700, damage in proptest::option::of((0usize..4000, 1u8..)),
    ) {
        let (mut sealer, _) = codec::pair(0x1302, EndpointRole::Server, &of(0x1302, &[1; 48]), &of(0x1302, &[2; 48])).unwrap();
        let (mut out, mut want) = (Vec::new(), Vec::new());
        for m in &messages {
            want.extend_from_slice(m);
            sealer.data([m.as_slice()].into_iter(), &mut out).unwrap();
        }
        sealer.close_notify(&mut out).unwrap();
        let damaged = damage.filter(|(at, _)| *at < out.len() && !matches!(at_in_record(&out, *at), 1 | 2));
        if let Some((at, flip)) = damaged {
            out[at] ^= flip;
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let got: Result<Vec<u8>, ()> = runtime.block_on(async {
            let (near, mut far) = tokio::io::duplex(cut);
            let secrets = TrafficSecrets { suite: 0x1302, side: EndpointRole::Client, client: &of(0x1302, &[1; 48]), server: &of(0x1302, &[2; 48]) };
            let mut reader = RecordStream::new(near, &secrets, &[]).unwrap();
            let mut got = Vec::new();
            let send = async { let _ = far.write_all(&out).await; let _ = far.shutdown().await; drop(far); };
            let receive = async { let end = reader.read_to_end(&mut got).await; drop(reader); end };
            let (_, end) = tokio::join!(send, receive);
            end.map(|_| got.clone()).map_err(|_| prop_assert_prefix(&got, &want))
        });
        match damaged {
            None => prop_assert_eq!(got, Ok(want)),
            Some(_) => prop_assert!(got.is_err()),
        }
    }
}

/// Checks that the bytes before the damage are as they were sent.
fn prop_assert_prefix(got: &[u8], want: &[u8]) {
    assert!(want.starts_with(got));
}

/// Returns the position of a byte within its record. The version in a header is the only field that
/// is not checked separately, but it is authenticated.
fn at_in_record(out: &[u8], at: usize) -> usize {
    let mut start = 0;
    loop {
        let length = HEADER + usize::from(u16::from_be_bytes([out[start + 3], out[start + 4]]));
        if at < start + length {
            return at - start;
        }
        start += length;
    }
}
