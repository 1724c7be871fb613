//! Defines which mirrors get a copy of a request. A copy is what the endpoint receives. A gateway may
//! leave out copies within its limits, and copies that policies deny; that is not part of the meaning.

use canal_model::program::RouteMirror;

/// Returns the mirrors that get a copy of one request to the backend at this position. Each mirror has a random number, of which the
/// lower half decides.
pub fn copied<'m>(
    mirrors: &'m [RouteMirror],
    backend: u16,
    randoms: &[u64],
) -> Vec<&'m RouteMirror> {
    let drawn = mirrors.iter().zip(randoms).filter(|(mirror, random)| {
        let number = u128::from(**random % (1 << 32));
        let is_drawn = number * 1_000_000 < u128::from(mirror.fraction.millionths()) << 32;
        is_drawn && (mirror.backend.is_none() || mirror.backend == Some(backend))
    });
    drawn.map(|(mirror, _)| mirror).collect()
}
