//! `canal-controller`: flags, logging, signals. Everything else is `canal-controller-core`. Start
//! at [`run`].

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use canal_ca::{LIFETIME_SECONDS_MAX, LIFETIME_SECONDS_MIN, RotationTimeouts};
use canal_controller_core::{
    AllowedHost, Controller, ControllerConfig, ControllerLimits, ExternalCa, FILES_RESERVED,
    JwksOptions, SilenceTimeouts, TrustOptions,
};
use canal_model::share::{Share, ShareKind, Shares};
use canal_runtime::metrics::show_legacy_names;
use canal_runtime::raise_file_limit;
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// mimalloc gives free pages back to the kernel soon (`canal_allocator`). The allocator of the C
/// library keeps the arenas of all threads.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The controller of a Canal mesh: reads policy from files and from `canal apply`, compiles it,
/// sends every node and gateway the resources in its scope, and issues the mesh's certificates.
#[derive(Parser)]
#[command(version)]
struct Flags {
    /// Address on which nodes, gateways and operators connect (TLS).
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:15012")]
    listen: SocketAddr,
    /// Directory of the store. It contains private keys; no other user needs to read it.
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// Directory with one directory per tenant, which contains the tenant's YAML files. Without it,
    /// `canal apply` is the only source.
    #[arg(long, value_name = "DIR")]
    config_dir: Option<PathBuf>,
    /// YAML list of the principals that may connect: {tokenSha256, kind:
    /// node|gateway|edge|keyserver|operator, name, tenant, az, backend}. Read again when it
    /// changes.
    #[arg(long, value_name = "FILE")]
    principals: PathBuf,
    /// Directory of the controller's own CA; clients need root.pem from it.
    #[arg(long, value_name = "DIR")]
    infra_dir: PathBuf,
    /// Lifetime of workload certificates, e.g. 24h, 90m, 60s.
    // istiod's default, and the maximum (`LIFETIME_SECONDS_MAX`).
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = lifetime)]
    svid_ttl: u64,
    /// Directory with a directory per trust domain with an external CA: cert-chain.pem, key.pem,
    /// root-cert.pem, and crl.pem if there is one. Read again when it changes.
    #[arg(long, value_name = "DIR")]
    ca_dir: Option<PathBuf>,
    /// A trust domain with certificates that another process signs through CFSSL's API:
    /// TRUST_DOMAIN=URL. Its root-cert.pem (and auth-key, profile, crl.pem, tls-root.pem if needed)
    /// are in its directory in --ca-dir.
    #[arg(long, value_name = "DOMAIN=URL", requires = "ca_dir")]
    external_ca: Vec<ExternalCa>,
    /// File of 32 bytes, or 64 hexadecimal digits: seals the private keys in the store. Without it
    /// they are in a file of mode 0600.
    #[arg(long, value_name = "FILE")]
    store_key_file: Option<PathBuf>,
    /// Time between the last data plane's acknowledgement of a new root and its first signature.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = seconds)]
    ca_rotation_settle: u64,
    /// Time for which an old root stays in the trust bundle after its last certificate in use.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = seconds)]
    ca_retire_grace: u64,
    /// Hosts whose key sets (jwksUri) the controller may fetch: host[:port], separated by commas.
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    jwks_hosts: Vec<AllowedHost>,
    /// Interval between two fetches of the key sets.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = refresh)]
    jwks_refresh: Duration,
    /// PEM roots for https to key sets and external CAs.
    #[arg(long, value_name = "FILE")]
    tls_roots: Option<PathBuf>,
    /// Time after which a silent gateway replica that its edge reports down counts as gone: its
    /// sessions count as ended.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    replica_gone_after: Duration,
    #[command(flatten)]
    limits: LimitFlags,
    /// /metrics and /healthz/ready; keep it on localhost. /config_dump is on the unix socket admin.sock in --data-dir
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:15000")]
    admin_addr: SocketAddr,
    /// /metrics and /healthz/ready.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:15020")]
    metrics_addr: SocketAddr,
    /// Add the names that metrics had in earlier versions to /metrics; docs/operations/renamed.md
    /// lists them. The next release does not have this flag.
    #[arg(long)]
    legacy_metric_names: bool,
    /// Log filter, e.g. info or canal_controller_core=debug,info.
    #[arg(long, value_name = "FILTER", default_value = "info")]
    log: String,
}

/// Limits that tenants share; docs/operations/limits.md describes each.
#[derive(clap::Args)]
struct LimitFlags {
    /// Maximum connections that have sent a valid token.
    #[arg(long, value_name = "COUNT", default_value_t = 25_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    connections: u64,
    /// Maximum connections that have not yet sent a valid token.
    #[arg(long, value_name = "COUNT", default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    unauthenticated_connections: u64,
    /// Maximum changes of all tenants that are queued or being compiled.
    #[arg(long, value_name = "COUNT", default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    queued_changes: u64,
    /// Maximum bytes of the changes of all tenants that are queued or being compiled.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30, value_parser = clap::value_parser!(u64).range(1 << 20..=1 << 40))]
    queued_change_bytes: u64,
    /// Maximum bytes of all tenants' objects.
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 30, value_parser = clap::value_parser!(u64).range(1 << 20..=1 << 40))]
    configuration_bytes: u64,
    /// Maximum bytes of the resources compiled from all tenants' objects.
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 30, value_parser = clap::value_parser!(u64).range(1 << 20..=1 << 40))]
    compiled_bytes: u64,
    /// Maximum number of the resources compiled from all tenants' objects.
    #[arg(long, value_name = "COUNT", default_value_t = 5_000_000, value_parser = clap::value_parser!(u64).range(1_000..=1_000_000_000))]
    compiled_resources: u64,
    /// Maximum bytes of the route tables that gateways build of all tenants' objects.
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 30, value_parser = clap::value_parser!(u64).range(1 << 20..=1 << 40))]
    route_table_bytes: u64,
    /// Maximum certificates in the issuance log that have not expired.
    #[arg(long, value_name = "COUNT", default_value_t = 500_000, value_parser = clap::value_parser!(u64).range(100..=10_000_000))]
    certificates: u64,
    /// A tenant's share of a limit if its Tenant does not set one: LIMIT=AMOUNT or LIMIT=PERCENT%,
    /// LIMIT as in spec.shares.
    #[arg(long = "share", value_name = "LIMIT=SHARE", value_parser = share)]
    shares: Vec<(ShareKind, Share)>,
}

impl LimitFlags {
    /// Returns the controller's limits, for a process that may have `files` open files.
    fn limits(&self, files: u64) -> ControllerLimits {
        let count = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let mut shares = Shares::default();
        self.shares
            .iter()
            .for_each(|(kind, share)| shares.set(*kind, *share));
        let limits = ControllerLimits {
            connections: count(self.connections),
            unauthenticated: count(self.unauthenticated_connections),
            queued_changes: self.queued_changes,
            queued_change_bytes: self.queued_change_bytes,
            configuration_bytes: self.configuration_bytes,
            compiled_bytes: self.compiled_bytes,
            compiled_resources: self.compiled_resources,
            route_table_bytes: self.route_table_bytes,
            issued: count(self.certificates),
            shares,
            ..ControllerLimits::default()
        };
        limits.within(files)
    }

    fn files(&self) -> u64 {
        self.connections + self.unauthenticated_connections + FILES_RESERVED
    }
}

/// Parses one tenant's share of one limit.
fn share(text: &str) -> Result<(ShareKind, Share), String> {
    let (limit, share) = text
        .split_once('=')
        .ok_or("there is no '='; fix: write LIMIT=SHARE, as in certificates=20%")?;
    let kind = Shares::kind(limit).ok_or_else(|| {
        format!(
            "{limit:?} is not a limit that tenants share; fix: name one that docs/operations/limits.md lists"
        )
    })?;
    Ok((kind, share.parse::<Share>().map_err(|e| e.to_string())?))
}

/// Parses a time with a unit, in seconds.
fn seconds(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let seconds = match (digits.parse::<u64>(), &text[digits.len()..]) {
        (Ok(n), "s") => Some(n),
        (Ok(n), "m") => n.checked_mul(60),
        (Ok(n), "h") => n.checked_mul(3600),
        _ => None,
    };
    seconds.ok_or_else(|| {
        "this is not a time; fix: write a number and a unit, as in 24h, 90m or 60s".into()
    })
}

/// Parses a certificate lifetime, in seconds, and checks its limits.
fn lifetime(text: &str) -> Result<u64, String> {
    let seconds = seconds(text)?;
    if (LIFETIME_SECONDS_MIN..=LIFETIME_SECONDS_MAX).contains(&seconds) {
        Ok(seconds)
    } else {
        Err(format!(
            "certificates cannot be valid for {seconds}s; fix: write {LIFETIME_SECONDS_MIN}s to {}h",
            LIFETIME_SECONDS_MAX / 3600
        ))
    }
}

/// Parses the silence after which a replica is gone. The minimum of 5 s is the time that an edge
/// needs to be sure.
fn duration(text: &str) -> Result<Duration, String> {
    let seconds = seconds(text)?;
    if (5..=24 * 3600).contains(&seconds) {
        Ok(Duration::from_secs(seconds))
    } else {
        Err(format!("{seconds}s is out of range; fix: write 5s to 24h"))
    }
}

/// Parses the interval between two fetches from another server.
fn refresh(text: &str) -> Result<Duration, String> {
    let seconds = seconds(text)?;
    // A key that its issuer has withdrawn is trusted for a day at most.
    if (1..=24 * 3600).contains(&seconds) {
        Ok(Duration::from_secs(seconds))
    } else {
        Err(format!("{seconds}s is out of range; fix: write 1s to 24h"))
    }
}

fn main() -> ExitCode {
    canal_allocator::return_memory_soon();
    let flags = Flags::parse();
    if flags.legacy_metric_names {
        show_legacy_names();
    }
    let filter = match EnvFilter::try_new(&flags.log) {
        Ok(filter) => filter,
        Err(e) => {
            eprintln!(
                "canal-controller: --log {:?}: {e}; fix: write a filter such as info or canal_controller_core=debug,info",
                flags.log
            );
            // clap ends with the same code for a wrong command line.
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Logs end in files and journals, where codes for colours would be noise.
        .with_ansi(false)
        .init();
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!(
                "canal-controller: cannot start the runtime: {e}; fix: raise the limits of threads and open files (ulimit -u, ulimit -n)"
            );
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run(flags)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("canal-controller: {e:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(flags: Flags) -> anyhow::Result<()> {
    // The handlers are installed first, so that an early SIGTERM also ends the process in order.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // The limits of connections below follow from the files that the process may really open.
    let files = raise_file_limit(flags.limits.files());
    if files < flags.limits.files() {
        tracing::warn!(
            files,
            wanted = flags.limits.files(),
            "controller: the limit of open files is lower than requested, so fewer connections are accepted; fix: raise it (ulimit -n, LimitNOFILE)"
        );
    }
    // The other timeouts of the fleet have no flags.
    let fleet = SilenceTimeouts {
        gone: flags.replica_gone_after,
        ..SilenceTimeouts::default()
    };
    let controller = Controller::start(ControllerConfig {
        listen: flags.listen,
        admin: Some(flags.admin_addr),
        metrics: Some(flags.metrics_addr),
        data_dir: flags.data_dir,
        config_dir: flags.config_dir,
        principals: flags.principals,
        infra_dir: flags.infra_dir,
        svid_seconds: flags.svid_ttl,
        trust: TrustOptions {
            ca_dir: flags.ca_dir,
            external: flags.external_ca,
            key_file: flags.store_key_file,
            tls_roots: flags.tls_roots,
            rotation_timeouts: RotationTimeouts {
                settle: flags.ca_rotation_settle,
                grace: flags.ca_retire_grace,
                ..RotationTimeouts::default()
            },
        },
        jwks: JwksOptions {
            hosts: flags.jwks_hosts,
            refresh: flags.jwks_refresh,
        },
        limits: ControllerLimits {
            fleet,
            ..flags.limits.limits(files)
        },
    })
    .await?;
    tracing::info!(address = %controller.address(), version = env!("CARGO_PKG_VERSION"), "controller: serving");
    tokio::select! {
        _ = terminate.recv() => tracing::info!("controller: received SIGTERM, stopping"),
        _ = interrupt.recv() => tracing::info!("controller: received SIGINT, stopping"),
    }
    controller.stop().await;
    tracing::info!("controller: stopped");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use canal_controller_core::{
        COMPILED_BYTES_MAX, COMPILED_RESOURCES_MAX, CONFIGURATION_BYTES_MAX, CONNECTIONS_MAX,
        ISSUED_MAX, QUEUED_CHANGE_BYTES_MAX, QUEUED_CHANGES_MAX, ROUTE_TABLE_BYTES_MAX,
        UNAUTHENTICATED_MAX,
    };

    fn flags(more: &[&str]) -> Result<Flags, clap::Error> {
        let needed = [
            "canal-controller",
            "--data-dir",
            "d",
            "--principals",
            "p",
            "--infra-dir",
            "i",
        ];
        Flags::try_parse_from(needed.iter().chain(more))
    }

    #[test]
    fn limits_without_flags_are_the_libraries_defaults() {
        let limits = flags(&[]).unwrap().limits.limits(u64::MAX);
        assert_eq!(
            (limits.connections, limits.unauthenticated, limits.issued),
            (CONNECTIONS_MAX, UNAUTHENTICATED_MAX, ISSUED_MAX)
        );
        assert_eq!(
            (limits.queued_changes, limits.queued_change_bytes),
            (QUEUED_CHANGES_MAX, QUEUED_CHANGE_BYTES_MAX)
        );
        assert_eq!(
            (limits.configuration_bytes, limits.compiled_bytes),
            (CONFIGURATION_BYTES_MAX, COMPILED_BYTES_MAX)
        );
        assert_eq!(
            (limits.compiled_resources, limits.route_table_bytes),
            (COMPILED_RESOURCES_MAX, ROUTE_TABLE_BYTES_MAX)
        );
    }

    #[test]
    fn connections_leave_files_for_the_store_and_the_configuration() {
        let limits = flags(&[]).unwrap().limits.limits(1_024);
        assert_eq!(limits.connections + limits.unauthenticated, 768);
        assert!(limits.unauthenticated >= 100);
    }

    #[test]
    fn a_share_flag_names_a_limit_and_a_share() {
        let limits = flags(&[
            "--share",
            "certificates=20%",
            "--share",
            "configurationBytes=1048576",
        ])
        .unwrap()
        .limits
        .limits(u64::MAX);
        assert_eq!(
            limits.shares.get(ShareKind::Certificates),
            Share::Percent(20)
        );
        assert_eq!(
            limits.shares.get(ShareKind::ConfigurationBytes),
            Share::Amount(1 << 20)
        );
        for bad in ["certificates", "certificate=20%", "certificates=0"] {
            assert!(flags(&["--share", bad]).is_err(), "{bad}");
        }
    }
}
