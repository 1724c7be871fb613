//! A subscriber against a controller that the test plays: what is sent, held, refused, written and booted from.

mod closure;
mod life;
mod response;
mod rig;
mod shares;
mod store;
