//! The traffic secrets of a handshake, on their way from TLS to whom they are for. They stay on the thread that the handshake is worked on, and
//! are wiped when they are dropped.

use std::cell::RefCell;

use rustls::KeyLog;
use zeroize::Zeroizing;

/// A traffic secret.
pub type Secret = Zeroizing<Vec<u8>>;

thread_local! {
    /// Client's, server's.
    static TAKEN: RefCell<(Option<Secret>, Option<Secret>)> = const { RefCell::new((None, None)) };
}

/// Takes the application traffic secrets of the handshake that this thread is at.
#[derive(Debug)]
pub(crate) struct Secrets;

impl KeyLog for Secrets {
    fn log(&self, label: &str, _client_random: &[u8], secret: &[u8]) {
        let secret = Some(Zeroizing::new(secret.to_vec()));
        TAKEN.with_borrow_mut(|taken| match label {
            "CLIENT_TRAFFIC_SECRET_0" => taken.0 = secret,
            "SERVER_TRAFFIC_SECRET_0" => taken.1 = secret,
            _ => {}
        });
    }
    fn will_log(&self, label: &str) -> bool {
        matches!(label, "CLIENT_TRAFFIC_SECRET_0" | "SERVER_TRAFFIC_SECRET_0")
    }
}

/// Whatever another handshake left on this thread goes.
pub(crate) fn forget() {
    TAKEN.set((None, None));
}

/// The client's and the server's, as far as TLS has told them.
pub(crate) fn take() -> (Option<Secret>, Option<Secret>) {
    TAKEN.take()
}
