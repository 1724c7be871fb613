//! A connection whose handshake a key server performed: its secrets become a record layer, in the
//! kernel or here. No key server is contacted.

use std::io;
use std::sync::Arc;

use canal_model::identity::Identity;

use super::handshake_failure::TlsError;
use super::record::{EndpointRole, KtlsHandover, RecordStream, TrafficSecrets, hand_over};
use super::stream::{Inner, MtlsStream};
use super::transport::Transport;
use super::trust::{PeerTrustWatch, TrustView};
use super::verified_chain::PeerLeaf;

/// Traffic secrets and the peer's identity that a key server's handshake yields.
pub struct RemoteHandshakeResult {
    pub suite: u16,
    pub alpn: Vec<u8>,
    pub client_traffic: zeroize::Zeroizing<Vec<u8>>,
    pub server_traffic: zeroize::Zeroizing<Vec<u8>>,
    pub peer: Identity,
    pub leaf: Arc<PeerLeaf>,
    /// Bytes of the peer after the handshake.
    pub early: Vec<u8>,
}

impl<IO: Transport> MtlsStream<IO> {
    /// Creates the connection after a remote handshake of this `side`. The records go to the kernel
    /// where it offers TLS.
    ///
    /// # Errors
    /// The peer has lost trust in the meantime, or the secrets cannot be used.
    pub fn of_remote(
        io: IO,
        handshake: RemoteHandshakeResult,
        side: EndpointRole,
        trust: &TrustView,
    ) -> Result<Self, TlsError> {
        // The key server may not have received the loss of trust yet.
        if trust.current().check(&handshake.leaf).is_some() {
            return Err(TlsError::Protocol(rustls::Error::InvalidCertificate(
                rustls::CertificateError::Revoked,
            )));
        }
        let secrets = TrafficSecrets {
            suite: handshake.suite,
            side,
            client: &handshake.client_traffic,
            server: &handshake.server_traffic,
        };
        let inner = match by_kernel(io, &secrets, &handshake.early, trust)? {
            KtlsHandover::Done(stream) => Inner::Kernel(stream, handshake.alpn),
            KtlsHandover::Not(io, _) => {
                let failed = |e| TlsError::Io(io::Error::new(io::ErrorKind::InvalidData, e));
                Inner::Remote(
                    Box::new(RecordStream::new(io, &secrets, &handshake.early).map_err(failed)?),
                    handshake.alpn,
                )
            }
        };
        Ok(Self::new(
            inner,
            PeerTrustWatch::new(trust.clone(), handshake.leaf),
        ))
    }
}

/// Tries to hand the connection to kernel TLS, if the kernel offers it.
fn by_kernel<IO: Transport>(
    io: IO,
    secrets: &TrafficSecrets<'_>,
    early: &[u8],
    trust: &TrustView,
) -> Result<KtlsHandover<IO>, TlsError> {
    let Some(shared) = trust
        .shared
        .as_ref()
        .filter(|shared| shared.kernel_tls && io.tcp().is_some())
    else {
        return Ok(KtlsHandover::Not(io, "unavailable"));
    };
    let tried = hand_over(io, secrets, early);
    shared.handed_over(match &tried {
        Ok(KtlsHandover::Done(_)) => "kernel",
        Ok(KtlsHandover::Not(_, why)) => why,
        Err(_) => "lost",
    });
    tried.map_err(TlsError::Io)
}
