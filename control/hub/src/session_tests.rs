//! Cases of the session.
