//! What a scrape says after what workers did.

use super::*;

const REQUESTS: Family = Family::new("requests_total", "Requests.", &["tenant", "code"]);

fn lines(r: &Registry, start: &str) -> Vec<String> {
    r.render().lines().filter(|l| l.starts_with(start)).map(str::to_string).collect()
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
        ["requests_total{tenant=\"alpha\",code=\"200\"} 3005", "requests_total{tenant=\"beta\",code=\"a\\\"b\\\\c\\nd\"} 6"]
    );
    assert_eq!(lines(&r, "# TYPE requests"), ["# TYPE requests_total counter"]);
}

#[test]
fn a_full_family_folds_into_other_and_counts_it() {
    let r = Registry::new();
    let family = r.counters(Family { series_max: 2, ..REQUESTS });
    let (one, two) = (r.shard(), r.shard());
    for i in 0..5 {
        one.counter(&family, &["t", &i.to_string()]).inc();
    }
    two.counter(&family, &["t", "1"]).inc();
    two.counter(&family, &["t", "9"]).inc();
    assert_eq!(
        lines(&r, "requests_total"),
        [
            "requests_total{tenant=\"t\",code=\"0\"} 1",
            "requests_total{tenant=\"t\",code=\"1\"} 2",
            "requests_total{tenant=\"other\",code=\"other\"} 4"
        ]
    );
    assert_eq!(lines(&r, "canal_metrics_folded_total"), ["canal_metrics_folded_total{family=\"requests_total\"} 4"]);
}

#[test]
fn gauges_fall_and_guards_give_back() {
    let r = Registry::new();
    let family = r.gauges(Family::new("open", "Open connections.", &[]));
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
    let family = r.histograms(Family::new("ms", "Time.", &["x"]), &[500, 1000, 5000], 0.001);
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
fn pages_grow_and_probes_are_asked() {
    let r = Registry::new();
    let family = r.counters(REQUESTS);
    let shard = r.shard();
    let handles: Vec<_> = (0..2000).map(|i| shard.counter(&family, &["t", &i.to_string()])).collect();
    handles.iter().for_each(Counter::inc);
    assert!(handles.iter().all(|h| h.value() == 1));
    assert_eq!(lines(&r, "requests_total").len(), 2000);
    r.probe("answer", "It.", || 42.5);
    assert_eq!(lines(&r, "answer"), ["answer 42.5"]);
}

#[test]
#[should_panic(expected = "registered twice")]
fn a_name_has_one_meaning() {
    let r = Registry::new();
    r.counters(REQUESTS);
    r.gauges(REQUESTS);
}
