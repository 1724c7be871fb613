//! Exchanges with an application that closes an idle connection, or responds before it has read the
//! request. The test compares what a client gets through the mesh, without a mesh and through other
//! proxies, in one run. `make soak PART=exchanges` runs the full numbers, `make test` counts
//! through the mesh alone.

use std::sync::OnceLock;

use canal_e2e::exchanges::{BATCH, ExchangeWorld, RaceClient, least_failed};
use canal_timing::{assert_losses, is_timed, timed};
use serde_json::json;

fn world() -> &'static ExchangeWorld {
    static WORLD: OnceLock<ExchangeWorld> = OnceLock::new();
    WORLD.get_or_init(|| ExchangeWorld::up("e2e-exchanges"))
}

/// Returns the number to run: the full one, or the one for `make test` and `make test-timing`.
fn part(full: u64, short: u64) -> u64 {
    if std::env::var_os("CANAL_SOAK").is_some() {
        full
    } else {
        short
    }
}

/// A POST that arrives after the close is never lost, and one that was read is never read again.
/// The first POST of a connection meets no close. Of later ones that arrive at the same moment, no
/// more fail than through the best other proxy.
#[test]
fn posts_that_meet_a_close_are_answered_once() {
    let tries = part(3_000, BATCH);
    let first = world().race(RaceClient::NewConnections, tries);
    println!("canal, on new connections: of {tries} POSTs {first:?}");
    assert_eq!(
        (first.failed, first.twice, first.lost),
        (0, 0, 0),
        "{first:?}\n{}",
        world().mesh.logs()
    );
    let later = world().race(RaceClient::KeptConnection, tries);
    let again = world().sent_again();
    println!("canal, on one connection: of {tries} POSTs {later:?}, {again} sent again");
    assert_eq!(
        (later.failed_after_close, later.twice, later.lost),
        (0, 0, 0),
        "{later:?}\n{}",
        world().mesh.logs()
    );
    timed!(
        later.closes > tries / 3 && again > 0,
        "a third of the POSTs meet a close, and some are sent again"
    );
    if is_timed() {
        // With such a small number, one in a hundred more may be chance.
        let bound = least_failed(&world().race_beside(RaceClient::KeptConnection, tries))
            .unwrap_or(tries)
            + tries / 100;
        assert_losses(
            "POSTs that fail at a close, against the best other proxy",
            later.failed,
            bound,
        );
    }
}

#[test]
fn answers_to_uploads_that_are_refused_unread_arrive() {
    let tries = part(1_000, 40);
    for client in ["curl", "python"] {
        let failures = world().uploads(client, tries);
        println!("{client}: of {tries} uploads refused unread: {failures:?}");
        assert_losses(
            &format!(
                "uploads refused unread that get no answer, against those without a mesh, {client}"
            ),
            failures.meshed,
            failures.unmeshed + (tries / 50).max(1),
        );
    }
}

#[test]
fn an_answer_before_the_end_of_an_upload_does_not_cut_it() {
    for _ in 0..part(20, 2) {
        let early = world().early_answer();
        assert_eq!(
            early,
            json!({"cut": 0, "status": "200", "stored": 400_000}),
            "{}",
            world().mesh.logs()
        );
    }
}
