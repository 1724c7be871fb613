//! The mirrors of a rule: which of them get a copy of a request. It sends nothing: the engine does.

use canal_model::program::RouteMirror;

use crate::EndpointSetId;

/// A mirror that gets a copy of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectedMirror {
    pub target: EndpointSetId,
}

/// Returns whether a mirror gets copies of the requests to the backend at this position.
pub(crate) fn is_of_backend(mirror: &RouteMirror, backend: usize) -> bool {
    mirror.backend.is_none_or(|of| usize::from(of) == backend)
}

/// Draws the mirrors that get a copy of one request to the backend at this position, and returns
/// their own positions.
pub fn draw(
    mirrors: &[RouteMirror],
    backend: usize,
    mut random: impl FnMut() -> u64,
) -> impl Iterator<Item = usize> {
    let mirrors = mirrors.iter().enumerate();
    // The lower half of the number decides.
    mirrors.filter_map(move |(at, mirror)| {
        let is_drawn = mirror.fraction.contains(random() as u32);
        (is_drawn && is_of_backend(mirror, backend)).then_some(at)
    })
}
