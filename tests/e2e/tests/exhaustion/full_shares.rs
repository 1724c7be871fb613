//! Effects on other tenants of a tenant whose configuration is at every share, and the remains of a
//! deleted tenant. `configuration.rs` fills the shares.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use canal_e2e::controller::Caller;
use canal_e2e::until;
use canal_timing::{assert_time, deadline, is_timed, timed};
use canal_world::Signal;

use super::configuration::{CONFIGURATION_SHARES, PATTERNS, fill, patterns, remove, used};
use super::exhaustion_world::{
    ALPHA, BETA, BETA_OPERATOR, BETA_WEB, ExhaustionWorld, resident_mib, setup,
};

/// Another tenant's DENY is in force, and its revoked identity out, within this time. The same as
/// on a mesh that is not loaded (`AT_ONCE` in `identity.rs`).
const OTHERS_WITHIN: Duration = Duration::from_secs(1);
/// A gateway that was killed serves other tenants again within this time. The edges find the dead
/// gateway within a second; the rest is for the loaded machine.
const GATEWAY_WITHIN: Duration = Duration::from_secs(2);
/// Memory is given back within this time after a tenant was deleted. `docs/operations/limits.md`
/// names 2 s; the test's machine is loaded.
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(60);
/// Memory that a process may keep in addition to 1.5 times its earlier memory. Allocators retain
/// some. `docs/operations/limits.md` names what was kept: 17 to 53 MiB.
const KEPT_MIB: u64 = 32;
/// Time within which a change is in force on a machine that does nothing else. It only has to
/// exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of denials by beta, and number of kills of a gateway. One could be chance; more would
/// take longer than they show.
const TIMES: usize = 3;
/// The world restarts a process that ran this long after its shortest pause, which it doubles for
/// one that ended earlier.
const RAN_LONG: Duration = Duration::from_secs(10);

const BETA_INTRUDER: &str = "beta/default/intruder-0";
const PROCESSES: [&str; 4] = ["controller", "gw-1", "gw-2", "gw-3"];

/// A file in which a tenant of the world's configuration is, or was.
fn folder(setup: &ExhaustionWorld, name: &str) -> PathBuf {
    setup.mesh.world.dir().join(name)
}

fn beta_code(setup: &ExhaustionWorld, pod: &str, more: &[&str]) -> u16 {
    setup
        .mesh
        .code(pod, &format!("http://{BETA_WEB}/headers"), more)
}

/// Waits until a request of beta's has this status, and returns how long that took.
fn until_code(setup: &ExhaustionWorld, what: &str, code: u16) -> Duration {
    until(deadline(STEP_TIMEOUT), what, || {
        beta_code(setup, BETA, &["--max-time", "1"]) == code
    })
}

/// Beta denies a path. Returns the time from the order to the first refusal.
fn deny(setup: &ExhaustionWorld) -> Duration {
    let policy = "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: closed, namespace: default}\nspec: {action: DENY, \
                  selector: {matchLabels: {app: web}}, rules: [{to: [{operation: {paths: [/headers]}}]}]}\n";
    let operator = Caller::with_token(&setup.mesh.world, "beta-n1", BETA_OPERATOR);
    let ordered = Instant::now();
    let answer = operator
        .apply("beta", policy)
        .expect("beta's operator gets answers");
    assert!(answer.accepted, "{:?}", answer.diagnostics);
    until_code(setup, "beta's DENY is in force", 403);
    let took = ordered.elapsed();
    operator
        .delete("beta", "AuthorizationPolicy", "closed")
        .expect("beta's operator gets answers");
    until_code(setup, "beta's DENY was removed", 200);
    took
}

/// Beta revokes an identity. Returns the time from the order until a pod with that identity is
/// refused.
fn revoke(setup: &ExhaustionWorld) -> Duration {
    until(deadline(STEP_TIMEOUT), "the intruder is served", || {
        beta_code(setup, BETA_INTRUDER, &[]) == 200
    });
    let ordered = Instant::now();
    setup
        .provider()
        .revoke("beta", "spiffe://beta.example/ns/default/sa/intruder")
        .expect("the provider gets answers");
    until(deadline(STEP_TIMEOUT), "the intruder is refused", || {
        beta_code(setup, BETA_INTRUDER, &["--max-time", "1"]) != 200
    });
    ordered.elapsed()
}

/// Alpha changes its largest tables until the flag is false, so that the controller compiles and
/// gateways build all the time.
fn churn(setup: &ExhaustionWorld, goes_on: &AtomicBool) -> u64 {
    let mut changes = 0;
    for variant in ['b', 'c']
        .into_iter()
        .cycle()
        .take_while(|_| goes_on.load(Ordering::Relaxed))
    {
        let objects: String = (0..PATTERNS).map(|n| patterns(n, variant)).collect();
        let answer = setup
            .operator()
            .apply("alpha", &objects)
            .expect("alpha's operator gets answers");
        assert!(answer.accepted, "{:?}", answer.diagnostics);
        changes += 1;
    }
    changes
}

/// Runs `work` while alpha changes its largest tables.
fn beside_changes<T: Send>(setup: &ExhaustionWorld, work: impl FnOnce() -> T + Send) -> T {
    let goes_on = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let changes = scope.spawn(|| churn(setup, &goes_on));
        let work = scope.spawn(work);
        // The changes end with the work, also if it fails.
        let done = work.join();
        goes_on.store(false, Ordering::Relaxed);
        println!(
            "alpha changed its tables {} times",
            changes.join().expect("the changes end")
        );
        done.unwrap_or_else(|cause| std::panic::resume_unwind(cause))
    })
}

fn residents(setup: &ExhaustionWorld) -> Vec<u64> {
    let resident = |name: &&str| {
        let pid = setup
            .mesh
            .world
            .host(name)
            .ok()
            .and_then(|host| host.process.pid)
            .unwrap_or_else(|| panic!("{name} runs"));
        resident_mib(pid, "VmRSS:").unwrap_or_else(|| panic!("{name} has memory"))
    };
    PROCESSES.iter().map(resident).collect()
}

/// Deletes a tenant: all that was applied, then its files. Its folder stays, because the content of
/// a folder that vanishes stays in force.
fn delete(setup: &ExhaustionWorld, tenant: &str) {
    let (from, to) = (
        folder(setup, &format!("config/{tenant}")),
        folder(setup, &format!("{tenant}-was")),
    );
    setup
        .provider()
        .delete_all(tenant)
        .expect("the provider may delete all");
    std::fs::rename(&from, &to).unwrap_or_else(|e| panic!("{}: {e}", from.display()));
    std::fs::create_dir(&from).unwrap_or_else(|e| panic!("{}: {e}", from.display()));
}

fn until_nothing_is_used(setup: &ExhaustionWorld, tenant: &str) {
    for (kind, name) in CONFIGURATION_SHARES {
        until(
            deadline(STEP_TIMEOUT),
            &format!("{tenant} has nothing of {}", kind.key()),
            || used(setup, tenant, name) == 0,
        );
    }
}

/// A tenant at every share of its configuration does not delay the orders of another. When it is
/// deleted, its shares and the memory are free again.
#[test]
fn one_tenant_at_every_share_delays_no_other_and_is_deleted_completely() {
    let setup = setup();
    let before = residents(setup);
    fill(setup);
    let (denied, revoked) = beside_changes(setup, || {
        // The slowest denial counts, because a single one may meet a pause of alpha's compilations.
        let denied = (0..TIMES).map(|_| deny(setup)).max().unwrap_or_default();
        (denied, revoke(setup))
    });
    assert_time(
        "time until another tenant's DENY is in force",
        denied,
        OTHERS_WITHIN,
    );
    assert_time(
        "time until another tenant's revoked identity is out",
        revoked,
        OTHERS_WITHIN,
    );
    let (full, complaint) = (residents(setup), setup.memory_complaint());
    println!("{}", setup.memory());
    assert_eq!(complaint, None, "no process exceeds its memory");
    delete(setup, "alpha");
    until_nothing_is_used(setup, "alpha");
    let (deleted, max): (_, Vec<u64>) = (
        Instant::now(),
        // Allocators keep some freed memory, so the bound is above the memory before.
        before.iter().map(|mib| mib * 3 / 2 + KEPT_MIB).collect(),
    );
    let fits = |now: &[u64]| now.iter().zip(&max).all(|(now, max)| now <= max);
    let mut now = residents(setup);
    while !fits(&now) && deleted.elapsed() < GIVEN_BACK_WITHIN {
        // Allocators give pages back with a delay.
        std::thread::sleep(Duration::from_millis(500));
        now = residents(setup);
    }
    println!(
        "MiB of {PROCESSES:?}: before {before:?}, full {full:?}, {:?} after the deletion {now:?}, bound {max:?}",
        deleted.elapsed()
    );
    println!("{}", setup.memory());
    timed!(
        fits(&now),
        "memory is given back within a minute of the deletion of a tenant"
    );
    // The next tests need alpha as it was.
    std::fs::remove_dir(folder(setup, "config/alpha")).expect("alpha's empty folder");
    std::fs::rename(folder(setup, "alpha-was"), folder(setup, "config/alpha"))
        .expect("alpha's files");
    let url = format!("http://{}/headers", super::exhaustion_world::ALPHA_WEB);
    until(deadline(GIVEN_BACK_WITHIN), "alpha is served again", || {
        setup.mesh.code(ALPHA, &url, &[]) == 200
    });
}

/// Replicas at which beta has sessions, besides the one that is killed.
const OTHER_REPLICAS: [&str; 2] = ["gw-2", "gw-3"];

/// Starts the replicas that a test has stopped, also if the test fails: the next one needs them.
struct StoppedReplicas<'a>(&'a ExhaustionWorld);

impl<'a> StoppedReplicas<'a> {
    fn stop(setup: &'a ExhaustionWorld) -> Self {
        let stopped = Self(setup);
        for name in OTHER_REPLICAS {
            let end = setup.mesh.world.stop(name);
            end.unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        stopped
    }
}

impl Drop for StoppedReplicas<'_> {
    fn drop(&mut self) {
        let world = &self.0.mesh.world;
        for name in OTHER_REPLICAS {
            if let Err(error) = world.start(name) {
                eprintln!("{name} does not start again: {error}");
            }
        }
        if let Err(error) = world.wait_ready(deadline(STEP_TIMEOUT)) {
            eprintln!("the replicas are not ready again: {error}");
        }
    }
}

/// Kills gw-1, the only replica that runs, and returns the time until beta is served again.
fn restart(setup: &ExhaustionWorld, started: &Cell<Instant>) -> Duration {
    let world = &setup.mesh.world;
    if is_timed() {
        // The pause is the world's, and no part of the time that is judged.
        until(deadline(STEP_TIMEOUT), "gw-1 has run long enough", || {
            started.get().elapsed() > RAN_LONG
        });
    }
    until_code(setup, "beta is served", 200);
    let starts = world.host("gw-1").expect("gw-1").process.restarts;
    world.kill("gw-1", Signal::Kill).expect("gw-1 runs");
    // A connection that begins while no replica is up waits for TCP's retransmission of its SYN,
    // which comes after a second. The time that is judged is the gateway's, so attempts are short.
    let attempt = if is_timed() { "0.2" } else { "1" };
    let took = until(deadline(STEP_TIMEOUT), "beta is served again", || {
        beta_code(setup, BETA, &["--max-time", attempt]) == 200
    });
    started.set(Instant::now());
    assert!(
        world.host("gw-1").expect("gw-1").process.restarts > starts,
        "gw-1 was started again"
    );
    took
}

/// A gateway that is killed serves another tenant before it has built the tables of one that is at
/// every share.
#[test]
fn a_restarted_gateway_serves_others_before_one_tenants_full_shares() {
    let setup = setup();
    let started = Cell::new(Instant::now());
    // All of beta's sessions are at the replica that is killed.
    let stopped = StoppedReplicas::stop(setup);
    let quiet = restart(setup, &started);
    drop(stopped);
    setup
        .mesh
        .world
        .wait_ready(deadline(STEP_TIMEOUT))
        .expect("all are ready");
    fill(setup);
    let stopped = StoppedReplicas::stop(setup);
    let took: Vec<_> = (0..TIMES).map(|_| restart(setup, &started)).collect();
    println!("a gateway was restarted in {quiet:?} without alpha's objects, in {took:?} with them");
    drop(stopped);
    remove(setup);
    assert_time(
        "time until a restarted gateway serves another tenant",
        took.into_iter().max().unwrap_or_default(),
        GATEWAY_WITHIN,
    );
}

/// A tenant that uses some of every shared limit is deleted, and then uses nothing of any of them.
#[test]
fn a_deleted_tenant_has_nothing_of_the_shares_of_configuration() {
    let setup = setup();
    let staged = folder(setup, "gamma-staged");
    std::fs::create_dir_all(&staged).expect("a directory");
    let tenant = "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: gamma}\nspec: {vni: 103, trustDomain: gamma.example, podCidrs: \
                  [10.3.0.0/16], serviceCidrs: [10.103.0.0/16], gatewayCidrs: [10.104.0.0/20]}\n";
    std::fs::write(staged.join("_tenant.yaml"), tenant).expect("gamma's Tenant");
    // The controller must not read half of a tenant.
    std::fs::rename(&staged, folder(setup, "config/gamma")).expect("gamma's files");
    // A Service and a route with a pattern use some of each share.
    let objects = "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: default}\nspec: {selector: {app: web}, ports: [{name: http, port: \
                   80}]}\n---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: web, namespace: default}\nspec: \
                   {parentRefs: [{group: \"\", kind: Service, name: web}], rules: [{matches: [{path: {type: RegularExpression, value: '/[ab]{30}'}}], \
                   backendRefs: [{name: web, port: 80}]}]}\n";
    until(
        deadline(STEP_TIMEOUT),
        "gamma's objects are accepted",
        || {
            setup
                .provider()
                .apply("gamma", objects)
                .is_ok_and(|answer| answer.accepted)
        },
    );
    for (kind, name) in CONFIGURATION_SHARES {
        until(
            deadline(STEP_TIMEOUT),
            &format!("gamma has some of {}", kind.key()),
            || used(setup, "gamma", name) > 0,
        );
    }
    delete(setup, "gamma");
    until_nothing_is_used(setup, "gamma");
    let at_gateways = || {
        setup
            .mesh
            .counted_at("gateway", "canal_share_used", &["tenant=\"gamma\""])
    };
    until(
        deadline(STEP_TIMEOUT),
        "gamma has nothing at gateways",
        || at_gateways() == 0,
    );
}
