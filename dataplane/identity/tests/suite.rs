//! Integration tests of the crate from outside: hostile TLS peers. `make test` runs each module in
//! its own process (`suite MODULE::`).

mod hostile;
