//! The certificates above a leaf, in the form in which revocation lists identify them. They serve
//! only to notice that one of them is revoked later. Start at [`IssuerChain`].

use super::fields::{FieldReader, FieldWriter};
use super::{BODY_MAX, CHAIN_MAX, EncodeError, FrameError};

/// One certificate, identified by issuer and serial number (RFC 5280 §5.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IssuerSerial<'a> {
    /// Name of the issuer in DER, without its outer tag and length.
    pub issuer: &'a [u8],
    /// Serial number in big-endian form, as it is in the certificate.
    pub serial: &'a [u8],
}

impl<'a> IssuerSerial<'a> {
    /// Splits the first entry from `bytes` and returns it with the rest.
    fn first(bytes: &'a [u8]) -> Result<(Self, &'a [u8]), FrameError> {
        let mut r = FieldReader(bytes);
        Ok((
            Self {
                issuer: r.short("issuer", BODY_MAX)?,
                serial: r.short("serial number", BODY_MAX)?,
            },
            r.rest(),
        ))
    }

    /// Appends the entry to the bytes of an [`IssuerChain`]; after an error `out` is invalid.
    ///
    /// # Errors
    /// Fails if the issuer or the serial number is too long for a body.
    pub fn append(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let mut w = FieldWriter(out);
        w.short("issuer", self.issuer, BODY_MAX)?;
        w.short("serial number", self.serial, BODY_MAX)
    }
}

/// The peer's certificates without the leaf, in the peer's order; at most [`CHAIN_MAX`] - 1.
///
/// Both ends keep them in encoded form, so that a handshake does not copy them. Where a root signs
/// leaves, the chain is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IssuerChain<'a>(&'a [u8]);

impl<'a> IssuerChain<'a> {
    /// Validates bytes written by [`IssuerSerial::append`].
    ///
    /// # Errors
    /// Fails with a [`FrameError`] if an entry is incomplete or there are too many entries.
    pub fn read(bytes: &'a [u8]) -> Result<Self, FrameError> {
        let (mut rest, mut count) = (bytes, 0);
        while !rest.is_empty() {
            rest = IssuerSerial::first(rest)?.1;
            count += 1;
        }
        if count < CHAIN_MAX {
            Ok(Self(bytes))
        } else {
            Err(FrameError::Oversized(
                "certificates above the leaf",
                count,
                CHAIN_MAX - 1,
            ))
        }
    }

    /// Returns the chain in encoded form.
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// Iterates over the entries, starting with the leaf's issuer.
    pub fn links(self) -> impl Iterator<Item = IssuerSerial<'a>> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let (link, after) = IssuerSerial::first(rest).ok()?;
            rest = after;
            Some(link)
        })
    }
}
