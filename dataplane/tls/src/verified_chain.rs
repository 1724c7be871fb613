//! The parts of a peer's certificate chain that are retained after its verification. The module
//! verifies nothing.

use std::sync::Arc;
use std::time::SystemTime;

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use canal_wire::keyrpc::{IssuerChain, IssuerSerial};
use rustls_pki_types::{CertificateDer, UnixTime};
use webpki::EndEntityCert;

/// Side of TLS on which the peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PeerRole {
    Client,
    Server,
}

/// A chain that was verified against the roots of a trust domain.
#[derive(Debug)]
pub(super) struct VerifiedChain {
    pub(super) uris: Vec<String>,
    /// Start and end of validity over all certificates of the chain, in seconds since 1970.
    pub(super) life: (u64, u64),
    pub(super) leaf: Arc<PeerLeaf>,
}

impl VerifiedChain {
    pub(super) fn valid_at(&self, now: UnixTime) -> bool {
        (self.life.0..=self.life.1).contains(&now.as_secs())
    }
}

/// Data of a peer's verified chain that are retained with the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerLeaf {
    identity: Identity,
    not_after: SystemTime,
    issuer: Box<[u8]>,
    serial: Box<[u8]>,
    /// Issuers above the leaf, in the encoding of [`IssuerChain`].
    above: Box<[u8]>,
}

impl PeerLeaf {
    /// Reads a leaf and the certificates above it, which were verified for `identity`.
    ///
    /// # Errors
    /// A certificate cannot be parsed.
    pub fn read(
        identity: Identity,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        not_after: SystemTime,
    ) -> Result<Self, rustls::Error> {
        let mut bytes = Vec::new();
        for der in above {
            let c = EndEntityCert::try_from(der).map_err(unreadable)?;
            IssuerSerial {
                issuer: c.issuer(),
                serial: c.serial(),
            }
            .append(&mut bytes)
            .map_err(unreadable)?;
        }
        let above = IssuerChain::read(&bytes).map_err(unreadable)?;
        Self::from_key_server(identity, leaf, above, not_after)
    }

    /// Does what [`PeerLeaf::read`] does for a chain that a key server verified, where the key
    /// server gives the issuers above the leaf.
    pub(super) fn from_key_server(
        identity: Identity,
        leaf: &CertificateDer<'_>,
        above: IssuerChain<'_>,
        not_after: SystemTime,
    ) -> Result<Self, rustls::Error> {
        let c = EndEntityCert::try_from(leaf).map_err(unreadable)?;
        Ok(Self {
            identity,
            not_after,
            issuer: c.issuer().into(),
            serial: c.serial().into(),
            above: above.bytes().into(),
        })
    }

    /// Returns the DER of the issuer's name, without its outer tag and length.
    pub fn issuer(&self) -> &[u8] {
        &self.issuer
    }

    /// Returns the serial number, big-endian, as it is in the certificate.
    pub fn serial(&self) -> &[u8] {
        &self.serial
    }

    /// Returns the issuers that the peer presented above the leaf.
    pub fn above(&self) -> IssuerChain<'_> {
        // The bytes were parsed once already, when this value was created.
        IssuerChain::read(&self.above).unwrap_or_default()
    }

    /// Returns the leaf and then the certificates above it.
    pub(super) fn links(&self) -> impl Iterator<Item = IssuerSerial<'_>> {
        std::iter::once(IssuerSerial {
            issuer: &self.issuer,
            serial: &self.serial,
        })
        .chain(self.above().links())
    }

    /// Returns the end of the leaf's validity.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Returns the trust domain whose roots verified the leaf.
    pub fn trust_domain(&self) -> &TrustDomain {
        &self.identity.trust_domain
    }

    /// Returns the identity of the leaf.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }
}

fn unreadable<E>(_: E) -> rustls::Error {
    rustls::Error::InvalidCertificate(rustls::CertificateError::BadEncoding)
}
