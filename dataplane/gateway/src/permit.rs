//! A connection's permits in the limits that tenants share, from its accept to its end. It takes, keeps and gives back, and reports when the
//! connection has to give way; what is closed then is `accept`'s business. Start at [`ConnectionPermit::take`].

use std::cell::{Cell, RefCell};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use canal_model::ids::TenantName;
use canal_runtime::{ShareHolder, ShareRefusal, TenantPermit};
use futures::FutureExt;
use futures::future::LocalBoxFuture;

use crate::shares::SharedLimits;
use crate::worker::Shared;

/// What a connection holds of the shared limits. It begins as one that proved nothing and may have to give way; a connection that is at
/// work does not.
pub(crate) struct ConnectionPermit {
    shared: Arc<Shared>,
    holder: ShareHolder,
    connection: RefCell<TenantPermit>,
    /// Given back once the connection proved an identity, or sent a whole request head.
    unauthenticated: RefCell<Option<TenantPermit>>,
    /// Set while one of the permits can be revoked.
    revocation: RefCell<Option<LocalBoxFuture<'static, ()>>>,
    /// The connection's task, to be woken when it has to look at `revocation` again.
    task: RefCell<Option<Waker>>,
    is_established: Cell<bool>,
    /// Set while it has to give way for having proved nothing, and may still prove something.
    last_turn: RefCell<Option<LocalBoxFuture<'static, ()>>>,
}

/// Why a connection is refused; the names are values of the label `reason`.
fn reason_of(limits: &SharedLimits, refusal: ShareRefusal) -> &'static str {
    // A tenant that may take everything meets its share and the whole limit at once.
    let is_full = refusal == ShareRefusal::Full || limits.connections.used() >= limits.connections.capacity();
    if is_full {
        limits.refused();
        return "connections";
    }
    "tenant_connections"
}

impl ConnectionPermit {
    /// Takes what a new connection of `tenant` needs. Where the tenant has its share, its own oldest connection that proved nothing gives
    /// way: connections that say nothing keep out nobody.
    pub(crate) fn take(shared: &Arc<Shared>, tenant: &TenantName) -> Result<Rc<Self>, &'static str> {
        let limits = &shared.limits;
        let holder = ShareHolder::Tenant(tenant.clone());
        // Connections first: where they refuse, no other connection has given way in vain.
        let connection = limits.connections.take_replacing(&holder, 1).map_err(|refusal| reason_of(limits, refusal))?;
        let unauthenticated = limits.unauthenticated.take_replacing(&holder, 1).map_err(|_| "unauthenticated_connections")?;
        let permit = Self {
            shared: shared.clone(),
            holder,
            connection: RefCell::new(connection),
            unauthenticated: RefCell::new(Some(unauthenticated)),
            revocation: RefCell::default(),
            task: RefCell::default(),
            is_established: Cell::new(false),
            last_turn: RefCell::default(),
        };
        permit.watch();
        Ok(Rc::new(permit))
    }

    /// Takes a place among the TLS handshakes that are under way. From here on the connection does not give way to others that prove
    /// nothing: many clients that come at once would otherwise end each other's handshakes. What bounds it is the limit of handshakes.
    pub(crate) fn begin_handshake(&self) -> Result<TenantPermit, &'static str> {
        let permit = self.shared.limits.handshakes.take(&self.holder, 1).map_err(|_| "handshakes")?;
        if let Some(unauthenticated) = &mut *self.unauthenticated.borrow_mut() {
            // In its last turn: what it had is another's by now.
            if unauthenticated.is_revoked() {
                let taken = self.shared.limits.unauthenticated.take_replacing(&self.holder, 1);
                *unauthenticated = taken.map_err(|_| "unauthenticated_connections")?;
            }
            unauthenticated.keep();
        }
        self.connection.borrow_mut().keep();
        self.watch();
        Ok(permit)
    }

    /// The handshake is over. The connection may have to give way until it is at work.
    pub(crate) fn end_handshake(&self, is_authenticated: bool) {
        let mut unauthenticated = self.unauthenticated.borrow_mut();
        match &mut *unauthenticated {
            Some(permit) if !is_authenticated => permit.offer(),
            permit => *permit = None,
        }
        drop(unauthenticated);
        self.offer();
    }

    /// A request, tunnel or relay is under way: the connection does not give way. Costs a comparison after the first call.
    #[inline]
    pub(crate) fn establish(&self) {
        if !self.is_established.replace(true) {
            self.unauthenticated.borrow_mut().take();
            self.connection.borrow_mut().keep();
            self.revocation.borrow_mut().take();
        }
    }

    /// The connection is idle and may have to give way until [`ConnectionPermit::establish`] is called again.
    pub(crate) fn offer(&self) {
        self.is_established.set(false);
        self.connection.borrow_mut().offer();
        self.watch();
    }

    /// Watches the permits that can be revoked now.
    fn watch(&self) {
        let connection = self.connection.borrow().revoked();
        let unauthenticated = self.unauthenticated.borrow().as_ref().map(TenantPermit::revoked);
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

    /// Ready, once, when the connection has to give way. Costs a look while it is at work.
    fn poll_revoked(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut revocation = self.revocation.borrow_mut();
        let Some(revoked) = &mut *revocation else {
            return self.remember(cx);
        };
        if revoked.poll_unpin(cx).is_ready() {
            *revocation = None;
            return Poll::Ready(());
        }
        self.remember(cx)
    }

    fn remember(&self, cx: &Context<'_>) -> Poll<()> {
        let mut task = self.task.borrow_mut();
        match &mut *task {
            Some(known) if known.will_wake(cx.waker()) => {}
            other => *other = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    /// Runs `served` to its end; `false` if the connection had to give way before.
    pub(crate) async fn run(&self, mut served: Pin<&mut impl Future<Output = ()>>) -> bool {
        std::future::poll_fn(|cx| {
            let is_revoked = self.poll_revoked(cx).is_ready() || self.last_turn.borrow().is_some();
            if is_revoked && self.connection.borrow().is_revoked() {
                return Poll::Ready(false);
            }
            let end = served.as_mut().poll(cx).map(|()| true);
            if !is_revoked || end.is_ready() {
                return end;
            }
            self.poll_last_turn(cx).map(|()| false)
        })
        .await
    }

    /// Ready once a connection that has to give way has had its last turn and proved nothing. After a pause of the worker many connections wait
    /// at once, and what their clients sent is known only once the reactor was asked: they wait for the gateway, not it for them.
    fn poll_last_turn(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut last_turn = self.last_turn.borrow_mut();
        if !self.unauthenticated.borrow().as_ref().is_some_and(TenantPermit::is_revoked) {
            *last_turn = None;
            return Poll::Pending;
        }
        last_turn.get_or_insert_with(|| tokio::task::yield_now().boxed_local()).poll_unpin(cx)
    }
}
