//! Tests which destinations `bpf/capture.bpf.c` refuses at `connect()` by its tables, and from when
//! on, against real sockets.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::lab::{self, CaseProcess, Cgroup, LabNetns};
use canal_offload::capture::{CaptureOptions, CapturePrograms};
use canal_offload::connect_tables::{
    CONNECT_REFUSALS, Destination, TENANT_DESTINATIONS_MAX, TenantDestinations, Verdict,
};

const UNKNOWN_PORT: Verdict = Verdict::CANAL_CAPTURE_REFUSED_UNKNOWN_PORT;
const OUTSIDE_MESH: Verdict = Verdict::CANAL_CAPTURE_REFUSED_OUTSIDE_MESH;
const GATEWAY_ADDRESS: Verdict = Verdict::CANAL_CAPTURE_REFUSED_GATEWAY_ADDRESS;
const TENANT_CLOSED: Verdict = Verdict::CANAL_CAPTURE_REFUSED_TENANT_CLOSED;
const REFUSED: &str = "error ConnectionRefused Some(111)";
const TENANT: u32 = 1;

/// Entry of the child process.
#[test]
fn the_client() {
    if let Some(c) = lab::case() {
        lab::client::run(&c);
    }
}

/// Captured pod with the addresses 10.77.0.2 and fd77::2, and a proxy that answers each client with
/// its original destination.
struct DialingPod {
    ns: LabNetns,
    cg: Cgroup,
    capture: CapturePrograms,
    cookie: u64,
    _captured: canal_offload::capture::PodCapture,
}

impl DialingPod {
    fn new(options: &CaptureOptions) -> Self {
        let (ns, cg, capture) = (
            LabNetns::new(),
            Cgroup::new(),
            CapturePrograms::load(options).unwrap(),
        );
        let ips = ["10.77.0.2".parse().unwrap(), "fd77::2".parse().unwrap()];
        let cookie = capture.tables().put_pod(&ns.path(), &ips, TENANT).unwrap();
        let captured = capture.attach("a/b/pod", &cg.dir).unwrap();
        let (listener, origins) = (ns.listen("[::]:15001"), capture.origins().of_pod());
        std::thread::spawn(move || {
            answer(&listener, |peer, proxy| {
                origins.take(cookie, peer, proxy.ip())
            })
        });
        Self {
            ns,
            cg,
            capture,
            cookie,
            _captured: captured,
        }
    }

    fn dial(&self, to: &str) -> String {
        CaseProcess::start(&self.ns, Some(&self.cg), "dial", &[to]).line()
    }

    fn count(&self, verdict: &str) -> u64 {
        self.capture
            .counters()
            .unwrap()
            .into_iter()
            .find(|(n, _)| n == verdict)
            .unwrap_or_else(|| panic!("no counter {verdict}"))
            .1
    }

    fn update(&self, before: &TenantDestinations, after: &TenantDestinations) -> (usize, usize) {
        let writes = self
            .capture
            .tables()
            .update_tenant(TENANT, before, after)
            .unwrap();
        (writes.put, writes.removed)
    }
}

/// Answers clients until the process ends.
fn answer(l: &TcpListener, origin: impl Fn(SocketAddr, SocketAddr) -> Option<SocketAddr>) {
    while let Ok((mut s, peer)) = l.accept() {
        let said = s
            .local_addr()
            .ok()
            .and_then(|proxy| origin(peer, proxy))
            .map_or("none".into(), |o| o.to_string());
        let mut hi = [0; 2];
        let _ = s
            .read_exact(&mut hi)
            .and_then(|()| s.write_all(said.as_bytes()));
    }
}

fn destinations(outside: Option<Verdict>) -> TenantDestinations {
    let address =
        |ip: &str, refused, ports: &[u16]| (ip.parse().unwrap(), Destination::new(refused, ports));
    TenantDestinations {
        all: None,
        outside,
        addresses: BTreeMap::from([
            address("10.96.0.1", UNKNOWN_PORT, &[80, 443]),
            address("fd96::1", UNKNOWN_PORT, &[80]),
            address("10.9.0.1", GATEWAY_ADDRESS, &[53]),
            address("10.96.0.2", UNKNOWN_PORT, &[15008]),
            address("10.96.0.3", UNKNOWN_PORT, &(1..=20).collect::<Vec<_>>()),
        ]),
        ranges: BTreeMap::from([
            ("10.77.0.0/24".parse().unwrap(), None),
            ("fd77::/64".parse().unwrap(), None),
            ("10.9.0.0/16".parse().unwrap(), Some(GATEWAY_ADDRESS)),
        ]),
    }
}

/// Destinations of the pod, and the verdicts that refuse them.
const CONNECT_CASES: [(&str, &str, Option<&str>); 20] = [
    ("a service's port", "10.96.0.1:443", None),
    (
        "another port of it",
        "10.96.0.1:81",
        Some("refused_unknown_port"),
    ),
    (
        "from an IPv6 socket",
        "[::ffff:10.96.0.1]:81",
        Some("refused_unknown_port"),
    ),
    ("a mapped service's port", "[::ffff:10.96.0.1]:80", None),
    ("IPv6", "[fd96::1]:80", None),
    (
        "another port, IPv6",
        "[fd96::1]:443",
        Some("refused_unknown_port"),
    ),
    ("a service may use a reserved port", "10.96.0.2:15008", None),
    (
        "more ports than the table holds: the proxy decides",
        "10.96.0.3:999",
        None,
    ),
    (
        "no such service",
        "10.96.0.9:80",
        Some("refused_outside_mesh"),
    ),
    ("outside", "192.0.2.1:443", Some("refused_outside_mesh")),
    (
        "outside, IPv6",
        "[2001:db8::1]:443",
        Some("refused_outside_mesh"),
    ),
    ("a pod", "10.77.0.9:8080", None),
    ("a pod, IPv6", "[fd77::9]:8080", None),
    (
        "the proxy's port at a pod",
        "10.77.0.9:15008",
        Some("refused_reserved_port"),
    ),
    (
        "the same, IPv6",
        "[fd77::9]:15001",
        Some("refused_reserved_port"),
    ),
    ("the pod itself", "10.77.0.2:8080", None),
    (
        "the proxy's port at the pod itself",
        "10.77.0.2:15006",
        Some("refused_reserved_port"),
    ),
    ("a gateway", "10.9.7.7:80", Some("refused_gateway_address")),
    ("the tier's DNS", "10.9.0.1:53", None),
    (
        "another port of the tier",
        "10.9.0.1:80",
        Some("refused_gateway_address"),
    ),
];

#[test]
fn connect_refuses_listed_destinations_and_captures_the_rest() {
    let pod = DialingPod::new(&CaptureOptions::default());
    pod.update(
        &TenantDestinations::default(),
        &destinations(Some(OUTSIDE_MESH)),
    );
    for (case, to, refused) in CONNECT_CASES {
        let before = refused.map(|verdict| pod.count(verdict));
        let said = pod.dial(to);
        match refused {
            Some(verdict) => assert_eq!(
                (said.as_str(), pod.count(verdict)),
                (REFUSED, before.unwrap() + 1),
                "{case}: {to}"
            ),
            None => assert!(
                said.ends_with(&format!(
                    "reply={}",
                    to.replace("[::ffff:10.96.0.1]", "10.96.0.1")
                )),
                "{case}: {to}: {said}"
            ),
        }
    }
    let refusals = pod.capture.tables().refusals(pod.cookie).unwrap();
    // In the order of `CONNECT_REFUSALS`, as many as the cases above expect.
    assert_eq!(refusals.count, [3, 3, 3, 2, 0]);
    let at = |verdict| {
        refusals.last[CONNECT_REFUSALS.iter().position(|v| *v == verdict).unwrap()]
            .destination()
            .to_string()
    };
    assert_eq!(
        (at(UNKNOWN_PORT).as_str(), at(OUTSIDE_MESH).as_str()),
        ("[fd96::1]:443", "[2001:db8::1]:443")
    );
    assert_eq!(
        pod.capture.origins().waiting(),
        0,
        "what is refused is not published"
    );
}

#[test]
fn unknown_destinations_are_captured_and_changes_apply_at_once() {
    let pod = DialingPod::new(&CaptureOptions::default());
    let none = TenantDestinations::default();
    assert!(
        pod.dial("192.0.2.1:443").ends_with("reply=192.0.2.1:443"),
        "the tenant is not known yet"
    );
    let deny = destinations(Some(OUTSIDE_MESH));
    // Entries written and removed: five addresses and three ranges (`destinations`).
    assert_eq!(pod.update(&none, &deny), (8, 0));
    assert_eq!(pod.dial("10.96.0.9:80"), REFUSED);
    let mut more = deny.clone();
    more.addresses.insert(
        "10.96.0.9".parse().unwrap(),
        Destination::new(UNKNOWN_PORT, &[80]),
    );
    assert_eq!(
        pod.update(&deny, &more),
        (1, 0),
        "what differs is written and nothing else"
    );
    assert!(
        pod.dial("10.96.0.9:80").ends_with("reply=10.96.0.9:80"),
        "a new service is reached at once"
    );
    assert_eq!(pod.update(&more, &deny), (0, 1));
    assert_eq!(
        pod.dial("10.96.0.9:80"),
        REFUSED,
        "and refused as soon as it is removed"
    );
    let pass = destinations(None);
    // Only the tenant's own entry changes, and it is not counted.
    assert_eq!(pod.update(&deny, &pass), (0, 0));
    assert!(
        pod.dial("192.0.2.1:443").ends_with("reply=192.0.2.1:443"),
        "destinations outside the mesh are admitted"
    );
    assert_eq!(
        pod.dial("10.96.0.1:81"),
        REFUSED,
        "services' ports are what they were"
    );
    let closed = TenantDestinations {
        all: Some(TENANT_CLOSED),
        ..pass.clone()
    };
    pod.update(&pass, &closed);
    assert_eq!(
        (
            pod.dial("10.96.0.1:80").as_str(),
            pod.count("refused_tenant_closed")
        ),
        (REFUSED, 1)
    );
    assert!(
        pod.dial("10.77.0.2:80").ends_with("reply=10.77.0.2:80"),
        "a closed tenant's pod still reaches itself"
    );
    pod.capture.tables().remove_tenant(TENANT, &closed).unwrap();
    assert!(
        pod.dial("192.0.2.1:443").ends_with("reply=192.0.2.1:443"),
        "the proxy decides for a removed tenant"
    );
    pod.capture.tables().remove_pod(pod.cookie).unwrap();
    assert_eq!(
        pod.dial("10.77.0.2:15001"),
        "peer=10.77.0.2:15001 local=127.0.0.1 reply=10.77.0.2:15001",
        "no entry, nothing is known"
    );
}

#[test]
fn another_tenants_tables_do_not_matter() {
    let pod = DialingPod::new(&CaptureOptions::default());
    let other = destinations(Some(OUTSIDE_MESH));
    pod.capture
        .tables()
        .update_tenant(TENANT + 1, &TenantDestinations::default(), &other)
        .unwrap();
    assert!(pod.dial("10.96.0.1:81").ends_with("reply=10.96.0.1:81"));
}

#[test]
fn tenant_that_does_not_fit_is_left_to_the_proxy_whole() {
    let pod = DialingPod::new(&CaptureOptions {
        destinations_max: 2,
        ..CaptureOptions::default()
    });
    let none = TenantDestinations::default();
    let mut small = destinations(Some(OUTSIDE_MESH));
    small
        .addresses
        .retain(|ip, _| *ip == "10.96.0.1".parse::<std::net::IpAddr>().unwrap());
    pod.update(&none, &small);
    assert_eq!(pod.dial("10.96.0.1:81"), REFUSED);
    let large = destinations(Some(OUTSIDE_MESH));
    assert!(
        pod.capture
            .tables()
            .update_tenant(TENANT, &small, &large)
            .unwrap_err()
            .is_full()
    );
    assert!(
        pod.dial("10.96.0.1:81").ends_with("reply=10.96.0.1:81"),
        "nothing is refused by half a table"
    );
    pod.update(&none, &small);
    assert_eq!(
        pod.dial("10.96.0.1:81"),
        REFUSED,
        "its elements were removed, so there is room again"
    );
    let mut large = none;
    large.addresses = (0..=TENANT_DESTINATIONS_MAX as u32)
        .map(|n| (std::net::Ipv4Addr::from(n).into(), Destination::default()))
        .collect();
    assert!(small.fits() && !large.fits());
}

/// The two tables allow 10.77.0.9:80 and 10.96.0.1:80 by different elements; everything else
/// differs.
#[test]
fn a_switch_never_refuses_what_both_tables_allow() {
    let pod = DialingPod::new(&CaptureOptions::default());
    let one = destinations(Some(OUTSIDE_MESH));
    let address =
        |ip: &str, ports: &[u16]| (ip.parse().unwrap(), Destination::new(UNKNOWN_PORT, ports));
    let other = TenantDestinations {
        addresses: BTreeMap::from([address("10.77.0.9", &[80]), address("10.96.0.7", &[1])]),
        ranges: BTreeMap::from([
            ("10.96.0.0/16".parse().unwrap(), None),
            ("10.77.0.0/16".parse().unwrap(), Some(GATEWAY_ADDRESS)),
        ]),
        ..one.clone()
    };
    pod.update(&TenantDestinations::default(), &one);
    let ended = Arc::new(AtomicBool::new(false));
    let mut clients = ["10.77.0.9:80", "10.96.0.1:80"]
        .map(|to| CaseProcess::start(&pod.ns, Some(&pod.cg), "dial_again", &["3000", to]));
    let tables = pod.capture.tables();
    let flips = std::thread::scope(|s| {
        let flips = s.spawn(|| {
            let mut flips = 0;
            while !ended.load(Ordering::Relaxed) {
                tables.update_tenant(TENANT, &one, &other).unwrap();
                tables.update_tenant(TENANT, &other, &one).unwrap();
                flips += 2;
            }
            flips
        });
        let said = clients.each_mut().map(CaseProcess::line);
        ended.store(true, Ordering::Relaxed);
        assert_eq!(said, ["refused 0", "refused 0"]);
        flips.join().unwrap()
    });
    assert!(
        flips > 100,
        "{flips} changes while 6000 connections were made"
    );
}
