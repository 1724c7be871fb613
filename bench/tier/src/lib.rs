//! Shared parts of benches in worlds: a world with clients in its pods, the spread of rounds, and
//! the file of figures. It measures nothing. Start at [`scene`].

#![forbid(unsafe_code)]

pub mod record;
pub mod scene;
pub mod spread;
