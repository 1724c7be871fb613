//! A connection's permits in the limits that tenants share, from its accept to its end.
//!
//! It takes and returns permits, and reports when the connection must give way to another. `accept`
//! closes the connection then. Start with [`ConnectionPermit::take`].

use std::cell::{Cell, RefCell};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use canal_gateway_io::scheduler::{Scheduler, TenantQueue};
use canal_gateway_limits::shares::SharedLimits;
use canal_model::ids::TenantName;
use canal_runtime::{ShareHolder, ShareRefusal, TenantPermit};
use futures::FutureExt;
use futures::future::LocalBoxFuture;

use crate::rebalance::ConnectionDrain;

/// Permits that one connection has in the shared limits. It starts as an unauthenticated
/// connection, which may have to give way; a connection with work in progress never does.
pub(crate) struct ConnectionPermit {
    limits: Arc<SharedLimits>,
    holder: ShareHolder,
    connection: RefCell<TenantPermit>,
    /// Returned once the connection has authenticated or has sent a complete request head.
    unauthenticated: RefCell<Option<TenantPermit>>,
    /// Set while one of the permits can be revoked.
    revocation: RefCell<Option<LocalBoxFuture<'static, ()>>>,
    /// True once a permit was revoked, until the connection has authenticated after all.
    must_give_way: Cell<bool>,
    /// Waker of the connection's task, used when `revocation` must be polled again.
    task: RefCell<Option<Waker>>,
    /// True while a request, tunnel or relay is in progress.
    is_established: Cell<bool>,
    /// Soft drain of this connection alone, which sends its client to another replica.
    pub(crate) drain: Rc<ConnectionDrain>,
    /// Set while the connection must give way as unauthenticated and may still authenticate.
    last_turn: RefCell<Option<LocalBoxFuture<'static, ()>>>,
}

/// The permit of a connection whose TLS handshake is in progress.
pub(crate) struct HandshakePermit(RefCell<TenantPermit>);

impl HandshakePermit {
    /// Marks the ClientHello as whole: from now on the handshake does not give way. Its end is
    /// bounded in time.
    pub(crate) fn keep(&self) {
        self.0.borrow_mut().keep();
    }

    /// Runs a handshake that calls [`HandshakePermit::keep`].
    ///
    /// # Errors
    /// The handshake had to give way to another one; the error is a counter label.
    pub(crate) async fn run<T>(
        &self,
        handshake: impl Future<Output = T>,
    ) -> Result<T, &'static str> {
        let revoked = self.0.borrow().revoked();
        tokio::select! {
            // A ClientHello that has just become whole counts.
            biased;
            done = handshake => Ok(done),
            () = revoked => Err("handshake_displaced"),
        }
    }
}

/// Returns the reason for refusing a connection, a value of the label `reason`.
fn reason_of(limits: &SharedLimits, refusal: ShareRefusal) -> &'static str {
    // A tenant whose share is the entire limit reaches both limits at once.
    let is_full =
        refusal == ShareRefusal::Full || limits.connections.used() >= limits.connections.capacity();
    if is_full {
        limits.refused();
        return "connections";
    }
    "tenant_connections"
}

impl ConnectionPermit {
    /// Takes the permits that a new connection of `tenant` needs. If the tenant has used its share,
    /// its own oldest unauthenticated connection gives way, so silent connections block no others.
    ///
    /// # Errors
    /// A limit is reached; the error is a counter label.
    pub(crate) fn take(
        limits: &Arc<SharedLimits>,
        tenant: &TenantName,
    ) -> Result<Rc<Self>, &'static str> {
        let holder = ShareHolder::Tenant(tenant.clone());
        // The connection permit comes first: if it is refused, no other connection has given way
        // for nothing.
        let connection = limits
            .connections
            .take_replacing(&holder, 1)
            .map_err(|refusal| reason_of(limits, refusal))?;
        let unauthenticated = limits
            .unauthenticated
            .take_replacing(&holder, 1)
            .map_err(|_| "unauthenticated_connections")?;
        let permit = Self {
            limits: limits.clone(),
            holder,
            connection: RefCell::new(connection),
            unauthenticated: RefCell::new(Some(unauthenticated)),
            revocation: RefCell::default(),
            must_give_way: Cell::new(false),
            task: RefCell::default(),
            is_established: Cell::new(false),
            last_turn: RefCell::default(),
            drain: ConnectionDrain::new(),
        };
        permit.watch();
        Ok(Rc::new(permit))
    }

    /// Takes a permit for a TLS handshake. From now on the connection does not give way to
    /// unauthenticated ones, because many simultaneous clients would otherwise end each other's
    /// handshakes. The limit of handshakes bounds these connections instead. There, a connection
    /// without a whole ClientHello gives way to others: the oldest of the tenant with the most.
    ///
    /// # Errors
    /// A limit is reached; the error is a counter label.
    pub(crate) fn begin_handshake(&self) -> Result<HandshakePermit, &'static str> {
        let permit = self
            .limits
            .handshakes
            .take_replacing(&self.holder, 1)
            .map_err(|_| "handshakes")?;
        if let Some(unauthenticated) = &mut *self.unauthenticated.borrow_mut() {
            // The permit was revoked and belongs to another connection now, so a new one is needed.
            if unauthenticated.is_revoked() {
                let taken = self.limits.unauthenticated.take_replacing(&self.holder, 1);
                *unauthenticated = taken.map_err(|_| "unauthenticated_connections")?;
            }
            unauthenticated.keep();
        }
        self.connection.borrow_mut().keep();
        self.watch();
        Ok(HandshakePermit(RefCell::new(permit)))
    }

    /// Ends the handshake. The connection may have to give way until it has work in progress.
    pub(crate) fn end_handshake(&self, is_authenticated: bool) {
        let mut unauthenticated = self.unauthenticated.borrow_mut();
        match &mut *unauthenticated {
            Some(permit) if !is_authenticated => permit.offer(),
            permit => *permit = None,
        }
        drop(unauthenticated);
        self.offer();
    }

    /// Releases the permit of an unauthenticated connection, because a component outside the engine
    /// counts the connection by a limit of its own. It still may have to give way as an idle
    /// connection.
    pub(crate) fn hand_over(&self) {
        self.unauthenticated.borrow_mut().take();
        self.offer();
    }

    /// Marks the connection as busy with a request, tunnel or relay: it does not give way. Costs
    /// one comparison after the first call.
    #[inline]
    pub(crate) fn establish(&self) {
        if !self.is_established.replace(true) {
            self.unauthenticated.borrow_mut().take();
            self.connection.borrow_mut().keep();
            self.revocation.borrow_mut().take();
        }
    }

    /// Marks the connection as idle: it may have to give way until [`ConnectionPermit::establish`]
    /// is called again.
    pub(crate) fn offer(&self) {
        self.is_established.set(false);
        self.connection.borrow_mut().offer();
        self.watch();
    }

    /// Starts watching the permits that can be revoked now.
    fn watch(&self) {
        let connection = self.connection.borrow().revoked();
        let unauthenticated = self
            .unauthenticated
            .borrow()
            .as_ref()
            .map(TenantPermit::revoked);
        let revoked = async move {
            match unauthenticated {
                None => connection.await,
                Some(unauthenticated) => {
                    futures::future::select(pin!(connection), pin!(unauthenticated)).await;
                }
            }
        };
        *self.revocation.borrow_mut() = Some(revoked.boxed_local());
        if let Some(task) = self.task.borrow_mut().take() {
            task.wake();
        }
    }

    /// Notes whether a permit was revoked. Costs one check while the connection is busy.
    fn poll_revoked(&self, cx: &mut Context<'_>) {
        let mut revocation = self.revocation.borrow_mut();
        while let Some(revoked) = &mut *revocation
            && revoked.poll_unpin(cx).is_ready()
        {
            self.must_give_way.set(true);
            let connection = self.connection.borrow();
            // A connection that waits for its last turn may lose its other permit too.
            *revocation = (!connection.is_revoked()).then(|| connection.revoked().boxed_local());
        }
        let mut task = self.task.borrow_mut();
        match &mut *task {
            Some(known) if known.will_wake(cx.waker()) => {}
            other => *other = Some(cx.waker().clone()),
        }
    }

    /// Runs `served` to its end in its tenant's turns; `false` if the connection had to give way
    /// before.
    ///
    /// A connection that the limits no longer count ends at once, not in a turn of its tenant: the
    /// files of a tenant that waits for the CPU would otherwise exceed its share, and in sum those
    /// of the process.
    pub(crate) async fn run(
        &self,
        queue: &Rc<TenantQueue>,
        served: Pin<&mut impl Future<Output = ()>>,
    ) -> bool {
        let serve = pin!(self.serve(served));
        let mut turns = pin!(Scheduler::run(queue, serve));
        std::future::poll_fn(|cx| {
            self.poll_revoked(cx);
            if self.must_give_way.get() && self.connection.borrow().is_revoked() {
                return Poll::Ready(false);
            }
            turns.as_mut().poll(cx)
        })
        .await
    }

    /// Runs `served` to its end; `false` if it was unauthenticated and had to give way. Until its
    /// last turn it counts as one of its tenant's connections.
    async fn serve(&self, mut served: Pin<&mut impl Future<Output = ()>>) -> bool {
        std::future::poll_fn(|cx| {
            let must_give_way = self.must_give_way.get();
            let end = served.as_mut().poll(cx).map(|()| true);
            if !must_give_way || end.is_ready() {
                return end;
            }
            self.poll_last_turn(cx).map(|()| false)
        })
        .await
    }

    /// Ready once a connection that must give way has run once more and is still unauthenticated.
    /// After a pause of the worker many connections wait at once. Data from their clients is known
    /// only after the reactor has polled the kernel. The gateway, not the client, has delayed such
    /// a connection.
    fn poll_last_turn(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut last_turn = self.last_turn.borrow_mut();
        if !self
            .unauthenticated
            .borrow()
            .as_ref()
            .is_some_and(TenantPermit::is_revoked)
        {
            *last_turn = None;
            self.must_give_way.set(false);
            return Poll::Pending;
        }
        last_turn
            .get_or_insert_with(|| tokio::task::yield_now().boxed_local())
            .poll_unpin(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use canal_gateway_limits::limits::GatewayLimits;
    use canal_model::share::Shares;
    use canal_runtime::metrics::{MetricFamily, Registry};
    use tokio::net::UnixStream;

    use super::*;

    // Eight times what the tenant may have (`SHARE`), so that most of them have to go.
    const ACCEPTED: usize = 64;
    const SHARE: u64 = 8;

    /// Connections of a tenant that has no CPU time left.
    struct ParkedTenant {
        scheduler: Scheduler,
        limits: Arc<SharedLimits>,
        clients: Vec<UnixStream>,
        served: Vec<tokio::task::JoinHandle<bool>>,
    }

    impl ParkedTenant {
        /// Accepts connections while no round begins, so that none of them has a turn.
        async fn accept(limits: GatewayLimits) -> Self {
            let registry = Registry::new();
            let cpu = registry.seconds(MetricFamily::new("cpu_seconds_total", "CPU.", &[]));
            let scheduler = Scheduler::new();
            let queue = scheduler.queue(&Shares::default(), registry.shard().counter(&cpu, &[]));
            let spent = pin!(async {
                let begun = Instant::now();
                while begun.elapsed() < Duration::from_millis(5) {}
            });
            Scheduler::run(&queue, spent).await;
            let limits = Arc::new(SharedLimits::new(&limits, &registry));
            let (mut clients, mut served) = (Vec::new(), Vec::new());
            for _ in 0..ACCEPTED {
                let (client, accepted) = UnixStream::pair().unwrap();
                let permit = ConnectionPermit::take(&limits, &"alpha".parse().unwrap()).unwrap();
                let queue = queue.clone();
                served.push(tokio::task::spawn_local(async move {
                    let silent = pin!(async {
                        let _ = accepted.readable().await;
                    });
                    permit.run(&queue, silent).await
                }));
                clients.push(client);
                tokio::task::yield_now().await;
            }
            let waiting = Self {
                scheduler,
                limits,
                clients,
                served,
            };
            waiting.let_all_run().await;
            waiting
        }

        /// Polls every ready task, and those that they wake.
        async fn let_all_run(&self) {
            for _ in 0..10 * ACCEPTED {
                tokio::task::yield_now().await;
            }
        }

        /// Counts the connections that the gateway has not closed.
        fn open(&self) -> u64 {
            let is_open = |client: &&UnixStream| client.try_read(&mut [0]).is_err();
            self.clients.iter().filter(is_open).count() as u64
        }
    }

    fn run<R: Future<Output = ()>>(test: impl FnOnce() -> R) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build_local(tokio::runtime::LocalOptions::default())
            .unwrap();
        runtime.block_on(async { test().await });
    }

    #[test]
    fn a_connection_beyond_its_tenants_share_closes_before_the_tenants_turn() {
        // In the second case each of them is first displaced as unauthenticated.
        for unauthenticated in [GatewayLimits::default().unauthenticated, SHARE] {
            run(move || async move {
                let waiting = ParkedTenant::accept(GatewayLimits {
                    tenant_connections: SHARE,
                    unauthenticated,
                    ..GatewayLimits::default()
                })
                .await;
                assert_eq!(waiting.limits.connections.used(), SHARE);
                assert_eq!(waiting.open(), SHARE, "the files are those that count");
                let (first, last) = waiting.served.split_at(ACCEPTED - SHARE as usize);
                assert!(first.iter().all(|task| task.is_finished()), "the oldest");
                assert!(last.iter().all(|task| !task.is_finished()));
            });
        }
    }

    #[test]
    fn an_unauthenticated_connection_counts_until_it_has_had_its_last_turn() {
        run(|| async {
            let waiting = ParkedTenant::accept(GatewayLimits {
                unauthenticated: 4 * SHARE,
                ..GatewayLimits::default()
            })
            .await;
            let all = ACCEPTED as u64;
            assert_eq!(waiting.limits.unauthenticated.used(), SHARE);
            let counted = waiting.limits.connections.used();
            assert_eq!((waiting.open(), counted), (all, all), "no one had a turn");
            tokio::task::spawn_local(waiting.scheduler.clone().rounds());
            waiting.let_all_run().await;
            let counted = waiting.limits.connections.used();
            assert_eq!((waiting.open(), counted), (SHARE, SHARE));
        });
    }
}
