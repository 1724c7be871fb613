//! Instructions that `canal-gateway` executes per request, counted by callgrind, for one build or
//! for two. They do not depend on how busy the machine is, and include neither caches nor the
//! kernel; `canal-bench-peers` measures CPU time.

#![forbid(unsafe_code)]

mod features;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::Context;
use canal_bench_peers::canal::{self, BenchListener, Build, TOKEN};
use canal_bench_peers::process::{PROXY_CORE, PinnedProcess};
use canal_bench_peers::spread::Spread;
use canal_bench_peers::{document, generators, namespace, origin};
use clap::Parser;
use features::{FEATURES, FeatureCase};

/// Counts the instructions of `canal-gateway` for a request: one gateway under callgrind answers
/// few requests, another one many, and the difference is the cost of the additional requests. Fails
/// if --after needs more than --bar percent more than --before.
#[derive(Parser)]
#[command(after_help = "Examples:
  canal-bench-instructions
  canal-bench-instructions --before ../before/target/release --markdown docs/performance.md
  canal-bench-instructions --only http1 --rounds 1 --keep /tmp/profiles   # then callgrind_annotate --inclusive=yes")]
struct Flags {
    /// A folder with `canal` and `canal-gateway` of another commit for comparison.
    #[arg(long)]
    before: Option<PathBuf>,
    /// The folder with `canal` and `canal-gateway`.
    #[arg(long, default_value = "target/release")]
    after: PathBuf,
    /// Requests counted in a run.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(100..))]
    requests: u64,
    /// Runs of each case and build; the median is compared.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Count what single features of routes and services cost, in place of the cases.
    #[arg(long, conflicts_with_all = ["before", "only"])]
    features: bool,
    /// Only these cases (http1, h2c, policies).
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Maximum permitted increase in percent.
    #[arg(long, default_value_t = 3.0)]
    bar: f64,
    /// Keep callgrind's files of the longer runs in this folder.
    #[arg(long)]
    keep: Option<PathBuf>,
    /// Replace the table between the `bench-instructions` marks of this file, or the
    /// `bench-features` marks with --features.
    #[arg(long)]
    markdown: Option<PathBuf>,
}

/// Requests before the first counted one: afterwards connections, pools and caches exist.
/// Nobody measured a smaller number.
const WARM: u64 = 1_000;
/// A tenant's turn in a worker lasts a hundred times as long, because callgrind slows everything
/// but the clock by about this factor. Otherwise a request would take several turns, whereas
/// normally a turn has dozens of requests.
const SLOW: &str = "shares: {gatewayCpu: 10000}";
/// Address of the gateway's listener.
const PLAIN_LISTENER: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 18_081);

/// Kind of the requests to the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoadCase {
    Http1,
    H2c,
    Policies,
}

impl LoadCase {
    const ALL: [LoadCase; 3] = [LoadCase::Http1, LoadCase::H2c, LoadCase::Policies];

    fn word(self) -> &'static str {
        match self {
            LoadCase::Http1 => "http1",
            LoadCase::H2c => "h2c",
            LoadCase::Policies => "policies",
        }
    }

    fn name(self) -> &'static str {
        match self {
            LoadCase::Http1 => "HTTP/1.1 keep-alive",
            LoadCase::H2c => "h2c to HTTP/1.1",
            LoadCase::Policies => "HTTP/1.1 with a token and three policies",
        }
    }

    /// Sends one request at a time per connection, so that wake-ups are nearly the same in every
    /// run.
    fn load(self, requests: u64) -> anyhow::Result<()> {
        let (count, bearer) = (
            format!("-n{requests}"),
            format!("authorization: Bearer {TOKEN}"),
        );
        let url = |path: &str| format!("http://{PLAIN_LISTENER}{path}");
        let answers = match self {
            LoadCase::Http1 => {
                generators::h2load(&["--h1", "-t1", "-c4", "-m1", &count, &url("/")])?
            }
            LoadCase::H2c => generators::h2load(&["-t1", "-c2", "-m4", &count, &url("/")])?,
            LoadCase::Policies => generators::h2load(&[
                "--h1",
                "-t1",
                "-c4",
                "-m1",
                &count,
                "-H",
                &bearer,
                &url("/items/7"),
            ])?,
        };
        anyhow::ensure!(
            answers.ok == requests,
            "{}: {answers:?} of {requests} requests",
            self.name()
        );
        Ok(())
    }
}

/// A build, its state files, and the folder of its runs.
struct Subject {
    name: &'static str,
    build: Build,
    dir: PathBuf,
}

impl Subject {
    fn new(name: &'static str, folder: &Path, dir: &Path) -> anyhow::Result<Self> {
        let subject = Self {
            name,
            build: Build::at(folder)?,
            dir: dir.join(name),
        };
        for (kind, policies) in [("plain", String::new()), ("policies", canal::policies())] {
            subject.compile(kind, &policies, true)?;
        }
        Ok(subject)
    }

    /// Compiles the plain service, with or without its HTTPRoute, and what follows in YAML.
    fn compile(&self, kind: &str, further: &str, is_routed: bool) -> anyhow::Result<()> {
        let tenant = self.dir.join(kind).join("bench");
        std::fs::create_dir_all(&tenant)?;
        let service = canal::service(0, [String::from("/")]);
        // The Service is the first of the two objects.
        let alone = service.find("---\napiVersion: gateway.networking.k8s.io");
        let service = match alone {
            Some(end) if !is_routed => &service[..end],
            _ => &service,
        };
        let compile = |shares: &str| {
            let text = canal::tenant("bench", 1, shares) + service + further;
            std::fs::write(tenant.join("bench.yaml"), text)?;
            self.build
                .compile(&self.dir.join(kind), &self.snapshot(kind))
        };
        // Builds older than the tenants' shares of a worker refuse them, and have no turns.
        compile(SLOW).or_else(|_| compile(""))
    }

    fn snapshot(&self, kind: &str) -> PathBuf {
        self.dir.join(format!("{kind}.snapshot"))
    }

    /// Returns the instructions of a gateway that started with a snapshot, answered the requests of
    /// `load` and ended; callgrind's file is at `out`.
    fn run(
        &self,
        kind: &str,
        load: impl FnOnce() -> anyhow::Result<()>,
        out: &Path,
    ) -> anyhow::Result<u64> {
        let (log, counts) = (self.dir.join("gateway.log"), self.dir.join("callgrind.log"));
        let listener = BenchListener {
            address: PLAIN_LISTENER,
            tenant: "bench".into(),
        };
        let mut argv: Vec<String> = ["valgrind", "--tool=callgrind"].map(str::to_owned).into();
        argv.extend([
            format!("--callgrind-out-file={}", out.display()),
            format!("--log-file={}", counts.display()),
        ]);
        argv.extend(
            self.build
                .gateway(&self.snapshot(kind), &self.dir.join("data"), &[listener]),
        );
        // Workers must not pin themselves, because they would leave the bench's core.
        argv.push("--no-pin".into());
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        let gateway = PinnedProcess::start(&argv, PROXY_CORE, PLAIN_LISTENER, &log)?;
        load()?;
        gateway.end()?;
        collected(&std::fs::read_to_string(&counts)?)
            .with_context(|| format!("callgrind counted nothing; fix: see {}", counts.display()))
    }

    /// Returns the instructions per request.
    fn measure(&self, case: LoadCase, flags: &Flags) -> anyhow::Result<f64> {
        let copy = flags
            .keep
            .as_ref()
            .map(|folder| folder.join(format!("callgrind.{}.{}", self.name, case.word())));
        let kind = if case == LoadCase::Policies {
            "policies"
        } else {
            "plain"
        };
        let nowhere = Path::new("/dev/null");
        let few = self.run(kind, || case.load(WARM), nowhere)?;
        let load = || case.load(WARM + flags.requests);
        let many = self.run(kind, load, copy.as_deref().unwrap_or(nowhere))?;
        Ok((many as f64 - few as f64) / flags.requests as f64)
    }

    /// Returns the instructions per request on keep-alive connections, with a feature.
    fn measure_feature(&self, feature: &FeatureCase, requests: u64) -> anyhow::Result<f64> {
        const KIND: &str = "feature";
        let further = format!("{}{}", feature.rule, feature.objects);
        self.compile(KIND, &further, !feature.replaces_route)?;
        let load = |count: u64| {
            let (count_flag, url) = (
                format!("-n{count}"),
                format!("http://{PLAIN_LISTENER}/items/7"),
            );
            let mut argv = vec!["--h1", "-t1", "-c4", "-m1", count_flag.as_str()];
            if !feature.header.is_empty() {
                argv.extend(["-H", feature.header]);
            }
            argv.push(&url);
            let answers = generators::h2load(&argv)?;
            anyhow::ensure!(
                answers.ok == count,
                "{}: {answers:?} of {count} requests",
                feature.name
            );
            Ok(())
        };
        let nowhere = Path::new("/dev/null");
        let few = self.run(KIND, || load(WARM), nowhere)?;
        let many = self.run(KIND, || load(WARM + requests), nowhere)?;
        Ok((many as f64 - few as f64) / requests as f64)
    }
}

/// Reads the last lines, which contain `==PID== Collected : N`.
fn collected(text: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.split("Collected : ").nth(1))
        .and_then(|n| n.trim().parse().ok())
}

struct InstructionRow {
    case: LoadCase,
    subject: &'static str,
    runs: Vec<f64>,
}

fn render(rows: &[InstructionRow], flags: &Flags) -> String {
    let mut out = format!(
        "Instructions in the gateway's process for one request; {} requests, median of {} runs.\n\n\
         | case | build | instructions | least | most | after / before |\n|---|---|---|---|---|---|\n",
        flags.requests, flags.rounds
    );
    for row in rows {
        let spread = Spread::of(row.runs.iter().copied());
        let ratio = change(rows, row.case)
            .filter(|_| row.subject == "after")
            .map(|more| format!("{more:+.1} %"))
            .unwrap_or_default();
        let (name, subject) = (row.case.name(), row.subject);
        out.push_str(&format!(
            "| {name} | {subject} | {:.0} | {:.0} | {:.0} | {ratio} |\n",
            spread.median, spread.min, spread.max
        ));
    }
    out
}

/// Returns the increase of the cost of a request, in percent.
fn change(rows: &[InstructionRow], case: LoadCase) -> Option<f64> {
    let median = |subject| {
        rows.iter()
            .find(|r| r.case == case && r.subject == subject)
            .map(|r| Spread::of(r.runs.iter().copied()).median)
    };
    Some((median("after")? / median("before")? - 1.0) * 100.0)
}

/// Counts what each feature costs beside a route without any.
fn count_features(flags: &Flags, dir: &Path) -> anyhow::Result<()> {
    let subject = Subject::new("after", &flags.after, dir)?;
    let _origin = origin::start(dir)?;
    let mut out = format!(
        "Instructions in the gateway's process for one request on kept connections; {} requests, median of {} runs.\n\n\
         | feature | instructions | more than with nothing |\n|---|---|---|\n",
        flags.requests, flags.rounds
    );
    let mut plain = None;
    for feature in &FEATURES {
        let mut runs = Vec::new();
        for _ in 0..flags.rounds {
            runs.push(subject.measure_feature(feature, flags.requests)?);
        }
        let median = Spread::of(runs.iter().copied()).median;
        let base = *plain.get_or_insert(median);
        let (more, percent) = (median - base, (median / base - 1.0) * 100.0);
        eprintln!("{}: {median:.0}", feature.name);
        out.push_str(&format!(
            "| {} | {median:.0} | {more:+.0} ({percent:+.1} %) |\n",
            feature.name
        ));
    }
    print!("{out}");
    match &flags.markdown {
        Some(path) => document::replace(path, "bench-features", &out),
        None => Ok(()),
    }
}

fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    // A network namespace of its own keeps ports and loopback traffic of the machine apart.
    namespace::enter()?;
    let dir = tempfile::tempdir().context("a temporary directory")?;
    // Callgrind's files are kept only on request.
    if let Some(folder) = &flags.keep {
        std::fs::create_dir_all(folder)?;
    }
    if flags.features {
        return count_features(&flags, dir.path());
    }
    let mut subjects = Vec::new();
    if let Some(folder) = &flags.before {
        subjects.push(Subject::new("before", folder, dir.path())?);
    }
    subjects.push(Subject::new("after", &flags.after, dir.path())?);
    let _origin = origin::start(dir.path())?;
    let mut rows = Vec::new();
    for case in LoadCase::ALL
        .into_iter()
        .filter(|case| flags.only.is_empty() || flags.only.iter().any(|word| word == case.word()))
    {
        let first = rows.len();
        rows.extend(subjects.iter().map(|subject| InstructionRow {
            case,
            subject: subject.name,
            runs: Vec::new(),
        }));
        // Instructions hardly vary; several rounds show by how much.
        for round in 0..flags.rounds {
            for (subject, row) in subjects.iter().zip(&mut rows[first..]) {
                row.runs.push(subject.measure(case, &flags)?);
                eprintln!(
                    "{}, {}, run {}: {:.0}",
                    case.name(),
                    subject.name,
                    round + 1,
                    // The run was just pushed, so the default is never printed.
                    row.runs.last().copied().unwrap_or(f64::NAN)
                );
            }
        }
    }
    let text = render(&rows, &flags);
    print!("{text}");
    if let Some(path) = &flags.markdown {
        document::replace(path, "bench-instructions", &text)?;
    }
    // Without `--before` there is no change to compare with the bar.
    let over: Vec<_> = LoadCase::ALL
        .into_iter()
        .filter(|case| change(&rows, *case).is_some_and(|more| more > flags.bar))
        .map(LoadCase::name)
        .collect();
    anyhow::ensure!(
        over.is_empty(),
        "more than {} % above before: {}",
        flags.bar,
        over.join(", ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn callgrinds_count_is_parsed() {
        let text = "==7== Events    : Ir\n==7== Collected : 123456\n==7== \n==7== I   refs:      123,456\n";
        assert_eq!(super::collected(text), Some(123_456));
    }
}
