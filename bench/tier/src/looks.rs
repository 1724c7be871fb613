//! Cost of a session scan on a replica with many sessions, compared with reading `/proc/net/tcp`,
//! which has the same data as text. The sessions are real, in their own network namespace. Both
//! ends of each are there, because a replica has one session to the client and one to the endpoint.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use canal_net::sys::Netns;
use canal_redirector_agent::session_scan::SessionScanner;

use crate::scene::programs;

/// Sessions of one pair of processes; a limit of 20,000 open files is enough for them.
const EACH: u32 = 15_000;
/// First port on which servers listen.
const PORT: u32 = 7000;
/// At 6,000 sessions a second this opens a million of them.
/// A million sessions need 167 s.
const OPEN_WITHIN: Duration = Duration::from_secs(180);
/// The least time of five counts, because others use the machine too.
const SCANS: usize = 5;

/// A namespace with its processes, which are removed on drop.
struct ScanNetns {
    name: String,
    running: Vec<Child>,
}

impl Drop for ScanNetns {
    fn drop(&mut self) {
        for child in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = Command::new("ip")
            .args(["netns", "del", &self.name])
            .output();
    }
}

impl ScanNetns {
    fn ip(&self, args: &str) -> anyhow::Result<()> {
        let out = Command::new("ip")
            .args(args.split_whitespace())
            .output()
            .context("ip (iproute2)")?;
        ensure!(
            out.status.success(),
            "ip {args}: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        Ok(())
    }

    fn start(&mut self, args: &str) -> anyhow::Result<()> {
        let samples = programs()?.join("canal-samples");
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.name])
            .arg(samples)
            .args(args.split_whitespace());
        self.running.push(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .context("canal-samples")?,
        );
        Ok(())
    }
}

/// Opens this many sessions and scans them.
pub(crate) fn run(sessions: u32) -> anyhow::Result<()> {
    let mut lab = ScanNetns {
        name: format!("canal-bench-{}-looks", std::process::id()),
        running: Vec::new(),
    };
    lab.ip(&format!("netns add {}", lab.name))?;
    lab.ip(&format!("-n {} link set lo up", lab.name))?;
    lab.ip(&format!("-n {} addr add 10.1.1.9/32 dev lo", lab.name))?;
    // Servers have an address of 240.0.0.0/4, since scans count sessions to services only.
    lab.ip(&format!(
        "-n {} route add local 240.0.0.7 dev lo src 10.1.1.9",
        lab.name
    ))?;
    let netns = Netns::open(format!("/run/netns/{}", lab.name))?;
    // One process may open too few files for all sessions.
    let pairs = sessions.div_ceil(EACH);
    for n in 0..pairs {
        lab.start(&format!("tcp --listen echo={}", PORT + n))?;
    }
    // The servers must listen before the clients connect; no event tells when.
    std::thread::sleep(Duration::from_millis(500));
    for n in 0..pairs {
        // The remainder goes to the first pairs.
        let count = sessions / pairs + u32::from(n < sessions % pairs);
        let port = PORT + n;
        lab.start(&format!(
            // After its first message a session sends nothing for ten minutes, and it stays open
            // for an hour. Both are longer than the scans take.
            "sessions 240.0.0.7:{port} -n {count} --open-rate {} --interval-ms 600000 -d 3600",
            // All pairs together open 6,000 sessions per second.
            6000 / pairs
        ))?;
    }
    let sockets = SessionScanner::kernel();
    let found = || {
        // The scan's deadline only ends a hang.
        let owned = netns.enter(|| sockets.scan(Instant::now() + Duration::from_secs(60)))??;
        anyhow::Ok(owned.values().map(|of| of.sessions).sum::<u32>())
    };
    let started = Instant::now();
    while found()? < sessions {
        ensure!(
            started.elapsed() < OPEN_WITHIN,
            "only {} sessions were opened within {OPEN_WITHIN:?}",
            found()?
        );
        // A scan costs CPU that the opening of sessions needs.
        std::thread::sleep(Duration::from_secs(1));
    }
    // The last sessions exchange their first message; afterwards nothing disturbs the scans.
    std::thread::sleep(Duration::from_secs(2));
    let scan = least(|| found().map(u64::from))?;
    let text = least(|| netns.enter(read_text)?)?;
    println!(
        "| {sessions} sessions, {} sockets | read | time |",
        2 * sessions
    );
    println!("|---|---|---|");
    println!(
        "| socket diagnostics, sorted out by the kernel | {} sessions | {:.0} ms |",
        scan.0, scan.1
    );
    println!(
        "| /proc/net/tcp and tcp6 as text, not even parsed | {} bytes | {:.0} ms |",
        text.0, text.1
    );
    Ok(())
}

/// Returns the shortest time of several reads in ms, and the result.
fn least(mut read: impl FnMut() -> anyhow::Result<u64>) -> anyhow::Result<(u64, f64)> {
    let mut best = (0, f64::MAX);
    for _ in 0..SCANS {
        let begun = Instant::now();
        let got = read()?;
        best = (got, best.1.min(begun.elapsed().as_secs_f64() * 1e3));
    }
    Ok(best)
}

fn read_text() -> anyhow::Result<u64> {
    let (mut buffer, mut bytes) = (vec![0; 1 << 16], 0);
    for table in ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"] {
        let mut file = std::fs::File::open(table).context(table)?;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                n => bytes += n as u64,
            }
        }
    }
    Ok(bytes)
}
