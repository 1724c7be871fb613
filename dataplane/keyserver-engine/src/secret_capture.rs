//! Captures the traffic secrets of a handshake from rustls. They stay on the thread that performs
//! the handshake, and are wiped when they are dropped.

use std::cell::RefCell;

use rustls::KeyLog;
use zeroize::Zeroizing;

/// A traffic secret that is wiped when it is dropped.
pub type WipedSecret = Zeroizing<Vec<u8>>;

thread_local! {
    /// Secrets of the client and of the server.
    static TAKEN: RefCell<(Option<WipedSecret>, Option<WipedSecret>)> = const { RefCell::new((None, None)) };
}

/// Captures the application traffic secrets of the handshake that this thread performs.
#[derive(Debug)]
pub(crate) struct SecretCapture;

impl KeyLog for SecretCapture {
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

/// Wipes secrets that another handshake left on this thread.
pub(crate) fn forget() {
    TAKEN.set((None, None));
}

/// Takes the client's and the server's secret, as far as rustls has reported them.
pub(crate) fn take() -> (Option<WipedSecret>, Option<WipedSecret>) {
    TAKEN.take()
}
