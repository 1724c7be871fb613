//! Limits the bytes of request bodies that a worker buffers: for external authorizers, before the
//! clients are authorized, and for retries that a rule asks for.
//!
//! Each worker has a part of the process's limit, and each tenant a share of that part, which
//! shrinks as the part fills. Bodies are not read here: the engine does that. Start
//! with [`BodyBudget::take`].

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use canal_gateway_http::proxy_error::ProxyError;
use canal_runtime::share::decide_free_needed;
use hashbrown::HashMap;

/// Body bytes that one worker buffers, in total and per tenant.
#[derive(Debug)]
pub struct BodyBudget {
    /// Most bytes that the worker buffers for all tenants.
    max: u64,
    used: Cell<u64>,
    tenants: RefCell<HashMap<u32, u64>>,
}

impl BodyBudget {
    /// Creates the budget of a worker that may buffer `max` bytes.
    pub fn new(max: u64) -> Rc<Self> {
        Rc::new(Self {
            max,
            used: Cell::default(),
            tenants: RefCell::default(),
        })
    }

    /// Reserves `bytes` for a tenant that may have `tenant_max` on this worker.
    pub fn take(
        self: &Rc<Self>,
        tenant: u32,
        tenant_max: u64,
        bytes: u64,
    ) -> Result<BodyPermit, ProxyError> {
        let mut tenants = self.tenants.borrow_mut();
        let own = tenants.get(&tenant).copied().unwrap_or(0);
        if own + bytes > tenant_max {
            return Err(ProxyError::TenantBodies);
        }
        let Some(left) = self.max.checked_sub(self.used.get() + bytes) else {
            return Err(ProxyError::Bodies);
        };
        // Bodies are not given up, so the shares of some tenants must not add up to everything.
        let has_others = self.used.get() > own;
        if has_others && decide_free_needed(own + bytes, self.max) > left {
            return Err(ProxyError::TenantBodies);
        }
        tenants.insert(tenant, own + bytes);
        self.used.set(self.used.get() + bytes);
        Ok(BodyPermit {
            of: self.clone(),
            tenant,
            tenant_max,
            bytes,
        })
    }

    /// Begins to reserve bytes for a copy of a body. `copied` counts those of all copies of the
    /// tenant, which may have half of `tenant_max`.
    pub fn begin_copy(
        self: &Rc<Self>,
        tenant: u32,
        tenant_max: u64,
        copied: &Rc<Cell<u64>>,
    ) -> CopyPermit {
        let permit = BodyPermit {
            of: self.clone(),
            tenant,
            tenant_max,
            bytes: 0,
        };
        CopyPermit {
            permit,
            copied: copied.clone(),
        }
    }
}

/// Bytes reserved for a copy of a body, released on drop.
#[derive(Debug)]
pub struct CopyPermit {
    permit: BodyPermit,
    copied: Rc<Cell<u64>>,
}

impl CopyPermit {
    /// Extends the reservation to `bytes` if it is smaller.
    ///
    /// # Errors
    /// The name of the limit that has no room.
    pub fn cover(&mut self, bytes: u64) -> Result<(), &'static str> {
        let more = bytes.saturating_sub(self.permit.bytes);
        let copied = self.copied.get() + more;
        if copied > self.permit.tenant_max / 2 {
            return Err("tenant_mirrored_body_bytes");
        }
        self.permit.cover(bytes).map_err(|error| error.name())?;
        self.copied.set(copied);
        Ok(())
    }
}

impl Drop for CopyPermit {
    fn drop(&mut self) {
        self.copied.set(self.copied.get() - self.permit.bytes);
    }
}

/// Bytes reserved in a [`BodyBudget`], released on drop.
#[derive(Debug)]
pub struct BodyPermit {
    of: Rc<BodyBudget>,
    tenant: u32,
    tenant_max: u64,
    bytes: u64,
}

impl BodyPermit {
    /// Extends the reservation to `bytes` if it is smaller.
    pub fn cover(&mut self, bytes: u64) -> Result<(), ProxyError> {
        if bytes > self.bytes {
            let mut more = self
                .of
                .take(self.tenant, self.tenant_max, bytes - self.bytes)?;
            self.bytes += std::mem::take(&mut more.bytes);
        }
        Ok(())
    }
}

impl Drop for BodyPermit {
    fn drop(&mut self) {
        self.of.used.set(self.of.used.get() - self.bytes);
        let mut tenants = self.of.tenants.borrow_mut();
        if let Some(own) = tenants.get_mut(&self.tenant) {
            *own -= self.bytes;
            if *own == 0 {
                tenants.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_have_half_of_a_tenants_bytes() {
        let (budget, copied) = (BodyBudget::new(1000), Rc::new(Cell::new(0)));
        let begin = || budget.begin_copy(1, 100, &copied);
        let (mut one, mut two) = (begin(), begin());
        one.cover(30).unwrap();
        two.cover(20).unwrap();
        two.cover(10).unwrap();
        assert_eq!(two.cover(21), Err("tenant_mirrored_body_bytes"));
        let rest = budget.take(1, 100, 50).unwrap();
        drop(one);
        two.cover(50).unwrap();
        assert_eq!(copied.get(), 50);
        drop(two);
        let more = budget.take(1, 100, 50).unwrap();
        assert_eq!(begin().cover(1), Err("tenant_body_bytes"));
        drop((rest, more));
        assert_eq!((copied.get(), budget.used.get()), (0, 0));
        assert!(budget.tenants.borrow().is_empty());
    }

    #[test]
    fn body_budget_is_shared_and_given_back() {
        const SHARE: u64 = 16 << 20;
        let budget = BodyBudget::new(4 * SHARE);
        let quarter = SHARE / 4;
        // Four quarters fill the share.
        let mut own: Vec<BodyPermit> = (0..4)
            .map(|_| budget.take(1, SHARE, quarter).unwrap())
            .collect();
        assert_eq!(
            budget.take(1, SHARE, 1).unwrap_err(),
            ProxyError::TenantBodies,
            "a tenant has its share"
        );
        assert!(
            budget.take(2, SHARE, quarter).is_ok(),
            "another tenant has its own"
        );
        assert!(
            budget.take(1, 2 * SHARE, quarter).is_ok(),
            "the provider may write a larger one"
        );
        own.pop();
        assert!(budget.take(1, SHARE, quarter).is_ok());
        let mut others: Vec<BodyPermit> = (2..4)
            .map(|tenant| budget.take(tenant, SHARE, SHARE).unwrap())
            .collect();
        own.push(budget.take(1, SHARE, quarter).unwrap());
        assert_eq!(
            budget.take(4, SHARE, SHARE).unwrap_err(),
            ProxyError::TenantBodies,
            "the rest is not for one tenant"
        );
        // Whatever eleven tenants take, a twelfth gets its first bytes.
        // From 8 MiB down to 256 bytes, so that these tenants get all that they can.
        for size in (8..24).rev().map(|bits| 1 << bits) {
            (4..12).for_each(|tenant| {
                others.extend(std::iter::from_fn(|| budget.take(tenant, SHARE, size).ok()))
            });
        }
        // A sixteenth of an eighth of the worker's bytes is granted whatever stays free.
        others.push(budget.take(12, SHARE, SHARE / 32).unwrap());
        assert_eq!(
            budget.take(13, 5 * SHARE, 4 * SHARE).unwrap_err(),
            ProxyError::Bodies,
            "the worker has its limit"
        );
        // The permit has these bytes already, so only one beyond them is refused.
        own[0].cover(quarter).unwrap();
        assert_eq!(
            own[0].cover(quarter + 1).unwrap_err(),
            ProxyError::TenantBodies
        );
        own.pop();
        assert_eq!(
            own[0].cover(quarter + 1).unwrap_err(),
            ProxyError::TenantBodies,
            "others have nearly all"
        );
        drop(others);
        own[0].cover(quarter + 1).unwrap();
        drop(own);
        assert_eq!((budget.used.get(), budget.tenants.borrow().len()), (0, 0));
    }
}
