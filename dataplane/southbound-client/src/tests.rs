//! Tests of a subscriber against a fake controller: its requests, its state, its refusals, its
//! state file and its boot.

mod anew;
mod closure;
mod fixture;
mod life;
mod parts;
mod response;
mod shares;
mod store;
