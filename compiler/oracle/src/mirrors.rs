//! Defines which mirrors get a copy of a request. A copy is what the endpoint receives. A gateway may
//! leave out copies within its limits, and copies that policies deny; that is not part of the meaning.

use canal_model::program::RouteMirror;

/// Returns the mirrors that get a copy of one request. Each mirror has a random number, of which the
/// lower half decides.
pub fn copied<'m>(mirrors: &'m [RouteMirror], randoms: &[u64]) -> Vec<&'m RouteMirror> {
    let drawn = mirrors.iter().zip(randoms).filter(|(mirror, random)| {
        let number = u128::from(**random % (1 << 32));
        number * 1_000_000 < u128::from(mirror.fraction.millionths()) << 32
    });
    drawn.map(|(mirror, _)| mirror).collect()
}
