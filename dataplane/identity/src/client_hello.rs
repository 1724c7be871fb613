//! Reads a ClientHello without answering it: for TLS that is passed through, and for ports where the
//! server name decides whether it is. The caller keeps the bytes and bounds their number. Start at
//! [`ClientHelloReader`].

use canal_tls::TlsError;
use rustls::Error;
use rustls::server::{Accepted, Acceptor};

/// Length of the header of a TLS record, of which the last two bytes are the length of the rest
/// (RFC 8446 §5.1).
const RECORD_HEADER_BYTES: usize = 5;

/// Reads a ClientHello of TLS 1.2 or newer, in as many parts as it arrives in.
#[derive(Default)]
pub struct ClientHelloReader {
    acceptor: Acceptor,
    /// Number of bytes that were read.
    read: usize,
    /// Number of bytes up to the end of the record that is being read.
    record_end: usize,
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
        loop {
            let rest = sent.get(self.read..).unwrap_or_default();
            // Record by record, so that what follows the one with the end of the ClientHello is not
            // taken for a part of the handshake.
            if self.read == self.record_end {
                let Some(header) = rest.first_chunk::<RECORD_HEADER_BYTES>() else {
                    return Ok(None);
                };
                let length = u16::from_be_bytes([header[3], header[4]]);
                self.record_end += RECORD_HEADER_BYTES + usize::from(length);
            }
            let of_record = rest.len().min(self.record_end - self.read);
            let mut record = &rest[..of_record];
            if record.is_empty() {
                return Ok(None);
            }
            let read = self.acceptor.read_tls(&mut record)?;
            if read == 0 {
                let problem = "the ClientHello is too long".to_owned();
                return Err(TlsError::from(Error::General(problem)));
            }
            self.read += read;
            if let Some(accepted) = self.acceptor.accept().map_err(|(error, _)| error)? {
                return Ok(Some(ReceivedHello {
                    accepted,
                    is_followed: self.read < sent.len(),
                }));
            }
        }
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
    fn bytes_behind_the_hello_are_noticed_however_they_are_divided() {
        let mut sent = hello("www.example.com", 3);
        let length = sent.len();
        let hello = ClientHelloReader::default().read(&sent).unwrap().unwrap();
        assert!(!hello.is_followed);
        sent.extend([0x17, 3, 3, 0, 1, 0]);
        for step in [length + 1, sent.len()] {
            let mut reader = ClientHelloReader::default();
            let hello = reader.read(&sent[..step]).unwrap();
            assert!(hello.expect("it is complete").is_followed, "{step}");
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
