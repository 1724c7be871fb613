//! The compared proxies: the cases of each, and the paths of their programs and files. Each has one
//! worker and the features of its release.

mod canal;
mod envoy;
mod haproxy;
mod mesh;
mod nginx;

use std::cell::{Cell, OnceCell};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use canal_bench_peers::canal::Build;
use canal_bench_peers::process::PinnedProcess;

use crate::case::ProxyCase;
use crate::certificates::BenchCertificates;

pub(crate) use mesh::SECURE_SERVICE;

/// Folders of the programs and of temporary files.
pub(crate) struct PeerFolders {
    pub(crate) tools: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) now: Build,
    pub(crate) before: Option<Build>,
    pub(crate) certificates: BenchCertificates,
    /// Controllers with one service and with 10,000, started on demand.
    meshes: [OnceCell<mesh::BenchMesh>; 2],
    /// Number of gateways that a controller configured; each has its own data folder.
    starts: Cell<u32>,
}

impl PeerFolders {
    pub(crate) fn new(dir: &Path, now: Build, before: Option<Build>) -> anyhow::Result<Self> {
        let certificates = BenchCertificates::make(&dir.join("certificates"))?;
        let tools = std::env::current_dir()?.join(".tools");
        Ok(Self {
            tools,
            dir: dir.to_owned(),
            now,
            before,
            certificates,
            meshes: Default::default(),
            starts: Cell::new(0),
        })
    }

    /// Returns the command of a program of Debian's newest suite, with its own loader and
    /// libraries.
    fn newest(&self, program: &str) -> anyhow::Result<Vec<String>> {
        let libraries = self.tools.join("newest/usr/lib/x86_64-linux-gnu");
        let words = [
            libraries.join("ld-linux-x86-64.so.2"),
            libraries.clone(),
            self.tools.join("newest/usr/sbin").join(program),
        ];
        for file in &words {
            anyhow::ensure!(
                file.exists(),
                "{} is missing; fix: run setup/install bench",
                file.display()
            );
        }
        let [loader, libraries, program] = words.map(|word| word.to_string_lossy().into_owned());
        Ok(vec![loader, "--library-path".into(), libraries, program])
    }

    fn envoy(&self) -> anyhow::Result<String> {
        let program = self.tools.join("envoy/bin/envoy");
        anyhow::ensure!(
            program.exists(),
            "{} is missing; fix: run setup/install bench",
            program.display()
        );
        Ok(program.to_string_lossy().into_owned())
    }

    /// Returns the version that each peer reports.
    pub(crate) fn versions(&self) -> anyhow::Result<String> {
        let version = |mut argv: Vec<String>, flag: &str| -> anyhow::Result<String> {
            argv.push(flag.into());
            let out = Command::new(&argv[0])
                .args(&argv[1..])
                .output()
                .with_context(|| argv[0].clone())?;
            let text = String::from_utf8_lossy(&out.stdout).into_owned()
                + &String::from_utf8_lossy(&out.stderr);
            let digits = |word: &&str| {
                word.contains('.') && word.chars().next().is_some_and(|c| c.is_ascii_digit())
            };
            let words = text.split(|c: char| c.is_whitespace() || c == '/');
            Ok(words
                .clone()
                .find(digits)
                .with_context(|| format!("no version in {text:?}"))?
                .to_owned())
        };
        let (haproxy, nginx) = (
            version(self.newest("haproxy")?, "-v")?,
            version(self.newest("nginx")?, "-v")?,
        );
        Ok(format!(
            "HAProxy {haproxy}, nginx {nginx}, Envoy {}",
            version(vec![self.envoy()?], "--version")?
        ))
    }
}

/// A proxy that can be compared.
pub(crate) struct PeerProxy {
    pub(crate) name: &'static str,
    cases: &'static [ProxyCase],
    pub(crate) start: fn(&PeerFolders, ProxyCase) -> anyhow::Result<PinnedProcess>,
}

impl PeerProxy {
    pub(crate) fn supports(&self, case: ProxyCase) -> bool {
        self.cases.contains(&case)
    }

    /// Returns whether it is a build of Canal, which has HBONE where others have streams.
    pub(crate) fn is_canal(&self) -> bool {
        self.name.starts_with("canal")
    }

    /// Returns whether it is the older build of a comparison.
    pub(crate) fn is_before(&self) -> bool {
        self.name == "canal-before"
    }
}

static PEERS: [PeerProxy; 7] = [
    PeerProxy {
        name: "canal",
        cases: &ProxyCase::ALL,
        start: canal::start,
    },
    PeerProxy {
        name: "canal-before",
        cases: &[ProxyCase::Http1, ProxyCase::H2c],
        start: canal::start_before,
    },
    PeerProxy {
        name: "canal-100k",
        cases: &[ProxyCase::Http1],
        start: canal::start_100k,
    },
    PeerProxy {
        name: "canal-100k-controller",
        cases: &[ProxyCase::Http1],
        start: canal::start_controlled,
    },
    PeerProxy {
        name: "haproxy",
        cases: &ProxyCase::ALL,
        start: haproxy::start,
    },
    PeerProxy {
        name: "nginx",
        cases: &[
            ProxyCase::Http1,
            ProxyCase::Close,
            ProxyCase::H2c,
            ProxyCase::Mtls,
        ],
        start: nginx::start,
    },
    PeerProxy {
        name: "envoy",
        cases: &ProxyCase::ALL,
        start: envoy::start,
    },
];

pub(crate) fn all() -> impl Iterator<Item = &'static PeerProxy> {
    PEERS.iter()
}

fn write(dir: &Path, name: &str, text: &str) -> anyhow::Result<String> {
    let path = dir.join(name);
    std::fs::write(&path, text)?;
    Ok(path.to_string_lossy().into_owned())
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}
