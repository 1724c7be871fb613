//! Reads Prometheus text (exposition format 0.0.4) as far as the views need it: name, labels,
//! value. It ignores types, help and times.

use std::collections::BTreeMap;

/// One sample of a metric.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) value: f64,
}

/// Returns all samples of a text. Other lines are ignored.
pub(crate) fn parse(text: &str) -> Vec<Sample> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(sample)
        .collect()
}

fn sample(line: &str) -> Option<Sample> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (BTreeMap::new(), rest),
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

/// Returns the labels up to the closing brace, and the text after it.
fn labels(mut rest: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once("=\"")?;
        let (value, after) = quoted(after)?;
        labels.insert(name.to_owned(), value);
        rest = after;
    }
}

/// Returns the unescaped value up to its closing quote, and the text after it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match letters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

/// Returns the sum of all samples of `name` whose labels have these values.
pub(crate) fn sum(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let fits = |sample: &&Sample| {
        labels
            .iter()
            .all(|(label, value)| sample.labels.get(*label).is_some_and(|v| v == value))
    };
    samples
        .iter()
        .filter(|s| s.name == name)
        .filter(fits)
        .map(|s| s.value)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_with_their_labels() {
        let text = "# HELP a b\n# TYPE a counter\na{x=\"1\",y=\"a \\\"q\\\" \\\\\"} 3\na{x=\"2\"} 4 1700000000\nb 5.5\nbroken{\n";
        let samples = parse(text);
        assert_eq!(samples.len(), 3);
        assert_eq!(samples[0].labels["y"], "a \"q\" \\");
        for (name, labels, want) in [
            ("a", vec![], 7.0),
            ("a", vec![("x", "2")], 4.0),
            ("b", vec![], 5.5),
            ("a", vec![("z", "1")], 0.0),
        ] {
            assert_eq!(sum(&samples, name, &labels), want, "{name} {labels:?}");
        }
    }
}
