//! Limits that tests of this crate and of others shorten, for the calling thread (feature
//! `testing`). A product build does not contain the module.

use std::cell::Cell;
use std::time::Duration;

thread_local! {
    static RECORDS_MAX: Cell<Option<u64>> = const { Cell::new(None) };
    static EXPIRED_PEER_TIMEOUT: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Sets the number of records that keys may protect on connections that are handed to the kernel
/// from now on; `None` is that of the product.
pub fn set_records_max(records: Option<u64>) {
    RECORDS_MAX.set(records);
}

pub(super) fn records_max() -> Option<u64> {
    RECORDS_MAX.get()
}

/// Sets the time that open streams have after the peer's certificate has expired, instead of
/// [`super::EXPIRED_PEER_TIMEOUT`].
pub fn set_expired_peer_timeout(timeout: Duration) {
    EXPIRED_PEER_TIMEOUT.set(Some(timeout));
}

pub(super) fn expired_peer_timeout() -> Option<Duration> {
    EXPIRED_PEER_TIMEOUT.get()
}
