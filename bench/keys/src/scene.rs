//! The bench's world for one case: it is up, pinned and capped. This module runs the load and reads
//! what processes used and counted. It prints nothing.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use canal_world::{Topology, World, WorldOptions, WorldPlan};
use serde_json::Value;

use crate::figure_spread::LoadFigures;
use crate::limits::{self, CpuCap};
use crate::load::{self, ConnectPace, LoadRun};

/// The whole world must serve within this time.
/// `canal up` waits as long by default.
const UP_WITHIN: Duration = Duration::from_secs(60);
/// Hosts: the measured node proxy, the node of the load, the key server.
const NODE: &str = "keys-n2";
const LOAD: &str = "keys-n1";
const KEYS: &str = "ks-1";
/// Identity of the load's pod, and name of the application's.
const IDENTITY: &str = "spiffe://keys.example/ns/default/sa/load";
const APP: &str = "keys/default/web-0";
/// Port of the application in the world's file.
const APP_PORT: u16 = 8080;
/// `canal_wire::hbone::HBONE_PORT`.
const HBONE_PORT: u16 = 15008;
/// AWS-LC's setting that hides features of the processor: everything in CPUID's leaf 7.
pub(crate) const MASK: (&str, &str) = ("OPENSSL_ia32cap", ":0");
const ADMIN: &str = "http://127.0.0.1:15020/metrics";

/// Process that does the asymmetric operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum AsymmetricMode {
    /// The node proxy, without the features that processors have had for this since 2013: no AVX2,
    /// ADX, BMI2 or AVX-512 (the paper's "no offloading").
    None,
    /// The node proxy, with all features of this processor (the paper's "local offloading").
    Local,
    /// The key server.
    Remote,
}

impl AsymmetricMode {
    pub(crate) const ALL: [AsymmetricMode; 3] = [
        AsymmetricMode::None,
        AsymmetricMode::Local,
        AsymmetricMode::Remote,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            AsymmetricMode::None => "none",
            AsymmetricMode::Local => "local",
            AsymmetricMode::Remote => "remote",
        }
    }
}

/// Core that is charged for packets between the node proxy and the key server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Network {
    /// The key server's core, as with a network that another operator runs.
    Apart,
    /// The sender's core, as if its machine were all routers up to the receiver's socket.
    Sender,
}

/// Algorithm of the certificates on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CertificateAlgorithm {
    Ecdsa,
    Rsa,
}

impl CertificateAlgorithm {
    pub(crate) const ALL: [CertificateAlgorithm; 2] =
        [CertificateAlgorithm::Rsa, CertificateAlgorithm::Ecdsa];

    pub(crate) fn name(self) -> &'static str {
        match self {
            CertificateAlgorithm::Ecdsa => "ECDSA P-256",
            CertificateAlgorithm::Rsa => "RSA-2048",
        }
    }
}

pub(crate) struct KeyBenchWorld {
    world: World,
    mode: AsymmetricMode,
    identity: PathBuf,
    target: String,
    authority: String,
    cap: CpuCap,
    node: u32,
    why: RefCell<Option<String>>,
    _folder: tempfile::TempDir,
}

impl KeyBenchWorld {
    /// Brings up the world of a case. It is removed on drop, and however the process ends.
    pub(crate) fn up(
        algorithm: CertificateAlgorithm,
        mode: AsymmetricMode,
        network: Network,
    ) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut topology = topology_of(algorithm, mode, folder.path())?;
        let nodes = topology
            .tenants
            .iter_mut()
            .flat_map(|tenant| &mut tenant.nodes)
            .filter(|node| node.name == NODE);
        for proxy in nodes.filter_map(|node| node.proxy.as_mut()) {
            // It has one core, and so one worker, like a node proxy that detects one core.
            proxy.args.extend(["--workers".into(), "1".into()]);
            if mode == AsymmetricMode::None {
                proxy.env.insert(MASK.0.into(), MASK.1.into());
            }
        }
        let app = WorldPlan::of(&topology)
            .pods
            .iter()
            .find(|pod| pod.uid == APP)
            .map(|pod| pod.ip4)
            .context(APP)?;
        let bin = std::env::current_exe()?
            .parent()
            .context("a program has a folder")?
            .to_path_buf();
        // `replace` removes the world of a run that was killed.
        let world = World::up(
            &topology,
            &WorldOptions {
                ephemeral: true,
                replace: true,
                bin_dirs: vec![bin],
                ..WorldOptions::default()
            },
        )?;
        world.wait_ready(UP_WITHIN)?;
        let node = pid(&world, NODE)?;
        pin_hosts(&world, network)?;
        let cap = CpuCap::of(node, &world.host(NODE)?.environment.cgroup)?;
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
            // The topology's files are in it, so it lives as long as the world.
            _folder: folder,
        };
        scene.until_served()?;
        Ok(scene)
    }

    fn until_served(&self) -> anyhow::Result<()> {
        let started = Instant::now();
        let once = LoadRun {
            pace: ConnectPace::Concurrency(1),
            // Enough for one flow.
            seconds: 0.2,
            share: None,
            handshakes: false,
        };
        loop {
            match self.load(&once) {
                Ok(report) if report["failed"] == 0 && report["done"].as_u64() > Some(0) => {
                    return Ok(());
                }
                problem if started.elapsed() > UP_WITHIN => {
                    bail!("no flow gets through: {problem:?}")
                }
                // As long as the try, so that the bench leaves the machine to the start.
                _ => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    fn load(&self, run: &LoadRun) -> anyhow::Result<Value> {
        let mut command = load::command(&self.identity, &self.target, &self.authority, run)?;
        // The command runs inside the pod: otherwise the world's switches and routers would be
        // charged to the sender of a packet.
        load::read(&self.world.inside(APP, || command.output())??)
    }

    /// Runs the load once and returns its figures.
    pub(crate) fn run(&self, run: &LoadRun) -> anyhow::Result<LoadFigures> {
        self.cap.set(run.share)?;
        let (before, keys_before) = (self.world.cpu(NODE)?, self.world.cpu(KEYS)?);
        let report = self.load(run)?;
        let number = |field: &str| {
            report[field]
                .as_f64()
                .with_context(|| format!("{field} is missing: {report}"))
        };
        let done = number("done")?;
        if done == 0.0 {
            bail!("no flow of {run:?} got through: {report}");
        }
        if let Some(why) = report["why"].as_str() {
            self.why.borrow_mut().get_or_insert_with(|| why.to_string());
        }
        let (after, keys_after) = (self.world.cpu(NODE)?, self.world.cpu(KEYS)?);
        let us = |after: Duration, before: Duration| {
            after.saturating_sub(before).as_secs_f64() * 1e6 / done
        };
        let user_us = us(after.user, before.user);
        Ok(LoadFigures {
            per_second: number("per_second")?,
            p50_ms: number("p50_us")? / 1e3,
            p90_ms: number("p90_us")? / 1e3,
            node_us: user_us + us(after.system, before.system),
            user_us,
            keys_us: us(keys_after.user, keys_before.user)
                + us(keys_after.system, keys_before.system),
            completed: done,
            failed: number("failed")?,
        })
    }

    /// Returns the sum of a counter's series of the node proxy or the key server whose lines
    /// contain `part`.
    pub(crate) fn counted(&self, of_keys: bool, name: &str, part: &str) -> anyhow::Result<f64> {
        let host = if of_keys { KEYS } else { NODE };
        let out = self
            .world
            .exec(host, &["curl", "-sS", "--max-time", "5", ADMIN])?
            .stdin(Stdio::null())
            .output()?;
        let text = String::from_utf8_lossy(&out.stdout);
        let mut sum = None;
        for line in text
            .lines()
            .filter(|line| line.starts_with(name) && line.contains(part))
        {
            let value: f64 = line
                .rsplit(' ')
                .next()
                .unwrap_or("")
                .parse()
                .with_context(|| line.to_string())?;
            sum = Some(sum.unwrap_or(0.0) + value);
        }
        sum.with_context(|| format!("{host} has no {name} with {part:?}"))
    }

    pub(crate) fn mode(&self) -> AsymmetricMode {
        self.mode
    }

    /// Returns the node proxy's process.
    pub(crate) fn node(&self) -> u32 {
        self.node
    }

    /// Returns the error of the first flow that failed.
    pub(crate) fn why(&self) -> Option<String> {
        self.why.borrow().clone()
    }
}

/// Writes the world's files of a case into `folder`, and loads its topology.
fn topology_of(
    algorithm: CertificateAlgorithm,
    mode: AsymmetricMode,
    folder: &Path,
) -> anyhow::Result<Topology> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(here.join("world.yaml"))?
        .replace(
            "PLACE",
            if mode == AsymmetricMode::Remote {
                "KeyServer"
            } else {
                "Local"
            },
        )
        .replace(
            "ALGORITHM",
            if algorithm == CertificateAlgorithm::Rsa {
                "Rsa2048"
            } else {
                "EcdsaP256"
            },
        );
    let file = folder.join("world.yaml");
    std::fs::write(&file, text)?;
    std::fs::copy(here.join("services.yaml"), folder.join("services.yaml"))?;
    Topology::load(&file).map_err(|problems| anyhow::anyhow!("world.yaml: {problems:?}"))
}

/// Pins the processes of the world to the two cores, and the packets of the network that is apart.
fn pin_hosts(world: &World, network: Network) -> anyhow::Result<()> {
    // The load, the application, the controller and the node proxy share a core; the key server has
    // the other.
    for host in world
        .hosts()?
        .iter()
        .filter(|host| host.environment.name != KEYS)
    {
        if let Some(pid) = host.process.pid {
            limits::pin(pid, 0)?;
        }
    }
    limits::pin(pid(world, KEYS)?, 1)?;
    if network == Network::Apart {
        // The world's routers, and the network behind them, are on that core too.
        for host in world
            .hosts()?
            .iter()
            .filter(|host| host.environment.kind == "router" || host.environment.name == KEYS)
        {
            limits::receive_on(&host.environment.netns, 1)?;
        }
    }
    Ok(())
}

fn pid(world: &World, host: &str) -> anyhow::Result<u32> {
    world
        .host(host)?
        .process
        .pid
        .with_context(|| format!("{host} runs nothing"))
}

/// Returns the file in which the load's node stores its pod's certificate.
fn identity(world: &World) -> anyhow::Result<PathBuf> {
    let folder = world.host(LOAD)?.environment.data.join("certs");
    let started = Instant::now();
    loop {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            // A file that is still being written has another name.
            let is_whole = entry.path().extension().is_some_and(|e| e == "json");
            let text = if is_whole {
                std::fs::read_to_string(entry.path()).unwrap_or_default()
            } else {
                String::new()
            };
            if serde_json::from_str::<Value>(&text).is_ok_and(|stored| {
                stored["identity"]
                    .as_str()
                    .is_some_and(|is| is.starts_with(IDENTITY))
            }) {
                return Ok(entry.path());
            }
        }
        if started.elapsed() > UP_WITHIN {
            bail!("{} holds no certificate of {IDENTITY}", folder.display());
        }
        // Short beside `UP_WITHIN`; a poll is one read of a folder.
        std::thread::sleep(Duration::from_millis(100));
    }
}
