//! Connections that were let in, so that they can be asked for again when policies change. One worker's; who may stay is decided in
//! [`crate::authorization`].

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::authorization::{PodPolicy, Question, Refused};
use crate::room::Room;

struct Entry {
    room: Arc<Room>,
    question: Question,
    /// The policies that let it in last.
    judged_by: Arc<PodPolicy>,
    end: oneshot::Sender<Refused>,
}

/// A worker's open connections.
#[derive(Default)]
pub struct Open {
    all: RefCell<HashMap<u64, Entry>>,
    next: Cell<u64>,
}

/// One of them, for as long as this lives.
pub struct Held {
    open: Rc<Open>,
    id: u64,
    end: oneshot::Receiver<Refused>,
}

impl Open {
    /// Remembers a connection that `policy` let in just now: no await may lie between, or a change could be missed.
    pub fn hold(self: &Rc<Self>, room: &Arc<Room>, question: Question, policy: Arc<PodPolicy>) -> Held {
        let id = self.next.get();
        self.next.set(id + 1);
        let (end, ended) = oneshot::channel();
        self.all.borrow_mut().insert(id, Entry { room: room.clone(), question, judged_by: policy, end });
        Held { open: self.clone(), id, end: ended }
    }

    /// Asks again for all whose pod has other policies now, and tells those that may not stay.
    pub fn reconsider(&self) {
        let mut over = Vec::new();
        for (id, entry) in self.all.borrow_mut().iter_mut() {
            let now = entry.room.policy.load();
            if Arc::ptr_eq(&now, &entry.judged_by) {
                continue;
            }
            match now.decide(&entry.question) {
                Ok(()) => entry.judged_by = now.clone(),
                Err(refused) => over.push((*id, refused)),
            }
        }
        for (id, refused) in over {
            if let Some(entry) = self.all.borrow_mut().remove(&id) {
                // Fails only if the connection has just ended.
                let _ = entry.end.send(refused);
            }
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.all.borrow().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Held {
    /// Resolves when it may not stay.
    pub async fn over(&mut self) -> Refused {
        match (&mut self.end).await {
            Ok(refused) => refused,
            // The sender lives until it is used or this is dropped.
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.open.all.borrow_mut().remove(&self.id);
    }
}
