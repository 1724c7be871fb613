//! The names that metrics had in earlier versions, for dashboards that still use them
//! (`--legacy-metric-names`). It adds names to the text of a scrape and knows no values. Old labels
//! and label values do not come back. Each daemon has the flag for one release.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// True if the operator asked for the old names. There is one command line in a process, and only
/// `main` sets it.
static ARE_SHOWN: AtomicBool = AtomicBool::new(false);

/// Adds the metrics' old names to every scrape of this process.
pub fn show_legacy_names() {
    ARE_SHOWN.store(true, Relaxed);
}

pub(super) fn are_shown() -> bool {
    ARE_SHOWN.load(Relaxed)
}

/// The present name of each renamed metric, its old name, and the number of old units in a present
/// one, sorted by the present name.
#[rustfmt::skip]
const RENAMED: [(&str, &str, f64); 29] = [
    ("canal_certificate_write_failures_total", "canal_certificates_unwritten_total", 1.0),
    ("canal_controller_ca_blocked", "canal_controller_ca_barred", 1.0),
    ("canal_controller_fleet_bucket_moves_blocked_total", "canal_controller_fleet_buckets_held_total", 1.0),
    ("canal_controller_fleet_owners_retained_total", "canal_controller_fleet_owners_kept_total", 1.0),
    ("canal_controller_stale_responses_total", "canal_controller_answers_stale_total", 1.0),
    ("canal_edge_map_entries_omitted", "canal_edge_left_out", 1.0),
    ("canal_edge_map_entries_pending", "canal_edge_map_behind", 1.0),
    ("canal_gateway_broken_route_matches", "canal_gateway_route_faults", 1.0),
    ("canal_gateway_local_exhaustion_total", "canal_gateway_shortages_total", 1.0),
    ("canal_gateway_reauthorized_total", "canal_gateway_rejudged_total", 1.0),
    ("canal_gateway_upstream_not_pooled_total", "canal_gateway_upstream_not_kept_total", 1.0),
    ("canal_key_file_errors_total", "canal_key_files_broken_total", 1.0),
    ("canal_key_file_keys", "canal_key_files_held", 1.0),
    ("canal_key_generated_keys", "canal_key_made_held", 1.0),
    ("canal_key_handshakes_in_flight", "canal_key_handshakes_under_way", 1.0),
    ("canal_key_operations_queued_total", "canal_key_batch_waited_total", 1.0),
    ("canal_key_requests_in_flight", "canal_key_under_way", 1.0),
    ("canal_key_unauthenticated_connections_total", "canal_key_strangers_total", 1.0),
    ("canal_keys_round_trip_seconds_total", "canal_keys_trip_microseconds_total", 1e6),
    ("canal_keys_round_trips_total", "canal_keys_trips_total", 1.0),
    ("canal_keys_unavailable_total", "canal_keys_none_total", 1.0),
    ("canal_metrics_overflow_label_sets_total", "canal_metrics_folded_total", 1.0),
    ("canal_node_plaintext_capture_failures_total", "canal_node_guard_failures_total", 1.0),
    ("canal_node_plaintext_captured_pods", "canal_node_guarded_pods", 1.0),
    ("canal_redirector_map_entries_pending", "canal_redirector_map_behind", 1.0),
    ("canal_redirector_session_scan_seconds_total", "canal_redirector_look_microseconds_total", 1e6),
    ("canal_redirector_session_scans_total", "canal_redirector_looks_total", 1.0),
    ("canal_southbound_state_file_rejected_total", "canal_southbound_snapshot_refused_total", 1.0),
    ("canal_southbound_state_file_writes_total", "canal_southbound_snapshot_writes_total", 1.0),
];

/// Returns the old name of a metric, and the number of old units in a present one.
pub(super) fn old_name(name: &str) -> Option<(&'static str, f64)> {
    let at = RENAMED.binary_search_by_key(&name, |row| row.0).ok()?;
    Some((RENAMED[at].1, RENAMED[at].2))
}

/// Returns the lines of renamed metrics in a text of the Prometheus format, under their old names.
pub(super) fn translate(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        // Writing to a String cannot fail.
        let _ = match line.split_once(' ') {
            Some(("#", comment)) => translate_comment(&mut out, comment),
            _ => translate_sample(&mut out, line),
        };
    }
    out
}

/// Translates `HELP name text` or `TYPE name type`.
fn translate_comment(out: &mut String, comment: &str) -> std::fmt::Result {
    let mut words = comment.splitn(3, ' ');
    let (Some(kind), Some(name), Some(rest)) = (words.next(), words.next(), words.next()) else {
        return Ok(());
    };
    match old_name(name) {
        Some((old, _)) => writeln!(out, "# {kind} {old} {rest}"),
        None => Ok(()),
    }
}

/// Translates `name{labels} value`.
fn translate_sample(out: &mut String, line: &str) -> std::fmt::Result {
    let name_end = line.find(['{', ' ']).unwrap_or(line.len());
    let (name, rest) = line.split_at(name_end);
    let Some((old, factor)) = old_name(name) else {
        return Ok(());
    };
    match rest.rsplit_once(' ') {
        // The old counters had whole microseconds.
        Some((labels, value)) if factor != 1.0 => {
            let value: f64 = value.parse().unwrap_or_default();
            writeln!(out, "{old}{labels} {:.0}", value * factor)
        }
        _ => writeln!(out, "{old}{rest}"),
    }
}

/// Returns a whole scrape, with the old names at its end if the operator asked for them.
pub fn with_legacy_names(mut text: String) -> String {
    if are_shown() {
        let translated = translate(&text);
        text.push_str(&translated);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renamed_metrics_are_written_under_their_old_names() {
        let text = "# HELP canal_key_file_keys Keys in files.\n# TYPE canal_key_file_keys gauge\n\
                    canal_key_file_keys{tenant=\"a b\"} 3\n\
                    canal_other_total{name=\"canal_key_file_keys 1\"} 4\n\
                    canal_keys_round_trip_seconds_total 0.000012\n";
        let expected = "# HELP canal_key_files_held Keys in files.\n# TYPE canal_key_files_held gauge\n\
                        canal_key_files_held{tenant=\"a b\"} 3\n\
                        canal_keys_trip_microseconds_total 12\n";
        assert_eq!(translate(text), expected);
    }

    #[test]
    fn the_table_is_sorted_and_is_the_documents() {
        assert!(RENAMED.is_sorted_by_key(|row| row.0));
        let document = include_str!("../../../docs/operations/renamed.md");
        for (now, old, _) in RENAMED {
            let row = format!("| `{old}` | `{now}`");
            assert!(document.contains(&row), "renamed.md has no row {row}");
        }
        let rows = document
            .lines()
            .filter(|line| line.starts_with("| `canal_") && !line.contains("label `"))
            .count();
        assert_eq!(rows, RENAMED.len());
    }
}
