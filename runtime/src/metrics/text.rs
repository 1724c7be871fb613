//! Writes the Prometheus text exposition format 0.0.4. It computes nothing.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use tokio::time::Instant;

use super::MetricShape;
use super::series::FamilyCore;

// Writing to a String cannot fail, so `write!`'s result is dropped throughout.

pub(super) fn head(out: &mut String, name: &str, help: &str, kind: &str) {
    let _ = write!(out, "# HELP {name} ");
    for c in help.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
    }
    let _ = writeln!(out, "\n# TYPE {name} {kind}");
}

pub(super) fn labels(
    out: &mut String,
    names: &[&str],
    values: &[impl AsRef<str>],
    le: Option<&str>,
) {
    if names.is_empty() && le.is_none() {
        return;
    }
    out.push('{');
    let pairs = names
        .iter()
        .copied()
        .zip(values.iter().map(AsRef::as_ref))
        .chain(le.map(|v| ("le", v)));
    for (i, (name, value)) in pairs.enumerate() {
        if i > 0 {
            out.push(',');
        }
        out.push_str(name);
        out.push_str("=\"");
        for c in value.chars() {
            match c {
                '\\' => out.push_str("\\\\"),
                '"' => out.push_str("\\\""),
                '\n' => out.push_str("\\n"),
                c => out.push(c),
            }
        }
        out.push('"');
    }
    out.push('}');
}

/// Writes the series of a family, or those of one owner, from index `from` on until `out` is longer
/// than `most`. Returns the index to continue from.
pub(super) fn family(
    out: &mut String,
    core: &FamilyCore,
    owner: Option<&str>,
    (from, now, most): (usize, Instant, usize),
) -> Option<usize> {
    let f = &core.family;
    if from == 0 {
        let kind = match core.shape {
            MetricShape::Counter | MetricShape::Seconds => "counter",
            MetricShape::Gauge => "gauge",
            MetricShape::Histogram { .. } => "histogram",
        };
        head(out, f.name, f.help, kind);
    }
    core.visit(from, now, |values, sum| {
        if owner.is_some_and(|owner| core.owner_place().is_none_or(|at| &*values[at] != owner)) {
            return true;
        }
        match core.shape {
            MetricShape::Histogram { bounds, scale } => {
                histogram(out, core, values, sum, bounds, scale)
            }
            MetricShape::Counter | MetricShape::Seconds | MetricShape::Gauge => {
                out.push_str(f.name);
                labels(out, f.labels, values, None);
                // Writing to a String cannot fail.
                let _ = match core.shape {
                    MetricShape::Gauge => writeln!(out, " {}", sum[0].cast_signed()),
                    MetricShape::Seconds => writeln!(out, " {}", sum[0] as f64 * 1e-9),
                    _ => writeln!(out, " {}", sum[0]),
                };
            }
        }
        out.len() < most
    })
}

fn histogram(
    out: &mut String,
    core: &FamilyCore,
    values: &[Box<str>],
    sum: &[u64],
    bounds: &[u64],
    scale: f64,
) {
    let f = &core.family;
    let mut count = 0u64;
    // Prometheus buckets are cumulative.
    for (i, n) in sum[..=bounds.len()].iter().enumerate() {
        count += n;
        let le = bounds
            .get(i)
            .map_or_else(|| "+Inf".to_string(), |b| (*b as f64 * scale).to_string());
        let _ = write!(out, "{}_bucket", f.name);
        labels(out, f.labels, values, Some(&le));
        let _ = writeln!(out, " {count}");
    }
    let _ = write!(out, "{}_sum", f.name);
    labels(out, f.labels, values, None);
    let _ = writeln!(out, " {}", sum[bounds.len() + 1] as f64 * scale);
    let _ = write!(out, "{}_count", f.name);
    labels(out, f.labels, values, None);
    let _ = writeln!(out, " {count}");
}

/// Writes counters of the label sets that did not fit into each family, and of the series that
/// ended.
pub(super) fn folded(out: &mut String, families: &[Arc<FamilyCore>]) {
    let mut write = |name: &str, help: &str, value: fn(&FamilyCore) -> u64| {
        head(out, name, help, "counter");
        for core in families {
            let n = value(core);
            if n > 0 {
                let _ = writeln!(out, "{name}{{family=\"{}\"}} {n}", core.family.name);
            }
        }
    };
    let folded = "Lookups of label sets counted under \"other\" because their owner's share, or their family, is full.";
    write("canal_metrics_overflow_label_sets_total", folded, |core| {
        core.folded.load(Relaxed)
    });
    write(
        "canal_metrics_expired_total",
        "Series that ended because their count did not change.",
        |core| core.expired.load(Relaxed),
    );
    let displaced = "Series in use that were replaced by another owner's; their counts continue under \"other\".";
    write("canal_metrics_displaced_total", displaced, |core| {
        core.displaced.load(Relaxed)
    });
}

pub(super) fn probe(out: &mut String, name: &str, help: &str, value: f64) {
    head(out, name, help, "gauge");
    let _ = writeln!(out, "{name} {value}");
}
