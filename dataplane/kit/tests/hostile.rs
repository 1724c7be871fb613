//! Hostile peers against the TLS of the mesh, in the manner of tlsfuzzer: a client and a server of their own that say what no honest peer
//! says, peers that stall, and one in the middle. Every case ends in time, without panic, with the name that the refusal is counted by.

#[path = "hostile/craft.rs"]
mod craft;
#[path = "hostile/flights.rs"]
mod flights;
#[path = "hostile/foe.rs"]
mod foe;
#[path = "hostile/hellos.rs"]
mod hellos;
#[path = "hostile/keys.rs"]
mod keys;
#[path = "hostile/middle.rs"]
mod middle;
#[path = "hostile/pace.rs"]
mod pace;
#[path = "hostile/rig.rs"]
mod rig;
#[path = "hostile/servers.rs"]
mod servers;
