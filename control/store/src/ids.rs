//! Assigns 24-bit ids to services. The module decides only; `database` writes the decisions.
//!
//! A binding outlives its service: a service that returns under the same name gets the same id
//! back. An id moves to another service only when no fresh id is left and its quarantine is over.
//! Fresh ids begin at a random offset per store. A store that replaces a lost one therefore does
//! not give out ids that data planes still use.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::rc::Rc;

use canal_model::ids::{ServiceId, ServiceKey, TenantName};

/// Seconds before a released id may move to another service; longer than any data plane retains
/// stale state.
pub const SERVICE_ID_QUARANTINE_SECONDS: u64 = 24 * 3600;

/// Number of service ids: all values of 24 bits except 0.
pub(crate) const SERVICE_ID_SPACE: u32 = (1 << 24) - 1;

/// Ids of one tenant's services, at most, including deleted services in quarantine. It exceeds the
/// number of objects that a tenant may have and is 1/64 of the space.
pub const TENANT_SERVICE_IDS_MAX: u32 = 1 << 18;

/// The reason that a service gets no id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum IdShortage {
    /// All ids are in use or in quarantine.
    Mesh,
    /// The tenant has reached its limit.
    Tenant(TenantName),
}

/// The id of one service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Binding {
    pub(crate) id: ServiceId,
    /// Time of the release, in seconds since 1970; `None` while the service exists.
    pub(crate) released: Option<u64>,
}

/// The key of a binding: a [`ServiceKey`]. In a test it is one that counts its comparisons.
pub(crate) trait BindingKey: Clone + Ord + Hash {
    fn tenant(&self) -> &TenantName;
}

impl BindingKey for ServiceKey {
    fn tenant(&self) -> &TenantName {
        &self.tenant
    }
}

/// All bindings as they are on disk.
#[derive(Debug, Clone)]
pub(crate) struct ServiceIdTable<K = ServiceKey> {
    pub(crate) bindings: HashMap<K, Binding>,
    /// Number of fresh ids given out so far, plus one.
    pub(crate) next: u32,
    /// Distance of the first fresh id from id 1. After the last id, allocation continues at 1.
    pub(crate) offset: u32,
}

impl<K> Default for ServiceIdTable<K> {
    fn default() -> Self {
        Self {
            bindings: HashMap::new(),
            next: 0,
            offset: 0,
        }
    }
}

impl<K: BindingKey> ServiceIdTable<K> {
    /// Counts a tenant's bindings, including released ones.
    fn count_of(&self, tenant: &TenantName) -> u32 {
        self.bindings
            .keys()
            .filter(|key| key.tenant() == tenant)
            .count() as u32
    }

    /// Returns the `n`-th fresh id, counted from 1.
    fn fresh(&self, n: u32) -> Option<ServiceId> {
        let at = (u64::from(self.offset) + u64::from(n) - 1) % u64::from(SERVICE_ID_SPACE);
        ServiceId::new(u32::try_from(at).ok()? + 1).ok()
    }
}

/// The result of an allocation, to be written in one transaction.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Allocation<K = ServiceKey> {
    /// Bindings to write, as live.
    pub(crate) bound: Vec<(K, ServiceId)>,
    /// Keys that lose their binding because their id moved to another service.
    pub(crate) displaced: Vec<K>,
    pub(crate) next: u32,
}

impl<K> Allocation<K> {
    pub(crate) fn is_empty(&self) -> bool {
        self.bound.is_empty()
    }
}

/// Assigns an id to every key in `wanted`. A tenant that has `tenant_max` ids or more gets only its
/// own released ids again.
pub(crate) fn decide_allocation<K: BindingKey>(
    book: &ServiceIdTable<K>,
    wanted: &[K],
    now: u64,
    limit: u32,
    tenant_max: u32,
) -> Result<Allocation<K>, IdShortage> {
    let mut out = Allocation {
        bound: Vec::new(),
        displaced: Vec::new(),
        // The counter of a store without ids is 0, but `fresh` counts from 1.
        next: book.next.max(1),
    };
    let mut taken: HashMap<&TenantName, u32> = HashMap::new();
    let mut stale: Option<StaleBindings<K>> = None;
    for key in wanted {
        match book.bindings.get(key) {
            Some(Binding { released: None, .. }) => continue,
            // A released service that returns gets its id back, even during the quarantine.
            Some(Binding {
                id,
                released: Some(_),
            }) => {
                out.bound.push((key.clone(), *id));
                continue;
            }
            // A new service gets an id below.
            None => {}
        }
        let of_tenant = taken
            .entry(key.tenant())
            .or_insert_with(|| book.count_of(key.tenant()));
        let is_full = *of_tenant >= tenant_max;
        if !is_full && out.next <= limit {
            let id = book.fresh(out.next).ok_or(IdShortage::Mesh)?;
            out.next += 1;
            *of_tenant += 1;
            out.bound.push((key.clone(), id));
            continue;
        }
        // Neither a fresh id nor the tenant's limit allows a new id, so the oldest released one
        // moves; for a full tenant, only its own.
        let stale = stale.get_or_insert_with(|| StaleBindings::of(book, wanted, now));
        let Some(oldest) = stale.take(is_full.then(|| key.tenant())) else {
            return Err(if is_full {
                IdShortage::Tenant(key.tenant().clone())
            } else {
                IdShortage::Mesh
            });
        };
        // An id that moves within a tenant does not change how many the tenant has.
        if oldest.key.tenant() != key.tenant() {
            *of_tenant += 1;
        }
        out.displaced.push(oldest.key.clone());
        out.bound.push((key.clone(), oldest.id));
    }
    Ok(out)
}

/// A released binding whose id may move to another service.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct StaleBinding<K> {
    released: u64,
    key: K,
    id: ServiceId,
}

/// The released bindings that are past their quarantine and not wanted, the oldest first. Each
/// operation takes logarithmic time: a tenant may have 262,144 of them, and ask for thousands of
/// ids at once.
struct StaleBindings<K> {
    all: BTreeSet<Rc<StaleBinding<K>>>,
    by_tenant: HashMap<TenantName, BTreeSet<Rc<StaleBinding<K>>>>,
}

impl<K: BindingKey> StaleBindings<K> {
    fn of(book: &ServiceIdTable<K>, wanted: &[K], now: u64) -> Self {
        let wanted: HashSet<&K> = wanted.iter().collect();
        let mut stale = Self {
            all: BTreeSet::new(),
            by_tenant: HashMap::new(),
        };
        for (key, binding) in &book.bindings {
            let Some(released) = binding.released else {
                continue;
            };
            if released.saturating_add(SERVICE_ID_QUARANTINE_SECONDS) > now || wanted.contains(key)
            {
                continue;
            }
            let binding = Rc::new(StaleBinding {
                released,
                key: key.clone(),
                id: binding.id,
            });
            stale
                .by_tenant
                .entry(key.tenant().clone())
                .or_default()
                .insert(binding.clone());
            stale.all.insert(binding);
        }
        stale
    }

    /// Removes and returns the oldest binding, of one tenant if it is given.
    fn take(&mut self, of: Option<&TenantName>) -> Option<Rc<StaleBinding<K>>> {
        let oldest = match of {
            Some(tenant) => self.by_tenant.get(tenant)?.first()?.clone(),
            None => self.all.first()?.clone(),
        };
        self.all.remove(&oldest);
        if let Some(own) = self.by_tenant.get_mut(oldest.key.tenant()) {
            own.remove(&oldest);
        }
        Some(oldest)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::cmp::Ordering;
    use std::hash::Hasher;

    use super::*;

    fn key(n: &str) -> ServiceKey {
        format!("alpha/shop/{n}").parse().unwrap()
    }

    fn book(entries: &[(&str, u32, Option<u64>)], next: u32) -> ServiceIdTable {
        let bindings = entries
            .iter()
            .map(|(n, id, released)| {
                (
                    key(n),
                    Binding {
                        id: ServiceId::new(*id).unwrap(),
                        released: *released,
                    },
                )
            })
            .collect();
        ServiceIdTable {
            bindings,
            next,
            offset: 0,
        }
    }

    #[test]
    fn fresh_ids_start_at_an_offset_of_the_store_and_wrap_around() {
        let book = |offset| ServiceIdTable {
            offset,
            ..ServiceIdTable::default()
        };
        let ids = |book: &ServiceIdTable| [1, 2, 3].map(|n| book.fresh(n).unwrap().get());
        assert_eq!(ids(&book(0)), [1, 2, 3]);
        assert_eq!(
            ids(&book(SERVICE_ID_SPACE - 2)),
            [SERVICE_ID_SPACE - 1, SERVICE_ID_SPACE, 1]
        );
        assert_eq!(
            book(7).fresh(SERVICE_ID_SPACE).unwrap().get(),
            7,
            "the last is the one before the first"
        );
    }

    fn allocation_cases() -> Vec<IdCase> {
        vec![
            // The entries are a name, an id, and the time of its release; the number is the next
            // fresh id. All cases have 4 ids in total, of which one tenant may have 4.
            IdCase {
                what: "fresh ids ascend from 1",
                book: book(&[], 0),
                services: &["a", "b"],
                now: 0,
                bound: Some(&[("a", 1), ("b", 2)]),
            },
            IdCase {
                what: "a live binding stays",
                book: book(&[("a", 1, None)], 2),
                services: &["a"],
                now: 0,
                bound: Some(&[]),
            },
            IdCase {
                what: "a name that returns gets its id back",
                book: book(&[("a", 1, Some(5))], 2),
                services: &["a"],
                now: 6,
                bound: Some(&[("a", 1)]),
            },
            IdCase {
                what: "fresh before released",
                book: book(&[("a", 1, Some(0))], 2),
                services: &["b"],
                now: 10 * Q,
                bound: Some(&[("b", 2)]),
            },
            IdCase {
                what: "the oldest released once all are used",
                book: book(
                    &[
                        ("a", 1, Some(9)),
                        ("b", 2, Some(3)),
                        ("c", 3, None),
                        ("d", 4, None),
                    ],
                    5,
                ),
                services: &["e"],
                now: Q + 100,
                bound: Some(&[("e", 2)]),
            },
            IdCase {
                what: "not within the quarantine",
                book: book(
                    &[
                        ("a", 1, Some(9)),
                        ("b", 2, None),
                        ("c", 3, None),
                        ("d", 4, None),
                    ],
                    5,
                ),
                services: &["e"],
                // One second before the end of the quarantine of id 1.
                now: Q + 8,
                bound: None,
            },
            IdCase {
                what: "not the id of a name in the same request",
                book: book(
                    &[
                        ("a", 1, Some(9)),
                        ("b", 2, None),
                        ("c", 3, None),
                        ("d", 4, None),
                    ],
                    5,
                ),
                services: &["e", "a"],
                now: 10 * Q,
                bound: None,
            },
        ]
    }

    const Q: u64 = SERVICE_ID_QUARANTINE_SECONDS;

    struct IdCase {
        what: &'static str,
        book: ServiceIdTable,
        services: &'static [&'static str],
        now: u64,
        /// The expected bindings; `None` if the allocation fails.
        bound: Option<&'static [(&'static str, u32)]>,
    }

    #[test]
    fn allocation() {
        let cases = allocation_cases();
        for c in cases {
            let wanted: Vec<ServiceKey> = c.services.iter().map(|n| key(n)).collect();
            let got = decide_allocation(&c.book, &wanted, c.now, 4, 4);
            let got = got.ok().map(|a| {
                a.bound
                    .iter()
                    .map(|(k, id)| (k.name.to_string(), id.get()))
                    .collect::<Vec<_>>()
            });
            let want = c.bound.map(|b| {
                b.iter()
                    .map(|(n, id)| (n.to_string(), *id))
                    .collect::<Vec<_>>()
            });
            assert_eq!(got, want, "{}", c.what);
        }
    }

    thread_local! {
        /// Comparisons of keys and of their tenants.
        static COMPARISONS: Cell<u64> = const { Cell::new(0) };
    }

    /// A key that counts its comparisons.
    #[derive(Debug, Clone, Eq)]
    struct CountedKey(ServiceKey);

    impl CountedKey {
        fn counted(&self) -> &ServiceKey {
            COMPARISONS.with(|count| count.set(count.get() + 1));
            &self.0
        }
    }

    impl BindingKey for CountedKey {
        fn tenant(&self) -> &TenantName {
            &self.counted().tenant
        }
    }
    impl PartialEq for CountedKey {
        fn eq(&self, other: &Self) -> bool {
            self.counted() == &other.0
        }
    }
    impl PartialOrd for CountedKey {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }
    impl Ord for CountedKey {
        fn cmp(&self, other: &Self) -> Ordering {
            self.counted().cmp(&other.0)
        }
    }
    impl Hash for CountedKey {
        fn hash<H: Hasher>(&self, state: &mut H) {
            self.0.hash(state);
        }
    }

    /// Alpha has used up its ids, and beta's released ones are older.
    #[test]
    fn a_tenant_with_all_its_ids_released_gets_thousands_with_few_comparisons() {
        // Alpha's ids were released after all of beta's, so beta's are first in the order of
        // release.
        const OF_EACH: u32 = 10_000;
        const WANTED: u32 = 2_000;
        let key = |text: String| CountedKey(text.parse().unwrap());
        let bindings = (1..=2 * OF_EACH).map(|n| {
            let tenant = if n <= OF_EACH { "alpha" } else { "beta" };
            let released = Some(u64::from(if n <= OF_EACH {
                OF_EACH + n
            } else {
                n - OF_EACH
            }));
            let id = ServiceId::new(n).unwrap();
            (key(format!("{tenant}/shop/s{n}")), Binding { id, released })
        });
        let book = ServiceIdTable {
            bindings: bindings.collect(),
            next: 2 * OF_EACH + 1,
            offset: 0,
        };
        let wanted: Vec<_> = (0..WANTED)
            .map(|n| key(format!("alpha/shop/new{n}")))
            .collect();
        COMPARISONS.set(0);
        let now = 10 * SERVICE_ID_QUARANTINE_SECONDS;
        // The space has unused ids, but alpha is at its own limit of OF_EACH ids.
        let got = decide_allocation(&book, &wanted, now, 4 * OF_EACH, OF_EACH).unwrap();
        let compared = COMPARISONS.get();
        let ids: Vec<u32> = got.bound.iter().map(|(_, id)| id.get()).collect();
        assert_eq!(
            ids,
            (1..=WANTED).collect::<Vec<_>>(),
            "alpha gets its own ids, the oldest first"
        );
        assert!(
            got.displaced
                .iter()
                .all(|key| key.0.tenant.as_str() == "alpha")
        );
        // One comparison for each pair of a binding and a wanted name would be 40 million.
        // Ten comparisons for each binding and each wanted name leave a margin above a sort.
        let most = 10 * u64::from(2 * OF_EACH + WANTED);
        assert!(
            (1..=most).contains(&compared),
            "{compared} comparisons of keys"
        );
    }

    /// A tenant that creates services under ever new names and deletes them reaches its own limit,
    /// and other tenants still get ids.
    #[test]
    fn a_tenant_that_has_its_share_gets_only_its_own_ids_back() {
        const Q: u64 = SERVICE_ID_QUARANTINE_SECONDS;
        let book = book(&[("a", 1, Some(5)), ("b", 2, Some(3))], 3);
        let beta: ServiceKey = "beta/shop/x".parse().unwrap();
        let decide = |wanted: &[ServiceKey], now| decide_allocation(&book, wanted, now, 100, 2);
        assert_eq!(
            decide(&[key("c")], 5 + Q - 2),
            Ok(Allocation {
                bound: vec![(key("c"), ServiceId::new(2).unwrap())],
                displaced: vec![key("b")],
                next: 3
            })
        );
        assert_eq!(
            decide(&[key("c")], 2 + Q),
            Err(IdShortage::Tenant("alpha".parse().unwrap()))
        );
        assert_eq!(
            decide(std::slice::from_ref(&beta), 2 + Q).unwrap().bound,
            [(beta, ServiceId::new(3).unwrap())]
        );
        assert_eq!(
            decide(&[key("a")], 2 + Q).unwrap().bound,
            [(key("a"), ServiceId::new(1).unwrap())],
            "a name that returns"
        );
    }
}
