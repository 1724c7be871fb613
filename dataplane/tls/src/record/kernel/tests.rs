//! Tests of the kernel's records against rustls' and this record layer's. They run in user-mode
//! Linux, because the host's kernel may have no TLS.

use std::future::Future;
use std::io::IoSlice;
use std::pin::Pin;
use std::time::Duration;

use canal_testing::user_mode_linux;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::*;
use crate::record::tests::{SUITES, cases, check, converse, handshake_over, of, read_with};
use crate::record::{RecordStream, codec};

type KernelCaseFn = fn() -> Pin<Box<dyn Future<Output = ()>>>;
/// Cases that run inside user-mode Linux, by name.
const INSIDE: [(&str, KernelCaseFn); 15] = [
    (WITHOUT_CIPHER, || Box::pin(without_cipher())),
    ("rustls understands the kernel and is understood", || {
        Box::pin(rustls_understands())
    }),
    ("so does our own", || Box::pin(our_own_understands())),
    ("a peer that breaks the rules is refused by name", || {
        Box::pin(rule_breakers())
    }),
    (
        "the peer gets an alert, and nothing is written after the end",
        || Box::pin(alerts_to_the_peer()),
    ),
    ("a peer's new keys end the connection, by name", || {
        Box::pin(peers_update())
    }),
    (
        "own keys that are spent end the connection in order",
        || Box::pin(spent_keys()),
    ),
    (
        "a connection reports that its keys are nearly at their limit",
        || Box::pin(rotate_hints()),
    ),
    ("a writer after a bad record gets the error as well", || {
        Box::pin(writer_first())
    }),
    (
        "early bytes are read first, or are not passed to the kernel",
        || Box::pin(early()),
    ),
    ("a full transport loses nothing at the end", || {
        Box::pin(full_transport())
    }),
    ("an end waits for what the kernel has", || {
        Box::pin(end_waits())
    }),
    ("slices go as one", || Box::pin(slices())),
    ("small reads, with a ticket in between", || {
        Box::pin(small_reads())
    }),
    (
        "a connection that the kernel refuses continues in this process",
        || Box::pin(refused()),
    ),
];

const WITHOUT_CIPHER: &str = "a kernel that lacks the cipher changes nothing";

/// Boots user-mode Linux and lets it run [`inside`].
#[test]
fn a_kernel_that_has_tls_does_as_we_do() {
    let said = user_mode_linux::run("record::kernel::tests::inside");
    for (name, _) in INSIDE {
        assert!(
            said.contains(&format!("lab: ok {name}\n")),
            "not said: {name}\n{said}"
        );
    }
    assert!(said.contains("lab: all done\n"), "{said}");
}

/// Does nothing in the host's kernel: it is the first process of another kernel.
#[test]
fn inside() {
    user_mode_linux::first_process(|modules| {
        modules.load(&user_mode_linux::TLS);
        assert!(canal_net::sys::kernel_tls().unwrap(), "the module is there");
        for (name, case) in INSIDE {
            if name != WITHOUT_CIPHER {
                modules.load(&user_mode_linux::CIPHER);
            }
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime
                .block_on(async {
                    tokio::time::timeout(canal_timing::deadline(Duration::from_secs(30)), case())
                        .await
                })
                .unwrap_or_else(|_| panic!("hangs: {name}"));
            user_mode_linux::print_line(&format!("ok {name}"));
        }
    });
}

async fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
    (near.unwrap(), far.unwrap().0)
}

type BoxedKernelStream = Box<KernelStream<TcpStream>>;

fn handed(io: TcpStream, secrets: &TrafficSecrets<'_>, early: &[u8]) -> BoxedKernelStream {
    match hand_over(io, secrets, early).unwrap() {
        KtlsHandover::Done(stream) => stream,
        KtlsHandover::Not(_, why) => panic!("not handed over: {why}"),
    }
}

/// Returns a pair with such small buffers that, when the writer continues, half of a record is in
/// TCP and half in the kernel's TLS.
async fn narrow_pair() -> (TcpStream, TcpStream) {
    let (listens, connects) = (TcpSocket::new_v4().unwrap(), TcpSocket::new_v4().unwrap());
    listens.set_recv_buffer_size(2304).unwrap();
    connects.set_send_buffer_size(4608).unwrap();
    listens.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = listens.listen(1).unwrap();
    let (near, far) = tokio::join!(
        connects.connect(listener.local_addr().unwrap()),
        listener.accept()
    );
    (near.unwrap(), far.unwrap().0)
}

/// Returns a client's end in the kernel, and the other end of TCP. The secrets consist of ones and
/// twos.
async fn client_end() -> (BoxedKernelStream, TcpStream) {
    let (near, far) = tcp_pair().await;
    (client_of(near), far)
}

fn client_of(near: TcpStream) -> BoxedKernelStream {
    let (client, server) = twos();
    handed(
        near,
        &TrafficSecrets {
            suite: 0x1302,
            side: EndpointRole::Client,
            client: &client,
            server: &server,
        },
        &[],
    )
}

fn twos() -> (Vec<u8>, Vec<u8>) {
    (of(0x1302, &[1; 48]), of(0x1302, &[2; 48]))
}

/// Returns the server's end for [`client_end`], in this record layer.
fn server_end(far: TcpStream) -> RecordStream<TcpStream> {
    let (client, server) = twos();
    RecordStream::new(
        far,
        &TrafficSecrets {
            suite: 0x1302,
            side: EndpointRole::Server,
            client: &client,
            server: &server,
        },
        &[],
    )
    .unwrap()
}

fn name_of(error: &io::Error) -> String {
    error
        .get_ref()
        .and_then(|e| e.downcast_ref::<RecordError>())
        .map_or(error.to_string(), |e| e.name().to_string())
}

async fn rustls_understands() {
    for suite in SUITES {
        let ((c, mut s), number, client, server) = handshake_over(suite, 3, tcp_pair().await).await;
        let secrets = TrafficSecrets {
            suite: number,
            side: EndpointRole::Client,
            client: &client,
            server: &server,
        };
        // The server's tickets are in the socket already and must be skipped.
        converse(&mut handed(c.into_inner().0, &secrets, &[]), &mut s).await;

        let ((mut c, s), number, client, server) = handshake_over(suite, 0, tcp_pair().await).await;
        let secrets = TrafficSecrets {
            suite: number,
            side: EndpointRole::Server,
            client: &client,
            server: &server,
        };
        converse(&mut handed(s.into_inner().0, &secrets, &[]), &mut c).await;
    }
}

async fn our_own_understands() {
    for (suite, length) in [(0x1301, 32), (0x1302, 48)] {
        let (client, server) = (of(suite, &vec![1; length]), of(suite, &vec![2; length]));
        let secrets = |side| TrafficSecrets {
            suite,
            side,
            client: &client,
            server: &server,
        };
        let (near, far) = tcp_pair().await;
        let mut peer = RecordStream::new(far, &secrets(EndpointRole::Server), &[]).unwrap();
        converse(
            &mut handed(near, &secrets(EndpointRole::Client), &[]),
            &mut peer,
        )
        .await;
        let (near, far) = tcp_pair().await;
        converse(
            &mut handed(near, &secrets(EndpointRole::Client), &[]),
            &mut handed(far, &secrets(EndpointRole::Server), &[]),
        )
        .await;
    }
}

/// Cases in which the kernel reports another error than this record layer, or none.
const OTHERWISE: [(&str, &str); 5] = [
    ("plain alert", "bad_record"),
    ("ChangeCipherSpec", "bad_record"),
    ("nothing but zeros", "bad_record"),
    ("old keys after a key update", "rekey"),
    // The kernel skips these records, at no cost to this process.
    ("empty records without end", "truncated"),
];

async fn rule_breakers() {
    for (name, says, want) in cases() {
        let (reader, far) = client_end().await;
        let other = OTHERWISE
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, want)| Err(*want));
        check(
            name,
            read_with(reader, far, says).await,
            other.unwrap_or(want),
        );
    }
}

async fn alerts_to_the_peer() {
    let (mut a, far) = client_end().await;
    let mut far = server_end(far);
    let far_io = far.get_ref();
    far_io.writable().await.unwrap();
    far_io
        .try_write(&[&[23, 3, 3, 0, 20][..], &[9; 20]].concat())
        .unwrap();
    assert_eq!(name_of(&a.read_u8().await.unwrap_err()), "bad_record");
    assert_eq!(
        far.read_u8().await.unwrap_err().to_string(),
        RecordError::Alert(20).to_string(),
        "bad_record_mac"
    );
    assert_eq!(
        a.write_all(b"x").await.unwrap_err().kind(),
        io::ErrorKind::BrokenPipe
    );
    assert_eq!(
        name_of(&a.read_u8().await.unwrap_err()),
        "bad_record",
        "it stays broken"
    );
}

async fn peers_update() {
    for suite in SUITES {
        let ((c, mut s), number, client, server) = handshake_over(suite, 0, tcp_pair().await).await;
        let secrets = TrafficSecrets {
            suite: number,
            side: EndpointRole::Client,
            client: &client,
            server: &server,
        };
        let mut ours = handed(c.into_inner().0, &secrets, &[]);
        s.write_all(b"old").await.unwrap();
        s.get_mut().1.refresh_traffic_keys().unwrap();
        s.write_all(b"new").await.unwrap();
        s.flush().await.unwrap();
        let mut got = [0; 3];
        ours.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"old");
        if kernel_rekeys() {
            ours.read_exact(&mut got).await.unwrap();
            assert_eq!(&got, b"new");
            converse(&mut ours, &mut s).await;
        } else {
            assert_eq!(
                name_of(&ours.read_exact(&mut got).await.unwrap_err()),
                "rekey"
            );
            let error = s.read_u8().await.unwrap_err().to_string();
            assert!(error.contains("InternalError"), "{error}");
        }
    }
}

async fn spent_keys() {
    let (mut a, far) = client_end().await;
    let mut far = server_end(far);
    a.write_all(b"under the limit").await.unwrap();
    a.limit(0);
    let over = a.write_all(b"over it").await;
    if kernel_rekeys() {
        return converse(&mut *a, &mut far).await;
    }
    assert_eq!(name_of(&over.unwrap_err()), "rekey");
    let mut got = Vec::new();
    far.read_to_end(&mut got).await.unwrap();
    assert_eq!(got, b"under the limit", "and an end in order");
    assert_eq!(name_of(&a.read_u8().await.unwrap_err()), "rekey");
}

async fn rotate_hints() {
    let (mut a, far) = client_end().await;
    let mut far = server_end(far);
    let out = a.rotate_hint().clone().out();
    tokio::pin!(out);
    a.limit(8);
    for n in 1..=8 {
        a.write_all(b"one record").await.unwrap();
        far.read_exact(&mut [0; 10]).await.unwrap();
        let is = futures::poll!(out.as_mut()).is_ready();
        assert_eq!(is, n == 6 && !kernel_rekeys(), "{n}");
        if is {
            break;
        }
    }
    // The kernel counts the records of the peer's direction.
    let (mut a, far) = client_end().await;
    let mut far = server_end(far);
    a.limit(4000);
    for _ in 0..COUNT {
        far.write_all(b"x").await.unwrap();
        a.read_exact(&mut [0; 1]).await.unwrap();
    }
    let out = a.rotate_hint().clone().out();
    let wait = if kernel_rekeys() {
        Duration::from_millis(20)
    } else {
        canal_timing::deadline(Duration::from_secs(5))
    };
    assert_eq!(
        tokio::time::timeout(wait, out).await.is_ok(),
        !kernel_rekeys()
    );
    a.write_all(b"still works").await.unwrap();
    far.read_exact(&mut [0; 11]).await.unwrap();
}

async fn writer_first() {
    let (mut a, far) = client_end().await;
    let mut far = server_end(far);
    far.get_ref().writable().await.unwrap();
    // The header announces a record that is too long. The kernel reports that at the header, to the
    // first caller.
    far.get_ref().try_write(&[23, 3, 3, 0x41, 1, 7, 7]).unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    let written = a.write_all(b"x").await;
    assert!(
        written
            .as_ref()
            .err()
            .is_none_or(|e| name_of(e) == "record_overflow"),
        "{written:?}"
    );
    assert_eq!(name_of(&a.read_u8().await.unwrap_err()), "record_overflow");
    a.shutdown().await.unwrap();
    let mut heard = Vec::new();
    let end = far.read_to_end(&mut heard).await.unwrap_err();
    assert_eq!(end.to_string(), RecordError::Alert(22).to_string());
}

async fn without_cipher() {
    let (client, server) = twos();
    let secrets = TrafficSecrets {
        suite: 0x1302,
        side: EndpointRole::Client,
        client: &client,
        server: &server,
    };
    let (near, far) = tcp_pair().await;
    let KtlsHandover::Not(io, why) = hand_over(near, &secrets, &[]).unwrap() else {
        panic!("the kernel accepted it")
    };
    assert_eq!(why, "refused");
    converse(
        &mut RecordStream::new(io, &secrets, &[]).unwrap(),
        &mut server_end(far),
    )
    .await;
}

async fn early() {
    let (client, server) = twos();
    // 0x1302 is TLS_AES_256_GCM_SHA384.
    let secrets = TrafficSecrets {
        suite: 0x1302,
        side: EndpointRole::Server,
        client: &client,
        server: &server,
    };
    let sealed = |says: &dyn Fn(&mut codec::Sealer, &mut Vec<u8>)| {
        let (mut sealer, mut out) = (
            codec::pair(0x1302, EndpointRole::Client, &client, &server)
                .unwrap()
                .0,
            Vec::new(),
        );
        for text in ["early, ", "whole"] {
            sealer
                .data([text.as_bytes()].into_iter(), &mut out)
                .unwrap();
        }
        let whole = out.len();
        says(&mut sealer, &mut out);
        (sealer, out, whole)
    };
    // The cases differ in the bytes after two data records, and in the end of the early bytes,
    // counted from the second record's end. The last column says whether the kernel accepts them.
    // The header of a record has 5 bytes, so 3 cut the header and 9 the data.
    type Behind = fn(&mut codec::Sealer, &mut Vec<u8>);
    let data: Behind = |sealer, out| assert_eq!(sealer.data([&b"!"[..]].into_iter(), out), Ok(1));
    let update: Behind = |sealer, out| sealer.asking_update(out);
    let padded: Behind = |sealer, out| sealer.any(b"!", 23, 100, out);
    let cases: [(&str, Behind, isize, bool); 6] = [
        ("whole", data, 0, true),
        ("all of it", data, isize::MAX, true),
        ("padded", padded, isize::MAX, true),
        ("cut in the data", data, 9, false),
        ("cut in the header", data, 3, false),
        ("a key update", update, isize::MAX, false),
    ];
    for (name, behind, cut, taken) in cases {
        let (mut sealer, out, whole) = sealed(&behind);
        // The largest number stands for all bytes.
        let cut = whole.saturating_add_signed(cut).min(out.len());
        let (mut near, far) = tcp_pair().await;
        let mut got = Vec::new();
        let mut rest = out[cut..].to_vec();
        sealer.data([&b"."[..]].into_iter(), &mut rest).unwrap();
        sealer.close_notify(&mut rest).unwrap();
        near.write_all(&rest).await.unwrap();
        match hand_over(far, &secrets, &out[..cut]).unwrap() {
            KtlsHandover::Done(mut stream) => {
                assert!(taken, "{name}");
                stream.read_to_end(&mut got).await.unwrap();
            }
            KtlsHandover::Not(io, why) => {
                assert_eq!((taken, why), (false, "early"), "{name}");
                RecordStream::new(io, &secrets, &out[..cut])
                    .unwrap()
                    .read_to_end(&mut got)
                    .await
                    .unwrap();
            }
        }
        let want = if name == "a key update" {
            "early, whole."
        } else {
            "early, whole!."
        };
        assert_eq!(String::from_utf8(got).unwrap(), want, "{name}");
    }
}

async fn full_transport() {
    let data: Vec<u8> = (0..8_000_000u32).map(|n| (n * 7 % 251) as u8).collect();
    for (size, narrow, length) in [
        (1 << 20, false, 8_000_000),
        (16_384, false, 8_000_000),
        (16_384, true, 49_152),
        (5000, true, 49_152),
    ] {
        let data = &data[..length];
        let (near, far) = if narrow {
            narrow_pair().await
        } else {
            tcp_pair().await
        };
        let mut a = client_of(near);
        let mut far = server_end(far);
        let send = async {
            for piece in data.chunks(size) {
                a.write_all(piece).await.unwrap();
            }
            a.shutdown().await.unwrap();
            drop(a);
        };
        let receive = async {
            // The sender must be blocked before the receiver starts.
            tokio::time::sleep(Duration::from_millis(200)).await;
            let mut got = Vec::new();
            far.read_to_end(&mut got).await.unwrap();
            assert!(got == data, "{size}: {} of {}", got.len(), data.len());
        };
        tokio::join!(send, receive);
    }
}

/// Checks that TCP is shut down when it has all bytes, and not before.
async fn end_waits() {
    let (mut a, far) = client_end().await;
    let mut far = server_end(far);
    a.write_all(b"all").await.unwrap();
    // The count is as if the kernel still had one byte.
    a.sealed.content += 1;
    assert!(
        tokio::time::timeout(Duration::from_millis(30), a.shutdown())
            .await
            .is_err()
    );
    assert!(a.get_ref().try_write(b"").is_ok(), "not shut down");
    a.sealed.content -= 1;
    a.shutdown().await.unwrap();
    let mut got = Vec::new();
    far.read_to_end(&mut got).await.unwrap();
    assert_eq!(got, b"all");
}

async fn slices() {
    let (mut a, far) = client_end().await;
    let mut far = server_end(far);
    let parts: Vec<Vec<u8>> = (0..40u8)
        .map(|n| vec![n; 10 + usize::from(n) * 50])
        .collect();
    let all = parts.concat();
    let slices: Vec<IoSlice<'_>> = parts.iter().map(|p| IoSlice::new(p)).collect();
    assert!(a.is_write_vectored());
    assert_eq!(a.write_vectored(&slices).await.unwrap(), all.len());
    let mut got = vec![0; all.len()];
    far.read_exact(&mut got).await.unwrap();
    assert!(got == all);
    assert_eq!(a.write(b"").await.unwrap(), 0);
}

async fn small_reads() {
    let ((c, mut s), number, client, server) = handshake_over(SUITES[0], 4, tcp_pair().await).await;
    let secrets = TrafficSecrets {
        suite: number,
        side: EndpointRole::Client,
        client: &client,
        server: &server,
    };
    let mut ours = handed(c.into_inner().0, &secrets, &[]);
    let text: Vec<u8> = (0..5000u32).map(|n| n as u8).collect();
    s.write_all(&text).await.unwrap();
    s.shutdown().await.unwrap();
    for want in &text[..3000] {
        assert_eq!(ours.read_u8().await.unwrap(), *want);
    }
    let mut rest = Vec::new();
    ours.read_to_end(&mut rest).await.unwrap();
    assert!(rest == text[3000..]);
    assert_eq!(ours.plaintext.len(), 0);
    ours.shutdown().await.unwrap();
    assert_ended(s).await;
}

async fn assert_ended<S: AsyncRead + Unpin>(mut s: S) {
    assert_eq!(s.read(&mut [0; 10]).await.unwrap(), 0);
}

async fn refused() {
    let (client, server) = twos();
    let (near, mut far) = tcp_pair().await;
    // The kernel accepts only established connections, and this one is half closed.
    far.write_all(b"").await.unwrap();
    far.shutdown().await.unwrap();
    near.readable().await.unwrap();
    let secrets = TrafficSecrets {
        suite: 0x1302,
        side: EndpointRole::Client,
        client: &client,
        server: &server,
    };
    let KtlsHandover::Not(io, why) = hand_over(near, &secrets, &[]).unwrap() else {
        panic!("the kernel accepted it")
    };
    assert_eq!(why, "refused");
    let mut ours = RecordStream::new(io, &secrets, &[]).unwrap();
    ours.write_all(b"goes on").await.unwrap();
    ours.shutdown().await.unwrap();
    let mut got = Vec::new();
    server_end(far).read_to_end(&mut got).await.unwrap();
    assert_eq!(got, b"goes on");
    // A pipe is not a socket, and the suite is not one of the mesh.
    let (pipe, _far) = tokio::io::duplex(10);
    assert!(matches!(
        hand_over(pipe, &secrets, &[]),
        Ok(KtlsHandover::Not(_, "no_socket"))
    ));
    let other = TrafficSecrets {
        suite: 0x1303,
        side: EndpointRole::Client,
        client: &client,
        server: &server,
    };
    assert_eq!(
        name_of(&hand_over(tcp_pair().await.0, &other, &[]).err().unwrap()),
        "keys"
    );
}
