//! Client and server against each other on loopback.
