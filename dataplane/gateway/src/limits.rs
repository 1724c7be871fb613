//! HTTP/2 settings and the limits that protect a connection from its peer, in one place for both sides. Reached limits end the connection
//! with ENHANCE_YOUR_CALM and are counted in `canal_gateway_http2_errors_total`.

use std::time::Duration;

use canal_kit::hbone::WindowSizes;

use crate::config;

/// Streams the gateway opens on one connection to an endpoint, whatever it allows.
pub(crate) const UPSTREAM_STREAMS_MAX: usize = 250;
/// The largest receive windows, bytes: what the gateway may have to hold for a slow other side. A connection's is more than a stream's, or
/// one stalled stream would stop all others.
pub(crate) const WINDOWS_MAX: WindowSizes = WindowSizes { stream: 256 << 10, connection: 1 << 20 };
/// Bytes h2 buffers per stream for sending before it says "no capacity".
pub(crate) const SEND_BUFFER: usize = 256 << 10;
/// Streams the peer opened and reset before they were looked at ("rapid reset", CVE-2023-44487).
pub(crate) const RAPID_RESETS_MAX: usize = 20;
/// Streams reset because of the peer's errors ("MadeYouReset", CVE-2025-8671).
pub(crate) const ERROR_RESETS_MAX: usize = 256;
/// Reset streams remembered, so that late frames on them are not errors.
pub(crate) const RESETS_REMEMBERED: usize = 64;
/// For how long.
pub(crate) const RESET_MEMORY: Duration = Duration::from_secs(10);

const _: () = assert!(WINDOWS_MAX.connection >= 4 * WINDOWS_MAX.stream);

/// Settings towards clients. CONTINUATION floods are bounded by the header list's size in h2 itself.
pub(crate) fn http2_server(limits: &config::Limits, windows: WindowSizes) -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_concurrent_streams(limits.streams)
        .max_header_list_size(limits.head_bytes)
        .max_send_buffer_size(SEND_BUFFER)
        .max_pending_accept_reset_streams(RAPID_RESETS_MAX)
        .max_local_error_reset_streams(Some(ERROR_RESETS_MAX))
        .max_concurrent_reset_streams(RESETS_REMEMBERED)
        .reset_stream_duration(RESET_MEMORY);
    builder
}

/// Settings towards endpoints.
pub(crate) fn http2_client(windows: WindowSizes) -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_header_list_size(canal_h1::HEAD_BYTES_CAP as u32)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_reset_streams(RESETS_REMEMBERED)
        .reset_stream_duration(RESET_MEMORY)
        .enable_push(false);
    builder
}
