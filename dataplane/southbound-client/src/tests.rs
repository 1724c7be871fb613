//! Tests of a subscriber against a fake controller: what it sends, retains, refuses, writes and boots from.

mod anew;
mod closure;
mod fixture;
mod life;
mod response;
mod shares;
mod store;
