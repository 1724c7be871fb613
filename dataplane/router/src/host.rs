//! Table from hosts to values: exact names first, then the longest `*.suffix`, then `*`. It is for
//! plain listeners; the router has an index of its own. Start with [`HostTable::get`].

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use smallvec::SmallVec;

/// Host in lower case, on the stack if it is short.
pub(crate) type HostText = SmallVec<[u8; 64]>;

/// Returns the host in lower case and without one trailing dot: `A.example.` and `a.example` are
/// the same host.
pub(crate) fn canonical(host: &[u8]) -> HostText {
    let host = host.strip_suffix(b".").unwrap_or(host);
    host.iter().map(u8::to_ascii_lowercase).collect()
}

/// Iterates over the suffixes of a host that a wildcard may name, longest first. Each begins with a
/// dot that has something in front of it.
pub(crate) fn suffixes(host: &[u8]) -> impl Iterator<Item = &[u8]> {
    host.iter()
        .enumerate()
        .filter(|&(at, &b)| b == b'.' && at > 0)
        .map(|(at, _)| &host[at..])
}

/// Table from hosts to values. Its hash is seeded at random.
#[derive(Debug, Clone)]
pub struct HostTable<T> {
    exact: HashMap<Box<[u8]>, T, RandomState>,
    /// Values by suffix; a key begins with a dot.
    suffix: HashMap<Box<[u8]>, T, RandomState>,
    any: Option<T>,
}

impl<T> Default for HostTable<T> {
    fn default() -> Self {
        HostTable {
            exact: HashMap::default(),
            suffix: HashMap::default(),
            any: None,
        }
    }
}

impl<T> HostTable<T> {
    /// Creates a table that has no host names.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `name`, `*.suffix` or `*`. Returns the value that it replaces.
    pub fn insert(&mut self, host: &str, value: T) -> Option<T> {
        let key = canonical(host.as_bytes());
        match &key[..] {
            b"*" => self.any.replace(value),
            [b'*', suffix @ ..] if suffix.starts_with(b".") => {
                self.suffix.insert(suffix.into(), value)
            }
            exact => self.exact.insert(exact.into(), value),
        }
    }

    /// Returns the value for a host without port; the most specific entry wins. A wildcard stands
    /// for one label or more.
    pub fn get(&self, host: &[u8]) -> Option<&T> {
        let host = canonical(host);
        let exact = self.exact.get(&host[..]);
        let wild = || {
            if self.suffix.is_empty() {
                None
            } else {
                suffixes(&host).find_map(|suffix| self.suffix.get(suffix))
            }
        };
        exact.or_else(wild).or(self.any.as_ref())
    }
}

impl<T> HostTable<T> {
    /// Visits the values of all entries that match a host, the most specific first, until `visit`
    /// returns a result.
    pub fn find<'a, R>(&'a self, host: &[u8], visit: impl FnMut(&'a T) -> Option<R>) -> Option<R> {
        let host = canonical(host);
        let exact = self.exact.get(&host[..]).into_iter();
        let wild = suffixes(&host).filter_map(|suffix| self.suffix.get(suffix));
        exact.chain(wild).chain(self.any.as_ref()).find_map(visit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_specific_host_wins() {
        let mut table = HostTable::new();
        for (value, host) in ["a.example", "*.example", "*.b.example", "b.example"]
            .iter()
            .enumerate()
        {
            assert_eq!(table.insert(host, value), None);
        }
        let check = |table: &HostTable<usize>, host: &str, want| {
            assert_eq!(table.get(host.as_bytes()).copied(), want, "{host}")
        };
        for (host, want) in [
            ("a.example", Some(0)),
            ("A.Example.", Some(0)),
            ("x.a.example", Some(1)),
            ("c.example", Some(1)),
            ("b.example", Some(3)),
            ("c.b.example", Some(2)),
            ("d.c.b.example", Some(2)),
            ("example", None),
            (".example", None),
            ("xexample", None),
            ("", None),
        ] {
            check(&table, host, want);
        }
        table.insert("*", 9);
        let mut visited = Vec::new();
        let found = table.find(b"c.b.example", |value| {
            visited.push(*value);
            (*value == 9).then_some("any")
        });
        assert_eq!((found, visited), (Some("any"), vec![2, 1, 9]));
        check(&table, "example", Some(9));
        check(&table, "", Some(9));
        assert_eq!(table.insert("A.example", 5), Some(0));
    }
}
