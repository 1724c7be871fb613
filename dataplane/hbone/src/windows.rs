//! Receive windows of an HTTP/2 connection. The connection's window limits nothing; the windows of
//! its streams are small at first and larger with use, while all streams are read and the tenant
//! has bytes left. The code decides sizes, and the connection's task announces them. Start at
//! [`WindowGrowth::begin`].
//!
//! A window never shrinks. RFC 9113 §6.9.2 allows it. But h2 (0.4.20) then sends no WINDOW_UPDATE
//! to a stream whose returned bytes were less than half of the larger window, so the stream waits
//! for ever. [`crate::flow`] limits what streams hold.

use std::cell::Cell;
use std::rc::Rc;

use bytes::Bytes;
use canal_wire::hbone::STREAM_WINDOW;

use crate::flow::{BufferPressure, FlowAccount};

/// Window of a connection, in bytes: more than all its streams may have. With a smaller one,
/// streams that are not read would stop the others.
pub const CONNECTION_WINDOW: u32 = canal_wire::hbone::CONNECTION_WINDOW;
/// First stream windows of connections that begin while a tenant holds half of its share, and three
/// quarters of it.
const STREAM_WINDOW_UNDER_PRESSURE: [u32; 2] = [16 << 10, 4 << 10];
/// Stream windows of bytes that a connection receives until its streams' windows are doubled. With
/// it the largest window, 512 KiB, is reached after 7 MiB, so that only connections with much
/// traffic buffer so much.
const WINDOWS_PER_GROWTH: u64 = 16;

/// Decides the first stream window of a connection.
fn decide_first(pressure: BufferPressure) -> u32 {
    match pressure {
        BufferPressure::None => STREAM_WINDOW,
        BufferPressure::High => STREAM_WINDOW_UNDER_PRESSURE[0],
        BufferPressure::Severe => STREAM_WINDOW_UNDER_PRESSURE[1],
    }
}

/// Decides the next stream window of a connection that was used enough for a larger one: `now` is
/// the present one, `max` the largest, and `has_stalled` is true if one of its streams is not read.
/// All streams of a connection have the same window size, so the stalled one would buffer more too.
fn decide_next(now: u32, max: u32, pressure: BufferPressure, has_stalled: bool) -> u32 {
    if pressure == BufferPressure::None && !has_stalled {
        now.saturating_mul(2).min(max)
    } else {
        now
    }
}

/// Stream windows of one connection during its lifetime.
#[derive(Debug)]
pub struct WindowGrowth {
    window: u32,
    max: u32,
    account: Rc<FlowAccount>,
    /// Bytes received on the connection so far.
    read: Rc<Cell<u64>>,
    /// Value of [`WindowGrowth::read`] at which the next decision is due.
    due: u64,
    /// Window that could not be announced to the peer yet.
    unannounced: Option<u32>,
}

impl WindowGrowth {
    /// Returns the first windows of a connection, which grow up to `max`; `read` counts the bytes
    /// received on it.
    pub fn begin(max: u32, account: Rc<FlowAccount>, read: Rc<Cell<u64>>) -> Self {
        let window = decide_first(account.pressure());
        Self {
            window,
            max,
            account,
            read,
            due: due_after(0, window),
            unannounced: None,
        }
    }

    /// Returns the present window of each stream.
    pub fn stream_window(&self) -> u32 {
        self.window
    }

    /// Returns a larger window if use, the other streams and the budget justify it now. Otherwise
    /// it costs one comparison.
    #[inline]
    pub fn poll(&mut self) -> Option<u32> {
        if self.read.get() < self.due {
            None
        } else {
            self.grow()
        }
    }

    fn grow(&mut self) -> Option<u32> {
        if self.window >= self.max {
            self.due = u64::MAX;
            return None;
        }
        let window = decide_next(
            self.window,
            self.max,
            self.account.pressure(),
            self.account.stalled() > 0,
        );
        // The next decision comes after as much use, whether this one is favorable or not.
        self.due = due_after(self.read.get(), window);
        let is_larger = window > self.window;
        self.window = window;
        is_larger.then_some(window)
    }

    /// Applies a larger window to a server's connection, if it is due. The connection's task must
    /// call it at every poll.
    #[inline]
    pub fn apply_to_server<T>(&mut self, connection: &mut h2::server::Connection<T, Bytes>)
    where
        T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    {
        self.apply(|window| connection.set_initial_window_size(window).is_ok());
    }

    /// Applies a larger window to a client's connection, if it is due. The connection's task must
    /// call it at every poll.
    #[inline]
    pub fn apply_to_client<T>(&mut self, connection: &mut h2::client::Connection<T, Bytes>)
    where
        T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    {
        self.apply(|window| connection.set_initial_window_size(window).is_ok());
    }

    /// Announces a larger window to the peer. This fails while the peer has not acknowledged the
    /// previous one. It is repeated at the next poll, because no later growth would replace the
    /// last one.
    #[inline]
    fn apply(&mut self, announce: impl FnOnce(u32) -> bool) {
        if let Some(window) = self.poll() {
            self.unannounced = Some(window);
        }
        if self.unannounced.is_some_and(announce) {
            self.unannounced = None;
        }
    }
}

fn due_after(read: u64, window: u32) -> u64 {
    read.saturating_add(WINDOWS_PER_GROWTH * u64::from(window))
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use canal_model::share::Share;
    use canal_wire::hbone::STREAM_WINDOW_MAX;

    use super::*;
    use crate::flow::StalledBytes;
    use crate::flow::tests::budget;

    fn begin(account: &Rc<FlowAccount>) -> WindowGrowth {
        WindowGrowth::begin(STREAM_WINDOW_MAX, account.clone(), Rc::default())
    }

    /// Uses a connection until its window no longer changes, and returns the window.
    fn used(growth: &mut WindowGrowth) -> u32 {
        for _ in 0..1_000 {
            growth.read.set(growth.read.get() + (64 << 10));
            growth.poll();
        }
        growth.stream_window()
    }

    #[test]
    fn windows_begin_small_and_grow_with_use_up_to_the_largest() {
        let mut growth = begin(&FlowAccount::new(None));
        assert_eq!(growth.stream_window(), 64 << 10);
        for n in 1..16 {
            growth.read.set(n * (64 << 10));
            assert_eq!(
                growth.poll(),
                None,
                "a window used less than sixteen times stays"
            );
        }
        growth.read.set(1 << 20);
        assert_eq!(growth.poll(), Some(128 << 10));
        assert_eq!(growth.poll(), None);
        assert_eq!(used(&mut growth), STREAM_WINDOW_MAX);
    }

    #[test]
    fn windows_do_not_grow_while_a_stream_of_the_connection_is_not_read() {
        let account = FlowAccount::new(None);
        let mut growth = begin(&account);
        let stalled = StalledBytes::begin(&account, 1);
        assert_eq!(used(&mut growth), STREAM_WINDOW);
        drop(stalled);
        assert_eq!(used(&mut growth), STREAM_WINDOW_MAX);
    }

    #[test]
    fn a_tenant_that_holds_half_of_its_share_gets_small_windows_and_no_other_tenant_does() {
        let alpha = budget(4 << 20, Share::Percent(25), "alpha");
        let beta = crate::BufferBudget {
            holder: canal_runtime::ShareHolder::Tenant("beta".parse().unwrap()),
            ..alpha.clone()
        };
        let (mine, others) = (
            FlowAccount::new(Some(alpha.clone())),
            FlowAccount::new(Some(beta)),
        );
        let mut growth = begin(&mine);
        let half = alpha.limit.take(&alpha.holder, 512 << 10).unwrap();
        assert_eq!(
            (used(&mut growth), begin(&mine).stream_window()),
            (STREAM_WINDOW, 16 << 10),
            "it does not grow"
        );
        let more = alpha.limit.take(&alpha.holder, 256 << 10).unwrap();
        let mut small = begin(&mine);
        assert_eq!(
            (used(&mut growth), used(&mut small)),
            (STREAM_WINDOW, 4 << 10)
        );
        assert_eq!(used(&mut begin(&others)), STREAM_WINDOW_MAX);
        drop((half, more));
        assert_eq!(
            (used(&mut growth), used(&mut small)),
            (STREAM_WINDOW_MAX, STREAM_WINDOW_MAX)
        );
    }

    #[test]
    fn streams_get_the_largest_window_also_if_the_peer_was_slow_to_acknowledge_the_last_but_one() {
        // Larger than the bytes that the test sends without reading.
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            // The peer acknowledges nothing before it is polled.
            let (server, client) =
                tokio::join!(h2::server::handshake(ours), h2::client::handshake(theirs));
            let (mut server, (send, mut client)): (h2::server::Connection<_, Bytes>, _) =
                (server.unwrap(), client.unwrap());
            let mut growth = begin(&FlowAccount::new(None));
            let mut turn = async |growth: &mut WindowGrowth| {
                growth.apply_to_server(&mut server);
                std::future::poll_fn(|cx| {
                    // Only the frames that the poll sends and reads matter.
                    let _ = server.poll_accept(cx);
                    std::task::Poll::Ready(())
                })
                .await;
            };
            turn(&mut growth).await;
            while growth.stream_window() != STREAM_WINDOW_MAX {
                // Nothing is sent: bytes that count as read suffice for the window to grow.
                growth.read.set(growth.read.get() + (64 << 10));
                turn(&mut growth).await;
            }
            assert!(
                growth.unannounced.is_some(),
                "the first change is not acknowledged"
            );
            // A few polls of both sides deliver all SETTINGS and their acknowledgments.
            for _ in 0..10 {
                std::future::poll_fn(|cx| {
                    // As above.
                    let _ = Pin::new(&mut client).poll(cx);
                    std::task::Poll::Ready(())
                })
                .await;
                turn(&mut growth).await;
            }
            assert_eq!(
                growth.unannounced, None,
                "the last was announced to the peer"
            );
            drop(send);
        });
    }
}
