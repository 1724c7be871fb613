//! The integration tests of policies on every target, compared with the oracle. `make test` runs
//! each module in its own process (`suite MODULE::`).

mod attempts;
mod cases;
mod consumers;
mod cors;
mod explained_arrivals;
mod faults;
mod generated;
mod guarded;
mod ingress;
mod limits;
mod listener_mixes;
mod load_balancers;
mod mirrors;
mod relays;
mod route_authorizers;
mod running;
mod shares;
mod weights;
