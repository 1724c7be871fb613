//! canal-sources: not written yet.
