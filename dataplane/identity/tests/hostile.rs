//! Hostile peers against the TLS of the mesh, in the manner of tlsfuzzer: a client and a server
//! that send what no honest peer sends, peers that stall, and a man in the middle. Every case must
//! end in time, without a panic, and with the name under which the failure is counted.

#[path = "hostile/attacker.rs"]
mod attacker;
#[path = "hostile/craft.rs"]
mod craft;
#[path = "hostile/fixture.rs"]
mod fixture;
#[path = "hostile/flights.rs"]
mod flights;
#[path = "hostile/hello_records.rs"]
mod hello_records;
#[path = "hostile/hellos.rs"]
mod hellos;
#[path = "hostile/keys.rs"]
mod keys;
#[path = "hostile/man_in_the_middle.rs"]
mod man_in_the_middle;
#[path = "hostile/pace.rs"]
mod pace;
#[path = "hostile/servers.rs"]
mod servers;
