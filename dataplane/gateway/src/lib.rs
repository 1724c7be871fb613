//! The gateway: takes tenants' connections, serves their requests by their own routes, carries them to their endpoints.
//!
//! A request walks eight phases, each a file: [`accept`] → [`greet`] → [`read`] → [`place`] → [`pick`] → [`judge`] → [`forward`] →
//! [`finish`]. `docs/life-of/request.md` walks them with a request. Each [`worker`] is alone on its thread; a request sees one [`snapshot`].
//!
//! Modules name those below them only (`cargo xtask tidy` holds this). Where bytes come in calls what serves them: [`accept`], [`greet`],
//! [`read`], [`forward`] (or [`relay`], for bytes that are not requests), and that [`place`], [`pick`] and [`judge`]. What the phases pass on
//! lies below them: [`client`], [`session`], [`destination`], [`head`], and the record whose end is [`finish`].
//!
//! The engine opens listeners and connections; it reads no files and talks to no controller: its process feeds it ([`Engine::apply`]).

#![forbid(unsafe_code)]

mod accept;
mod account;
mod answer;
mod body;
mod body_budget;
mod buffer;
mod changes;
mod client;
mod clock;
mod config;
mod counts;
mod destination;
mod endpoints;
mod engine;
mod fault;
mod finish;
mod forward;
mod greet;
mod head;
mod io;
mod judge;
mod limits;
mod parting;
mod permit;
mod pick;
mod place;
mod read;
mod relay;
mod scheduler;
mod series;
mod session;
mod shares;
mod snapshot;
mod source;
mod tap;
mod time;
mod token;
mod upstream;
mod watchdog;
mod worker;

pub use accept::Doors;
pub use config::{BadPlain, EngineConfig, ForwardedHeaders, Limits, Plain, RequestHook, Tier, Times};
pub use engine::{Engine, EngineError, Surroundings};
pub use snapshot::build::WantService;
pub use tap::{Filter, Hub};
pub use worker::Handover;
