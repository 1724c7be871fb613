//! Removes entries that Canal does not read from Secrets and ConfigMaps, so that what is stored of
//! them contains no secrets of others, and nothing that has no use.

use canal_model::policy::config_map::CA_BUNDLE;
use canal_model::policy::secret::{TLS_CERTIFICATE, TLS_KEY, TLS_SECRET};
use canal_yaml::tree::{YamlNode, YamlValue};

use crate::limits::CA_BUNDLE_BYTES_MAX;

/// Removes all entries but the CA certificates of a Secret, and the certificate and the key of one for
/// TLS.
pub(crate) fn remove_from_secret(root: &mut YamlNode) -> RemovedEntries {
    let is_tls = root.field("type").and_then(YamlNode::text) == Some(TLS_SECRET);
    let mut bundle_bytes = None;
    let is_changed = retain_entries(root, &["data", "stringData"], |name, value| {
        let is_serving = is_tls && (name == TLS_CERTIFICATE || name == TLS_KEY);
        is_serving || is_kept_bundle(name, value, &mut bundle_bytes)
    });
    RemovedEntries {
        is_changed,
        bundle_bytes,
    }
}

/// Returns whether an entry has CA certificates that are kept. Sets their length if they are too long.
fn is_kept_bundle(name: &str, value: &YamlNode, bundle_bytes: &mut Option<usize>) -> bool {
    let bytes = value.text().map_or(0, str::len);
    let is_too_long = name == CA_BUNDLE && bytes > CA_BUNDLE_BYTES_MAX;
    if is_too_long {
        *bundle_bytes = Some(bytes);
    }
    name == CA_BUNDLE && !is_too_long
}

/// The result of removing entries of a Secret or a ConfigMap.
pub(crate) struct RemovedEntries {
    pub(crate) is_changed: bool,
    /// Length of the CA certificates, if they exceed the limit and so were removed too.
    pub(crate) bundle_bytes: Option<usize>,
}

/// Removes all entries but the CA certificates of a ConfigMap.
pub(crate) fn remove_from_config_map(root: &mut YamlNode) -> RemovedEntries {
    let mut bundle_bytes = None;
    let of_data = retain_entries(root, &["data"], |name, value| {
        is_kept_bundle(name, value, &mut bundle_bytes)
    });
    let of_binary = retain_entries(root, &["binaryData"], |_, _| false);
    RemovedEntries {
        is_changed: of_data || of_binary,
        bundle_bytes,
    }
}

/// Removes the entries of these fields for which `is_read` does not hold. Returns whether it removed
/// any.
fn retain_entries(
    root: &mut YamlNode,
    names: &[&str],
    mut is_read: impl FnMut(&str, &YamlNode) -> bool,
) -> bool {
    let YamlValue::Map(fields) = &mut root.value else {
        return false;
    };
    let mut is_changed = false;
    for (key, value) in fields {
        let YamlValue::Map(entries) = &mut value.value else {
            continue;
        };
        if names.contains(&key.name.as_str()) {
            let before = entries.len();
            entries.retain(|(entry, value)| is_read(&entry.name, value));
            is_changed |= entries.len() < before;
        }
    }
    is_changed
}

#[cfg(test)]
mod tests {
    use canal_model::policy::Object;

    use canal_model::diagnostic::Severity;

    use crate::limits::CA_BUNDLE_BYTES_MAX;
    use crate::parse;

    #[test]
    fn a_secret_keeps_only_the_entries_that_are_read() {
        let head =
            "apiVersion: v1\nkind: Secret\nmetadata: {name: a, namespace: b}\nimmutable: true\n";
        for (rest, expected) in [
            ("type: Opaque\ndata: {password: c2VjcmV0}\n", [false, false]),
            ("stringData: {tls.crt: secret}\n", [false, false]),
            (
                "type: kubernetes.io/tls\ndata: {tls.crt: '', tls.key: '', other: c2VjcmV0}\n",
                [true, true],
            ),
            (
                "type: Opaque\ndata: {ca.crt: UEVN, password: c2VjcmV0}\n",
                [false, false],
            ),
        ] {
            let parsed = parse("a.yaml", &format!("{head}{rest}"));
            assert_eq!(parsed.diagnostics, [], "{rest}");
            let document = &parsed.documents[0];
            let has = |text: &str| document.text.contains(text);
            assert_eq!(
                [has("tls.crt"), has("tls.key")],
                expected,
                "{}",
                document.text
            );
            assert!(!has("c2VjcmV0") && !has("secret}"), "{}", document.text);
            assert!(!document.shown_text().contains("tls.key"));
            // What is stored reads back as the same object.
            let again = parse("a.yaml", &document.text);
            assert_eq!(again.documents[0].object, document.object);
            let Object::Secret(secret) = &document.object else {
                panic!("{:?}", document.object);
            };
            assert_eq!(secret.certificate.is_some(), expected[0]);
            assert_eq!(secret.ca.is_some(), rest.contains("ca.crt"));
        }
    }
    #[test]
    fn a_config_map_keeps_only_its_ca_certificates() {
        let head =
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, namespace: b}\nimmutable: true\n";
        for (rest, expected) in [
            ("data: {envoy.yaml: 'big: text'}\n", 0),
            ("data:\n", 0),
            ("binaryData: {ca.crt: c2VjcmV0}\n", 0),
            ("data: {ca.crt: PEM, other: 'big: text'}\n", 1),
        ] {
            let parsed = parse("a.yaml", &format!("{head}{rest}"));
            assert_eq!(parsed.diagnostics, [], "{rest}");
            let document = &parsed.documents[0];
            let has = |text: &str| document.text.contains(text);
            assert!(!has("big") && !has("c2VjcmV0"), "{}", document.text);
            let again = parse("a.yaml", &document.text);
            assert_eq!(again.documents[0].object, document.object);
            let Object::ConfigMap(config_map) = &document.object else {
                panic!("{:?}", document.object);
            };
            assert_eq!(config_map.data.len(), expected, "{rest}");
        }
    }

    #[test]
    fn a_config_map_keeps_no_ca_certificates_beyond_the_limit() {
        for (bytes, is_kept) in [
            (CA_BUNDLE_BYTES_MAX, true),
            (CA_BUNDLE_BYTES_MAX + 1, false),
        ] {
            let bundle = "a".repeat(bytes);
            let parsed = parse(
                "a.yaml",
                &format!(
                    "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: a}}\ndata: {{ca.crt: {bundle}}}\n"
                ),
            );
            let warnings: Vec<Severity> = parsed.diagnostics.iter().map(|it| it.severity).collect();
            assert_eq!(warnings.is_empty(), is_kept, "{:?}", parsed.diagnostics);
            assert!(warnings.iter().all(|it| *it == Severity::Warning));
            assert!(parsed.is_clean());
            let text = &parsed.documents[0].text;
            assert_eq!(text.contains(&bundle), is_kept, "{bytes}");
        }
    }
}
