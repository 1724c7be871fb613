//! canal-world: not written yet.
