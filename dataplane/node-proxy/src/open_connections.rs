//! Open inbound connections of one worker, so that they can be reauthorized when policies change.
//!
//! [`crate::authorization`] decides which of them may stay.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::authorization::{AuthorizationQuery, AuthorizationRefusal, PodPolicy};
use crate::pod_context::PodContext;

struct OpenConnectionEntry {
    context: Arc<PodContext>,
    query: AuthorizationQuery,
    /// Policies that admitted the connection last.
    evaluated_by: Arc<PodPolicy>,
    end: oneshot::Sender<AuthorizationRefusal>,
}

/// Registry of one worker's open connections.
#[derive(Default)]
pub struct OpenConnections {
    all: RefCell<HashMap<u64, OpenConnectionEntry>>,
    next: Cell<u64>,
}

/// Registration of one open connection, which lasts until it is dropped.
pub struct OpenConnectionHandle {
    open: Rc<OpenConnections>,
    id: u64,
    end: oneshot::Receiver<AuthorizationRefusal>,
}

impl OpenConnections {
    /// Registers a connection that `policy` has just admitted. No await may lie in between, or a
    /// policy change could be missed.
    pub fn register(
        self: &Rc<Self>,
        context: &Arc<PodContext>,
        query: AuthorizationQuery,
        policy: Arc<PodPolicy>,
    ) -> OpenConnectionHandle {
        let id = self.next.get();
        self.next.set(id + 1);
        let (end, ended) = oneshot::channel();
        self.all.borrow_mut().insert(
            id,
            OpenConnectionEntry {
                context: context.clone(),
                query,
                evaluated_by: policy,
                end,
            },
        );
        OpenConnectionHandle {
            open: self.clone(),
            id,
            end: ended,
        }
    }

    /// Reauthorizes the connections whose pod's policies changed, and ends those that are no longer
    /// allowed.
    pub fn reauthorize(&self) {
        let mut over = Vec::new();
        for (id, entry) in self.all.borrow_mut().iter_mut() {
            let now = entry.context.policy.load();
            if Arc::ptr_eq(&now, &entry.evaluated_by) {
                continue;
            }
            match now.decide(&entry.query) {
                Ok(()) => entry.evaluated_by = now.clone(),
                Err(refused) => over.push((*id, refused)),
            }
        }
        for (id, refused) in over {
            if let Some(entry) = self.all.borrow_mut().remove(&id) {
                // Sending fails only if the connection has just ended.
                let _ = entry.end.send(refused);
            }
        }
    }

    /// Returns the number of open connections.
    pub fn len(&self) -> usize {
        self.all.borrow().len()
    }

    /// Returns whether no connection is open.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl OpenConnectionHandle {
    /// Resolves when policies no longer allow the connection.
    pub async fn over(&mut self) -> AuthorizationRefusal {
        match (&mut self.end).await {
            Ok(refused) => refused,
            // The sender lives until it is used, or until this handle is dropped.
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for OpenConnectionHandle {
    fn drop(&mut self) {
        self.open.all.borrow_mut().remove(&self.id);
    }
}
