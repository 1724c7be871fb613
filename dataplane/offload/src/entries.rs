//! A BPF map as typed keys and values: put, remove, list, and make it hold exactly what is wanted. Decides nothing about contents.

use std::collections::HashMap;
use std::hash::Hash;
use std::marker::PhantomData;

use canal_abi::{Plain, from_bytes, to_bytes};
use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle, MapType, Object};

use crate::OffloadError;

/// A hash, trie or array. Writes of one element are atomic: a program sees the old value or the new one.
#[derive(Debug)]
pub struct Entries<K, V> {
    name: &'static str,
    map: MapHandle,
    types: PhantomData<fn(K) -> V>,
}

/// What [`Entries::replace_all`] wrote.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Replaced {
    pub put: usize,
    pub removed: usize,
}

impl<K: Plain + Eq + Hash, V: Plain + PartialEq> Entries<K, V> {
    pub(crate) fn of(object: &Object, name: &'static str) -> Result<Self, OffloadError> {
        let map = object.maps().find(|m| m.name() == name).ok_or(OffloadError::Object { what: "map", name })?;
        let map = MapHandle::try_from(&map).map_err(|source| OffloadError::Map { map: name, source })?;
        Ok(Self { name, map, types: PhantomData })
    }

    /// The map's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// How many elements it holds at most.
    pub fn capacity(&self) -> u32 {
        self.map.max_entries()
    }

    fn is_array(&self) -> bool {
        matches!(self.map.map_type(), MapType::Array)
    }

    fn failed(&self, source: libbpf_rs::Error) -> OffloadError {
        OffloadError::Map { map: self.name, source }
    }

    /// Writes one element. Errors: [`OffloadError::Full`], [`OffloadError::Map`].
    pub fn put(&self, key: &K, value: &V) -> Result<(), OffloadError> {
        self.map.update(to_bytes(key), to_bytes(value), MapFlags::ANY).map_err(|e| {
            // libbpf-rs has no kind for a trie's ENOSPC; libbpf leaves errno as the system call set it.
            let is_full = e.kind() == ErrorKind::TooBig || std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOSPC);
            if is_full { OffloadError::Full { map: self.name, capacity: self.capacity() } } else { self.failed(e) }
        })
    }

    /// Removes one element; an array's becomes zero. One that is not there is fine.
    pub fn remove(&self, key: &K) -> Result<(), OffloadError> {
        if self.is_array() {
            return self.put(key, &V::default());
        }
        match self.map.delete(to_bytes(key)) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(self.failed(e)),
            _ => Ok(()),
        }
    }

    /// The value at `key`.
    pub fn get(&self, key: &K) -> Result<Option<V>, OffloadError> {
        let found = self.map.lookup(to_bytes(key), MapFlags::ANY).map_err(|e| self.failed(e))?;
        Ok(found.and_then(|v| from_bytes(&v)))
    }

    /// All elements; of an array those that are not zero. Only for maps that nobody else writes.
    pub fn all(&self) -> Result<HashMap<K, V>, OffloadError> {
        let mut all = HashMap::new();
        for key in self.map.keys() {
            let (Some(key), Some(found)) = (from_bytes::<K>(&key), self.map.lookup(&key, MapFlags::ANY).map_err(|e| self.failed(e))?)
            else {
                continue;
            };
            if let Some(value) = from_bytes::<V>(&found)
                && !(self.is_array() && value == V::default())
            {
                all.insert(key, value);
            }
        }
        Ok(all)
    }

    /// Makes the map hold `wanted` and nothing else. What is right stays untouched, new elements come before old ones go, so that no
    /// packet falls between two ranges; only where the map is too full for that, the old ones go first.
    pub fn replace_all(&self, wanted: &HashMap<K, V>) -> Result<Replaced, OffloadError> {
        let have = self.all()?;
        let mut late = Vec::new();
        let mut replaced = Replaced::default();
        for (key, value) in wanted.iter().filter(|(k, v)| have.get(k) != Some(v)) {
            match self.put(key, value) {
                Err(e) if e.is_full() => late.push((key, value)),
                done => done?,
            }
            replaced.put += 1;
        }
        for key in have.keys().filter(|k| !wanted.contains_key(k)) {
            self.remove(key)?;
            replaced.removed += 1;
        }
        late.into_iter().try_for_each(|(k, v)| self.put(k, v))?;
        Ok(replaced)
    }
}
