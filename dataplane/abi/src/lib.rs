//! canal-abi: not written yet.
