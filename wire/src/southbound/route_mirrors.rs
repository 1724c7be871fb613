//! Wire form of a rule's mirrors. They are about quality of service: a data plane that does not know
//! them serves the requests and copies none.

use canal_model::program::{BackendTarget, RouteMirror};

use super::decode::DecodeContext;
use super::{ResourceDecodeError, encode, route_faults};
use crate::program as w;

impl From<&RouteMirror> for w::RouteMirror {
    fn from(mirror: &RouteMirror) -> Self {
        let RouteMirror {
            target,
            fraction,
            backend,
        } = mirror;
        let target = encode::backend(&canal_model::program::Backend {
            weight: 1,
            target: target.clone(),
            filters: None,
        });
        Self {
            target: Some(target),
            millionths: fraction.millionths(),
            backend: backend.unwrap_or_default().into(),
        }
    }
}

pub(super) fn decode(
    at: &DecodeContext<'_>,
    received: w::RouteMirror,
    is_of_backend: bool,
) -> Result<RouteMirror, ResourceDecodeError> {
    let target = at.need("mirrors.target", received.target)?;
    let target = super::decode::backend(at, target)?.target;
    if matches!(target, BackendTarget::Refuse { .. }) {
        return at.err("mirrors.target", "is no service");
    }
    let Ok(backend) = u16::try_from(received.backend) else {
        return at.err("backend_mirrors.backend", "is no position of a backend");
    };
    Ok(RouteMirror {
        target,
        fraction: route_faults::fraction(at, "mirrors.millionths", received.millionths)?,
        backend: is_of_backend.then_some(backend),
    })
}

/// Returns mirrors with every field set, for the tests of all resources.
#[cfg(test)]
pub(super) fn samples() -> Vec<RouteMirror> {
    use canal_model::request_fraction::RequestFraction;
    let mirror = |backend| RouteMirror {
        target: BackendTarget::Service {
            service: "alpha/b/copies".parse().unwrap(),
            port: 80,
            subset: [("version".into(), "v2".into())].into(),
        },
        fraction: RequestFraction::ALL,
        backend,
    };
    vec![mirror(None), mirror(Some(0)), mirror(Some(1))]
}
