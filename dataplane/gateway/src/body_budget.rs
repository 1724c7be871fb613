//! Limits the bytes of request bodies that a worker holds before anybody is authorized: the worker's part of the process's limit, and of
//! each tenant's share of it. It reads no bodies; `judge::body` does. Start with [`BodyBudget::take`].

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use hashbrown::HashMap;

use crate::fault::Fault;

/// The bytes of bodies that one worker holds for authorizers, and whose they are.
#[derive(Debug)]
pub(crate) struct BodyBudget {
    /// What the worker holds at most for all tenants.
    max: u64,
    used: Cell<u64>,
    tenants: RefCell<HashMap<u32, u64>>,
}

impl BodyBudget {
    /// The budget of a worker that holds at most `max` bytes.
    pub(crate) fn new(max: u64) -> Rc<Self> {
        Rc::new(Self { max, used: Cell::default(), tenants: RefCell::default() })
    }

    /// Takes so many bytes for a tenant that may hold `tenant_max` on this worker.
    pub(crate) fn take(self: &Rc<Self>, tenant: u32, tenant_max: u64, bytes: u64) -> Result<BodyPermit, Fault> {
        let mut tenants = self.tenants.borrow_mut();
        let own = tenants.get(&tenant).copied().unwrap_or(0);
        if own + bytes > tenant_max {
            return Err(Fault::TenantBodies);
        }
        if self.used.get() + bytes > self.max {
            return Err(Fault::Bodies);
        }
        tenants.insert(tenant, own + bytes);
        self.used.set(self.used.get() + bytes);
        Ok(BodyPermit { of: self.clone(), tenant, tenant_max, bytes })
    }
}

/// Bytes taken of a [`BodyBudget`], given back when dropped.
#[derive(Debug)]
pub(crate) struct BodyPermit {
    of: Rc<BodyBudget>,
    tenant: u32,
    tenant_max: u64,
    bytes: u64,
}

impl BodyPermit {
    /// Takes what is missing to so many bytes.
    pub(crate) fn cover(&mut self, bytes: u64) -> Result<(), Fault> {
        if bytes > self.bytes {
            let mut more = self.of.take(self.tenant, self.tenant_max, bytes - self.bytes)?;
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
    fn body_budget_is_shared_and_given_back() {
        const SHARE: u64 = 16 << 20;
        let budget = BodyBudget::new(4 * SHARE);
        let quarter = SHARE / 4;
        let mut own: Vec<BodyPermit> = (0..4).map(|_| budget.take(1, SHARE, quarter).unwrap()).collect();
        assert_eq!(budget.take(1, SHARE, 1).unwrap_err(), Fault::TenantBodies, "a tenant has its share");
        assert!(budget.take(2, SHARE, quarter).is_ok(), "another tenant has its own");
        assert!(budget.take(1, 2 * SHARE, quarter).is_ok(), "the provider may write a larger one");
        own.pop();
        assert!(budget.take(1, SHARE, quarter).is_ok());
        let others: Vec<BodyPermit> = (2..5).map(|tenant| budget.take(tenant, SHARE, SHARE).unwrap()).collect();
        own.push(budget.take(1, SHARE, quarter).unwrap());
        assert_eq!(budget.take(6, SHARE, 1).unwrap_err(), Fault::Bodies, "the worker has its limit");
        own[0].cover(quarter).unwrap();
        assert_eq!(own[0].cover(quarter + 1).unwrap_err(), Fault::TenantBodies);
        own.pop();
        own[0].cover(quarter + 1).unwrap();
        drop((own, others));
        assert_eq!((budget.used.get(), budget.tenants.borrow().len()), (0, 0));
    }
}
