//! A mesh in a world for the end-to-end tests: brings it up, runs clients in its pods, and gives what they said. It asserts nothing itself.

#![forbid(unsafe_code)]

mod mesh;
mod said;

pub use mesh::{Mesh, bin, root};
pub use said::Said;
