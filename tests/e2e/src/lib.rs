//! canal-e2e: not written yet.
