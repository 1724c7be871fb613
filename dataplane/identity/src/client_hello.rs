//! Reads a ClientHello without answering it: for TLS that is passed through, and for ports where the
//! server name decides whether it is. The caller keeps the bytes and bounds their number. Start at
//! [`ClientHelloReader`].

use canal_tls::TlsError;
use rustls::Error;
use rustls::server::{Accepted, Acceptor};

/// Reads a ClientHello of TLS 1.2 or newer, in as many parts as it arrives in.
#[derive(Default)]
pub struct ClientHelloReader {
    acceptor: Acceptor,
    /// Number of bytes that were read.
    read: usize,
}

/// A complete ClientHello, to which nobody has answered.
pub struct ReceivedHello {
    pub(crate) accepted: Accepted,
    /// Whether the client has sent bytes behind it, which the handshake would not see.
    pub(crate) is_followed: bool,
}

impl ReceivedHello {
    /// Returns the server name (SNI) in lower case, if the client sent one.
    pub fn server_name(&self) -> Option<String> {
        let hello = self.accepted.client_hello();
        hello.server_name().map(str::to_ascii_lowercase)
    }
}

impl ClientHelloReader {
    /// Reads all bytes that the client has sent so far; those of earlier calls come first. Returns
    /// the ClientHello once it is complete.
    ///
    /// # Errors
    /// The bytes are no ClientHello.
    pub fn read(&mut self, sent: &[u8]) -> Result<Option<ReceivedHello>, TlsError> {
        let mut rest = sent.get(self.read..).unwrap_or_default();
        while !rest.is_empty() {
            let read = self.acceptor.read_tls(&mut rest)?;
            if read == 0 {
                let problem = "the ClientHello is too long".to_owned();
                return Err(TlsError::from(Error::General(problem)));
            }
            self.read += read;
            if let Some(accepted) = self.acceptor.accept().map_err(|(error, _)| error)? {
                return Ok(Some(ReceivedHello {
                    accepted,
                    is_followed: !rest.is_empty(),
                }));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::{ClientConfig, ClientConnection, RootCertStore};

    use super::*;

    /// Returns the first bytes of a client, with this server name unless it is empty.
    fn hello(name: &str, alpn: usize) -> Vec<u8> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider);
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let roots = RootCertStore::empty();
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        config.enable_sni = !name.is_empty();
        config.alpn_protocols = (0..alpn)
            .map(|n| format!("{n:0200}").into_bytes())
            .collect();
        let name = if name.is_empty() { "any.test" } else { name };
        let server = name.to_owned().try_into().unwrap();
        let mut client = ClientConnection::new(Arc::new(config), server).unwrap();
        let mut sent = Vec::new();
        client.write_tls(&mut sent).unwrap();
        sent
    }

    #[test]
    fn the_name_is_known_once_the_hello_is_complete_however_it_is_divided() {
        for (name, expected) in [
            ("WWW.example.com", Some("www.example.com")),
            ("", None),
            ("192.0.2.1", None),
        ] {
            let sent = hello(name, 3);
            for step in [1, 7, 500, sent.len()] {
                let mut reader = ClientHelloReader::default();
                for end in (step..sent.len()).step_by(step) {
                    let hello = reader.read(&sent[..end]).unwrap();
                    assert!(hello.is_none(), "{end} of {}", sent.len());
                }
                let hello = reader.read(&sent).unwrap().expect("it is complete");
                assert_eq!(hello.server_name().as_deref(), expected, "{name} by {step}");
            }
        }
    }

    #[test]
    fn bytes_that_are_no_hello_are_refused() {
        let mut sent = hello("www.example.com", 0);
        // The type of the handshake message: a ServerHello.
        sent[5] = 2;
        for bytes in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            &[0x17, 3, 1, 0, 1, 0],
            &sent,
        ] {
            assert!(
                ClientHelloReader::default().read(bytes).is_err(),
                "{bytes:?}"
            );
        }
    }
}
