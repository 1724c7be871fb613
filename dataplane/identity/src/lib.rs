//! A process's own identities and the handshakes in their name: certificates and their renewal
//! ([`certs`]), mesh mTLS with a local key or with one in a key server ([`ServerIdentity`],
//! [`ClientIdentity`]), and TLS termination for clients outside the mesh ([`Terminator`]). The
//! crate decides no policy. Start with [`ClientIdentityFactory`].

#![forbid(unsafe_code)]

mod bundles;
pub mod certs;
mod client_hello;
mod handshake;
mod identity_factory;
mod listener_certificates;
mod listener_clients;
mod terminate;

pub use bundles::apply_bundles;
pub use client_hello::{ClientHelloReader, ReceivedHello};
pub use handshake::{
    ClientIdentity, CredentialId, PinnedIdentity, REMOTE_PROOF_LIFE, ServerIdentity,
};
pub use identity_factory::ClientIdentityFactory;
pub use listener_certificates::{CertificateSelector, ListenerKeyPair};
pub use listener_clients::{ClientCertificate, ListenerClient, ListenerClientVerifier};
pub use terminate::{
    ListenerChoice, TerminatedConnection, TerminationConfig as TerminationTerms, Terminator,
    accept_by_server_name, accept_received_hello,
};

#[cfg(test)]
mod tests;
