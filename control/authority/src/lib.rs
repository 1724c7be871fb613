//! canal-authority: not written yet.
