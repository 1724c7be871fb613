//! canal-router: not written yet.
