//! Figure 25's other half: the slowdown below eight simultaneous sessions. It is typical of
//! accelerators that work in batches, and the key server exists to avoid it. The bench runs
//! handshakes of one server (`lanes`) one by one and in batches, over the loopback. It prints
//! figures and does not assess them.
//!
//! An operation costs the same CPU time in a batch or alone, because this process computes it in
//! both cases. The figure therefore shows the waiting time, not the time that eight parallel lanes
//! would save.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use rcgen::{
    BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256, RsaKeySize,
};

use crate::figure_spread::{LoadFigures, Rounds};
use crate::lanes::{LANES, WAIT};
use crate::limits;
use crate::load::{self, ConnectPace, LoadRun};
use crate::scene::{CertificateAlgorithm, MASK};

#[derive(clap::Args)]
pub(crate) struct BatchedFlags {
    /// Seconds of load for each cell and round
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Number of runs of which each cell is the median; the columns take turns
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Only this algorithm; both by default
    #[arg(long, value_enum)]
    algorithm: Option<CertificateAlgorithm>,
}

/// Numbers of concurrent sessions, below and above eight.
/// Seven and eight show the step: a batch of eight lanes waits for its eighth operation.
const CONCURRENCY: [usize; 8] = [1, 2, 4, 7, 8, 16, 32, 64];
/// AWS-LC's setting that hides AVX-512 IFMA alone: bit 21 of EBX of CPUID's leaf 7.
const WITHOUT_IFMA: &str = ":~0x200000";
/// Name of the feature in Linux.
const IFMA: &str = "avx512ifma";

/// One way to make handshakes.
struct Column {
    name: &'static str,
    /// Features of the processor that are hidden.
    mask: Option<&'static str>,
    batched: bool,
}

static COLUMNS: [Column; 3] = [
    Column {
        name: "none",
        mask: Some(MASK.1),
        batched: false,
    },
    Column {
        name: "local, one by one",
        mask: None,
        batched: false,
    },
    Column {
        name: "batched",
        mask: None,
        batched: true,
    },
];
/// Columns for processors with IFMA, which is hidden in the second.
static MASKED: [Column; 2] = [
    Column {
        name: "local without IFMA",
        mask: Some(WITHOUT_IFMA),
        batched: false,
    },
    Column {
        name: "batched without IFMA",
        mask: Some(WITHOUT_IFMA),
        batched: true,
    },
];

pub(crate) fn run(flags: &BatchedFlags) -> anyhow::Result<()> {
    println!(
        "Processor: {}. A batch is {LANES} operations, or what came in {WAIT:?}.",
        limits::processor()
    );
    let mut columns: Vec<&Column> = COLUMNS.iter().collect();
    if limits::has_feature(IFMA) {
        columns.extend(&MASKED);
    } else {
        println!(
            "\n**SKIPPED: this processor has no AVX-512 IFMA, so nothing here is of its lanes and the columns without it are left out.**"
        );
    }
    for algorithm in CertificateAlgorithm::ALL
        .into_iter()
        .filter(|one| flags.algorithm.is_none_or(|wanted| wanted == *one))
    {
        let folder = tempfile::tempdir()?;
        issue(folder.path(), algorithm)?;
        let mut cells: Vec<Vec<Rounds>> = columns
            .iter()
            .map(|_| CONCURRENCY.iter().map(|_| Rounds::default()).collect())
            .collect();
        for round in 0..flags.rounds as usize {
            for at in (0..columns.len()).map(|n| (n + round) % columns.len()) {
                let server = PinnedServer::start(folder.path(), columns[at])?;
                for (cell, concurrency) in cells[at].iter_mut().zip(CONCURRENCY) {
                    cell.add(server.measure(folder.path(), concurrency, flags.seconds)?);
                }
            }
        }
        print(algorithm, &columns, &cells);
    }
    Ok(())
}

fn print(algorithm: CertificateAlgorithm, columns: &[&Column], cells: &[Vec<Rounds>]) {
    println!(
        "\n### {}\n\nNew sessions per second, in parts of none; p50 ms; µs of CPU for each. Medians (least–most).\n",
        algorithm.name()
    );
    println!(
        "| concurrency | {} |",
        columns
            .iter()
            .map(|column| column.name)
            .collect::<Vec<_>>()
            .join(" | ")
    );
    println!("|---{}|", "|---".repeat(columns.len()));
    for (at, concurrency) in CONCURRENCY.iter().enumerate() {
        // Rates are printed relative to the first column, `none`.
        let base = cells[0][at].of(|m| m.per_second).median;
        let cell = |of: &Vec<Rounds>| {
            let (rate, late, cost) = (
                of[at].of(|m| m.per_second),
                of[at].of(|m| m.p50_ms),
                of[at].of(|m| m.node_us),
            );
            format!(
                "{rate:#.0}, {:.2} x; {late:.2} ms; {cost:.0} µs",
                rate.median / base
            )
        };
        println!(
            "| {concurrency} | {} |",
            cells.iter().map(cell).collect::<Vec<_>>().join(" | ")
        );
    }
    for (column, cells) in columns.iter().zip(cells) {
        let sum = |figure: fn(&LoadFigures) -> f64| {
            cells.iter().map(|cell| cell.sum(figure)).sum::<f64>()
        };
        println!(
            "{}{}: {} sessions, {} failed.",
            // Markdown needs an empty line between a table and text.
            if column.name == "none" { "\n" } else { "" },
            column.name,
            sum(|m| m.completed),
            sum(|m| m.failed)
        );
    }
}

/// Writes the certificates of the server and of the load.
fn issue(folder: &Path, algorithm: CertificateAlgorithm) -> anyhow::Result<()> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let root = params.self_signed(&key)?.pem();
    let issuer = Issuer::new(params, key);
    std::fs::write(folder.join("root.pem"), root)?;
    for name in ["server", "client"] {
        let key = match algorithm {
            CertificateAlgorithm::Ecdsa => KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?,
            CertificateAlgorithm::Rsa => {
                KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048)?
            }
        };
        let (chain, key) = (
            CertificateParams::new(vec![name.to_string()])?
                .signed_by(&key, &issuer)?
                .pem(),
            key.serialize_pem(),
        );
        let identity = serde_json::json!({ "chain": chain, "key": key });
        std::fs::write(folder.join(format!("{name}.json")), identity.to_string())?;
        std::fs::write(folder.join(format!("{name}.pem")), chain)?;
        std::fs::write(folder.join(format!("{name}.key")), key)?;
    }
    Ok(())
}

/// A server on core 1, while this value exists.
struct PinnedServer {
    child: Child,
    address: String,
}

impl PinnedServer {
    fn start(folder: &Path, column: &Column) -> anyhow::Result<Self> {
        let mut command = Command::new("taskset");
        command
            .args(["-c", "1"])
            .arg(std::env::current_exe()?)
            .arg("lanes");
        for (flag, file) in [
            ("--chain", "server.pem"),
            ("--key", "server.key"),
            ("--root", "root.pem"),
        ] {
            command.arg(flag).arg(folder.join(file));
        }
        if column.batched {
            command.arg("--batched");
        }
        if let Some(mask) = column.mask {
            command.env(MASK.0, mask);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("taskset")?;
        let mut server = Self {
            child,
            address: String::new(),
        };
        let out = server.child.stdout.take().context("its output is a pipe")?;
        BufReader::new(out).read_line(&mut server.address)?;
        ensure!(
            server.address.ends_with('\n'),
            "the server ended before it served"
        );
        server.address.truncate(server.address.len() - 1);
        Ok(server)
    }

    fn measure(
        &self,
        folder: &Path,
        concurrency: usize,
        seconds: f64,
    ) -> anyhow::Result<LoadFigures> {
        let run = LoadRun {
            pace: ConnectPace::Concurrency(concurrency),
            seconds,
            share: None,
            handshakes: true,
        };
        let before = self.used()?;
        let report = load::read(
            &load::command(&folder.join("client.json"), &self.address, "none", &run)?.output()?,
        )?;
        let used = self.used()? - before;
        let number = |field: &str| {
            report[field]
                .as_f64()
                .with_context(|| format!("{field} is missing: {report}"))
        };
        let done = number("done")?;
        ensure!(done > 0.0, "no session got through: {report}");
        Ok(LoadFigures {
            per_second: number("per_second")?,
            p50_ms: number("p50_us")? / 1e3,
            p90_ms: number("p90_us")? / 1e3,
            node_us: used.as_secs_f64() * 1e6 / done,
            completed: done,
            failed: number("failed")?,
            ..LoadFigures::default()
        })
    }

    /// Returns the CPU time of all its threads.
    fn used(&self) -> anyhow::Result<Duration> {
        let mut used = Duration::ZERO;
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.child.id()))?.flatten() {
            let text = std::fs::read_to_string(thread.path().join("schedstat"))?;
            let nanoseconds = text
                .split_whitespace()
                .next()
                .and_then(|ns| ns.parse().ok())
                .context("schedstat")?;
            used += Duration::from_nanos(nanoseconds);
        }
        Ok(used)
    }
}

impl Drop for PinnedServer {
    fn drop(&mut self) {
        // This fails only if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
