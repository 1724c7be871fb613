//! Kill tests: a child process writes objects, ids, replicas and plans and acknowledges each round
//! on stdout.
//!
//! The parent kills it with SIGKILL at arbitrary instants, counted from its start or from one of
//! its acknowledgements. Every acknowledged write must be in the store afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use canal_model::ids::{AzName, Generation, ServiceId, ServiceKey, StoreId, TenantName, Vni};
use canal_model::plan::{Plan, PlannedService};
use canal_store::{ObjectEdit, Store, StoreLimits, StoredObjectKey};
use canal_timing::{assert_time, deadline};

const CHILD: &str = "CANAL_STORE_KILL_CHILD";
/// Ten rounds of each of the three ways in which the child is killed.
const ROUNDS: u64 = 30;
/// Maximum time of a child for one round.
/// A round takes tens of milliseconds; it only ends one that hangs.
const SOON: Duration = Duration::from_secs(10);

fn key(name: &str) -> StoredObjectKey {
    StoredObjectKey {
        tenant: TenantName::new("alpha").unwrap(),
        kind: "Service".into(),
        namespace: "shop".into(),
        name: name.into(),
    }
}

/// The child process: each round writes a pair of rows, removes an older pair, and prints an
/// acknowledgment. It never ends by itself.
#[test]
fn writer() {
    let Ok(dir) = std::env::var(CHILD) else {
        return;
    };
    let store = Store::open(Path::new(&dir), StoreLimits::default()).unwrap();
    let first = store
        .objects()
        .unwrap()
        .iter()
        .filter_map(|o| o.key.name.strip_prefix('n')?.parse::<u64>().ok())
        .max()
        .map_or(0, |n| n + 1);
    let mut out = std::io::stdout();
    let mut plan = store.plan().unwrap();
    for n in first.. {
        let generation = store.next_generation().unwrap();
        let mut edits: Vec<ObjectEdit> = ['n', 'm']
            .iter()
            .map(|c| ObjectEdit::Put {
                key: key(&format!("{c}{n}")),
                yaml: format!("{n} ").repeat(300),
            })
            .collect();
        if n >= 50 {
            edits.extend(['n', 'm'].iter().map(|c| ObjectEdit::Delete {
                key: key(&format!("{c}{}", n - 50)),
            }));
        }
        store.apply(&edits, generation, n).unwrap();
        plan = keep_fleet(&store, &plan, n);
        let service: ServiceKey = format!("alpha/shop/s{n}").parse().unwrap();
        let id = store
            .service_ids(std::slice::from_ref(&service), n)
            .unwrap()[&service];
        // The test harness writes to stdout too, so the lines are marked.
        writeln!(out, "ack {n} {} {}", generation.0, id.get()).unwrap();
        out.flush().unwrap();
    }
}

/// Registers a replica, forgets an older one, and writes a plan whose two services always have the
/// plan's number.
fn keep_fleet(store: &Store, plan: &Plan, n: u64) -> Plan {
    let az: AzName = "az1".parse().unwrap();
    store
        .register(
            &format!("r{n}").parse().unwrap(),
            &"b1".parse().unwrap(),
            (&az, 1),
            Ipv4Addr::new(250, 1, 0, 9),
        )
        .unwrap();
    if n >= 8 {
        store
            .forget_replica(&format!("r{}", n - 8).parse().unwrap())
            .unwrap();
    }
    let number = u32::try_from(n).unwrap() + 1;
    let service = |i: u32| {
        let key = format!("alpha/shop/p{i}").parse().unwrap();
        let planned = PlannedService {
            key,
            vni: Vni::new(1).unwrap(),
            number,
            network: None,
            placement: None,
            tables: BTreeMap::new(),
        };
        (ServiceId::new(i).unwrap(), planned)
    };
    let next = Plan {
        number,
        parent: plan.number,
        services: [service(1), service(2)].into(),
        notes: vec![],
    };
    store.put_plan(Some(plan), &next).unwrap();
    next
}

struct Ack {
    n: u64,
    generation: u64,
    id: u32,
}

/// Runs the child until it has acknowledged this many rounds, and kills it after a further time.
/// Returns what it acknowledged.
fn run_and_kill(dir: &Path, rounds: u64, after: Duration) -> Vec<Ack> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kill::writer", "--nocapture", "--test-threads=1"])
        .env(CHILD, dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let out = child.stdout.take().unwrap();
    let (acknowledge, acknowledged) = mpsc::channel();
    std::thread::spawn(move || {
        let acks = BufReader::new(out)
            .lines()
            .map_while(Result::ok)
            .filter_map(|l| {
                let mut words = l.split("ack ").nth(1)?.split(' ').map(str::to_string);
                Some(Ack {
                    n: words.next()?.parse().ok()?,
                    generation: words.next()?.parse().ok()?,
                    id: words.next()?.parse().ok()?,
                })
            });
        acks.for_each(|ack| acknowledge.send(ack).unwrap());
    });
    let mut acks: Vec<Ack> = (0..rounds)
        .map(|_| {
            acknowledged
                .recv_timeout(deadline(SOON))
                .expect("the child writes")
        })
        .collect();
    std::thread::sleep(after);
    child.kill().unwrap();
    child.wait().unwrap();
    acks.extend(acknowledged);
    acks
}

#[test]
fn a_kill_at_any_instant_loses_no_acknowledged_write() {
    let dir = tempfile::tempdir().unwrap();
    let mut last = Ack {
        n: 0,
        generation: 0,
        id: 0,
    };
    let (mut acknowledged, mut slowest) = (0, Duration::ZERO);
    for round in 0..ROUNDS {
        // The instants cover start-up, the first write and steady writing; the scheduler decides
        // the exact instant.
        let acks = match round % 3 {
            // Some milliseconds after the start the child opens the store or writes for the first
            // time.
            0 => run_and_kill(dir.path(), 0, Duration::from_millis(2 + round)),
            _ => run_and_kill(
                dir.path(),
                // Up to 20 acknowledgements, and less than 9 ms afterwards: the instant lies within
                // a later write.
                1 + round * 7 % 20,
                Duration::from_micros(round * 3_700 % 9_000),
            ),
        };
        for a in acks {
            assert!(
                a.generation > last.generation,
                "round {round}: generation {} after {}",
                a.generation,
                last.generation
            );
            assert!(a.id > last.id, "round {round}: id {} given twice", a.id);
            last = a;
            acknowledged += 1;
        }
        let begun = Instant::now();
        let store = Store::open(dir.path(), StoreLimits::default()).unwrap();
        slowest = slowest.max(begun.elapsed());
        check(&store, round, &last, acknowledged > 0);
    }
    assert!(
        acknowledged > ROUNDS,
        // Two of three rounds wait for acknowledgements, most for several.
        "the children wrote too little to prove anything: {acknowledged}"
    );
    assert_time(
        // The controller is to serve within a second of its start.
        "longest time to open a store after a kill",
        slowest,
        Duration::from_secs(1),
    );
}

#[test]
fn a_kill_while_the_store_is_made_leaves_none_or_a_whole_one() {
    for round in 0..60 {
        let dir = tempfile::tempdir().unwrap();
        // The instants reach from the start of the process to some writes later.
        run_and_kill(dir.path(), 0, Duration::from_micros(2000 + round * 400));
        let store = Store::open(dir.path(), StoreLimits::default())
            .unwrap_or_else(|e| panic!("round {round}: {e}"));
        assert_ne!(store.id(), StoreId::from_bits(0), "round {round}");
        assert!(
            !dir.path().join("controller.redb.new").exists(),
            "round {round}"
        );
    }
}

/// Checks that at most one write follows the last acknowledged one, that pairs are complete, and
/// that nothing older than the window is left.
fn check(store: &Store, round: u64, last: &Ack, any: bool) {
    let mut ns = Vec::new();
    let mut ms = Vec::new();
    for o in store.objects().unwrap() {
        let (c, n) = o.key.name.split_at(1);
        let n: u64 = n.parse().unwrap();
        // 300 repetitions make a row large enough that half of it would be noticed.
        assert_eq!(o.yaml, format!("{n} ").repeat(300));
        if c == "n" { ns.push(n) } else { ms.push(n) }
    }
    ns.sort_unstable();
    ms.sort_unstable();
    assert_eq!(ns, ms, "round {round}: a half-applied transaction");
    // The kill may come between the commit and its acknowledgement.
    assert!(
        store.generation() >= Generation(last.generation),
        "round {round}"
    );
    let (plan, fleet) = (store.plan().unwrap(), store.fleet().unwrap());
    assert!(
        plan.services.values().all(|s| s.number == plan.number),
        "round {round}: half a plan: {plan:?}"
    );
    let numbers: BTreeSet<u16> = fleet.replicas.iter().map(|r| r.number.get()).collect();
    assert!(
        // The child keeps 8 replicas; each round may leave one that was registered and not
        // acknowledged. One is to spare.
        numbers.len() == fleet.replicas.len() && fleet.replicas.len() as u64 <= 10 + round,
        "round {round}: {:?}",
        fleet.replicas
    );
    if any {
        assert!(
            u64::from(plan.number) > last.n,
            "round {round}: plan {} and {} was acknowledged",
            plan.number,
            last.n
        );
        assert!(
            fleet
                .replicas
                .iter()
                .any(|r| r.name.as_str() == format!("r{}", last.n)),
            "round {round}: a registration is lost"
        );
        let newest = *ns.last().unwrap();
        assert!(
            newest >= last.n,
            "round {round}: {} was acknowledged, the newest on disk is {newest}",
            last.n
        );
        assert_eq!(
            ns,
            // With each pair the child removes the one that it wrote 50 pairs before.
            (newest.saturating_sub(49)..=newest).collect::<Vec<_>>(),
            "round {round}"
        );
        let service: ServiceKey = format!("alpha/shop/s{}", last.n).parse().unwrap();
        assert_eq!(
            store
                .service_ids(std::slice::from_ref(&service), 0)
                .unwrap()[&service]
                .get(),
            last.id,
            "round {round}"
        );
    }
}
