//! Bytes that a connection's streams buffer because their readers accept none. It charges them to a
//! tenant's budget, and selects the stream that is reset when the budget is used up. It reads
//! nothing from HTTP/2 and decides no window; [`crate::windows`] does that. Start with
//! [`StalledBytes`].
//!
//! The window of a connection is unlimited, because otherwise a stream that is not read would stop
//! all others. The windows of streams therefore limit the bytes of one stream, and a budget limits
//! the bytes of all streams of a tenant together.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use canal_runtime::metrics::Gauge;
use canal_runtime::{ShareHolder, TenantLimit, TenantPermit};

use crate::credit::SendCredit;

/// Bytes that one permit of a stalled stream covers. It is the first window of a stream
/// (`STREAM_WINDOW`), so most streams take one permit.
const PERMIT_BYTES: usize = 64 << 10;
/// Smallest [`BufferBudget`] of a process: with less, not one stream could hold anything.
pub const BUFFER_BYTES_MIN: u64 = PERMIT_BYTES as u64;

/// Budget of buffered bytes, and the holder whose share they use.
#[derive(Debug, Clone)]
pub struct BufferBudget {
    /// Limit on buffered bytes, which tenants share.
    pub limit: TenantLimit,
    pub holder: ShareHolder,
}

/// Part of its share that a holder has used, in three classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BufferPressure {
    /// Less than half of the share.
    None,
    /// Half of the share or more.
    High,
    /// Three quarters of the share or more.
    Severe,
}

impl BufferPressure {
    /// Decides the pressure of `used` of `max` bytes.
    fn decide(used: u64, max: u64) -> Self {
        match used {
            used if used >= max / 4 * 3 => Self::Severe,
            used if used >= max / 2 => Self::High,
            _ => Self::None,
        }
    }
}

/// State that all streams of one connection share: the budget for the bytes that they buffer, the
/// number of streams that are not read, and the peer's credit to send.
#[derive(Debug, Default)]
pub struct FlowAccount {
    budget: Option<BufferBudget>,
    stalled: Cell<u32>,
    /// Number of such streams of all connections of the worker.
    stalled_streams: Option<Gauge>,
    credit: Rc<SendCredit>,
}

impl FlowAccount {
    /// Creates the account of a new connection. Without a budget, nothing but the windows limits
    /// what the streams hold.
    pub fn new(budget: Option<BufferBudget>) -> Rc<Self> {
        Rc::new(Self {
            budget,
            ..Self::default()
        })
    }

    /// Creates an account like [`FlowAccount::new`] that counts its stalled streams in a gauge.
    pub(crate) fn counted(
        budget: Option<BufferBudget>,
        stalled_streams: Gauge,
        credit: Rc<SendCredit>,
    ) -> Rc<Self> {
        Rc::new(Self {
            budget,
            stalled_streams: Some(stalled_streams),
            credit,
            ..Self::default()
        })
    }

    /// Returns the peer's credit for the connection's streams.
    pub fn credit(&self) -> &Rc<SendCredit> {
        &self.credit
    }

    /// Returns the number of streams that are not read although bytes wait in them.
    pub fn stalled(&self) -> u32 {
        self.stalled.get()
    }

    fn add_stalled(&self) {
        self.stalled.set(self.stalled.get() + 1);
        self.stalled_streams.iter().for_each(|gauge| gauge.add(1));
    }

    fn remove_stalled(&self) {
        self.stalled.set(self.stalled.get() - 1);
        self.stalled_streams.iter().for_each(|gauge| gauge.add(-1));
    }

    /// Returns how much of its share the holder has used.
    pub fn pressure(&self) -> BufferPressure {
        self.budget.as_ref().map_or(BufferPressure::None, |budget| {
            let (used, max) = budget.limit.used_of(&budget.holder);
            BufferPressure::decide(used, max)
        })
    }
}

/// A permit for some of the held bytes.
struct HeldPermit {
    _permit: TenantPermit,
    revoked: Pin<Box<dyn Future<Output = ()>>>,
}

/// The bytes that one stream holds for a reader that accepts none. They were taken off HTTP/2, so
/// that small frames are merged. Their window was not returned, so that there is never more than a
/// window of them.
pub struct StalledBytes {
    account: Rc<FlowAccount>,
    bytes: BytesMut,
    /// Bytes that were handed to the reader before it stopped, and that it has not consumed.
    handed: usize,
    permits: Vec<HeldPermit>,
}

impl fmt::Debug for StalledBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StalledBytes({} + {})", self.handed, self.bytes.len())
    }
}

impl StalledBytes {
    /// Begins with a reader that has `handed` bytes which it does not consume.
    pub fn begin(account: &Rc<FlowAccount>, handed: usize) -> Self {
        account.add_stalled();
        Self {
            account: account.clone(),
            bytes: BytesMut::new(),
            handed,
            permits: Vec::new(),
        }
    }

    /// Adds bytes that have arrived. They are copied, because a frame is a part of a larger buffer
    /// that it would keep.
    pub fn push(&mut self, data: &[u8]) {
        self.bytes.extend_from_slice(data);
    }

    /// Returns whether no byte waits here.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Hands all bytes to the reader. They are charged until this is dropped.
    pub fn take(&mut self) -> Bytes {
        self.handed = self.bytes.len();
        std::mem::take(&mut self.bytes).freeze()
    }

    /// Charges the buffered bytes. Ready when the stream must be reset: its holder's share or the
    /// whole budget is used up, and this is the holder's stream that has stalled for the longest
    /// time.
    pub fn poll_revoked(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(budget) = &self.account.budget else {
            return Poll::Pending;
        };
        while self.permits.len() * PERMIT_BYTES < self.handed + self.bytes.len() {
            // No permit can be taken if the share is smaller than one permit.
            let Ok(permit) = budget
                .limit
                .take_replacing(&budget.holder, PERMIT_BYTES as u64)
            else {
                return Poll::Ready(());
            };
            let revoked = Box::pin(permit.revoked());
            self.permits.push(HeldPermit {
                _permit: permit,
                revoked,
            });
        }
        match self
            .permits
            .iter_mut()
            .any(|permit| permit.revoked.as_mut().poll(cx).is_ready())
        {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }
}

impl Drop for StalledBytes {
    fn drop(&mut self) {
        self.account.remove_stalled();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::task::Waker;

    use canal_model::share::{Share, ShareKind};
    use canal_runtime::{RevocationOrder, TenantLimitConfig};

    use super::*;

    pub(crate) fn budget(capacity: u64, share: Share, tenant: &str) -> BufferBudget {
        let config = TenantLimitConfig {
            kind: ShareKind::GatewayBufferBytes,
            capacity,
            reserve: 0,
            revocation_order: RevocationOrder::OldestFirst,
        };
        let limit = TenantLimit::new(config);
        limit.set_default_share(share);
        BufferBudget {
            limit,
            holder: ShareHolder::Tenant(tenant.parse().unwrap()),
        }
    }

    fn is_revoked(stalled: &mut StalledBytes) -> bool {
        stalled
            .poll_revoked(&mut Context::from_waker(Waker::noop()))
            .is_ready()
    }

    #[test]
    fn stalled_bytes_are_charged_until_they_are_read() {
        let alpha = budget(1 << 20, Share::Percent(50), "alpha");
        let account = FlowAccount::new(Some(alpha.clone()));
        let mut stalled = StalledBytes::begin(&account, 1);
        assert!(!is_revoked(&mut stalled));
        assert_eq!((alpha.limit.used(), account.stalled()), (64 << 10, 1));
        stalled.push(&[7; 64 << 10]);
        assert!(!is_revoked(&mut stalled));
        assert_eq!(alpha.limit.used(), 128 << 10);
        assert_eq!((stalled.take().len(), stalled.is_empty()), (64 << 10, true));
        assert!(!is_revoked(&mut stalled));
        assert_eq!(
            alpha.limit.used(),
            128 << 10,
            "the reader has not consumed them"
        );
        drop(stalled);
        assert_eq!((alpha.limit.used(), account.stalled()), (0, 0));
    }

    #[test]
    fn the_longest_stalled_stream_of_the_tenant_ends_and_no_other_tenants() {
        let alpha = budget(4 << 20, Share::Percent(25), "alpha");
        let beta = BufferBudget {
            holder: ShareHolder::Tenant("beta".parse().unwrap()),
            ..alpha.clone()
        };
        let (mine, others) = (
            FlowAccount::new(Some(alpha.clone())),
            FlowAccount::new(Some(beta)),
        );
        let full = |account: &Rc<FlowAccount>| {
            let mut stalled = StalledBytes::begin(account, 64 << 10);
            assert!(!is_revoked(&mut stalled));
            stalled
        };
        let mut other = full(&others);
        let mut all: Vec<_> = (0..16).map(|_| full(&mine)).collect();
        assert_eq!(mine.pressure(), BufferPressure::Severe);
        assert!(!all.iter_mut().any(is_revoked), "the share suffices");
        let mut newest = full(&mine);
        let revoked: Vec<bool> = all.iter_mut().map(is_revoked).collect();
        assert!(revoked[0] && !revoked[1..].contains(&true), "{revoked:?}");
        assert!(!is_revoked(&mut newest) && !is_revoked(&mut other));
        all.drain(..8);
        assert_eq!(
            (mine.pressure(), others.pressure()),
            (BufferPressure::High, BufferPressure::None)
        );
    }

    #[test]
    fn pressure_begins_at_half_of_the_share() {
        for (used, expected) in [
            (0, BufferPressure::None),
            (49, BufferPressure::None),
            (50, BufferPressure::High),
            (74, BufferPressure::High),
            (75, BufferPressure::Severe),
        ] {
            assert_eq!(BufferPressure::decide(used, 100), expected, "{used}");
        }
    }
}
