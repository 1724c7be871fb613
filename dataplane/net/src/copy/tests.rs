//! Tests of copies between TCP connections on loopback.

use std::io::ErrorKind;

use canal_runtime::metrics::{MetricFamily, Registry};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::sys;

async fn pair() -> (TcpStream, TcpStream) {
    let l = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (a, b) = tokio::join!(TcpStream::connect(l.local_addr().unwrap()), l.accept());
    (a.unwrap(), b.unwrap().0)
}

#[test]
fn copy_buffers_grow_with_the_bytes_moved() {
    for (moved, size) in [
        (0, 1 << 10),
        ((128 << 10) - 1, 1 << 10),
        (128 << 10, 16 << 10),
        ((10 << 20) - 1, 16 << 10),
        (10 << 20, 256 << 10),
    ] {
        assert_eq!(buffer_size(moved), size, "{moved}");
    }
}

/// Sends normal and urgent bytes, so that all of them are there before the first read.
fn send_urgently(stream: &TcpStream) {
    let socket = socket2::SockRef::from(stream);
    assert_eq!(socket.send(b"ab").unwrap(), 2);
    assert_eq!(socket.send_out_of_band(b"!").unwrap(), 1);
    assert_eq!(socket.send(b"cd").unwrap(), 2);
}

#[tokio::test]
async fn urgent_bytes_keep_their_position_and_do_not_block() {
    let near_listener = sys::listen(
        None,
        "127.0.0.1:0".parse().unwrap(),
        &sys::ListenOptions::default(),
    )
    .unwrap();
    let server_listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for _ in 0..20 {
        let mut client = TcpStream::connect(near_listener.local_addr().unwrap())
            .await
            .unwrap();
        let mut near = near_listener.accept().await.unwrap().0;
        let to = server_listener.local_addr().unwrap();
        let mut far = sys::connect(None, to, &sys::ConnectOptions::default())
            .await
            .unwrap();
        let mut server = server_listener.accept().await.unwrap().0;
        send_urgently(&client);
        send_urgently(&server);
        let exchange = async {
            let (mut there, mut back) = ([0; 5], [0; 5]);
            server.read_exact(&mut there).await.unwrap();
            client.read_exact(&mut back).await.unwrap();
            (there, back)
        };
        let meter = Meter::default();
        tokio::select! {
            end = both(&mut near, &mut far, &meter, None) => panic!("{end:?}"),
            got = tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), exchange) => assert_eq!(got.expect("nothing is buffered"), (*b"ab!cd", *b"ab!cd")),
        }
    }
}

#[tokio::test]
async fn both_directions_are_exact_counted_and_end_separately() {
    let ((mut client, near), (far, mut server)) = (pair().await, pair().await);
    // 20 MiB are more than the last step of the buffer's growth, 10 MiB (`GROW_AT`).
    let (r, total) = (Registry::new(), 20 << 20);
    let family = r.counters(MetricFamily::new("bytes_total", "Bytes.", &["way"]));
    let shard = r.shard();
    let meter = Meter::with(
        shard.counter(&family, &["there"]),
        shard.counter(&family, &["back"]),
    );
    let copying = async {
        let (mut near, mut far) = (
            Prefixed {
                prefix: Bytes::from_static(b"first "),
                leg: near,
            },
            far,
        );
        both(&mut near, &mut far, &meter, None).await
    };
    let client = async {
        // 251 is a prime, so that a piece that is shifted by a power of two does not look right.
        let body: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
        client.write_all(&body).await.unwrap();
        client.shutdown().await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let server = async {
        let mut all = Vec::new();
        server.read_to_end(&mut all).await.unwrap();
        assert!(all.starts_with(b"first "));
        assert!(
            all[6..]
                .iter()
                .enumerate()
                .all(|(i, b)| *b == (i % 251) as u8)
        );
        server.write_all(b"thanks").await.unwrap();
        server.shutdown().await.unwrap();
        all.len()
    };
    let (end, answer, n) = tokio::join!(copying, client, server);
    assert!(matches!(end, CopyEnd::Complete));
    assert_eq!((answer.as_str(), n), ("thanks", total + 6));
    assert_eq!((meter.a_to_b(), meter.b_to_a()), (total as u64 + 6, 6));
    assert!(
        r.render()
            .contains(&format!("bytes_total{{way=\"there\"}} {}", total + 6))
    );
}

#[tokio::test]
async fn resets_pass_from_either_side() {
    for from_a in [true, false] {
        let ((client, mut near), (mut far, server)) = (pair().await, pair().await);
        let (broken, mut other) = if from_a {
            (client, server)
        } else {
            (server, client)
        };
        sys_reset(broken);
        let end = both(&mut near, &mut far, &Meter::default(), None).await;
        let side = if from_a { CopySide::A } else { CopySide::B };
        assert!(
            matches!(end, CopyEnd::Broken { side: s, .. } if s == side),
            "{end:?}"
        );
        drop((near, far));
        assert_eq!(
            other.read_u8().await.unwrap_err().kind(),
            ErrorKind::ConnectionReset
        );
    }
}

fn sys_reset(tcp: TcpStream) {
    crate::sys::reset_on_close(&tcp);
    drop(tcp);
}

#[tokio::test]
async fn a_slow_reader_holds_the_writer() {
    let ((mut client, mut near), (mut far, server)) = (pair().await, pair().await);
    let meter = Meter::default();
    let copying = both(&mut near, &mut far, &meter, None);
    let writing = async {
        let (mut sent, piece) = (0usize, vec![0; 64 << 10]);
        while let Ok(n) =
            tokio::time::timeout(Duration::from_millis(300), client.write(&piece)).await
        {
            sent += n.unwrap();
        }
        sent
    };
    let sent =
        tokio::select! { _ = copying => unreachable!("nobody ended"), sent = writing => sent };
    // The bytes fill the socket buffers of two connections and one chunk; the kernel's autotuning
    // stops at about 6 MiB each.
    assert!(sent < 32 << 20, "{sent}");
    drop(server);
}

/// A leg that sends some chunks and then ends, and that may refuse the bytes sent to it.
struct Closing {
    says: Vec<Bytes>,
    received: Vec<u8>,
    refuses: bool,
    /// True once bytes were refused; a refusing leg sends nothing before.
    refused: bool,
    aborted: bool,
}

impl Closing {
    fn new(says: &[&'static str], refuses: bool) -> Self {
        let says = says
            .iter()
            .rev()
            .map(|s| Bytes::from_static(s.as_bytes()))
            .collect();
        Self {
            says,
            received: Vec::new(),
            refuses,
            refused: false,
            aborted: false,
        }
    }
}

impl Leg for Closing {
    fn poll_chunk(
        &mut self,
        cx: &mut Context<'_>,
        _: &mut BytesMut,
        _: usize,
    ) -> Poll<io::Result<Option<Bytes>>> {
        if self.refuses && !self.refused {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(self.says.pop()))
    }
    fn poll_send(&mut self, _: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        if self.refuses {
            self.refused = true;
            return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
        }
        self.received.extend_from_slice(data);
        Poll::Ready(Ok(std::mem::take(data).len()))
    }
    fn poll_finish(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_broken(&mut self, _: &mut Context<'_>) -> Poll<io::Error> {
        Poll::Pending
    }
    fn poll_stalled(&mut self, _: &mut Context<'_>) -> Poll<io::Error> {
        Poll::Pending
    }
    fn is_reset(&self) -> bool {
        false
    }
    fn poll_departed(&mut self) -> Poll<()> {
        Poll::Ready(())
    }
    fn abort(&mut self) {
        self.aborted = true;
    }
}

#[tokio::test]
async fn a_response_before_the_close_is_delivered_to_the_end() {
    for a_closes in [true, false] {
        let mut closing = Closing::new(&["413 ", "too ", "large"], true);
        let mut talking = Closing::new(&["body", "body"], false);
        let meter = Meter::default();
        let (end, side) = if a_closes {
            (
                both(&mut closing, &mut talking, &meter, None).await,
                CopySide::A,
            )
        } else {
            (
                both(&mut talking, &mut closing, &meter, None).await,
                CopySide::B,
            )
        };
        assert!(
            matches!(&end, CopyEnd::Broken { side: s, error } if *s == side && error.kind() == ErrorKind::BrokenPipe),
            "{end:?}"
        );
        assert_eq!(talking.received, b"413 too large");
        assert!(talking.aborted && closing.aborted);
    }
}
