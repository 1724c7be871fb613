//! canal-kit: not written yet.
