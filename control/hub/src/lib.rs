//! canal-hub: not written yet.
