//! canal-h1: not written yet.
