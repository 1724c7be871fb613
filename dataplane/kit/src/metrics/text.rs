//! Prometheus' text exposition format 0.0.4. It only writes.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Shape;
use super::series::Core;

// Writing to a String cannot fail, so `write!`'s result is dropped throughout.

fn head(out: &mut String, name: &str, help: &str, kind: &str) {
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

fn labels(out: &mut String, names: &[&str], values: &[Box<str>], le: Option<&str>) {
    if names.is_empty() && le.is_none() {
        return;
    }
    out.push('{');
    let pairs = names.iter().copied().zip(values.iter().map(|v| &**v)).chain(le.map(|v| ("le", v)));
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

pub(super) fn family(out: &mut String, core: &Core) {
    let f = &core.family;
    match core.shape {
        Shape::Counter => {
            head(out, f.name, f.help, "counter");
            core.sums(|values, sum| {
                out.push_str(f.name);
                labels(out, f.labels, values, None);
                let _ = writeln!(out, " {}", sum[0]);
            });
        }
        Shape::Seconds => {
            head(out, f.name, f.help, "counter");
            core.sums(|values, sum| {
                out.push_str(f.name);
                labels(out, f.labels, values, None);
                let _ = writeln!(out, " {}", sum[0] as f64 * 1e-9);
            });
        }
        Shape::Gauge => {
            head(out, f.name, f.help, "gauge");
            core.sums(|values, sum| {
                out.push_str(f.name);
                labels(out, f.labels, values, None);
                let _ = writeln!(out, " {}", sum[0].cast_signed());
            });
        }
        Shape::Histogram { bounds, scale } => {
            head(out, f.name, f.help, "histogram");
            core.sums(|values, sum| histogram(out, core, values, sum, bounds, scale));
        }
    }
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

/// How often each family had no room for a label set.
pub(super) fn folded(out: &mut String, families: &[Arc<Core>]) {
    let name = "canal_metrics_folded_total";
    head(out, name, "Look-ups of label sets counted under \"other\" because their family is full.", "counter");
    for core in families {
        let n = core.folded.load(Relaxed);
        if n > 0 {
            let _ = writeln!(out, "{name}{{family=\"{}\"}} {n}", core.family.name);
        }
    }
}

pub(super) fn probe(out: &mut String, name: &str, help: &str, value: f64) {
    head(out, name, help, "gauge");
    let _ = writeln!(out, "{name} {value}");
}
