//! canal-compiler: not written yet.
