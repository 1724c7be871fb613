//! The certificates above a leaf as revocation lists name them: enough to notice that one was revoked later, and no more.

use super::fields::{Reader, Writer};
use super::{BODY_MAX, CHAIN_MAX, Malformed, Unsendable};

/// One certificate, by issuer and serial number (RFC 5280 §5.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link<'a> {
    /// DER of the issuer's name, without its outer tag and length.
    pub issuer: &'a [u8],
    /// Big-endian, as the certificate writes it.
    pub serial: &'a [u8],
}

impl<'a> Link<'a> {
    /// The first of `bytes`, and what follows it.
    fn first(bytes: &'a [u8]) -> Result<(Self, &'a [u8]), Malformed> {
        let mut r = Reader(bytes);
        Ok((Self { issuer: r.short("issuer", BODY_MAX)?, serial: r.short("serial number", BODY_MAX)? }, r.rest()))
    }

    /// Appends it to the bytes of an [`Above`]; on an error `out` is of no use.
    pub fn append(&self, out: &mut Vec<u8>) -> Result<(), Unsendable> {
        let mut w = Writer(out);
        w.short("issuer", self.issuer, BODY_MAX)?;
        w.short("serial number", self.serial, BODY_MAX)
    }
}

/// All but the leaf that a peer showed, in its order; at most [`CHAIN_MAX`] less one. Both ends keep them as they are written, so that nothing is
/// copied for each handshake, and nothing at all where a root signs leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Above<'a>(&'a [u8]);

impl<'a> Above<'a> {
    /// Checks what [`Link::append`] wrote.
    pub fn read(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let (mut rest, mut count) = (bytes, 0);
        while !rest.is_empty() {
            rest = Link::first(rest)?.1;
            count += 1;
        }
        if count < CHAIN_MAX { Ok(Self(bytes)) } else { Err(Malformed::Oversized("certificates above the leaf", count, CHAIN_MAX - 1)) }
    }

    /// As it is written.
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// Each, the leaf's issuer first.
    pub fn links(self) -> impl Iterator<Item = Link<'a>> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let (link, after) = Link::first(rest).ok()?;
            rest = after;
            Some(link)
        })
    }
}
