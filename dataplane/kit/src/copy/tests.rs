//! Copies between TCP connections on loopback.
