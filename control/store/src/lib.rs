//! canal-store: not written yet.
