//! Writes one item of a `kind: List` as a document of its own, so that the item can be stored,
//! compared and read again without its list.

use std::fmt::Write;

use canal_model::policy::READ_ANNOTATIONS;
use canal_yaml::tree::{YamlNode, YamlValue};

/// Returns the item as one line of YAML, without annotations that no component reads.
pub(crate) fn item_text(item: &YamlNode) -> String {
    let mut out = String::new();
    write_node(item, &mut Vec::new(), &mut out);
    out
}

/// Writes a node in flow style. The depth of a tree is limited, so the recursion is.
fn write_node<'n>(node: &'n YamlNode, path: &mut Vec<&'n str>, out: &mut String) {
    match &node.value {
        YamlValue::Null => out.push_str("null"),
        YamlValue::Text(text) => write_text(text, out),
        YamlValue::List(items) => {
            out.push('[');
            for (at, item) in items.iter().enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                path.push("[]");
                write_node(item, path, out);
                path.pop();
            }
            out.push(']');
        }
        YamlValue::Map(entries) => {
            let is_annotations = *path == ["metadata", "annotations"];
            let kept = entries.iter().filter(|(key, _)| {
                !is_annotations || READ_ANNOTATIONS.contains(&key.name.as_str())
            });
            out.push('{');
            for (at, (key, value)) in kept.enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                write_text(&key.name, out);
                out.push_str(": ");
                path.push(&key.name);
                write_node(value, path, out);
                path.pop();
            }
            out.push('}');
        }
        // Numbers and truth values are written as their writer typed them: `1.10` is not `1.1`.
        YamlValue::Bool(_)
        | YamlValue::Unsigned(_)
        | YamlValue::Signed(_)
        | YamlValue::Float(_) => {
            out.push_str(node.scalar_text().unwrap_or("null"));
        }
    }
}

/// Writes a text in double quotes.
fn write_text(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            // YAML breaks lines at, or does not allow, these characters (YAML 1.2.2 §5.1).
            '\u{0}'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' => {
                // Writing to a String cannot fail.
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use canal_yaml::tree::parse;

    use super::*;

    fn values(node: &YamlNode) -> YamlValue {
        match &node.value {
            YamlValue::List(items) => {
                let plain = |item: &YamlNode| format!("{:?}", values(item));
                YamlValue::Text(items.iter().map(plain).collect::<Vec<_>>().join(","))
            }
            YamlValue::Map(entries) => {
                let plain = |(key, item): &(canal_yaml::tree::YamlKey, YamlNode)| {
                    format!("{}={:?}", key.name, values(item))
                };
                YamlValue::Text(entries.iter().map(plain).collect::<Vec<_>>().join(";"))
            }
            value => value.clone(),
        }
    }

    #[test]
    fn an_item_reads_back_as_it_was() {
        for text in [
            "{a: 1, b: '1', c: 1.10, d: true, e: 'true', f: null, g: '', h: ~, i: -3, j: 0x1F}",
            "a: |\n  two\n  lines: \"x\"\n\nb: [x, {y: z}, []]\nc: {}\n'<<': 1\n",
            "a: \"tab\\t quote\\\" back\\\\ nul\\0 nel\\x85 ls\\u2028 é 日\"\n'k: #': '- x'\n",
        ] {
            let item = parse(text).unwrap();
            let again = parse(&item_text(&item)).unwrap();
            assert_eq!(values(&again), values(&item), "{}", item_text(&item));
        }
    }

    #[test]
    fn annotations_that_nobody_reads_are_left_out() {
        let item = parse("metadata: {annotations: {a: b, canal.mesh/az: z1}, x: 1}").unwrap();
        let expected = r#"{"metadata": {"annotations": {"canal.mesh/az": "z1"}, "x": 1}}"#;
        assert_eq!(item_text(&item), expected);
    }
}
