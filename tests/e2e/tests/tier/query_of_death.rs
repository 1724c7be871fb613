//! A request that crashes each replica that it reaches, and the losses of the services beside it.
//! The test is `a_request_that_crashes_replicas_affects_one_service_only` of [`super`].

use super::*;

/// Sends the request that crashes each replica it reaches, until at least one has died. Returns the
/// replicas in the service's tables meanwhile: placement may change while replicas are away, so the
/// tables of all plans count.
pub(super) fn kill_by_request(
    victim: &WatchedService,
    before: &[(String, u32)],
) -> BTreeSet<String> {
    let mesh = mesh();
    let death = format!("http://web-{}.default.svc.cluster.local:80/death", victim.n);
    let limit = if is_timed() { "1" } else { "60" };
    let mut own = members(&victim.name);
    for _ in 0..12 {
        own.extend(members(&victim.name));
        mesh.run(
            victim.client,
            &[
                "curl",
                "-sS",
                "--max-time",
                limit,
                "-o",
                "/dev/null",
                &death,
            ],
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    until(deadline(SETTLED_WITHIN), "a replica has died", || {
        before
            .iter()
            .zip(restarts())
            .any(|(old, new)| new.1 > old.1)
    });
    own
}

/// Returns the replicas that have died since `before`, and the number of deaths.
pub(super) fn deaths_since(before: &[(String, u32)]) -> (BTreeSet<String>, u64) {
    let died: BTreeSet<String> = before
        .iter()
        .zip(restarts())
        .filter(|(old, new)| new.1 > old.1)
        .map(|(old, _)| old.0.clone())
        .collect();
    let deaths: u64 = before
        .iter()
        .zip(restarts())
        .map(|(old, new)| u64::from(new.1.saturating_sub(old.1)))
        .sum();
    (died, deaths)
}

/// The result of a query of death: the plans before and after it, the replicas that died, and how
/// often.
pub(super) struct QueryOfDeath<'a> {
    pub(super) victim: &'a str,
    pub(super) placed: Value,
    pub(super) after: Value,
    pub(super) died: BTreeSet<String>,
    pub(super) deaths: u64,
}

impl QueryOfDeath<'_> {
    /// Checks the losses of another service, whose tables named the replicas `table`. Returns
    /// whether it shares no replica that died.
    pub(super) fn check_losses(
        &self,
        name: &str,
        table: &BTreeSet<String>,
        report: &Value,
    ) -> bool {
        let Self {
            victim,
            placed,
            after,
            died,
            deaths,
        } = self;
        let is_beside = !died.is_disjoint(table) || !died.is_disjoint(&members(name));
        // A process that dies loses its requests in flight, including those of services that share
        // it; all others lose nothing. A service without another replica in this AZ has none here
        // while they are away.
        let is_twin = [placed, after]
            .into_iter()
            .any(|plan| is_twin(plan, name, died));
        let (losses_max, gap_max) = match (is_twin, is_beside) {
            // First, because a twin shares replicas too, and may lose more.
            (true, _) => (TWIN_LOSSES_MAX, TWIN_GAP_MAX),
            (_, true) => ((*deaths).min(BESIDE_LOSSES_MAX), GAP_MAX),
            (_, false) => (0, GAP_MAX),
        };
        let failed = number(report, "failed");
        println!(
            "query of death for {victim}: {name}: {failed} of {} failed (at most {losses_max}), {}",
            report["requests"],
            gap(report).as_millis()
        );
        // The gate judges no counts of losses, but a service apart from the dead replicas must lose
        // nothing.
        assert!(
            is_timed() || is_beside || failed == 0,
            "{name} shares no replica that died: {report}\n{placed}"
        );
        assert_losses(
            &format!("requests lost beside a query of death, {name}"),
            failed,
            losses_max,
        );
        assert_time(
            &format!("time without a response beside a query of death, {name}"),
            gap(report),
            gap_max,
        );
        timed!(
            // 25 requests a second, for at least the 12 s of QUERIED_FOR, are 300.
            number(report, "requests") > 290,
            "the load is sent at its rate beside a query of death, {name}"
        );
        !is_beside
    }
}

/// Starts a load on every service but the victim, and returns it with the replicas that the
/// service's tables name.
pub(super) fn loads_beside<'a>(
    victim: &WatchedService,
    all: &'a [WatchedService],
    tables: Vec<BTreeSet<String>>,
) -> Vec<(&'a String, BTreeSet<String>, std::process::Child)> {
    let others = all
        .iter()
        .zip(tables)
        .filter(|(service, _)| service.name != victim.name);
    others
        .map(|(s, table)| {
            (
                &s.name,
                table,
                start_load(s.client, s.n, &["-r", "25", "-c", "4"]),
            )
        })
        .collect()
}
