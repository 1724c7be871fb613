//! The intermediate representation (IR) of one compiled tenant, with what it means ([`oracle`]),
//! how it is written ([`text`]), and how it becomes the programs of data planes ([`lower`]). Pure:
//! no files, no sockets, no clock. It reads no objects: `canal-compiler` resolves them to an IR.

#![forbid(unsafe_code)]

pub mod direct;
pub mod ir;
pub mod ir_ingress;
pub mod limits;
pub mod lower;
pub mod oracle;
pub mod oracle_ingress;
pub mod oracle_relay;
pub mod pattern;
pub mod preferences;
pub mod resource_budget;
pub mod route_weight;
pub mod text;
pub mod text_security;

pub use canal_scope::{claims, scope};
