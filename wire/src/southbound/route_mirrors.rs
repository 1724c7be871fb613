//! Wire form of a rule's mirrors. They are about quality of service: a data plane that does not know
//! them serves the requests and copies none.

use canal_model::program::{BackendTarget, RouteMirror};

use super::decode::DecodeContext;
use super::{ResourceDecodeError, encode, route_faults};
use crate::program as w;

impl From<&RouteMirror> for w::RouteMirror {
    fn from(mirror: &RouteMirror) -> Self {
        let RouteMirror { target, fraction } = mirror;
        let target = encode::backend(&canal_model::program::Backend {
            weight: 1,
            target: target.clone(),
            filters: None,
        });
        Self {
            target: Some(target),
            millionths: fraction.millionths(),
        }
    }
}

pub(super) fn decode(
    at: &DecodeContext<'_>,
    received: w::RouteMirror,
) -> Result<RouteMirror, ResourceDecodeError> {
    let target = at.need("mirrors.target", received.target)?;
    let target = super::decode::backend(at, target)?.target;
    if matches!(target, BackendTarget::Refuse { .. }) {
        return at.err("mirrors.target", "is no service");
    }
    Ok(RouteMirror {
        target,
        fraction: route_faults::fraction(at, "mirrors.millionths", received.millionths)?,
    })
}

/// Returns mirrors with every field set, for the tests of all resources.
#[cfg(test)]
pub(super) fn samples() -> Vec<RouteMirror> {
    use canal_model::request_fraction::RequestFraction;
    let mirror = |fraction| RouteMirror {
        target: BackendTarget::Service {
            service: "alpha/b/copies".parse().unwrap(),
            port: 80,
            subset: [("version".into(), "v2".into())].into(),
        },
        fraction,
    };
    let half = RequestFraction::of_millionths(500_000).expect("less than all");
    vec![mirror(RequestFraction::ALL), mirror(half)]
}
