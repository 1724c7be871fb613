//! Receive windows of an HTTP/2 connection: small at first, larger with use, under a budget that tenants share. The code decides sizes, and
//! the connection's task announces them. A window that was announced to a peer cannot be taken back (RFC 9113 §6.9). An exhausted budget
//! therefore only stops windows from growing; beyond that, back-pressure applies. Start at [`WindowGrowth::begin`].

use std::cell::Cell;
use std::rc::Rc;

use bytes::Bytes;
use canal_runtime::{ShareHolder, TenantLimit, TenantPermit};
use canal_wire::hbone::{CONNECTION_WINDOW, CONNECTION_WINDOW_MAX, STREAM_WINDOW, STREAM_WINDOW_MAX};

/// Smallest connection window of HTTP/2, rounded up: a peer may always send that much.
const CONNECTION_WINDOW_MIN: u32 = 64 << 10;
/// Stream window of a connection without a share of the budget: a quarter, as for larger ones, so that a stalled stream does not stop the
/// other streams.
const STREAM_WINDOW_MIN: u32 = CONNECTION_WINDOW_MIN / 4;
/// Number of times that a connection's window must be used up before it is doubled.
const USES_PER_GROWTH: u64 = 4;

/// Receive window sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowSizes {
    /// Receive window of each stream.
    pub stream: u32,
    /// Window of all streams of a connection together, which the connection may have to buffer.
    pub connection: u32,
}

impl WindowSizes {
    /// The largest windows of an HBONE connection.
    pub const HBONE_MAX: Self = Self { stream: STREAM_WINDOW_MAX, connection: CONNECTION_WINDOW_MAX };
    const FIRST: Self = Self { stream: STREAM_WINDOW, connection: CONNECTION_WINDOW };
    const MIN: Self = Self { stream: STREAM_WINDOW_MIN, connection: CONNECTION_WINDOW_MIN };

    /// Returns the next larger sizes; `None` at the largest.
    fn next(self, max: Self) -> Option<Self> {
        let twice = |now: u32, max: u32| now.saturating_mul(2).min(max);
        let next = Self { stream: twice(self.stream, max.stream), connection: twice(self.connection, max.connection) };
        (next != self).then_some(next)
    }
}

/// Budget of windows, and the holder that it is charged to.
#[derive(Debug, Clone)]
pub struct WindowBudget {
    /// Limit of window bytes that tenants share.
    pub limit: TenantLimit,
    pub holder: ShareHolder,
}

/// Windows of one connection during its lifetime.
#[derive(Debug)]
pub struct WindowGrowth {
    sizes: WindowSizes,
    max: WindowSizes,
    /// Bytes received on the connection so far.
    read: Rc<Cell<u64>>,
    /// Value of [`WindowGrowth::read`] at which growth is checked next.
    due: u64,
    /// Stream window that could not be announced to the peer yet.
    untold: Option<u32>,
    budget: BudgetShare,
}

#[derive(Debug)]
enum BudgetShare {
    Unlimited,
    /// The budget was exhausted at the beginning.
    None(WindowBudget),
    Taken(TenantPermit),
}

impl WindowGrowth {
    /// Returns the first windows of a connection; `read` counts the bytes received on it. Without a budget, windows grow up to `max`.
    pub fn begin(max: WindowSizes, budget: Option<&WindowBudget>, read: Rc<Cell<u64>>) -> Self {
        let (sizes, budget) = match budget {
            None => (WindowSizes::FIRST, BudgetShare::Unlimited),
            Some(budget) => match take(budget, WindowSizes::MIN, WindowSizes::FIRST) {
                Some(permit) => (WindowSizes::FIRST, BudgetShare::Taken(permit)),
                None => (WindowSizes::MIN, BudgetShare::None(budget.clone())),
            },
        };
        Self { sizes, max, read, due: due_after(0, sizes), untold: None, budget }
    }

    /// Returns the present window sizes.
    pub fn sizes(&self) -> WindowSizes {
        self.sizes
    }

    /// Returns larger sizes if use and budget justify them now. Otherwise it costs one comparison.
    #[inline]
    pub fn poll(&mut self) -> Option<WindowSizes> {
        if self.read.get() < self.due { None } else { self.grow() }
    }

    fn grow(&mut self) -> Option<WindowSizes> {
        let Some(next) = self.sizes.next(self.max) else {
            self.due = u64::MAX;
            return None;
        };
        // The next check comes after as much use, whether this one is granted or not.
        self.due = due_after(self.read.get(), next);
        match &mut self.budget {
            BudgetShare::Unlimited => {}
            BudgetShare::Taken(permit) => permit.grow(u64::from(next.connection - self.sizes.connection)).ok()?,
            BudgetShare::None(budget) => {
                let permit = take(budget, self.sizes, next)?;
                self.budget = BudgetShare::Taken(permit);
            }
        }
        self.sizes = next;
        Some(next)
    }

    /// Applies larger windows to a server's connection, if they are due. The connection's task must call it at every poll.
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

    /// Applies larger windows to a client's connection, if they are due. The connection's task must call it at every poll.
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

    /// Announces larger stream windows to the peer. This fails while the peer has not acknowledged the last ones, and is repeated at the
    /// next poll, because after the last growth no later one would make up for it.
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

/// Takes the difference between the sizes `after` and `before` from the budget.
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

    /// Uses a connection until it no longer grows, and returns its sizes.
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
        // To a reader that takes nothing, a peer can send no more than the window.
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
