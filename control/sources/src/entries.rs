//! Removes entries that Canal does not read from Secrets and ConfigMaps, so that what is stored of
//! them contains no secrets of others, and nothing that has no use.

use canal_model::policy::config_map::CA_BUNDLE;
use canal_model::policy::secret::{
    GENERIC_CA_BUNDLE, GENERIC_CERTIFICATE, GENERIC_KEY, REVOCATION_LISTS, TLS_CERTIFICATE,
    TLS_KEY, TLS_SECRET,
};
use canal_yaml::tree::{YamlNode, YamlValue};

use crate::limits::CA_BUNDLE_BYTES_MAX;

/// Names of the fields with the entries of a Secret.
const SECRET_DATA: [&str; 2] = ["data", "stringData"];
/// Text in place of a list of revoked certificates, of which only the existence is of interest.
const NOT_STORED: &str = "not stored";

/// Removes all entries of a Secret but the CA certificates, and the certificate with its key of one
/// for TLS or of one of no particular type that has both.
pub(crate) fn remove_from_secret(root: &mut YamlNode) -> RemovedEntries {
    let kind = root.field("type").and_then(YamlNode::text);
    let is_generic = matches!(kind, None | Some("Opaque"));
    let has = |name: &&str| {
        let data = SECRET_DATA.iter().filter_map(|field| root.field(field));
        data.into_iter().any(|data| data.field(name).is_some())
    };
    let pairs = [
        (kind == Some(TLS_SECRET), [TLS_CERTIFICATE, TLS_KEY]),
        (is_generic, [TLS_CERTIFICATE, TLS_KEY]),
        (is_generic, [GENERIC_CERTIFICATE, GENERIC_KEY]),
    ];
    let kept = pairs.iter().find(|(is_of_kind, names)| {
        *is_of_kind && (kind == Some(TLS_SECRET) || names.iter().all(has))
    });
    let serving: &[&str] = kept.map_or(&[], |(_, names)| names);
    let mut bundle_bytes = None;
    let is_changed = retain_entries(root, &SECRET_DATA, |name, value| {
        let is_list = REVOCATION_LISTS.contains(&name);
        let text = value.text().unwrap_or_default();
        if is_list && !text.is_empty() && text != NOT_STORED {
            value.value = YamlValue::Text(NOT_STORED.to_owned());
            return (true, true);
        }
        let is_kept =
            serving.contains(&name) || is_list || is_kept_bundle(name, value, &mut bundle_bytes);
        (is_kept, false)
    });
    RemovedEntries {
        is_changed,
        bundle_bytes,
    }
}

/// Returns whether an entry has CA certificates that are kept. Sets their length if they are too long.
fn is_kept_bundle(name: &str, value: &YamlNode, bundle_bytes: &mut Option<usize>) -> bool {
    let bytes = value.text().map_or(0, str::len);
    let is_bundle = name == CA_BUNDLE || name == GENERIC_CA_BUNDLE;
    let is_too_long = is_bundle && bytes > CA_BUNDLE_BYTES_MAX;
    if is_too_long {
        *bundle_bytes = Some(bytes);
    }
    is_bundle && !is_too_long
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
        // ConfigMaps have only the entry of Gateway API.
        let is_kept = name == CA_BUNDLE && is_kept_bundle(name, value, &mut bundle_bytes);
        (is_kept, false)
    });
    let of_binary = retain_entries(root, &["binaryData"], |_, _| (false, false));
    RemovedEntries {
        is_changed: of_data || of_binary,
        bundle_bytes,
    }
}

/// Removes the entries of these fields that are not kept. `keep` returns whether an entry is kept, and
/// whether it changed the entry. Returns whether anything was removed or changed.
fn retain_entries(
    root: &mut YamlNode,
    names: &[&str],
    mut keep: impl FnMut(&str, &mut YamlNode) -> (bool, bool),
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
            entries.retain_mut(|(entry, value)| {
                let (is_kept, is_edited) = keep(&entry.name, value);
                is_changed |= !is_kept || is_edited;
                is_kept
            });
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
        // The parser must not keep `c2VjcmV0`, which is `secret` in base64, or `secret` itself.
        for (rest, expected) in [
            ("type: Opaque\ndata: {password: c2VjcmV0}\n", [false, false]),
            // A certificate without its key is no pair, so neither is read.
            ("stringData: {tls.crt: secret}\n", [false, false]),
            (
                "type: kubernetes.io/tls\ndata: {tls.crt: '', tls.key: '', other: c2VjcmV0}\n",
                [true, true],
            ),
            (
                "type: Opaque\ndata: {ca.crt: UEVN, password: c2VjcmV0}\n",
                [false, false],
            ),
            // Istio reads both of a Secret of no particular type.
            (
                "type: Opaque\ndata: {tls.crt: '', other: c2VjcmV0}\nstringData: {tls.key: ''}\n",
                [true, true],
            ),
            // The pair has Istio's own names, so no `tls.` entry is kept.
            (
                "data: {cert: '', key: '', cacert: '', ca.crl: c2VjcmV0}\n",
                [false, false],
            ),
            (
                "type: example.com/other\ndata: {tls.crt: c2VjcmV0, tls.key: c2VjcmV0}\n",
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
            let is_generic = rest.contains("cacert");
            assert_eq!(secret.certificate.is_some(), expected[0] || is_generic);
            assert_eq!(secret.has_revocation_list, is_generic);
            assert_eq!(secret.generic_ca.is_some(), is_generic);
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
