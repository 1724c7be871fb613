//! Identities over their lifetime: roots and intermediates replaced, members revoked, tenants
//! federated, chains that no mesh may accept, and the Workload API. Alpha has a root of the
//! controller's. Beta's is the test's own, in files, so that the test can issue what a careless or
//! hostile CA would.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use canal_e2e::credential::{Leaf, PemCredential, TestAuthority};
use canal_e2e::hbone::{TunnelAttempt, TunnelRequest, tunnel};
use canal_e2e::{Mesh, deadline_ms, load_while, until};
use canal_timing::{assert_losses, assert_time, deadline, is_timed, timed};
use canal_world::Topology;
use serde_json::Value;

const CLIENT: &str = "alpha/default/client-0";
const INTRUDER: &str = "alpha/default/intruder-0";
const BETA_CLIENT: &str = "beta/default/client-0";
/// Maximum time of a step on a quiet machine: a change is in force, or a process serves. It only
/// has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(15);
/// A root is replaced within this time.
/// With the 3 s before the order it fits into the load of the timing tier, which lasts 45 s.
const REPLACED_WITHIN: Duration = Duration::from_secs(38);
/// All certificates are renewed within this time: half of their life, and the checks for it.
const RENEWED_WITHIN: Duration = Duration::from_secs(100);
/// A request, or a message of a session, is answered within this time. It only has to exceed what a
/// quiet machine needs: in the gate, `deadline` waits a minute or more.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// A revoked identity has no access after this time. It is the bound in `docs/timing.md`, not a
/// measured value.
const AT_ONCE: Duration = Duration::from_secs(1);
const PAGE: &str = "http://10.101.0.10/headers";
const ECHO: &str = "10.101.0.50:7000";

/// Beta's CA, and the directory in which the controller finds it.
struct BetaAuthorityFiles {
    dir: tempfile::TempDir,
    root: TestAuthority,
    intermediate: TestAuthority,
}

impl BetaAuthorityFiles {
    fn domain(&self) -> PathBuf {
        self.dir.path().join("beta.example")
    }

    fn write(&self, intermediate: &TestAuthority, crl: Option<&str>) {
        let domain = self.domain();
        std::fs::create_dir_all(&domain).expect("a directory");
        let write = |name: &str, text: &str| {
            std::fs::write(domain.join(name), text).unwrap_or_else(|e| panic!("{name}: {e}"))
        };
        write("root-cert.pem", &self.root.pem());
        write("key.pem", &intermediate.key_pem());
        write("cert-chain.pem", &intermediate.pem());
        if let Some(crl) = crl {
            write("crl.pem", crl);
        }
    }
}

fn files() -> &'static BetaAuthorityFiles {
    static FILES: OnceLock<BetaAuthorityFiles> = OnceLock::new();
    FILES.get_or_init(|| {
        let root = TestAuthority::root("beta's own root");
        let intermediate = root.intermediate("beta's first intermediate");
        let files = BetaAuthorityFiles {
            dir: tempfile::tempdir().expect("a directory"),
            root,
            intermediate,
        };
        files.write(&files.intermediate, None);
        files
    })
}

/// Certificates live for one minute, the minimum, and a root is replaced without long pauses.
fn shortened(topology: &mut Topology) {
    let controller = topology
        .controller
        .as_mut()
        .and_then(|c| c.process.as_mut())
        .expect("the world has a controller");
    let args = [
        "--svid-ttl",
        "60s",
        "--ca-rotation-settle",
        "1s",
        "--ca-retire-grace",
        "3s",
        "--ca-dir",
    ];
    controller.args.extend(args.map(str::to_owned));
    controller
        .args
        .push(files().dir.path().display().to_string());
}

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let mesh = Mesh::up_with("trust.yaml", "e2e-identity", shortened);
        for client in [CLIENT, BETA_CLIENT] {
            until(deadline(STEP_TIMEOUT), "both tenants are served", || {
                mesh.code(client, PAGE, &[]) == 200
            });
        }
        mesh
    })
}

fn domain(tenant: &str) -> Value {
    let status = mesh()
        .canal(&["ca", "status", "--tenant", tenant, "-o", "json"])
        .json();
    let domains = status["domains"].as_array().cloned().unwrap_or_default();
    domains
        .into_iter()
        .find(|domain| domain["tenant"] == tenant)
        .unwrap_or_else(|| panic!("{tenant} has no authority: {status}"))
}

fn roots(tenant: &str) -> Vec<String> {
    let domain = domain(tenant);
    domain["roots"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|root| Some(root["fingerprint"].as_str()?.to_owned()))
        .collect()
}

/// Every certificate of a tenant is replaced, then its root, and no request is affected.
#[test]
fn a_root_is_replaced_under_load() {
    let before = roots("alpha");
    let (timeout, web) = (
        deadline_ms(ANSWERED_WITHIN),
        "http://10.101.0.10/blob?size=100",
    );
    // In the gate clients follow one another; in the timing tier one lasts until the root is new.
    let seconds = if is_timed() { "45" } else { "10" };
    let load = |more: &[&'static str]| {
        [
            &[
                "canal-samples",
                "load",
                web,
                "-d",
                seconds,
                "--timeout-ms",
                &timeout,
            ][..],
            more,
        ]
        .concat()
    };
    // Three messages a second on each of 50 sessions soon show a session that breaks.
    let sessions = [
        "canal-samples",
        "sessions",
        ECHO,
        "-n",
        "50",
        "--interval-ms",
        "300",
        "-d",
        seconds,
        "--patience-ms",
        &timeout,
    ];
    let (persistent, new): (&[&str], &[&str]) = match is_timed() {
        true => (
            &["-r", "100", "-c", "8"],
            &["-r", "20", "-c", "4", "--no-keepalive"],
        ),
        // The gate checks no rate, so a smaller load suffices. Nobody derived the numbers.
        false => (
            &["-r", "50", "-c", "4"],
            &["-r", "20", "-c", "2", "--no-keepalive"],
        ),
    };
    let clients = [
        (CLIENT, load(persistent)),
        ("alpha/default/client-far-0", load(new)),
        (CLIENT, sessions.to_vec()),
    ];
    let (took, reports) = load_while(mesh(), &clients, || {
        if is_timed() {
            // Only the timing tier measures at a steady rate, which clients reach by then.
            std::thread::sleep(Duration::from_secs(3));
        }
        mesh()
            .canal(&["ca", "rotate", "--tenant", "alpha"])
            .expect_success();
        until(
            deadline(STEP_TIMEOUT),
            "the replacement is under way",
            || {
                // A rotation that has not begun looks like one that is over.
                domain("alpha")["phase"] != "steady"
            },
        );
        until(deadline(RENEWED_WITHIN), "the old root is retired", || {
            domain("alpha")["phase"] == "steady"
        })
    });
    println!("a root was replaced in {took:?}");
    assert_time("time until a root is replaced", took, REPLACED_WITHIN);
    for (what, reports) in ["requests lost", "new connections lost", "sessions lost"]
        .into_iter()
        .zip(&reports)
    {
        reports.assert_none_lost(&format!("{what} while a root is replaced"));
    }
    let after = roots("alpha");
    assert!(
        after.len() == 1 && before.len() == 1 && after != before,
        "{before:?}, {after:?}"
    );
}

/// The intermediate in the files is replaced and issues the next certificates. A broken one changes
/// nothing, and is reported.
#[test]
fn a_changed_intermediate_in_files_is_used() {
    let certs = mesh().world.dir().join("data/beta-n1/certs");
    let issuers = || {
        // A file that was replaced since the directory was read is left out.
        let stored = std::fs::read_dir(&certs)
            .into_iter()
            .flatten()
            .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
        stored
            .filter_map(|text| {
                Some(
                    serde_json::from_str::<Value>(&text).ok()?["chain"]
                        .as_str()?
                        .to_owned(),
                )
            })
            .collect::<Vec<_>>()
    };
    let shown_by = |intermediate: &TestAuthority| {
        let own = intermediate.pem().replace(['\r', '\n'], "");
        // Both sides are PEM, with different line ends.
        let chains = issuers();
        !chains.is_empty()
            && chains
                .iter()
                .all(|chain| chain.replace(['\r', '\n'], "").contains(&own))
    };
    assert!(
        // The check must find the first intermediate, or its later absence would mean nothing.
        shown_by(&files().intermediate),
        "chains hold the intermediate"
    );
    std::fs::write(files().domain().join("cert-chain.pem"), "no certificate").expect("written");
    until(deadline(STEP_TIMEOUT), "the fault is reported", || {
        domain("beta")["error"]
            .as_str()
            .is_some_and(|fault| !fault.is_empty())
    });
    assert_eq!(
        mesh().code(BETA_CLIENT, PAGE, &[]),
        200,
        "the previous configuration stays in force"
    );
    let second = files().root.intermediate("beta's second intermediate");
    files().write(&second, None);
    until(deadline(STEP_TIMEOUT), "the error was cleared", || {
        domain("beta")["error"].as_str().unwrap_or("").is_empty()
    });
    // Half a lifetime later all certificates have been renewed.
    until(
        deadline(RENEWED_WITHIN),
        "new certificates are the second's",
        || shown_by(&second),
    );
    assert_eq!(mesh().code(BETA_CLIENT, PAGE, &[]), 200);
    // Other tests of this mesh issue certificates from the first intermediate.
    files().write(&files().intermediate, None);
}

/// Waits until the intruder, who was revoked, opens nothing new. Returns how long that took.
fn until_shut_out() -> Duration {
    until(deadline(STEP_TIMEOUT), "nothing new opens", || {
        mesh().code(INTRUDER, PAGE, &["--max-time", "1"]) != 200
    })
}

/// Revokes the intruder's identity, or restores it.
fn order(what: &str) {
    let intruder = "spiffe://alpha.example/ns/default/sa/intruder";
    mesh()
        .canal(&["ca", what, "--tenant", "alpha", "--identity", intruder])
        .expect_success();
}

fn revoked_connections() -> u64 {
    ["gateway", "node"]
        .map(|kind| mesh().counted_at(kind, "canal_hbone_closed_total", &["reason=\"revoked\""]))
        .iter()
        .sum()
}

/// Restores the intruder, and waits until it is served again.
fn restore() {
    assert_ne!(
        mesh().code(INTRUDER, PAGE, &[]),
        200,
        "nothing new opens, however often it tries"
    );
    let refused = mesh().counted(
        "controller",
        "canal_controller_certificates_refused_total",
        &["reason=\"blocked\""],
    );
    order("restore");
    until(
        deadline(RENEWED_WITHIN),
        "the restored identity is admitted again",
        || mesh().code(INTRUDER, PAGE, &[]) == 200,
    );
    println!("while it was out the controller refused it {refused} certificates");
}

/// A revoked identity loses all access and all open connections; other identities keep theirs.
/// After the order is reverted it has access again.
#[test]
fn the_revoked_are_out() {
    /// Prints a line once the session is answered, and ends with the session.
    const SESSION: &str = "exec 3<>/dev/tcp/10.101.0.50/7000 && echo open >&3 && cat <&3";
    let timeout = deadline_ms(ANSWERED_WITHIN);
    until(
        deadline(STEP_TIMEOUT),
        "the intruder is admitted before its revocation",
        || mesh().code(INTRUDER, PAGE, &[]) == 200,
    );
    let before = revoked_connections();
    // Others must not notice: the load is short and repeats until the revoked sessions have ended.
    // A message each 20 ms soon shows a session that breaks.
    let others = [
        "canal-samples",
        "sessions",
        ECHO,
        "-n",
        "20",
        "--interval-ms",
        "20",
        "-d",
        "5",
        "--patience-ms",
        &timeout,
    ];
    let ((), reports) = load_while(mesh(), &[(CLIENT, others.to_vec())], || {
        // Several sessions, since one alone could end for another reason.
        let mut theirs: Vec<_> = (0..5)
            .map(|_| mesh().spawn(INTRUDER, &["bash", "-c", SESSION]))
            .collect();
        for session in &mut theirs {
            // A session is open once its first bytes are echoed; before, it could be refused at its
            // beginning.
            let (mut line, out) = (
                String::new(),
                session.stdout.take().expect("it was started with pipes"),
            );
            BufReader::new(out).read_line(&mut line).expect("a line");
            assert_eq!(line, "open\n", "the intruder has a session");
        }
        assert!(
            theirs
                .iter_mut()
                .all(|session| session.try_wait().expect("it runs").is_none()),
            "the intruder's sessions are open"
        );
        order("revoke");
        for session in &mut theirs {
            until(deadline(AT_ONCE), "the intruder's sessions end", || {
                session.try_wait().expect("it runs").is_some()
            });
        }
        until_shut_out();
    });
    reports[0].assert_none_lost("sessions of others lost by a revocation");
    assert!(
        revoked_connections() > before,
        "no connection ended because it was revoked"
    );
    restore();
}

/// The same with bounds: within a second of the order.
#[test]
fn the_revoked_are_out_at_once() {
    /// Time from the first session to the order.
    /// All sessions are open by then, so that the order meets open ones.
    const BEFORE: Duration = Duration::from_secs(3);
    let sessions = |pod: &str, count: &str, lasts: Duration| {
        let lasts = lasts.as_secs_f64().to_string();
        // This test runs in the timing tier only, so the sessions last for fixed times.
        mesh().spawn(
            pod,
            &[
                "canal-samples",
                "sessions",
                ECHO,
                "-n",
                count,
                "--interval-ms",
                "20",
                "-d",
                &lasts,
            ],
        )
    };
    until(
        deadline(STEP_TIMEOUT),
        "the intruder is admitted before its revocation",
        || mesh().code(INTRUDER, PAGE, &[]) == 200,
    );
    let began = Instant::now();
    // These sessions end with that second, because a revoked client has none then. One more
    // continues, and reports when it broke.
    let (theirs, one) = (
        sessions(INTRUDER, "20", BEFORE + AT_ONCE),
        sessions(INTRUDER, "1", BEFORE + 5 * AT_ONCE),
    );
    // The others must outlast the order by far.
    let others = sessions(CLIENT, "20", Duration::from_secs(12));
    std::thread::sleep(BEFORE.saturating_sub(began.elapsed()));
    let ordered = began.elapsed();
    order("revoke");
    let taken = began.elapsed() - ordered;
    let again = until_shut_out();
    let theirs = mesh().end("sessions of the revoked", theirs).json();
    let one = mesh().end("a session of the revoked", one).json();
    let others = mesh().end("sessions of others", others).json();
    let broken = one["breaks"][0]["at_s"]
        // A session's report gives times from its own begin, so the order's time is subtracted.
        .as_f64()
        .map(|at| Duration::from_secs_f64(at).saturating_sub(ordered));
    println!(
        "revoked: the order took {taken:?}; its sessions broke {broken:?} after its beginning; nothing new {again:?} after its end"
    );
    println!("revoked: {theirs} {one}");
    timed!(
        theirs["held"] == 0,
        "no session of a revoked peer lives a second after the order"
    );
    timed!(
        theirs["broken"].as_u64() >= Some(20),
        "all sessions of a revoked peer end within a second"
    );
    assert_time(
        // A session that never broke has no time and exceeds the bound.
        "time until a revoked peer's connection ends",
        broken.unwrap_or(Duration::MAX),
        AT_ONCE,
    );
    assert_time(
        "time until a revoked peer opens nothing new",
        taken + again,
        AT_ONCE,
    );
    assert_losses(
        "sessions of others lost by a revocation",
        // A report without the number exceeds the bound.
        others["broken"].as_u64().unwrap_or(u64::MAX),
        0,
    );
    restore();
}

/// A certificate that another program signed with the tenant's own CA is not in the controller's
/// log. If its identity is revoked, it is rejected too.
#[test]
fn a_revoked_identity_is_out_with_a_certificate_of_no_record() {
    let guest = "spiffe://beta.example/ns/default/sa/guest";
    // The test signs with beta's own intermediate, so the controller has no record of the
    // certificate.
    let credential = files().intermediate.issue(&Leaf::of(guest));
    let other = files()
        .intermediate
        .issue(&Leaf::of("spiffe://beta.example/ns/default/sa/client"));
    let pod = mesh().address("beta/default/web-0");
    let authority = format!("{pod}:8080");
    let listeners = [format!("{pod}:15008"), GATEWAY.to_owned()];
    let open = |listener: &String, credential: &PemCredential| {
        let to = listener.parse().expect("an address");
        tunnel(
            &mesh().world,
            &TunnelRequest::new(BETA_CLIENT, to, Some(credential), &authority),
        )
    };
    let reached = |credential: &PemCredential| {
        let mut all = listeners.iter();
        all.all(|listener| open(listener, credential).reached())
    };
    until(
        deadline(STEP_TIMEOUT),
        "the guest is admitted before its revocation",
        || reached(&credential),
    );
    let order = |what: &str| {
        mesh()
            .canal(&["ca", what, "--tenant", "beta", "--identity", guest])
            .expect_success()
    };
    order("revoke");
    // Data planes must know the identity, because no serial can be looked up for this certificate.
    for listener in &listeners {
        let what = format!("{listener} refuses the revoked identity");
        until(deadline(AT_ONCE), &what, || {
            matches!(open(listener, &credential), TunnelAttempt::Refused(_))
        });
    }
    assert!(reached(&other), "others of the same CA are members");
    order("restore");
    until(
        deadline(STEP_TIMEOUT),
        "the restored identity is admitted again",
        || reached(&credential),
    );
}

/// The gateway's address for pods in az1, the same for every tenant.
const GATEWAY: &str = "10.102.2.1:15008";

/// Opens a tunnel through alpha's gateway to alpha's web pod, from inside alpha's network.
fn to_alpha(credential: &PemCredential) -> TunnelAttempt {
    let pod = format!("{}:8080", mesh().address("alpha/default/web-0"));
    tunnel(
        &mesh().world,
        &TunnelRequest::new(
            CLIENT,
            GATEWAY.parse().expect("an address"),
            Some(credential),
            &pod,
        ),
    )
}

/// Members of another tenant are admitted only if both tenants federate, and then only where a
/// policy names them.
#[test]
fn federation_needs_both_and_a_policy() {
    let member = files()
        .intermediate
        .issue(&Leaf::of("spiffe://beta.example/ns/default/sa/client"));
    let federation = |tenant: &str| {
        format!(
            "---\napiVersion: canal.mesh/v1\nkind: Federation\nmetadata: {{name: {tenant}, namespace: default}}\n\
             spec: {{tenant: {tenant}, trustDomain: {tenant}.example}}\n"
        )
    };
    let closed = |what: &str| {
        let opened = to_alpha(&member);
        assert!(
            !matches!(opened, TunnelAttempt::Open(_)),
            "{what}: {opened:?}"
        );
        opened
    };
    // A foreign trust domain is refused in the handshake as long as no federation exists.
    assert!(matches!(
        closed("without a federation"),
        TunnelAttempt::Refused(_)
    ));
    mesh().apply("beta", &federation("alpha"));
    // Gives the change time to reach the data planes, because its effect must be none.
    std::thread::sleep(Duration::from_secs(1));
    assert!(matches!(
        closed("beta alone declares it"),
        TunnelAttempt::Refused(_)
    ));
    mesh().apply("alpha", &federation("beta"));
    // The tunnel opens, and the request in it is refused.
    until(
        deadline(STEP_TIMEOUT),
        "both sides declare it: requests arrive, but no policy allows them",
        || matches!(to_alpha(&member), TunnelAttempt::Open(answer) if answer.contains("RBAC: access denied")),
    );
    let named = "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: guests, namespace: default}\n\
                 spec:\n  selector: {matchLabels: {app: web}}\n  action: ALLOW\n  rules:\n  \
                 - from: [{source: {principals: [beta.example/ns/default/sa/client, \"alpha.example/*\"]}}]\n";
    mesh().apply("alpha", named);
    until(deadline(STEP_TIMEOUT), "a policy names it", || {
        to_alpha(&member).reached()
    });
    let other = files()
        .intermediate
        .issue(&Leaf::of("spiffe://beta.example/ns/default/sa/web"));
    assert!(
        !to_alpha(&other).reached(),
        "another of the same tenant is not named"
    );
    mesh()
        .canal(&["delete", "--tenant", "beta", "federation", "alpha"])
        .expect_success();
    until(
        deadline(STEP_TIMEOUT),
        "one side removes its Federation",
        || matches!(to_alpha(&member), TunnelAttempt::Refused(_)),
    );
    mesh()
        .canal(&["delete", "--tenant", "alpha", "federation", "beta"])
        .expect_success();
    mesh()
        .canal(&[
            "delete",
            "--tenant",
            "alpha",
            "authorizationpolicy",
            "guests",
        ])
        .expect_success();
}

/// Returns credentials that a node and a gateway refuse, with the reasons. `ours` is the
/// intermediate that signs.
fn bad_chains(
    ours: &TestAuthority,
    good: &Leaf,
    revoked: &Leaf,
) -> Vec<(&'static str, PemCredential)> {
    let foreign = TestAuthority::root("another root");
    let (one, two) = (
        "spiffe://beta.example/ns/default/sa/client",
        "spiffe://beta.example/ns/default/sa/web",
    );
    // The chain is longer than CHAIN_CERTIFICATES_MAX (8).
    let long = (0..10).fold(files().root.intermediate("deep 0"), |above, n| {
        above.intermediate(&format!("deep {}", n + 1))
    });
    vec![
        // Times are an hour away from now, so that a difference of clocks does not matter.
        (
            "expired",
            ours.issue(&Leaf {
                not_before: -7200,
                not_after: -3600,
                ..good.clone()
            }),
        ),
        (
            "not_yet_valid",
            ours.issue(&Leaf {
                not_before: 3600,
                not_after: 7200,
                ..good.clone()
            }),
        ),
        (
            "wrong_usage",
            ours.issue(&Leaf {
                for_tls: false,
                ..good.clone()
            }),
        ),
        (
            "wrong_trust_domain",
            ours.issue(&Leaf::of("spiffe://gamma.example/ns/default/sa/client")),
        ),
        (
            "wrong_trust_domain",
            ours.issue(&Leaf::of("spiffe://alpha.example/ns/default/sa/client")),
        ),
        ("unknown_issuer", foreign.issue(good)),
        // A leaf must name exactly one identity (SPIFFE X.509-SVID).
        (
            "ambiguous",
            ours.issue(&Leaf {
                identities: vec![one.into(), two.into()],
                ..good.clone()
            }),
        ),
        (
            "ambiguous",
            ours.issue(&Leaf {
                identities: Vec::new(),
                ..good.clone()
            }),
        ),
        (
            // A leaf that is a CA could sign for other identities.
            "bad_chain",
            ours.issue(&Leaf {
                authority: true,
                ..good.clone()
            }),
        ),
        (
            "chain_too_large",
            ours.issue(&Leaf {
                // The certificate is larger than CHAIN_BYTES_MAX (32 KiB).
                padding: 60_000,
                ..good.clone()
            }),
        ),
        ("chain_too_long", long.issue(good)),
        ("revoked", ours.issue(revoked)),
    ]
}

/// Chains that a node and a gateway refuse, by name; the same leaf without the defect is accepted.
#[test]
fn bad_chains_are_refused_by_name() {
    let good = Leaf::of("spiffe://beta.example/ns/default/sa/client");
    let ours = &files().intermediate;
    let revoked = Leaf {
        // Any serial number that no other certificate of the test has.
        serial: 77,
        ..good.clone()
    };
    // The mesh must be up before the CA's files change.
    mesh();
    // Beta's CA is in files, and its CRL is one of them; 1 is the number of the CRL.
    files().write(ours, Some(&ours.revoke(&[77], 1)));
    let cases = bad_chains(ours, &good, &revoked);
    let pod = mesh().address("beta/default/web-0");
    let authority = format!("{pod}:8080");
    let listeners = [
        ("node", format!("{pod}:15008")),
        ("gateway", GATEWAY.to_owned()),
    ];
    let open = |listener: &str, credential: Option<&PemCredential>| {
        tunnel(
            &mesh().world,
            &TunnelRequest::new(
                BETA_CLIENT,
                listener.parse().expect("an address"),
                credential,
                &authority,
            ),
        )
    };
    for (kind, listener) in &listeners {
        let taken = open(listener, Some(&ours.issue(&good)));
        assert!(
            taken.reached(),
            "{kind}: the same without a fault is taken: {taken:?}"
        );
        // The CRL reaches a listener some time after the file is written.
        let known = || {
            matches!(
                open(listener, Some(&ours.issue(&revoked))),
                TunnelAttempt::Refused(_)
            )
        };
        until(
            deadline(STEP_TIMEOUT),
            &format!("{kind}: the list of revoked is known"),
            known,
        );
        let count = |reason: &str| {
            mesh().counted_at(
                kind,
                "canal_tls_refused_total",
                &["side=\"server\"", &format!("reason=\"{reason}\"")],
            )
        };
        for (reason, credential) in &cases {
            let before = count(reason);
            let opened = open(listener, Some(credential));
            assert!(
                matches!(opened, TunnelAttempt::Refused(_)),
                "{kind}, {reason}: {opened:?}"
            );
            // A refused client may learn of it a moment before it is counted.
            until(
                deadline(STEP_TIMEOUT),
                &format!("{kind}: {reason} is counted, {opened:?}"),
                || count(reason) > before,
            );
        }
        let before = count("no_certificate");
        assert!(
            matches!(open(listener, None), TunnelAttempt::Refused(_)),
            "{kind}: none at all"
        );
        until(
            deadline(STEP_TIMEOUT),
            &format!("{kind}: no_certificate is counted"),
            || count("no_certificate") > before,
        );
    }
}

/// An application that requests its SVID gets it, and a new one before the old one expires; one
/// that may not request it gets none.
#[test]
fn the_workload_api_sends_svids_and_renewals() {
    let out = tempfile::tempdir().expect("a directory");
    let dir = out.path().display().to_string();
    let seconds = deadline(RENEWED_WITHIN).as_secs().to_string();
    let report = mesh()
        .run(
            CLIENT,
            &[
                "canal-samples",
                "workload-client",
                // The second answer is the renewal.
                "-n",
                "2",
                "-d",
                &seconds,
                "--out",
                &dir,
            ],
        )
        .json();
    assert_eq!(report["ok"], true, "{report}");
    let svid = |n: usize| &report["answers"][n]["svids"][0];
    assert_eq!(
        svid(0)["spiffe_id"],
        "spiffe://alpha.example/ns/default/sa/client"
    );
    assert_ne!(
        svid(0)["serial"],
        svid(1)["serial"],
        "the SVID was renewed: {report}"
    );
    let read = |name: &str| {
        std::fs::read_to_string(out.path().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    };
    let own = PemCredential {
        chain: read("svid.pem"),
        key: read("key.pem"),
    };
    assert!(to_alpha(&own).reached(), "the mesh accepts it");
    // SPIFFE requires the header, so that a request which an application can be tricked into gets
    // no SVID.
    let bare = mesh()
        .run(
            CLIENT,
            &["canal-samples", "workload-client", "--without-header"],
        )
        .json();
    assert_eq!(
        (&bare["ok"], &bare["code"]),
        (&false.into(), &"InvalidArgument".into()),
        "{bare}"
    );
    // The pod has not requested the Workload API, so the client ends without an SVID. Nobody
    // measured a shorter wait than 3 s.
    let none = mesh().run(INTRUDER, &["canal-samples", "workload-client", "-d", "3"]);
    assert_ne!(none.code, Some(0), "{none:?}");
}
