//! canal-model: not written yet.
