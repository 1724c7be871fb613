//! Which service has which 24-bit id. A binding outlives its service: the same name gets the same id back, and an id goes to
//! another service only when no fresh one is left and its quarantine is over. Fresh ids begin at a place of the store's own, so that a store
//! in the place of a lost one does not give out what data planes still hold. Decisions only; `database` writes them.

use std::collections::HashMap;

use canal_model::ids::{ServiceId, ServiceKey, TenantName};

/// A released id is not given to another service before this many seconds: longer than any data plane's stale state lives.
pub const SERVICE_ID_QUARANTINE_SECONDS: u64 = 24 * 3600;

/// Service ids that there are: all of 24 bits but 0.
pub(crate) const SERVICE_ID_SPACE: u32 = (1 << 24) - 1;

/// Of those, how many one tenant's services may have, the deleted ones' that rest among them: more than a tenant may have objects, and a 64th of
/// all.
pub const TENANT_SERVICE_IDS_MAX: u32 = 1 << 18;

/// Why there is no id for a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum IdShortage {
    /// All are taken or rest.
    Mesh,
    /// The tenant has as many as it may.
    Tenant(TenantName),
}

/// One service's binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Binding {
    pub(crate) id: ServiceId,
    /// Seconds since 1970; `None` while the service exists.
    pub(crate) released: Option<u64>,
}

/// All bindings, as on disk.
#[derive(Debug, Clone, Default)]
pub(crate) struct IdBook {
    pub(crate) bindings: HashMap<ServiceKey, Binding>,
    /// How many fresh ids were given out, plus one.
    pub(crate) next: u32,
    /// So far beyond id 1 the first fresh id is; the space goes round.
    pub(crate) offset: u32,
}

impl IdBook {
    /// How many bindings a tenant has, the resting ones among them.
    fn count_of(&self, tenant: &TenantName) -> u32 {
        self.bindings.keys().filter(|key| key.tenant == *tenant).count() as u32
    }

    /// The `n`-th fresh id, from 1.
    fn fresh(&self, n: u32) -> Option<ServiceId> {
        let at = (u64::from(self.offset) + u64::from(n) - 1) % u64::from(SERVICE_ID_SPACE);
        ServiceId::new(u32::try_from(at).ok()? + 1).ok()
    }
}

/// What allocation decided, to be written in one transaction.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Allocation {
    /// Bindings to write.
    pub(crate) bound: Vec<(ServiceKey, ServiceId)>,
    /// Bindings whose id moved to another service.
    pub(crate) displaced: Vec<ServiceKey>,
    pub(crate) next: u32,
}

impl Allocation {
    pub(crate) fn is_empty(&self) -> bool {
        self.bound.is_empty()
    }
}

/// Gives every key in `wanted` an id. A tenant that has `tenant_max` gets only ids of its own back.
pub(crate) fn decide_allocation(
    book: &IdBook,
    wanted: &[ServiceKey],
    now: u64,
    limit: u32,
    tenant_max: u32,
) -> Result<Allocation, IdShortage> {
    let mut out = Allocation { next: book.next.max(1), ..Allocation::default() };
    let mut taken: HashMap<&TenantName, u32> = HashMap::new();
    let mut stale: Option<Vec<StaleBinding>> = None;
    for key in wanted {
        match book.bindings.get(key) {
            Some(Binding { released: None, .. }) => continue,
            Some(Binding { id, released: Some(_) }) => {
                out.bound.push((key.clone(), *id));
                continue;
            }
            None => {}
        }
        let of_tenant = taken.entry(&key.tenant).or_insert_with(|| book.count_of(&key.tenant));
        let is_full = *of_tenant >= tenant_max;
        if !is_full && out.next <= limit {
            let id = book.fresh(out.next).ok_or(IdShortage::Mesh)?;
            out.next += 1;
            *of_tenant += 1;
            out.bound.push((key.clone(), id));
            continue;
        }
        let stale = stale.get_or_insert_with(|| oldest_last(book, wanted, now));
        let at = stale.iter().rposition(|binding| !is_full || binding.key.tenant == key.tenant);
        let Some(at) = at else {
            return Err(if is_full { IdShortage::Tenant(key.tenant.clone()) } else { IdShortage::Mesh });
        };
        let StaleBinding { key: old, id, .. } = stale.remove(at);
        if old.tenant != key.tenant {
            *of_tenant += 1;
        }
        out.displaced.push(old);
        out.bound.push((key.clone(), id));
    }
    Ok(out)
}

/// A binding whose id may go to another service.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct StaleBinding {
    released: u64,
    key: ServiceKey,
    id: ServiceId,
}

/// Released bindings whose quarantine is over and which nobody asks for now; the oldest stands last.
fn oldest_last(book: &IdBook, wanted: &[ServiceKey], now: u64) -> Vec<StaleBinding> {
    let mut v: Vec<StaleBinding> = book
        .bindings
        .iter()
        .filter_map(|(k, b)| b.released.map(|released| StaleBinding { released, key: k.clone(), id: b.id }))
        .filter(|b| b.released.saturating_add(SERVICE_ID_QUARANTINE_SECONDS) <= now && !wanted.contains(&b.key))
        .collect();
    v.sort_by(|a, b| b.cmp(a));
    v
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: &str) -> ServiceKey {
        format!("alpha/shop/{n}").parse().unwrap()
    }

    fn book(entries: &[(&str, u32, Option<u64>)], next: u32) -> IdBook {
        let bindings =
            entries.iter().map(|(n, id, released)| (key(n), Binding { id: ServiceId::new(*id).unwrap(), released: *released })).collect();
        IdBook { bindings, next, offset: 0 }
    }

    #[test]
    fn fresh_ids_begin_at_the_stores_own_place_and_go_round() {
        let book = |offset| IdBook { offset, ..IdBook::default() };
        let ids = |book: &IdBook| [1, 2, 3].map(|n| book.fresh(n).unwrap().get());
        assert_eq!(ids(&book(0)), [1, 2, 3]);
        assert_eq!(ids(&book(SERVICE_ID_SPACE - 2)), [SERVICE_ID_SPACE - 1, SERVICE_ID_SPACE, 1]);
        assert_eq!(book(7).fresh(SERVICE_ID_SPACE).unwrap().get(), 7, "the last is the one before the first");
    }

    #[test]
    fn allocation() {
        const Q: u64 = SERVICE_ID_QUARANTINE_SECONDS;
        struct Case {
            what: &'static str,
            book: IdBook,
            wanted: &'static [&'static str],
            now: u64,
            /// `None`: refused.
            bound: Option<&'static [(&'static str, u32)]>,
        }
        let cases = [
            Case { what: "fresh ids ascend from 1", book: book(&[], 0), wanted: &["a", "b"], now: 0, bound: Some(&[("a", 1), ("b", 2)]) },
            Case { what: "a live binding stays", book: book(&[("a", 1, None)], 2), wanted: &["a"], now: 0, bound: Some(&[]) },
            Case {
                what: "a name that returns gets its id back",
                book: book(&[("a", 1, Some(5))], 2),
                wanted: &["a"],
                now: 6,
                bound: Some(&[("a", 1)]),
            },
            Case {
                what: "fresh before released",
                book: book(&[("a", 1, Some(0))], 2),
                wanted: &["b"],
                now: 10 * Q,
                bound: Some(&[("b", 2)]),
            },
            Case {
                what: "the oldest released once all are used",
                book: book(&[("a", 1, Some(9)), ("b", 2, Some(3)), ("c", 3, None), ("d", 4, None)], 5),
                wanted: &["e"],
                now: Q + 100,
                bound: Some(&[("e", 2)]),
            },
            Case {
                what: "not within the quarantine",
                book: book(&[("a", 1, Some(9)), ("b", 2, None), ("c", 3, None), ("d", 4, None)], 5),
                wanted: &["e"],
                now: Q + 8,
                bound: None,
            },
            Case {
                what: "not the id of a name asked for in the same breath",
                book: book(&[("a", 1, Some(9)), ("b", 2, None), ("c", 3, None), ("d", 4, None)], 5),
                wanted: &["e", "a"],
                now: 10 * Q,
                bound: None,
            },
        ];
        for c in cases {
            let wanted: Vec<ServiceKey> = c.wanted.iter().map(|n| key(n)).collect();
            let got = decide_allocation(&c.book, &wanted, c.now, 4, 4);
            let got = got.ok().map(|a| a.bound.iter().map(|(k, id)| (k.name.to_string(), id.get())).collect::<Vec<_>>());
            let want = c.bound.map(|b| b.iter().map(|(n, id)| (n.to_string(), *id)).collect::<Vec<_>>());
            assert_eq!(got, want, "{}", c.what);
        }
    }

    /// One tenant makes services of new names and deletes them for as long as it likes: it runs into its own share, and others get ids.
    #[test]
    fn a_tenant_that_has_its_share_gets_only_its_own_ids_back() {
        const Q: u64 = SERVICE_ID_QUARANTINE_SECONDS;
        let book = book(&[("a", 1, Some(5)), ("b", 2, Some(3))], 3);
        let beta: ServiceKey = "beta/shop/x".parse().unwrap();
        let decide = |wanted: &[ServiceKey], now| decide_allocation(&book, wanted, now, 100, 2);
        assert_eq!(
            decide(&[key("c")], 5 + Q - 2),
            Ok(Allocation { bound: vec![(key("c"), ServiceId::new(2).unwrap())], displaced: vec![key("b")], next: 3 })
        );
        assert_eq!(decide(&[key("c")], 2 + Q), Err(IdShortage::Tenant("alpha".parse().unwrap())));
        assert_eq!(decide(std::slice::from_ref(&beta), 2 + Q).unwrap().bound, [(beta, ServiceId::new(3).unwrap())]);
        assert_eq!(decide(&[key("a")], 2 + Q).unwrap().bound, [(key("a"), ServiceId::new(1).unwrap())], "a name that returns");
    }
}
