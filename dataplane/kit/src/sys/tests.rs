//! Sockets on loopback and in namespaces made for the test.
