//! The bench's world for one case: up, pinned, capped; runs the load and reads what processes used and counted. It prints nothing.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use canal_world::{Options, Plan, Topology, World};
use serde_json::Value;

use crate::limits::{self, Cap};

/// All of it must serve within this time.
const UP_WITHIN: Duration = Duration::from_secs(60);
/// The node proxy under measure, the node of the load, the key server.
const NODE: &str = "keys-n2";
const LOAD: &str = "keys-n1";
const KEYS: &str = "ks-1";
/// The pod whose identity the load has, and the application.
const IDENTITY: &str = "spiffe://keys.example/ns/default/sa/load";
const APP: &str = "keys/default/web-0";
const APP_PORT: u16 = 8080;
const HBONE_PORT: u16 = 15008;
/// AWS-LC's way to hide what the processor has: nothing of CPUID's leaf 7.
const MASK: (&str, &str) = ("OPENSSL_ia32cap", ":0");
const ADMIN: &str = "http://127.0.0.1:15020/metrics";

/// Who does the asymmetric part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Mode {
    /// The node proxy, without what processors have had for it since 2013: no AVX2, ADX, BMI2 or AVX-512 (the paper's "no offloading").
    None,
    /// The node proxy, with all that this processor has (the paper's "local offloading").
    Local,
    /// The key server.
    Remote,
}

impl Mode {
    pub(crate) const ALL: [Mode; 3] = [Mode::None, Mode::Local, Mode::Remote];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Mode::None => "none",
            Mode::Local => "local",
            Mode::Remote => "remote",
        }
    }
}

/// Of the certificates on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Algorithm {
    Ecdsa,
    Rsa,
}

impl Algorithm {
    pub(crate) const ALL: [Algorithm; 2] = [Algorithm::Rsa, Algorithm::Ecdsa];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Algorithm::Ecdsa => "ECDSA P-256",
            Algorithm::Rsa => "RSA-2048",
        }
    }
}

/// One run of the load.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    /// Flows at once, or per second.
    pub(crate) pace: Pace,
    pub(crate) seconds: f64,
    /// The node proxy's share of a core; `None`: a whole one.
    pub(crate) share: Option<f64>,
    pub(crate) handshakes: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Pace {
    Concurrency(usize),
    Rate(f64),
}

/// What came of it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Measured {
    pub(crate) per_second: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p90_ms: f64,
    /// CPU of the node proxy for each flow.
    pub(crate) node_us: f64,
    /// The part of it that is not the kernel's.
    pub(crate) user_us: f64,
    /// CPU of the key server for each flow.
    pub(crate) keys_us: f64,
    pub(crate) done: f64,
    pub(crate) failed: f64,
}

impl Measured {
    /// The best of two runs of the same load, figure by figure; flows are added up.
    pub(crate) fn take(&mut self, other: &Self) {
        self.per_second = self.per_second.max(other.per_second);
        for (own, other) in [
            (&mut self.p50_ms, other.p50_ms),
            (&mut self.p90_ms, other.p90_ms),
            (&mut self.node_us, other.node_us),
            (&mut self.user_us, other.user_us),
            (&mut self.keys_us, other.keys_us),
        ] {
            *own = own.min(other);
        }
        self.done += other.done;
        self.failed += other.failed;
    }
}

pub(crate) struct Scene {
    world: World,
    mode: Mode,
    identity: PathBuf,
    target: String,
    authority: String,
    cap: Cap,
    node: u32,
    why: RefCell<Option<String>>,
    _folder: tempfile::TempDir,
}

impl Scene {
    /// Brings the world of a case up; it goes when this value goes, however the process ends.
    pub(crate) fn up(algorithm: Algorithm, mode: Mode) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(here.join("world.yaml"))?
            .replace("PLACE", if mode == Mode::Remote { "KeyServer" } else { "Local" })
            .replace("ALGORITHM", if algorithm == Algorithm::Rsa { "Rsa2048" } else { "EcdsaP256" });
        let file = folder.path().join("world.yaml");
        std::fs::write(&file, text)?;
        std::fs::copy(here.join("services.yaml"), folder.path().join("services.yaml"))?;
        let mut topology = Topology::load(&file).map_err(|problems| anyhow::anyhow!("world.yaml: {problems:?}"))?;
        let nodes = topology.tenants.iter_mut().flat_map(|tenant| &mut tenant.nodes).filter(|node| node.name == NODE);
        for proxy in nodes.filter_map(|node| node.proxy.as_mut()) {
            // It has one core, and one worker as a node proxy has that finds one.
            proxy.args.extend(["--workers".into(), "1".into()]);
            if mode == Mode::None {
                proxy.env.insert(MASK.0.into(), MASK.1.into());
            }
        }
        let app = Plan::of(&topology).pods.iter().find(|pod| pod.uid == APP).map(|pod| pod.ip4).context(APP)?;
        let bin = std::env::current_exe()?.parent().context("a program has a folder")?.to_path_buf();
        let world = World::up(&topology, &Options { ephemeral: true, replace: true, bin_dirs: vec![bin], ..Options::default() })?;
        world.wait_ready(UP_WITHIN)?;
        let node = pid(&world, NODE)?;
        // The load, the application, the controller and the node proxy share a core; the key server has the other.
        for host in world.hosts()?.iter().filter(|host| host.seat.name != KEYS) {
            if let Some(pid) = host.pulse.pid {
                limits::pin(pid, 0)?;
            }
        }
        limits::pin(pid(&world, KEYS)?, 1)?;
        // So are the world's routers, and the network behind them.
        for host in world.hosts()?.iter().filter(|host| host.seat.kind == "router" || host.seat.name == KEYS) {
            limits::receive_on(&host.seat.netns, 1)?;
        }
        let cap = Cap::of(node, &world.host(NODE)?.seat.cgroup)?;
        let identity = identity(&world)?;
        let scene = Self {
            world,
            mode,
            identity,
            target: format!("{app}:{HBONE_PORT}"),
            authority: format!("{app}:{APP_PORT}"),
            cap,
            node,
            why: RefCell::default(),
            _folder: folder,
        };
        scene.until_served()?;
        Ok(scene)
    }

    fn until_served(&self) -> anyhow::Result<()> {
        let started = Instant::now();
        let once = Run { pace: Pace::Concurrency(1), seconds: 0.2, share: None, handshakes: false };
        loop {
            match self.load(&once) {
                Ok(report) if report["failed"] == 0 && report["done"].as_u64() > Some(0) => return Ok(()),
                said if started.elapsed() > UP_WITHIN => bail!("no flow gets through: {said:?}"),
                _ => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    fn load(&self, run: &Run) -> anyhow::Result<Value> {
        let me = std::env::current_exe()?;
        let mut argv: Vec<String> = ["-c", "0", &me.to_string_lossy(), "load"].map(str::to_string).into();
        argv.extend(["--identity".into(), self.identity.display().to_string(), "--target".into(), self.target.clone()]);
        argv.extend(["--authority".into(), self.authority.clone(), "--seconds".into(), run.seconds.to_string()]);
        match run.pace {
            Pace::Concurrency(n) => argv.extend(["--concurrency".into(), n.to_string()]),
            Pace::Rate(rate) => argv.extend(["--rate".into(), rate.to_string()]),
        }
        if run.handshakes {
            argv.push("--handshakes".into());
        }
        // Inside the pod: what the world's switches and routers are made of would be charged to whoever sends a packet.
        let out = self.world.inside(APP, || Command::new("taskset").args(&argv).stdin(Stdio::null()).output())??;
        let said = String::from_utf8_lossy(&out.stdout);
        serde_json::from_str(&said).with_context(|| format!("the load said {said:?}, {}", String::from_utf8_lossy(&out.stderr)))
    }

    /// Runs the load once.
    pub(crate) fn run(&self, run: &Run) -> anyhow::Result<Measured> {
        self.cap.set(run.share)?;
        let (before, keys_before) = (self.world.cpu(NODE)?, self.world.cpu(KEYS)?);
        let report = self.load(run)?;
        let number = |field: &str| report[field].as_f64().with_context(|| format!("{field} is missing: {report}"));
        let done = number("done")?;
        if done == 0.0 {
            bail!("no flow of {run:?} got through: {report}");
        }
        if let Some(why) = report["why"].as_str() {
            self.why.borrow_mut().get_or_insert_with(|| why.to_string());
        }
        let (after, keys_after) = (self.world.cpu(NODE)?, self.world.cpu(KEYS)?);
        let us = |after: Duration, before: Duration| after.saturating_sub(before).as_secs_f64() * 1e6 / done;
        let user_us = us(after.user, before.user);
        Ok(Measured {
            per_second: number("per_second")?,
            p50_ms: number("p50_us")? / 1e3,
            p90_ms: number("p90_us")? / 1e3,
            node_us: user_us + us(after.system, before.system),
            user_us,
            keys_us: us(keys_after.user, keys_before.user) + us(keys_after.system, keys_before.system),
            done,
            failed: number("failed")?,
        })
    }

    /// The sum of a counter's series of the node proxy or the key server whose line holds `part`.
    pub(crate) fn counted(&self, of_keys: bool, name: &str, part: &str) -> anyhow::Result<f64> {
        let host = if of_keys { KEYS } else { NODE };
        let out = self.world.exec(host, &["curl", "-sS", "--max-time", "5", ADMIN])?.stdin(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&out.stdout);
        let mut sum = None;
        for line in text.lines().filter(|line| line.starts_with(name) && line.contains(part)) {
            let value: f64 = line.rsplit(' ').next().unwrap_or("").parse().with_context(|| line.to_string())?;
            sum = Some(sum.unwrap_or(0.0) + value);
        }
        sum.with_context(|| format!("{host} has no {name} with {part:?}"))
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    /// The node proxy's process.
    pub(crate) fn node(&self) -> u32 {
        self.node
    }

    /// Why the first of the flows that failed did.
    pub(crate) fn why(&self) -> Option<String> {
        self.why.borrow().clone()
    }
}

fn pid(world: &World, host: &str) -> anyhow::Result<u32> {
    world.host(host)?.pulse.pid.with_context(|| format!("{host} runs nothing"))
}

/// The file in which the load's node keeps its pod's certificate.
fn identity(world: &World) -> anyhow::Result<PathBuf> {
    let folder = world.host(LOAD)?.seat.data.join("certs");
    let started = Instant::now();
    loop {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            // One that is being written has another name yet.
            let is_whole = entry.path().extension().is_some_and(|e| e == "json");
            let text = if is_whole { std::fs::read_to_string(entry.path()).unwrap_or_default() } else { String::new() };
            if serde_json::from_str::<Value>(&text).is_ok_and(|kept| kept["identity"].as_str().is_some_and(|is| is.starts_with(IDENTITY))) {
                return Ok(entry.path());
            }
        }
        if started.elapsed() > UP_WITHIN {
            bail!("{} holds no certificate of {IDENTITY}", folder.display());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
