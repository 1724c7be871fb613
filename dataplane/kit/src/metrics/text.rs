//! Prometheus' text exposition format 0.0.4. It only writes.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use tokio::time::Instant;

use super::Shape;
use super::series::Core;

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

pub(super) fn labels(out: &mut String, names: &[&str], values: &[impl AsRef<str>], le: Option<&str>) {
    if names.is_empty() && le.is_none() {
        return;
    }
    out.push('{');
    let pairs = names.iter().copied().zip(values.iter().map(AsRef::as_ref)).chain(le.map(|v| ("le", v)));
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

/// Writes series of a family from the place `from` on until `out` is longer than `most`. Gives the place to go on from.
pub(super) fn family(out: &mut String, core: &Core, from: usize, now: Instant, most: usize) -> Option<usize> {
    let f = &core.family;
    if from == 0 {
        let kind = match core.shape {
            Shape::Counter => "counter",
            Shape::Gauge => "gauge",
            Shape::Histogram { .. } => "histogram",
        };
        head(out, f.name, f.help, kind);
    }
    core.visit(from, now, |values, sum| {
        match core.shape {
            Shape::Histogram { bounds, scale } => histogram(out, core, values, sum, bounds, scale),
            Shape::Counter | Shape::Gauge => {
                out.push_str(f.name);
                labels(out, f.labels, values, None);
                let _ = if core.shape == Shape::Gauge { writeln!(out, " {}", sum[0].cast_signed()) } else { writeln!(out, " {}", sum[0]) };
            }
        }
        out.len() < most
    })
}

fn histogram(out: &mut String, core: &Core, values: &[Box<str>], sum: &[u64], bounds: &[u64], scale: f64) {
    let f = &core.family;
    let mut count = 0u64;
    for (i, n) in sum[..=bounds.len()].iter().enumerate() {
        count += n;
        let le = bounds.get(i).map_or_else(|| "+Inf".to_string(), |b| (*b as f64 * scale).to_string());
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

/// What did not fit each family, and what ended to make room.
pub(super) fn folded(out: &mut String, families: &[Arc<Core>]) {
    let mut write = |name: &str, help: &str, value: fn(&Core) -> u64| {
        head(out, name, help, "counter");
        for core in families {
            let n = value(core);
            if n > 0 {
                let _ = writeln!(out, "{name}{{family=\"{}\"}} {n}", core.family.name);
            }
        }
    };
    let folded = "Look-ups of label sets counted under \"other\" because their owner's share, or their family, is full.";
    write("canal_metrics_folded_total", folded, |core| core.folded.load(Relaxed));
    write("canal_metrics_expired_total", "Series that ended because nothing counted in them.", |core| core.expired.load(Relaxed));
    let gave_way = "Series in use that gave way to another owner's, and are counted under \"other\" of their own.";
    write("canal_metrics_gave_way_total", gave_way, |core| core.gave_way.load(Relaxed));
}

pub(super) fn probe(out: &mut String, name: &str, help: &str, value: f64) {
    head(out, name, help, "gauge");
    let _ = writeln!(out, "{name} {value}");
}
