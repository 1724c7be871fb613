//! A tenant's manifest: the computation that both sides share, and its wire form.
//! `southbound-client` decides the effect of a mismatch.

use canal_model::ids::TenantName;
use canal_model::program::{Manifest, ResourceKind};
use sha2::{Digest, Sha256};

use super::ResourceDecodeError;
use super::decode::DecodeContext;
use crate::program as w;

/// Computes the manifest of `tenant` over its security resources, given as kind, name and version
/// in any order.
pub fn compute<'a>(
    tenant: &TenantName,
    resources: impl IntoIterator<Item = (ResourceKind, &'a str, &'a str)>,
) -> Manifest {
    let mut all: Vec<_> = resources.into_iter().collect();
    all.sort_unstable();
    let mut hash = Sha256::new();
    for (kind, name, version) in &all {
        // Length prefixes distinguish lists whose concatenated texts are equal. Type URLs stay the
        // same when kinds are added.
        for text in [kind.type_url(), name, version] {
            hash.update((text.len() as u64).to_be_bytes());
            hash.update(text.as_bytes());
        }
    }
    Manifest {
        tenant: tenant.clone(),
        count: u32::try_from(all.len()).unwrap_or(u32::MAX),
        digest: hash.finalize().into(),
    }
}

impl From<&Manifest> for w::Manifest {
    fn from(m: &Manifest) -> Self {
        Self {
            tenant: m.tenant.to_string(),
            count: m.count,
            digest: m.digest.to_vec(),
        }
    }
}

pub(super) fn decode(name: &str, m: w::Manifest) -> Result<Manifest, ResourceDecodeError> {
    let at = DecodeContext(name);
    let digest = m
        .digest
        .try_into()
        .or_else(|d: Vec<u8>| at.err("digest", format!("{} bytes, not 32", d.len())))?;
    Ok(Manifest {
        tenant: at.name("tenant", &m.tenant)?,
        count: m.count,
        digest,
    })
}
