//! Receive windows of an HTTP/2 connection: small at first, larger with use, under a budget that tenants share. It decides sizes; the
//! connection's task sends them. What was once opened to a peer cannot be taken back (RFC 9113 §6.9): a budget that is used up keeps windows
//! from growing, and the rest is back-pressure. Start at [`WindowGrowth::begin`].

use std::cell::Cell;
use std::rc::Rc;

use bytes::Bytes;
use canal_runtime::{ShareHolder, TenantLimit, TenantPermit};
use canal_wire::hbone::{CONNECTION_WINDOW, CONNECTION_WINDOW_MAX, STREAM_WINDOW, STREAM_WINDOW_MAX};

/// The smallest window of a connection that HTTP/2 knows, rounded up: what a peer may send to everybody.
const CONNECTION_WINDOW_MIN: u32 = 64 << 10;
/// A connection without a share of the budget keeps this for each stream: a quarter, as of larger ones, so that a stalled stream does not
/// stop its neighbours.
const STREAM_WINDOW_MIN: u32 = CONNECTION_WINDOW_MIN / 4;
/// A connection whose window was used up so often gets twice the window.
const USES_PER_GROWTH: u64 = 4;

/// Window sizes, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowSizes {
    /// Of each stream.
    pub stream: u32,
    /// Of all streams of a connection together: what a connection may have to hold.
    pub connection: u32,
}

impl WindowSizes {
    /// The largest windows of an HBONE connection.
    pub const HBONE_MAX: Self = Self { stream: STREAM_WINDOW_MAX, connection: CONNECTION_WINDOW_MAX };
    const FIRST: Self = Self { stream: STREAM_WINDOW, connection: CONNECTION_WINDOW };
    const MIN: Self = Self { stream: STREAM_WINDOW_MIN, connection: CONNECTION_WINDOW_MIN };

    /// The next larger sizes; `None` at the largest.
    fn next(self, max: Self) -> Option<Self> {
        let twice = |now: u32, max: u32| now.saturating_mul(2).min(max);
        let next = Self { stream: twice(self.stream, max.stream), connection: twice(self.connection, max.connection) };
        (next != self).then_some(next)
    }
}

/// Whose windows a budget pays for.
#[derive(Debug, Clone)]
pub struct WindowBudget {
    /// The limit, in bytes.
    pub limit: TenantLimit,
    pub holder: ShareHolder,
}

/// The windows of one connection for as long as it lives.
#[derive(Debug)]
pub struct WindowGrowth {
    sizes: WindowSizes,
    max: WindowSizes,
    /// Bytes that came in on the connection so far.
    read: Rc<Cell<u64>>,
    /// [`WindowGrowth::read`] at which growth is looked at next.
    due: u64,
    /// The streams' window that the peer could not be told of yet.
    untold: Option<u32>,
    budget: Budget,
}

#[derive(Debug)]
enum Budget {
    Unlimited,
    /// Nothing of the budget could be had at the beginning.
    None(WindowBudget),
    Taken(TenantPermit),
}

impl WindowGrowth {
    /// The first windows of a connection; `read` counts the bytes that come in on it. Without a budget windows grow up to `max`.
    pub fn begin(max: WindowSizes, budget: Option<&WindowBudget>, read: Rc<Cell<u64>>) -> Self {
        let (sizes, budget) = match budget {
            None => (WindowSizes::FIRST, Budget::Unlimited),
            Some(budget) => match take(budget, WindowSizes::MIN, WindowSizes::FIRST) {
                Some(permit) => (WindowSizes::FIRST, Budget::Taken(permit)),
                None => (WindowSizes::MIN, Budget::None(budget.clone())),
            },
        };
        Self { sizes, max, read, due: due_after(0, sizes), untold: None, budget }
    }

    /// The sizes in force.
    pub fn sizes(&self) -> WindowSizes {
        self.sizes
    }

    /// The larger sizes that the connection should have now, if its use and the budget say so. Costs a comparison otherwise.
    #[inline]
    pub fn poll(&mut self) -> Option<WindowSizes> {
        if self.read.get() < self.due { None } else { self.grow() }
    }

    fn grow(&mut self) -> Option<WindowSizes> {
        let Some(next) = self.sizes.next(self.max) else {
            self.due = u64::MAX;
            return None;
        };
        // Looked at again after as much use, granted or not.
        self.due = due_after(self.read.get(), next);
        match &mut self.budget {
            Budget::Unlimited => {}
            Budget::Taken(permit) => permit.grow(u64::from(next.connection - self.sizes.connection)).ok()?,
            Budget::None(budget) => {
                let permit = take(budget, self.sizes, next)?;
                self.budget = Budget::Taken(permit);
            }
        }
        self.sizes = next;
        Some(next)
    }

    /// Gives a server's connection its larger windows, if it should have them. To be called at every turn of its task.
    #[inline]
    pub fn apply_to_server<T>(&mut self, connection: &mut h2::server::Connection<T, Bytes>)
    where
        T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    {
        if let Some(sizes) = self.poll() {
            connection.set_target_window_size(sizes.connection);
            self.untold = Some(sizes.stream);
        }
        self.tell_streams(|stream| connection.set_initial_window_size(stream).is_ok());
    }

    /// The same for a client's connection.
    #[inline]
    pub fn apply_to_client<T>(&mut self, connection: &mut h2::client::Connection<T, Bytes>)
    where
        T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    {
        if let Some(sizes) = self.poll() {
            connection.set_target_window_size(sizes.connection);
            self.untold = Some(sizes.stream);
        }
        self.tell_streams(|stream| connection.set_initial_window_size(stream).is_ok());
    }

    /// Tells the peer of larger windows of streams. That fails while it has not acknowledged the last ones, and is tried again at the next turn:
    /// after the last growth none makes up for it.
    #[inline]
    fn tell_streams(&mut self, tell: impl FnOnce(u32) -> bool) {
        if self.untold.is_some_and(tell) {
            self.untold = None;
        }
    }
}

fn due_after(read: u64, sizes: WindowSizes) -> u64 {
    read.saturating_add(USES_PER_GROWTH * u64::from(sizes.connection))
}

/// Takes what `after` may hold more than `before`.
fn take(budget: &WindowBudget, before: WindowSizes, after: WindowSizes) -> Option<TenantPermit> {
    budget.limit.take(&budget.holder, u64::from(after.connection - before.connection)).ok()
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use canal_model::share::{Share, ShareKind};
    use canal_runtime::{GiveWay, TenantLimitConfig};

    use super::*;

    fn budget(capacity: u64, share: Share, tenant: &str) -> WindowBudget {
        let config = TenantLimitConfig { kind: ShareKind::GatewayBufferBytes, capacity, reserve: 0, give_way: GiveWay::Newest };
        let limit = TenantLimit::new(config);
        limit.set_default_share(share);
        WindowBudget { limit, holder: ShareHolder::Tenant(tenant.parse().unwrap()) }
    }

    /// Uses a connection until it no longer grows; gives its sizes.
    fn used(growth: &mut WindowGrowth) -> WindowSizes {
        for _ in 0..10_000 {
            growth.read.set(growth.read.get() + (64 << 10));
            growth.poll();
        }
        growth.sizes()
    }

    #[test]
    fn windows_begin_small_and_grow_with_use_up_to_the_largest() {
        let mut growth = WindowGrowth::begin(WindowSizes::HBONE_MAX, None, Rc::default());
        assert_eq!(growth.sizes(), WindowSizes { stream: 64 << 10, connection: 256 << 10 });
        growth.read.set((1 << 20) - 1);
        assert_eq!(growth.poll(), None, "a window used less than four times stays");
        growth.read.set(1 << 20);
        assert_eq!(growth.poll(), Some(WindowSizes { stream: 128 << 10, connection: 512 << 10 }));
        assert_eq!(growth.poll(), None);
        assert_eq!(used(&mut growth), WindowSizes::HBONE_MAX);
    }

    #[test]
    fn streams_get_the_largest_window_also_if_the_peer_was_slow_to_acknowledge_the_last_but_one() {
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            // The peer acknowledges nothing before it is polled.
            let (server, client) = tokio::join!(h2::server::handshake(ours), h2::client::handshake(theirs));
            let (mut server, (send, mut client)): (h2::server::Connection<_, Bytes>, _) = (server.unwrap(), client.unwrap());
            let mut growth = WindowGrowth::begin(WindowSizes::HBONE_MAX, None, Rc::default());
            let mut turn = async |growth: &mut WindowGrowth| {
                growth.apply_to_server(&mut server);
                std::future::poll_fn(|cx| {
                    let _ = server.poll_accept(cx);
                    std::task::Poll::Ready(())
                })
                .await;
            };
            turn(&mut growth).await;
            while growth.sizes() != WindowSizes::HBONE_MAX {
                growth.read.set(growth.read.get() + (64 << 10));
                turn(&mut growth).await;
            }
            assert!(growth.untold.is_some(), "the first change is not acknowledged");
            for _ in 0..10 {
                std::future::poll_fn(|cx| {
                    let _ = Pin::new(&mut client).poll(cx);
                    std::task::Poll::Ready(())
                })
                .await;
                turn(&mut growth).await;
            }
            assert_eq!(growth.untold, None, "the peer was told of the last");
            drop(send);
        });
    }

    #[test]
    fn stalled_connection_does_not_grow() {
        let mut growth = WindowGrowth::begin(WindowSizes::HBONE_MAX, None, Rc::default());
        // A peer can send no more than the window to a reader that takes nothing.
        growth.read.set(u64::from(CONNECTION_WINDOW));
        assert_eq!(growth.poll(), None);
    }

    #[test]
    fn used_up_budget_keeps_windows_small_for_its_tenant_alone() {
        let alpha = budget(10 << 20, Share::Percent(20), "alpha");
        let beta = WindowBudget { holder: ShareHolder::Tenant("beta".parse().unwrap()), ..alpha.clone() };
        let begin = |budget: &WindowBudget| WindowGrowth::begin(WindowSizes::HBONE_MAX, Some(budget), Rc::default());
        let mut all: Vec<_> = (0..100).map(|_| begin(&alpha)).collect();
        all.iter_mut().for_each(|growth| {
            used(growth);
        });
        let held: u64 = all.iter().map(|g| u64::from(g.sizes().connection - CONNECTION_WINDOW_MIN)).sum();
        assert!(held <= 2 << 20, "{held}");
        assert_eq!(held, alpha.limit.used());
        assert_eq!(begin(&alpha).sizes(), WindowSizes::MIN);
        assert_eq!(used(&mut begin(&beta)), WindowSizes::HBONE_MAX);
        drop(all);
        assert_eq!(alpha.limit.used(), 0);
        assert_eq!(used(&mut begin(&alpha)), WindowSizes::HBONE_MAX);
    }

    #[test]
    fn connection_that_began_without_budget_grows_once_there_is_some() {
        let alpha = budget(4 << 20, Share::Percent(100), "alpha");
        let other = alpha.limit.take(&alpha.holder, 4 << 20).unwrap();
        let mut growth = WindowGrowth::begin(WindowSizes::HBONE_MAX, Some(&alpha), Rc::default());
        assert_eq!(used(&mut growth), WindowSizes::MIN);
        drop(other);
        assert_eq!(used(&mut growth), WindowSizes::HBONE_MAX);
    }
}
