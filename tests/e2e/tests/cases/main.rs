//! Runs the same programs in a meshed and in an unmeshed tenant with the same addresses. Both ends
//! observe the same in 70 TCP cases and 166 HTTP/1 cases, except for the differences that
//! `differences.tsv` lists with the id of a row in docs/compatibility.md. A listed difference that
//! no longer occurs fails as well. The document, not this test, justifies the differences.
//!
//! `CANAL_BLESS=1` rewrites the list. A difference without an id gets `?`, which fails until it has
//! an id and a reason.

pub(crate) mod differences;
mod paths;

use canal_e2e::Mesh;

use differences::CaseObservation;

/// Minimum number of cases that must run on every path. As many as the programs have; a case that a
/// mistake skips would be missing here.
const TCP_CASES_MIN: usize = 39;
const HTTP_CASES_MIN: usize = 98;
/// Number of paths: pod and Service, IPv4 and IPv6, declared and undeclared, in the mesh; both
/// families outside it.
const PATHS: usize = 10;

#[test]
fn meshed_and_unmeshed_programs_observe_the_same() {
    let mesh = Mesh::up("cases.yaml", "e2e-cases");
    let servers = paths::start_servers(&mesh);
    differences::compare_runs("tests/e2e/tests/cases/differences.tsv", |_| {
        let observed = paths::observe_all(&mesh);
        for (kind, cases_min) in [("tcp:", TCP_CASES_MIN), ("http:", HTTP_CASES_MIN)] {
            let count = observed
                .iter()
                .filter(|o: &&CaseObservation| o.case.starts_with(kind))
                .count();
            assert!(
                count >= cases_min * PATHS && count % PATHS == 0,
                "{count} {kind} observations on {PATHS} paths:\n{}",
                mesh.logs()
            );
        }
        observed
    });
    servers.into_iter().for_each(paths::stop);
}
