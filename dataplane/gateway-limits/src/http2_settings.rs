//! HTTP/2 settings, and the limits that protect a connection from its peer, for both sides of the
//! gateway.
//!
//! A connection that exceeds a limit ends with ENHANCE_YOUR_CALM and is counted in
//! `canal_gateway_http2_errors_total`.

use std::time::Duration;

use canal_hbone::{CONNECTION_WINDOW, DATA_FRAME_BUDGET};

use crate::limits::GatewayLimits;

/// Most streams that the gateway opens on one connection to an endpoint, whatever the endpoint
/// allows. As many as a client has on a connection (`GatewayLimits::streams`), so that one
/// connection can carry all of a client's requests.
pub const UPSTREAM_STREAMS_MAX: usize = 250;
/// Largest receive window of a stream, bytes: what the gateway may have to buffer for a slow other
/// side. One window per round trip: 256 MB/s at 1 ms, 5 MB/s at 50 ms.
pub const STREAM_WINDOW_MAX: u32 = 256 << 10;
/// Bytes that h2 buffers per stream for sending before it reports no capacity. As much as the
/// kernel buffers below it (`canal_net::sys::UNSENT_BYTES_MAX`), and less than h2's default of 400
/// KiB.
pub const SEND_BUFFER: usize = 256 << 10;
/// Most streams that the peer opened and reset before they were accepted ("rapid reset",
/// CVE-2023-44487). It is h2's default.
pub const RAPID_RESETS_MAX: usize = 20;
/// Most streams reset because of the peer's errors ("MadeYouReset", CVE-2025-8671). A quarter of
/// h2's default of 1,024, and more than the 250 streams that a correct peer has open when it fails.
pub const ERROR_RESETS_MAX: usize = 256;
/// Number of reset streams that are remembered, so that late frames on them are not errors. It is
/// near h2's default of 50.
pub const RESETS_REMEMBERED: usize = 64;
/// Time for which a reset stream is remembered. Longer than h2's default of 1 s, because a frame
/// may wait behind a lost packet that TCP retransmits.
pub const RESET_MEMORY: Duration = Duration::from_secs(10);

const _: () =
    assert!(CONNECTION_WINDOW as usize >= UPSTREAM_STREAMS_MAX * STREAM_WINDOW_MAX as usize);

/// Returns the settings towards clients. h2 itself bounds CONTINUATION floods by the size of the
/// header list.
pub fn http2_server(limits: &GatewayLimits, stream_window: u32) -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(stream_window)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .data_frame_budget(DATA_FRAME_BUDGET)
        .max_concurrent_streams(limits.streams)
        .max_header_list_size(limits.head_bytes)
        .max_send_buffer_size(SEND_BUFFER)
        .max_pending_accept_reset_streams(RAPID_RESETS_MAX)
        .max_local_error_reset_streams(Some(ERROR_RESETS_MAX))
        .max_concurrent_reset_streams(RESETS_REMEMBERED)
        .reset_stream_duration(RESET_MEMORY);
    builder
}

/// Returns the settings towards endpoints.
pub fn http2_client(stream_window: u32) -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(stream_window)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .data_frame_budget(DATA_FRAME_BUDGET)
        .max_header_list_size(canal_h1::HEAD_BYTES_CAP as u32)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_reset_streams(RESETS_REMEMBERED)
        .reset_stream_duration(RESET_MEMORY)
        .enable_push(false);
    builder
}
