//! The gateway: takes tenants' connections, serves their requests by their own routes, carries them to their endpoints.
//!
//! A request walks these phases, each a file: [`accept`] → [`greet`] → [`read`] → [`place`] → [`permit`] → [`pick`] → [`forward`] → [`finish`].
//! `docs/life-of/request.md` walks them with a request. Each [`worker`] is alone on its thread; a request sees one [`snapshot`].
//!
//! The engine opens listeners and connections; it reads no files and talks to no controller: its process feeds it ([`Engine::apply`]).

#![forbid(unsafe_code)]

mod accept;
mod answer;
mod body;
mod buffer;
mod clock;
mod config;
mod counts;
mod engine;
mod fault;
mod finish;
mod forward;
mod greet;
mod io;
mod limits;
mod parting;
mod permit;
mod pick;
mod place;
mod read;
mod relay;
mod snapshot;
mod source;
mod tap;
mod time;
mod upstream;
mod worker;

pub use accept::Doors;
pub use config::{BadPlain, EngineConfig, Limits, Plain, Tier, Times};
pub use engine::{Engine, EngineError, Handover, Surroundings};
pub use snapshot::build::Keyring;
pub use tap::{Filter, Hub};
