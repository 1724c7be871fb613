//! canal-wire: not written yet.
