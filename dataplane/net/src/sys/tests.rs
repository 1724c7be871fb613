//! Tests of sockets on loopback and in namespaces that live as long as the test's thread. They need
//! root, like the product.

use std::os::fd::AsFd;
use std::process::Command;
use std::sync::mpsc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

/// A separate network namespace with loopback up. It belongs to a thread and has no name, so it
/// disappears when it is dropped.
struct TestNetns {
    netns: Netns,
    _end: mpsc::Sender<()>,
}

impl TestNetns {
    fn new() -> Self {
        let (sender, receiver) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            // SAFETY: CLONE_NEWNET affects only this thread, which shares nothing that depends on
            // its network namespace.
            let rc = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            assert_eq!(
                rc,
                0,
                "unshare: {}; these tests need root",
                io::Error::last_os_error()
            );
            run_here("ip link set lo up");
            sender.send(Netns::current().unwrap()).unwrap();
            let _ = ended.recv();
        });
        Self {
            netns: receiver.recv().unwrap(),
            _end: end,
        }
    }

    fn run(&self, command: &str) {
        self.netns.enter(|| run_here(command)).unwrap();
    }
}

fn run_here(command: &str) {
    let words: Vec<_> = command.split(' ').collect();
    let out = Command::new(words[0]).args(&words[1..]).output().unwrap();
    assert!(
        out.status.success(),
        "{command}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
}

fn any() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

#[tokio::test]
async fn sockets_stay_in_the_namespace_of_their_creation() {
    let (pod, home) = (TestNetns::new(), Netns::current().unwrap());
    assert_ne!(pod.netns.id(), home.id());
    for listen_on in ["127.0.0.1:0", "[::1]:0"] {
        let listener = listen(
            Some(&pod.netns),
            listen_on.parse().unwrap(),
            &ListenOptions::default(),
        )
        .unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(
            Netns::current().unwrap().id(),
            home.id(),
            "the thread returned to its namespace"
        );
        let outside = connect(None, address, &ConnectOptions::default()).await;
        assert!(
            matches!(
                outside,
                Err(SysError::Socket {
                    what: "connect",
                    ..
                })
            ),
            "no socket listens there in the thread's own namespace"
        );
        let options = ConnectOptions::default();
        let (near, far) = tokio::join!(
            connect(Some(&pod.netns), address, &options),
            listener.accept()
        );
        let (mut near, mut far) = (near.unwrap(), far.unwrap().0);
        near.write_all(b"inside").await.unwrap();
        let mut got = [0; 6];
        far.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"inside");
        let home_socket = listen(None, any(), &ListenOptions::default()).unwrap();
        let cookie = netns_cookie(near.as_fd()).unwrap();
        assert_eq!(cookie, netns_cookie(listener.as_fd()).unwrap());
        assert_ne!(cookie, netns_cookie(home_socket.as_fd()).unwrap());
        assert_ne!(
            socket_cookie(near.as_fd()).unwrap(),
            socket_cookie(far.as_fd()).unwrap()
        );
    }
}

#[test]
fn a_panic_restores_the_namespace_and_other_threads_keep_theirs() {
    let (pod, home) = (TestNetns::new(), Netns::current().unwrap().id());
    let panicked = std::panic::catch_unwind(|| pod.netns.enter(|| panic!("inside")));
    assert!(panicked.is_err());
    assert_eq!(Netns::current().unwrap().id(), home);
    let inside = pod
        .netns
        .enter(|| {
            std::thread::spawn(|| Netns::current().unwrap().id())
                .join()
                .unwrap()
        })
        .unwrap();
    assert_eq!(
        inside,
        pod.netns.id(),
        "a thread starts where its parent is"
    );
    assert_eq!(
        std::thread::spawn(|| Netns::current().unwrap().id())
            .join()
            .unwrap(),
        home
    );
}

#[test]
fn a_thread_returns_to_its_namespace_after_every_visit() {
    let (one, other) = (TestNetns::new(), TestNetns::new());
    let here = || Netns::current().unwrap().id();
    let visits = move || {
        let home = here();
        pin_home_netns().unwrap();
        for _ in 0..3 {
            let (inside, within, back) = one
                .netns
                .enter(|| (here(), other.netns.enter(here).unwrap(), here()))
                .unwrap();
            assert_eq!(
                (inside, within, back),
                (one.netns.id(), other.netns.id(), one.netns.id()),
                "a visit in a visit"
            );
            assert_eq!(here(), home);
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(Netns::open(file.path()).unwrap().enter(here).is_err());
        assert_eq!(here(), home, "after a visit that cannot be");
        assert!(std::panic::catch_unwind(|| one.netns.enter(|| panic!("inside"))).is_err());
        assert_eq!(here(), home, "after a panic");
        assert_eq!(other.netns.enter(here).unwrap(), other.netns.id());
        assert_eq!(here(), home, "and after that");
    };
    std::thread::spawn(visits).join().unwrap();
}

#[test]
fn the_error_names_a_missing_or_invalid_namespace() {
    let gone = Netns::open("/run/netns/canal-net-none")
        .unwrap_err()
        .to_string();
    assert!(
        gone.contains("/run/netns/canal-net-none") && gone.contains("check that the pod exists"),
        "{gone}"
    );
    let file = tempfile::NamedTempFile::new().unwrap();
    let none = Netns::open(file.path()).unwrap().enter(|| ()).unwrap_err();
    assert!(matches!(none, SysError::Enter { .. }), "{none}");
}

/// Returns the keepalive of a socket, in the form of the constants.
fn keepalive(s: &SockRef<'_>) -> (Duration, Duration, u32) {
    assert!(s.keepalive().unwrap());
    (
        s.tcp_keepalive_time().unwrap(),
        s.tcp_keepalive_interval().unwrap(),
        s.tcp_keepalive_retries().unwrap(),
    )
}

/// Applications' own connections to the proxy, and the proxy's to applications, have a peer in this
/// kernel.
#[tokio::test]
async fn sockets_of_pods_are_probed_after_half_a_minute() {
    assert_eq!(
        LOCAL_KEEPALIVE,
        (Duration::from_secs(30), Duration::from_secs(10), 3)
    );
    let pod = TestNetns::new();
    let captures = listen(
        Some(&pod.netns),
        any(),
        &ListenOptions {
            loopback_only: true,
            ..ListenOptions::default()
        },
    )
    .unwrap();
    let to = captures.local_addr().unwrap();
    let delivery = DeliveryOptions {
        mark: 7,
        source: to.ip(),
        is_foreign: false,
        on_loopback: false,
    };
    let (delivered, captured) = tokio::join!(
        connect_from(&pod.netns, to, &delivery, 40_000..40_010),
        captures.accept()
    );
    assert_eq!(
        keepalive(&SockRef::from(&captured.unwrap().0)),
        LOCAL_KEEPALIVE,
        "of an application's own connection"
    );
    assert_eq!(
        keepalive(&SockRef::from(&delivered.unwrap())),
        LOCAL_KEEPALIVE,
        "of a connection to an application"
    );
}

/// 0x539 is the mark that ztunnel sets on its sockets; the other marks have no meaning.
#[tokio::test]
async fn options_reach_the_socket() {
    let pod = TestNetns::new();
    let options = ListenOptions {
        reuse_port: true,
        mark: Some(0x539),
        ..ListenOptions::default()
    };
    let one = listen(Some(&pod.netns), any(), &options).unwrap();
    let address = one.local_addr().unwrap();
    let two = listen(Some(&pod.netns), address, &options).unwrap();
    assert_eq!(two.local_addr().unwrap(), address);
    assert_eq!(SockRef::from(&one).mark().unwrap(), 0x539);
    // Otherwise the kernel could give the connection below to the second listener.
    drop(two);

    let bind = Some("127.0.0.9:0".parse().unwrap());
    let connect_options = ConnectOptions {
        bind,
        mark: Some(7),
        ..ConnectOptions::default()
    };
    let (near, far) = tokio::join!(
        connect(Some(&pod.netns), address, &connect_options),
        one.accept()
    );
    let (near, (far, from)) = (near.unwrap(), far.unwrap());
    assert_eq!(from.ip().to_string(), "127.0.0.9");
    let s = SockRef::from(&near);
    assert_eq!(
        (
            s.mark().unwrap(),
            s.tcp_nodelay().unwrap(),
            s.keepalive().unwrap()
        ),
        (7, true, true)
    );
    assert_eq!(keepalive(&s), KEEPALIVE);
    assert_eq!(
        SockRef::from(&far).mark().unwrap(),
        0x539,
        "accepted connections inherit the listener's mark"
    );
    let s = SockRef::from(&far);
    assert_eq!(
        (s.tcp_nodelay().unwrap(), s.keepalive().unwrap()),
        (true, true),
        "accepted connections have the other options too"
    );
    assert_eq!(keepalive(&s), KEEPALIVE);

    let local = ConnectOptions {
        local: true,
        ..ConnectOptions::default()
    };
    let near = connect(Some(&pod.netns), address, &local).await.unwrap();
    assert!(
        near.peer_addr().is_ok(),
        "a local connect returns a connected socket"
    );
    let s = SockRef::from(&near);
    assert_eq!(
        (s.tcp_nodelay().unwrap(), keepalive(&s)),
        (true, LOCAL_KEEPALIVE)
    );

    let elsewhere = "10.99.0.1:80".parse().unwrap();
    let refused = listen(Some(&pod.netns), elsewhere, &ListenOptions::default())
        .unwrap_err()
        .to_string();
    assert!(refused.contains("not local in this namespace"), "{refused}");
    let free = ListenOptions {
        freebind: true,
        ..ListenOptions::default()
    };
    assert_eq!(
        listen(Some(&pod.netns), elsewhere, &free)
            .unwrap()
            .local_addr()
            .unwrap(),
        elsewhere
    );

    let taken = listen(Some(&pod.netns), address, &ListenOptions::default())
        .unwrap_err()
        .to_string();
    assert!(taken.contains("another process listens there"), "{taken}");
}

#[tokio::test]
async fn an_answer_that_never_comes_is_a_timeout() {
    let pod = TestNetns::new();
    // The route loops packets back to an address that is not local, so they are dropped silently.
    pod.run("ip route add 10.9.0.0/16 dev lo");
    let options = ConnectOptions {
        timeout: Duration::from_millis(100),
        ..ConnectOptions::default()
    };
    let e = connect(
        Some(&pod.netns),
        "10.9.0.1:15008".parse().unwrap(),
        &options,
    )
    .await
    .unwrap_err();
    assert!(
        matches!(e, SysError::Timeout { .. }) && e.to_string().contains("network policy"),
        "{e}"
    );
    let e = connect(
        Some(&pod.netns),
        "10.10.0.1:15008".parse().unwrap(),
        &options,
    )
    .await
    .unwrap_err();
    assert!(
        matches!(
            e,
            SysError::Socket {
                what: "connect",
                ..
            }
        ),
        "{e}"
    );
}

#[tokio::test]
async fn a_redirected_connection_has_its_original_destination() {
    let pod = TestNetns::new();
    pod.run("ip addr add 10.5.0.1/32 dev lo");
    pod.run("ip addr add fd00:5::1/128 dev lo");
    pod.run("nft add table inet t");
    pod.run("nft add chain inet t o { type nat hook output priority -100 ; }");
    pod.run("nft add rule inet t o tcp dport 80 redirect to :15001");
    for (listen_on, dial) in [
        ("0.0.0.0:15001", "10.5.0.1:80"),
        ("[::]:15001", "[fd00:5::1]:80"),
    ] {
        let options = ListenOptions {
            v6_only: true,
            ..ListenOptions::default()
        };
        let listener = listen(Some(&pod.netns), listen_on.parse().unwrap(), &options).unwrap();
        let dial: SocketAddr = dial.parse().unwrap();
        let options = ConnectOptions::default();
        let (near, far) =
            tokio::join!(connect(Some(&pod.netns), dial, &options), listener.accept());
        near.unwrap();
        assert_eq!(original_destination(&far.unwrap().0).unwrap(), dial);
    }
}

/// The listener accepts on every address, but only from the loopback device: 10.5.0.2 is the other
/// end of a veth pair.
#[tokio::test]
async fn a_loopback_only_listener_accepts_only_loopback() {
    let (pod, outside) = (TestNetns::new(), TestNetns::new());
    pod.run("ip link add out0 type veth peer name in0");
    pod.run(&format!(
        "ip link set in0 netns /proc/{}/fd/{}",
        std::process::id(),
        outside.netns.fd.as_raw_fd()
    ));
    pod.run("ip addr add 10.5.0.1/24 dev out0");
    pod.run("ip link set out0 up");
    outside.run("ip addr add 10.5.0.2/24 dev in0");
    outside.run("ip link set in0 up");
    let options = ListenOptions {
        loopback_only: true,
        ..ListenOptions::default()
    };
    let listener = listen(Some(&pod.netns), "0.0.0.0:15001".parse().unwrap(), &options).unwrap();
    let patient = ConnectOptions {
        timeout: canal_timing::deadline(Duration::from_secs(5)),
        ..ConnectOptions::default()
    };
    for (at, bind) in [
        ("127.0.0.1:15001", None),
        ("127.64.3.4:15001", None),
        ("127.64.3.4:15001", Some("10.5.0.1:0")),
        ("10.5.0.1:15001", None),
    ] {
        let patient = ConnectOptions {
            bind: bind.map(|b| b.parse().unwrap()),
            ..patient
        };
        let (near, far) = tokio::join!(
            connect(Some(&pod.netns), at.parse().unwrap(), &patient),
            listener.accept()
        );
        assert_eq!(
            near.unwrap().peer_addr().unwrap(),
            far.unwrap().0.local_addr().unwrap(),
            "{at}"
        );
    }
    // The packets are dropped without an answer, so the time is short.
    let quick = ConnectOptions {
        timeout: Duration::from_millis(300),
        ..ConnectOptions::default()
    };
    let e = connect(
        Some(&outside.netns),
        "10.5.0.1:15001".parse().unwrap(),
        &quick,
    )
    .await
    .unwrap_err();
    assert!(matches!(e, SysError::Timeout { .. }), "{e}");
}

#[tokio::test]
async fn a_reset_is_seen_as_one() {
    let listener = listen(None, any(), &ListenOptions::default()).unwrap();
    let options = ConnectOptions::default();
    let (near, far) = tokio::join!(
        connect(None, listener.local_addr().unwrap(), &options),
        listener.accept()
    );
    let (near, mut far) = (near.unwrap(), far.unwrap().0);
    reset_on_close(&near);
    drop(near);
    assert_eq!(
        far.read_u8().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
}

#[tokio::test]
async fn a_blocked_reader_gets_data_later() {
    let listener = listen(None, any(), &ListenOptions::default()).unwrap();
    let options = ConnectOptions::default();
    let (near, far) = tokio::join!(
        connect(None, listener.local_addr().unwrap(), &options),
        listener.accept()
    );
    let (mut near, mut far) = (near.unwrap(), far.unwrap().0);
    let mut buf = [0; 8];
    near.write_all(b"one").await.unwrap();
    assert_eq!(
        far.read(&mut buf).await.unwrap(),
        3,
        "all bytes from before are read"
    );
    let guard = ReadWakeupGuard::to(&far).unwrap();
    near.write_all(b"two").await.unwrap();
    // Nothing announces that no task is woken, so the test can only wait a moment.
    tokio::time::timeout(Duration::from_millis(50), far.readable())
        .await
        .expect_err("no task is woken");
    drop(guard);
    tokio::time::timeout(
        canal_timing::deadline(Duration::from_secs(5)),
        far.readable(),
    )
    .await
    .expect("now it is reported")
    .unwrap();
    assert_eq!(far.read(&mut buf).await.unwrap(), 3);
    // More bytes than the limit, and an end, are reported in spite of the guard.
    let _guard = ReadWakeupGuard::to(&far).unwrap();
    near.write_all(&vec![7; 2 * DEAF_BYTES as usize])
        .await
        .unwrap();
    drop(near);
    tokio::time::timeout(
        canal_timing::deadline(Duration::from_secs(5)),
        far.readable(),
    )
    .await
    .expect("so much is reported")
    .unwrap();
}

#[test]
fn threads_are_pinned_to_their_core() {
    let core = *cores().last().unwrap();
    let seen = std::thread::spawn(move || {
        pin_thread(core).unwrap();
        cores()
    });
    assert_eq!(seen.join().unwrap(), [core]);
    assert!(pin_thread(1 << 20).is_err());
}

#[test]
fn local_exhaustion_is_not_attributed_to_the_peer() {
    for (what, code, want) in [
        ("connect", libc::EADDRNOTAVAIL, Some("source_ports")),
        ("bind", libc::EADDRNOTAVAIL, None),
        ("socket", libc::EMFILE, Some("open_files")),
        ("socket", libc::ENFILE, Some("open_files")),
        ("connect", libc::ENOBUFS, Some("memory")),
        ("connect", libc::ECONNREFUSED, None),
    ] {
        let error = SysError::Socket {
            what,
            address: any(),
            source: io::Error::from_raw_os_error(code),
        };
        assert_eq!(error.exhausted_resource(), want, "{error}");
    }
    assert_eq!(
        SysError::Timeout {
            address: any(),
            limit: CONNECT_TIMEOUT
        }
        .exhausted_resource(),
        None
    );
}

#[tokio::test]
async fn port_exhaustion_is_distinguished_from_a_refusal() {
    let pod = TestNetns::new();
    let ports = "echo 40000 40001 > /proc/sys/net/ipv4/ip_local_port_range";
    let done = pod
        .netns
        .enter(|| Command::new("sh").args(["-c", ports]).status().unwrap())
        .unwrap();
    assert!(done.success());
    let listener = listen(
        Some(&pod.netns),
        "127.0.0.1:80".parse().unwrap(),
        &ListenOptions::default(),
    )
    .unwrap();
    let options = ConnectOptions {
        bind: Some(any()),
        ..ConnectOptions::default()
    };
    let mut streams = Vec::new();
    let error = loop {
        match connect(Some(&pod.netns), listener.local_addr().unwrap(), &options).await {
            Ok(stream) => streams.push(stream),
            Err(error) => break error,
        }
        assert!(streams.len() <= 2, "there are two ports");
    };
    assert_eq!(
        (streams.len(), error.exhausted_resource()),
        (2, Some("source_ports")),
        "{error}"
    );
    assert!(error.to_string().contains("ip_local_port_range"), "{error}");
    let refused = connect(Some(&pod.netns), "127.0.0.1:81".parse().unwrap(), &options)
        .await
        .unwrap_err();
    assert_eq!(refused.exhausted_resource(), None, "{refused}");
}

/// The layout is that of `struct tls12_crypto_info_aes_gcm_128` and `_256` of linux/tls.h: version,
/// cipher, IV, key, salt, number of the next record.
#[test]
fn keys_are_laid_out_as_the_kernel_reads_them() {
    let iv = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
    for (length, cipher, whole) in [(16, 51u16, 40), (32, 52, 56)] {
        let keys = TlsKeys::new(&vec![7; length], &iv, 0x0102).unwrap();
        let want = [
            &0x0304u16.to_ne_bytes()[..],
            &cipher.to_ne_bytes(),
            &iv[4..],
            &vec![7; length],
            &iv[..4],
            &[0, 0, 0, 0, 0, 0, 1, 2],
        ];
        assert_eq!(
            (keys.length, &keys.bytes[..keys.length]),
            (whole, &want.concat()[..])
        );
    }
    assert!(TlsKeys::new(&[7; 24], &iv, 0).is_none());
}

#[test]
fn kernel_tls_support_is_detected() {
    let has = kernel_tls().unwrap();
    let listed =
        std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_ulp").unwrap_or_default();
    assert!(
        has || !listed.split_whitespace().any(|m| m == "tls"),
        "{listed}"
    );
}

#[tokio::test]
async fn a_reserved_address_accepts_no_connections() {
    let options = ListenOptions {
        reuse_port: true,
        ..ListenOptions::default()
    };
    let plain = ConnectOptions::default();
    let reserved = reserve_address(any(), &options).unwrap();
    let refused = connect(None, reserved.address, &plain)
        .await
        .unwrap_err()
        .to_string();
    assert!(refused.contains("refused"), "{refused}");

    let listener = listen(None, reserved.address, &options).unwrap();
    let taken = reserve_address(reserved.address, &ListenOptions::default())
        .unwrap_err()
        .to_string();
    assert!(taken.contains("another process listens there"), "{taken}");
    for _ in 0..64 {
        let near = connect(None, reserved.address, &plain);
        let both = async { tokio::join!(near, listener.accept()) };
        let (near, far) =
            tokio::time::timeout(canal_timing::deadline(Duration::from_secs(10)), both)
                .await
                .expect("the listener gets every connection");
        assert!(near.is_ok() && far.is_ok());
    }
    drop(reserved);
    assert!(
        connect(None, listener.local_addr().unwrap(), &plain)
            .await
            .is_ok()
    );
}

/// Connects from a source port of the ephemeral range. Another process may have taken any of them,
/// so several are tried.
async fn connect_from_free_port(any: &str, peer: SocketAddr) -> (TcpStream, ConnectOptions) {
    for _ in 0..100 {
        let free = TcpListener::bind(any).await.unwrap().local_addr().unwrap();
        let source_port = Some(40_000 + free.port() % 10_000);
        let options = ConnectOptions {
            bind: Some(any.parse().unwrap()),
            source_port,
            ..ConnectOptions::default()
        };
        match connect(None, peer, &options).await {
            Ok(near) => return (near, options),
            Err(SysError::Socket { source, .. })
                if source.kind() == io::ErrorKind::AddrNotAvailable => {}
            Err(e) => panic!("{e}"),
        }
    }
    panic!("a hundred source ports are in use");
}

#[tokio::test]
async fn a_source_port_is_chosen_and_shared_with_connections_to_other_peers() {
    for any in ["127.0.0.1:0", "[::1]:0"] {
        let (one, other) = (
            TcpListener::bind(any).await.unwrap(),
            TcpListener::bind(any).await.unwrap(),
        );
        let (near, options) = connect_from_free_port(any, one.local_addr().unwrap()).await;
        let port = near.local_addr().unwrap().port();
        assert_eq!(Some(port), options.source_port);
        let shared = connect(None, other.local_addr().unwrap(), &options)
            .await
            .unwrap();
        assert_eq!(shared.local_addr().unwrap().port(), port, "another peer");
        let taken = connect(None, one.local_addr().unwrap(), &options)
            .await
            .unwrap_err();
        assert!(
            matches!(&taken, SysError::Socket { what: "connect", source, .. } if source.kind() == io::ErrorKind::AddrNotAvailable),
            "{taken}"
        );
        let outside = ConnectOptions {
            source_port: Some(20),
            ..options
        };
        let near = connect(None, one.local_addr().unwrap(), &outside)
            .await
            .unwrap();
        assert!(
            near.local_addr().unwrap().port() > 1024,
            "outside of the namespace's range"
        );
    }
}
