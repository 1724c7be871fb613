//! BPF map with typed keys and values: writes, removes and lists elements, and makes a map equal to
//! a desired state. It does not decide about contents. Start with [`Entries::replace_all`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::marker::PhantomData;

use canal_abi::{Plain, from_bytes, to_bytes};
use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle, MapType, Object};

use crate::OffloadError;
use crate::reconcile::{MapWrites, reconcile};

/// Typed view of a hash, trie or array. Writing one element is atomic: a program sees either the
/// old value or the new one.
#[derive(Debug)]
pub struct Entries<K, V> {
    name: &'static str,
    map: MapHandle,
    types: PhantomData<fn(K) -> V>,
}

impl<K: Plain + Eq + Hash, V: Plain + PartialEq> Entries<K, V> {
    pub(crate) fn of(object: &Object, name: &'static str) -> Result<Self, OffloadError> {
        let map = object
            .maps()
            .find(|m| m.name() == name)
            .ok_or(OffloadError::Object { what: "map", name })?;
        let map =
            MapHandle::try_from(&map).map_err(|source| OffloadError::Map { map: name, source })?;
        Ok(Self {
            name,
            map,
            types: PhantomData,
        })
    }

    /// Returns the name of the BPF map.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the maximum number of elements.
    pub fn capacity(&self) -> u32 {
        self.map.max_entries()
    }

    fn is_array(&self) -> bool {
        matches!(self.map.map_type(), MapType::Array)
    }

    fn failed(&self, source: libbpf_rs::Error) -> OffloadError {
        OffloadError::Map {
            map: self.name,
            source,
        }
    }

    /// Writes one element.
    ///
    /// # Errors
    /// Returns [`OffloadError::Full`] if the map has no capacity left, and [`OffloadError::Map`]
    /// for any other failure.
    pub fn put(&self, key: &K, value: &V) -> Result<(), OffloadError> {
        self.put_bytes(to_bytes(key), to_bytes(value))
    }

    fn put_bytes(&self, key: &[u8], value: &[u8]) -> Result<(), OffloadError> {
        self.map.update(key, value, MapFlags::ANY).map_err(|e| {
            // libbpf-rs has no error kind for a trie's ENOSPC; libbpf leaves errno as the system
            // call set it.
            let is_full = e.kind() == ErrorKind::TooBig
                || std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOSPC);
            if is_full {
                OffloadError::Full {
                    map: self.name,
                    capacity: self.capacity(),
                }
            } else {
                self.failed(e)
            }
        })
    }

    /// Removes one element; an element of an array becomes zero. It is no error if there is no such
    /// element.
    ///
    /// # Errors
    /// Returns [`OffloadError::Map`] if the kernel refuses the removal.
    pub fn remove(&self, key: &K) -> Result<(), OffloadError> {
        self.remove_bytes(to_bytes(key))
    }

    fn remove_bytes(&self, key: &[u8]) -> Result<(), OffloadError> {
        if self.is_array() {
            return self.put_bytes(key, to_bytes(&V::default()));
        }
        match self.map.delete(key) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(self.failed(e)),
            _ => Ok(()),
        }
    }

    /// Returns the value at `key`.
    ///
    /// # Errors
    /// Returns [`OffloadError::Map`] if the map cannot be read.
    pub fn get(&self, key: &K) -> Result<Option<V>, OffloadError> {
        let found = self
            .map
            .lookup(to_bytes(key), MapFlags::ANY)
            .map_err(|e| self.failed(e))?;
        Ok(found.and_then(|v| from_bytes(&v)))
    }

    /// Returns all elements; of an array those that are not zero. It is only for maps that no other
    /// writer changes meanwhile.
    ///
    /// # Errors
    /// Returns [`OffloadError::Map`] if the map cannot be read.
    pub fn all(&self) -> Result<HashMap<K, V>, OffloadError> {
        if self.is_array() {
            return self.all_of_array();
        }
        let mut all = HashMap::new();
        for key in self.map.keys() {
            let (Some(key), Some(found)) = (
                from_bytes::<K>(&key),
                self.map
                    .lookup(&key, MapFlags::ANY)
                    .map_err(|e| self.failed(e))?,
            ) else {
                continue;
            };
            if let Some(value) = from_bytes::<V>(&found) {
                all.insert(key, value);
            }
        }
        Ok(all)
    }

    /// Reads an array in one system call, not two per element.
    fn all_of_array(&self) -> Result<HashMap<K, V>, OffloadError> {
        let elements: Vec<_> = self
            .map
            .lookup_batch(self.capacity(), MapFlags::ANY, MapFlags::ANY)
            .map_err(|e| self.failed(e))?
            .collect();
        // The iterator of libbpf-rs ends at an error as it does after the last element.
        if elements.len() != self.capacity() as usize {
            return Err(self.failed(std::io::Error::last_os_error().into()));
        }
        let typed = elements
            .iter()
            .filter_map(|(key, value)| Some((from_bytes::<K>(key)?, from_bytes::<V>(value)?)));
        Ok(typed.filter(|(_, value)| *value != V::default()).collect())
    }

    /// Makes the map equal to `wanted`. Correct elements are not touched. New elements are written
    /// before old ones are removed, so that no packet falls between two ranges. New elements that
    /// do not fit beside the old ones are written after the removal.
    ///
    /// # Errors
    /// Returns [`OffloadError::Full`] if `wanted` does not fit, and [`OffloadError::Map`] if the
    /// map cannot be read or written.
    pub fn replace_all(&self, wanted: &HashMap<K, V>) -> Result<MapWrites, OffloadError> {
        let bytes = |all: &HashMap<K, V>| {
            all.iter()
                .map(|(k, v)| (to_bytes(k).to_vec(), to_bytes(v).to_vec()))
                .collect()
        };
        let desired: BTreeMap<Vec<u8>, Vec<u8>> = bytes(wanted);
        let mut actual = bytes(&self.all()?);
        let pass = reconcile(|pass| {
            pass.put_missing(self.name, &desired, &mut actual, |key, value| {
                self.put_bytes(key, value)
            });
            pass.remove_stale(self.name, &desired, &mut actual, |key| {
                self.remove_bytes(key)
            });
        });
        pass.finish()
    }
}

/// Makes a map whose values are all 1 the set `wanted`.
pub(crate) fn replace_set(
    map: &MapHandle,
    name: &'static str,
    wanted: &BTreeSet<Vec<u8>>,
) -> Result<(), OffloadError> {
    let failed = |source| OffloadError::Map { map: name, source };
    let desired: BTreeMap<Vec<u8>, ()> = wanted.iter().map(|key| (key.clone(), ())).collect();
    let mut actual: BTreeMap<Vec<u8>, ()> = map.keys().map(|key| (key, ())).collect();
    let pass = reconcile(|pass| {
        pass.put_missing(name, &desired, &mut actual, |key, ()| {
            map.update(key, to_bytes(&1u32), MapFlags::ANY)
                .map_err(failed)
        });
        pass.remove_stale(name, &desired, &mut actual, |key| {
            map.delete(key).map_err(failed)
        });
    });
    pass.finish().map(drop)
}
