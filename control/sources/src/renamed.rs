//! Names of fields and kinds that changed in a release. The old names are accepted, with a warning,
//! for one more release; `docs/operations/renamed.md` lists them. The types accept old names of
//! fields by serde's `alias`; an object of an old kind is stored under the new one.

use canal_model::policy::ObjectKind;
use canal_yaml::tree::{self, YamlNode};

/// A field that was renamed in a release. The old name is accepted for one more release.
pub(crate) struct RenamedField {
    kind: ObjectKind,
    /// Path in the object; its last element is the old name.
    pub(crate) path: &'static [&'static str],
    pub(crate) new_name: &'static str,
}

/// Renamed fields. The types accept the old names by serde's `alias`; this table produces the
/// warning.
const RENAMED_FIELDS: [RenamedField; 2] = [
    RenamedField {
        kind: ObjectKind::Tenant,
        path: &["spec", "outside"],
        new_name: "outboundTrafficPolicy",
    },
    RenamedField {
        kind: ObjectKind::Tenant,
        path: &["spec", "keys", "place"],
        new_name: "location",
    },
];

/// Returns the renamed fields of a kind.
pub(crate) fn renamed_fields(kind: ObjectKind) -> impl Iterator<Item = &'static RenamedField> {
    RENAMED_FIELDS
        .iter()
        .filter(move |renamed| renamed.kind == kind)
}

/// A kind that was renamed in a release. The old name is accepted for one more release.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RenamedKind {
    api_version: &'static str,
    old_name: &'static str,
    pub(crate) kind: ObjectKind,
}

/// Renamed kinds. `Gateway` is a kind of Gateway API's and of Istio's too, in groups of their own.
const RENAMED_KINDS: [RenamedKind; 1] = [RenamedKind {
    api_version: "canal.mesh/v1",
    old_name: "Gateway",
    kind: ObjectKind::GatewayReplica,
}];

/// Returns the renamed kind whose old name this is.
pub(crate) fn renamed_kind(api_version: &str, kind: &str) -> Option<&'static RenamedKind> {
    RENAMED_KINDS
        .iter()
        .find(|renamed| renamed.api_version == api_version && renamed.old_name == kind)
}

/// Returns the text of a document with its kind's new name, or `None` if its kind was not renamed.
/// A document in which the name cannot be replaced safely keeps the old one.
pub(crate) fn with_new_kind(text: &str, root: &YamlNode) -> Option<String> {
    let kind = root.field("kind")?;
    let renamed = renamed_kind(root.field("apiVersion")?.text()?, kind.text()?)?;
    let line = usize::try_from(kind.spot.line).ok()?.checked_sub(1)?;
    let column = usize::try_from(kind.spot.column).ok()?.checked_sub(1)?;
    let mut lines: Vec<&str> = text.split_inclusive('\n').collect();
    let (at, _) = lines.get(line)?.char_indices().nth(column)?;
    let (before, rest) = lines.get(line)?.split_at(at);
    // The name may be in quotes.
    let quote = rest.len() - rest.trim_start_matches(['"', '\'']).len();
    let (quote, rest) = rest.split_at(quote);
    let after = rest.strip_prefix(renamed.old_name)?;
    let replaced = [before, quote, renamed.kind.as_str(), after].concat();
    lines[line] = &replaced;
    let text = lines.concat();
    // An anchor or a tag could be in front of the name.
    let written = tree::parse(&text).ok()?;
    (written.field("kind")?.text() == Some(renamed.kind.as_str())).then_some(text)
}

#[cfg(test)]
mod tests {
    use canal_model::diagnostic::Severity;

    use crate::parse;

    #[test]
    fn an_object_of_an_old_kind_is_stored_as_one_of_the_new_kind() {
        let rest = "metadata: {name: g1}\nspec: {az: az1, addresses: [10.1.0.1]}\n";
        let flow = "metadata: {name: g1}, spec: {az: az1, addresses: [10.1.0.1]}}\n";
        for (text, stored) in [
            (
                format!("# é\napiVersion: canal.mesh/v1\nkind: Gateway # old\n{rest}"),
                format!("# é\napiVersion: canal.mesh/v1\nkind: GatewayReplica # old\n{rest}"),
            ),
            (
                format!("apiVersion: canal.mesh/v1\nkind:\n  'Gateway'\n{rest}"),
                format!("apiVersion: canal.mesh/v1\nkind:\n  'GatewayReplica'\n{rest}"),
            ),
            (
                format!("{{apiVersion: canal.mesh/v1, kind: \"Gateway\", {flow}"),
                format!("{{apiVersion: canal.mesh/v1, kind: \"GatewayReplica\", {flow}"),
            ),
        ] {
            let parsed = parse("a.yaml", &text);
            let [document] = parsed.documents.as_slice() else {
                panic!("{text}: {:?}", parsed.diagnostics);
            };
            assert_eq!(&*document.text, stored);
            let key = document.object.key().to_string();
            assert_eq!(key, "GatewayReplica default/g1");
            let [warning] = parsed.diagnostics.as_slice() else {
                panic!("{:?}", parsed.diagnostics);
            };
            assert_eq!(warning.severity, Severity::Warning);
            assert_eq!(warning.field, "kind");
            assert!(warning.fix.contains("GatewayReplica"), "{}", warning.fix);
            // The stored text has the new name, so that it needs no warning.
            let again = parse("a.yaml", &document.text);
            assert_eq!(again.diagnostics, []);
            assert_eq!(again.documents[0].object, document.object);
        }
    }

    #[test]
    fn the_items_of_a_list_may_have_the_old_kind() {
        let item = "{apiVersion: canal.mesh/v1, kind: Gateway, metadata: {name: g1}, spec: {az: az1, addresses: [10.1.0.1]}}";
        let parsed = parse(
            "a.yaml",
            &format!("apiVersion: v1\nkind: List\nitems:\n- {item}\n"),
        );
        assert!(parsed.documents[0].text.contains("\"GatewayReplica\""));
        assert_eq!(parsed.diagnostics.len(), 1, "{:?}", parsed.diagnostics);
    }
}
