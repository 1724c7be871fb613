//! The integration tests of the key server from outside: requesters, handshakes, requests, and
//! hostile ones. `make test` runs each module in a process of its own (`suite MODULE::`).

mod fixture;
mod handshakes;
mod hostile;
mod requester;
mod requests;
