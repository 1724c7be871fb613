//! Tests of the exposition after updates by workers.

use super::*;

const REQUESTS: MetricFamily =
    MetricFamily::new("requests_total", "Requests.", &["tenant", "code"]);

fn lines(r: &Registry, start: &str) -> Vec<String> {
    r.render()
        .lines()
        .filter(|l| l.starts_with(start))
        .map(str::to_string)
        .collect()
}

#[test]
fn shards_and_shared_handles_add_up() {
    let r = Registry::new();
    let family = r.counters(REQUESTS);
    family.shared(&["alpha", "200"]).add(5);
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (r, family) = (r.clone(), family.clone());
            std::thread::spawn(move || {
                let shard = r.shard();
                for _ in 0..1000 {
                    shard.counter(&family, &["alpha", "200"]).inc();
                }
                shard.counter(&family, &["beta", "a\"b\\c\nd"]).add(2);
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert_eq!(
        lines(&r, "requests_total"),
        [
            "requests_total{tenant=\"alpha\",code=\"200\"} 3005",
            "requests_total{tenant=\"beta\",code=\"a\\\"b\\\\c\\nd\"} 6"
        ]
    );
    assert_eq!(
        lines(&r, "# TYPE requests"),
        ["# TYPE requests_total counter"]
    );
}

#[test]
fn a_full_family_without_tenants_folds_into_other_and_counts_it() {
    let r = Registry::new();
    let family = r.counters(MetricFamily {
        series_max: 2,
        labels: &["shop", "code"],
        ..REQUESTS
    });
    let (one, two) = (r.shard(), r.shard());
    for i in 0..5 {
        one.counter(&family, &["t", &i.to_string()]).inc();
    }
    two.counter(&family, &["t", "1"]).inc();
    two.counter(&family, &["t", "9"]).inc();
    assert_eq!(
        lines(&r, "requests_total"),
        [
            "requests_total{shop=\"t\",code=\"0\"} 1",
            "requests_total{shop=\"t\",code=\"1\"} 2",
            "requests_total{shop=\"other\",code=\"other\"} 4"
        ]
    );
    assert_eq!(
        lines(&r, "canal_metrics_overflow_label_sets_total"),
        ["canal_metrics_overflow_label_sets_total{family=\"requests_total\"} 4"]
    );
}

/// Sums the values of all lines that begin with `start`.
fn sum(r: &Registry, start: &str) -> u64 {
    lines(r, start)
        .iter()
        .map(|l| l.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
        .sum()
}

#[test]
fn a_tenant_with_10304_label_sets_leaves_another_tenants_series_alone() {
    let r = Registry::new();
    let family = r.counters(REQUESTS);
    let shard = r.shard();
    for i in 0..10_304 {
        shard.counter(&family, &["alpha", &i.to_string()]).inc();
    }
    for i in 0..500 {
        shard.counter(&family, &["beta", &i.to_string()]).add(2);
    }
    let beta = lines(&r, "requests_total{tenant=\"beta\"");
    assert_eq!(beta.len(), 500);
    assert!(
        beta.iter()
            .all(|l| l.ends_with(" 2") && !l.contains("other")),
        "{beta:?}"
    );
    // The tenant has its share, and the rest is counted under its own name, so no count is lost.
    assert_eq!(
        lines(&r, "requests_total{tenant=\"alpha\"").len(),
        SERIES_MAX / 10 + 1
    );
    assert_eq!(sum(&r, "requests_total{tenant=\"alpha\""), 10_304);
    assert_eq!(
        sum(&r, "requests_total{tenant=\"alpha\",code=\"other\"}"),
        9_304
    );
    assert!(lines(&r, "requests_total{tenant=\"other\"").is_empty());
    assert_eq!(
        lines(
            &r,
            "canal_share_used{limit=\"metric_series\",tenant=\"alpha\"}"
        ),
        ["canal_share_used{limit=\"metric_series\",tenant=\"alpha\"} 1000"]
    );
}

#[test]
fn a_share_that_the_provider_wrote_holds() {
    let r = Registry::new();
    let family = r.counters(MetricFamily {
        series_max: 100,
        ..REQUESTS
    });
    let mut shares = Shares::default();
    shares.set(
        canal_model::share::ShareKind::MetricSeries,
        "30".parse().unwrap(),
    );
    r.set_shares([(&"alpha".parse().unwrap(), &shares)]);
    let shard = r.shard();
    for i in 0..60 {
        shard.counter(&family, &["alpha", &i.to_string()]).inc();
        shard.counter(&family, &["beta", &i.to_string()]).inc();
    }
    assert_eq!(lines(&r, "requests_total{tenant=\"alpha\"").len(), 31);
    assert_eq!(lines(&r, "requests_total{tenant=\"beta\"").len(), 11);
}

#[test]
fn a_full_family_evicts_series_of_the_largest_tenant_without_loss() {
    let r = Registry::new();
    let family = r.counters(MetricFamily {
        // The limit is as many series as alpha takes below.
        series_max: 20,
        ..REQUESTS
    });
    let mut shares = Shares::default();
    // Alpha's share is everything, so it fills the family before beta comes.
    shares.set(
        canal_model::share::ShareKind::MetricSeries,
        "100%".parse().unwrap(),
    );
    r.set_shares([(&"alpha".parse().unwrap(), &shares)]);
    let shard = r.shard();
    let held: Vec<_> = (0..20)
        .map(|i| shard.counter(&family, &["alpha", &i.to_string()]))
        .collect();
    held.iter().for_each(Counter::inc);
    let before = shard.generation();
    shard.counter(&family, &["beta", "200"]).inc();
    shard.counter(&family, &["beta", "404"]).inc();
    assert_eq!(lines(&r, "requests_total{tenant=\"beta\"").len(), 2);
    // An old handle of a series that gave way counts in the tenant's `other` series.
    held.iter().for_each(Counter::inc);
    // Each of the 20 counters was incremented twice.
    assert_eq!(sum(&r, "requests_total{tenant=\"alpha\""), 40);
    // Two series gave way, each with a count of 2.
    assert_eq!(
        sum(&r, "requests_total{tenant=\"alpha\",code=\"other\"}"),
        4
    );
    assert_eq!(
        lines(&r, "canal_metrics_displaced_total"),
        ["canal_metrics_displaced_total{family=\"requests_total\"} 2"]
    );
    assert!(
        shard.generation() > before,
        "stored handles are looked up again"
    );
    // A new look-up returns the `other` series, or the label set's own series once there is
    // capacity.
    drop(held);
    shard.counter(&family, &["alpha", "0"]).inc();
    assert_eq!(sum(&r, "requests_total{tenant=\"alpha\""), 41);
}

#[test]
fn series_of_tenants_end_after_an_hour_without_use_unless_a_handle_remains() {
    let r = Registry::new();
    let family = r.counters(REQUESTS);
    let plain = r.counters(MetricFamily::new("plain_total", "Plain.", &["reason"]));
    let gauge = r.gauges(MetricFamily::new("state", "State.", &["tenant"]));
    let shard = r.shard();
    shard.counter(&family, &["alpha", "200"]).inc();
    shard.counter(&plain, &["x"]).inc();
    gauge.shared(&["alpha"]).set(1);
    let held = shard.counter(&family, &["alpha", "500"]);
    held.inc();
    let start = Instant::now();
    let at = |minutes: u64| {
        r.exposition_at(start + Duration::from_secs(minutes * 60))
            .collect::<String>()
    };
    assert!(at(1).contains("code=\"200\"") && at(59).contains("code=\"200\""));
    let late = at(62);
    assert!(
        !late.contains("code=\"200\"")
            && late.contains("requests_total{tenant=\"alpha\",code=\"500\"} 1"),
        "{late}"
    );
    assert!(
        late.contains("plain_total{reason=\"x\"} 1") && late.contains("state{tenant=\"alpha\"} 1"),
        "{late}"
    );
    assert!(
        late.contains("canal_metrics_expired_total{family=\"requests_total\"} 1"),
        "{late}"
    );
    // A series that is used again starts at zero, as after a restart.
    shard.counter(&family, &["alpha", "200"]).add(3);
    assert!(at(63).contains("requests_total{tenant=\"alpha\",code=\"200\"} 3"));
    drop(held);
    assert!(!at(130).contains("code=\"500\""));
}

#[test]
fn a_scrape_of_full_families_comes_in_pieces_of_bounded_size() {
    let r = Registry::new();
    let labels = &["tenant", "path"];
    let family = r.histograms(
        MetricFamily::new("ms", "Time.", labels),
        &[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000],
        1.0,
    );
    let shard = r.shard();
    for tenant in ["a", "b", "c"] {
        for i in 0..1100 {
            shard
                .histogram(&family, &[tenant, &format!("{i}{}", "x".repeat(500))])
                .observe(3);
        }
    }
    let (mut total, mut longest, mut pieces) = (0, 0, 0);
    for piece in r.exposition() {
        (total, longest, pieces) = (
            total + piece.len(),
            longest.max(piece.capacity()),
            pieces + 1,
        );
        assert!(piece.ends_with('\n'));
    }
    assert!(total > 16 << 20 && pieces > 100, "{total} in {pieces}");
    assert!(longest <= 256 << 10, "{longest}");
}

#[test]
fn gauges_fall_and_guards_give_back() {
    let r = Registry::new();
    let family = r.gauges(MetricFamily::new("open", "Open connections.", &[]));
    let (one, two) = (r.shard(), r.shard());
    let held = one.gauge(&family, &[]).hold();
    two.gauge(&family, &[]).add(-3);
    assert_eq!(lines(&r, "open "), ["open -2"]);
    drop(held);
    assert_eq!(lines(&r, "open "), ["open -3"]);
    family.shared(&[]).set(10);
    assert_eq!(lines(&r, "open "), ["open 7"]);
}

#[test]
fn histograms_are_cumulative_scaled_and_bounds_are_inclusive() {
    let r = Registry::new();
    let family = r.histograms(
        MetricFamily::new("ms", "Time.", &["x"]),
        &[500, 1000, 5000],
        0.001,
    );
    let shard = r.shard();
    for v in [1, 500, 501, 1000, 5000, 5001] {
        shard.histogram(&family, &["y"]).observe(v);
    }
    assert_eq!(
        lines(&r, "ms_"),
        [
            "ms_bucket{x=\"y\",le=\"0.5\"} 2",
            "ms_bucket{x=\"y\",le=\"1\"} 4",
            "ms_bucket{x=\"y\",le=\"5\"} 5",
            "ms_bucket{x=\"y\",le=\"+Inf\"} 6",
            "ms_sum{x=\"y\"} 12.003",
            "ms_count{x=\"y\"} 6"
        ]
    );
}

#[test]
fn pages_grow_and_probes_are_read() {
    let r = Registry::new();
    let family = r.counters(MetricFamily {
        labels: &["shop", "code"],
        ..REQUESTS
    });
    let shard = r.shard();
    let handles: Vec<_> = (0..2000)
        .map(|i| shard.counter(&family, &["t", &i.to_string()]))
        .collect();
    handles.iter().for_each(Counter::inc);
    assert!(handles.iter().all(|h| h.value() == 1));
    assert_eq!(lines(&r, "requests_total").len(), 2000);
    r.probe("answer", "It.", || 42.5);
    assert_eq!(lines(&r, "answer"), ["answer 42.5"]);
}

#[test]
fn old_names_follow_the_whole_scrape_in_groups() {
    let r = Registry::new();
    let family = MetricFamily::new(
        "canal_key_requests_in_flight",
        "Requests in progress.",
        &["tenant"],
    );
    let gauges = r.gauges(family);
    r.counters(REQUESTS);
    // The series need several pieces.
    for i in 0..3_000 {
        gauges.shared(&[&format!("tenant-{i}")]).set(i);
    }
    let plain = r.render();
    let both: String = r.exposition().with_legacy_names().collect();
    let legacy = both.strip_prefix(&plain).unwrap();
    let mut samples = legacy.lines();
    assert_eq!(
        samples.next().unwrap(),
        "# HELP canal_key_under_way Requests in progress."
    );
    assert_eq!(samples.next().unwrap(), "# TYPE canal_key_under_way gauge");
    assert_eq!(
        samples
            .filter(|line| line.starts_with("canal_key_under_way{"))
            .count(),
        3_000
    );
    assert!(!plain.contains("canal_key_under_way"));
}

#[test]
#[should_panic(expected = "registered twice")]
fn a_name_has_one_meaning() {
    let r = Registry::new();
    r.counters(REQUESTS);
    r.gauges(REQUESTS);
}
