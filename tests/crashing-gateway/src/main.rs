//! A gateway for tests of queries of death: the shipped gateway plus `--crash-on-path`, which
//! aborts the process at a request with that path. It is not shipped, and the shipped program has
//! no such flag.
//!
//! The gateway's own request path is unchanged: a thread of this program reads the gateway's tap,
//! as an operator would, and aborts the process at the first request that the tap shows. Start at
//! [`crash_at`].

#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use canal_gateway::GatewayFlags;
use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Pause between two attempts to reach the tap of a gateway that is starting. Any pause that does
/// not use the CPU will do.
const CONNECT_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug, Parser)]
struct Flags {
    #[command(flatten)]
    gateway: GatewayFlags,
    /// A request whose path begins with this ends the process.
    #[arg(long)]
    crash_on_path: String,
}

/// Waits for a request whose path begins with `path` at the gateway that serves its operators at
/// `socket`. Returns `false` if the gateway ended the tap.
///
/// # Errors
///
/// The gateway does not serve its operators yet.
fn wait_for_request(socket: &Path, path: &str) -> std::io::Result<bool> {
    let mut tap = UnixStream::connect(socket)?;
    tap.write_all(format!("GET /tap?path={path} HTTP/1.1\r\nhost: gateway\r\n\r\n").as_bytes())?;
    // Each request is one line of JSON, inside chunks.
    let mut lines = BufReader::new(tap).lines();
    Ok(lines.any(|line| line.is_ok_and(|line| line.starts_with('{'))))
}

/// Ends the process at the first request, as a query of death would.
fn crash_at(socket: &Path, path: &str) {
    while !wait_for_request(socket, path).unwrap_or(false) {
        std::thread::sleep(CONNECT_INTERVAL);
    }
    eprintln!("a request with the path of --crash-on-path: the process ends");
    std::process::abort();
}

fn main() -> anyhow::Result<ExitCode> {
    let Flags {
        gateway,
        crash_on_path,
    } = Flags::parse();
    let socket = gateway.data_dir().join("admin.sock");
    std::thread::spawn(move || crash_at(&socket, &crash_on_path));
    canal_gateway::run(gateway)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn request_in_the_tap_is_seen_and_the_end_of_the_tap_is_not_one() {
        let folder = std::env::temp_dir().join(format!("crashing-gateway-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let socket = folder.join("admin.sock");
        assert!(
            wait_for_request(&socket, "/death").is_err(),
            "the gateway is not there yet"
        );
        let listener = UnixListener::bind(&socket).unwrap();
        let gateway = std::thread::spawn(move || {
            for body in ["", "13\r\n{\"path\":\"/death\"}\n\r\n"] {
                let mut tap = BufReader::new(listener.accept().unwrap().0);
                let mut request = String::new();
                tap.read_line(&mut request).unwrap();
                assert_eq!(request, "GET /tap?path=/death HTTP/1.1\r\n");
                tap.get_mut()
                    .write_all(
                        format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{body}")
                            .as_bytes(),
                    )
                    .unwrap();
            }
        });
        assert!(!wait_for_request(&socket, "/death").unwrap());
        assert!(wait_for_request(&socket, "/death").unwrap());
        gateway.join().unwrap();
        std::fs::remove_dir_all(folder).unwrap();
    }
}
