//! Validation of the certificates of a Gateway's clients, who are outside the mesh. Start at
//! [`ClientValidation`].

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::certificate::CaCertificates;

/// Validation of clients' certificates on ports of a Gateway for HTTPS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientValidation {
    /// The ports; no other validation of the Gateway has one of them.
    pub ports: BTreeSet<u16>,
    pub mode: ClientValidationMode,
    /// A certificate is valid if one of these authorities issued it for clients.
    pub authorities: Arc<CaCertificates>,
}

/// The clients that a validation accepts (Gateway API's FrontendValidationModeType).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ClientValidationMode {
    /// Only clients with a valid certificate.
    AllowValidOnly,
    /// All clients, also those without a certificate and with one that is not valid.
    AllowInsecureFallback,
}

impl ClientValidationMode {
    /// Returns the mode as YAML spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AllowValidOnly => "AllowValidOnly",
            Self::AllowInsecureFallback => "AllowInsecureFallback",
        }
    }
}
