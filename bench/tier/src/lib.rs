//! What benches in worlds share: a world with clients in its pods, the spread of rounds, and the file of figures. It measures nothing.

#![forbid(unsafe_code)]

pub mod record;
pub mod scene;
pub mod spread;
