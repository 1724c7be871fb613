//! What tenants and their data planes may not share: [`claims`] compares the identifiers of two
//! tenants, and [`scope`] decides which subscriber receives which resource. Pure: it compiles
//! nothing. Start at [`scope::admits`].

#![forbid(unsafe_code)]

pub mod claims;
pub mod scope;
