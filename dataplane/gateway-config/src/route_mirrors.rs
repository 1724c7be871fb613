//! The mirrors of a rule: which of them get a copy of a request. It sends nothing: the engine does.

use canal_model::program::RouteMirror;

use crate::EndpointSetId;

/// A mirror that gets a copy of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectedMirror {
    pub target: EndpointSetId,
}

/// Draws the mirrors that get a copy of one request, and returns their positions.
pub fn draw(
    mirrors: &[RouteMirror],
    mut random: impl FnMut() -> u64,
) -> impl Iterator<Item = usize> {
    let mirrors = mirrors.iter().enumerate();
    // The lower half of the number decides.
    mirrors.filter_map(move |(at, mirror)| mirror.fraction.contains(random() as u32).then_some(at))
}
