//! canal-offload: not written yet.
