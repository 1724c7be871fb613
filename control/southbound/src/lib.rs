//! Delivery of the catalog to data planes: one delta xDS stream per subscriber, and the registry of
//! how far each subscriber is. A subscriber receives its scope and nothing else; one that does not
//! read delays only itself. It changes no catalog. `subscriber_stream` decides what one subscriber
//! is sent. Start at [`DiscoveryService`].

#![forbid(unsafe_code)]

mod delivery;
mod share_report;
mod southbound;
mod subscriber_stream;
pub mod subscribers;

pub use delivery::DeliveryProgress;
pub use share_report::{ReportedOmission, ReportedShare, ShareReport, ShareReportError};
pub use southbound::{DiscoveryContext, DiscoveryService};
pub use subscriber_stream::{
    NACK_SPLITS_MAX, NAME_BYTES_MAX, NAMES_MAX, PART_BYTES_MAX, PENDING_MAX, RESPONSE_BYTES_MAX,
    STREAM_NAME_BYTES_MAX, SessionLimits,
};
pub use subscribers::{
    PRINCIPAL_NAME_BYTES_MAX, STREAMS_MAX, STREAMS_PER_PRINCIPAL_MAX, Subscribers,
};
