//! canal-bench-micro: not written yet.
