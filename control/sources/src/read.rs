//! Parses the YAML of one file into objects. Each document is checked alone; the compiler
//! interprets objects together.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use canal_certificate::read_trust_bundle;
use canal_model::diagnostic::{Diagnostic, Severity, SourceLocation};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName};
use canal_model::policy::config_map::CA_BUNDLE;
use canal_model::policy::{Document, Object, ObjectKey, ObjectKind, RejectedField};
use canal_yaml::decode::{DecodeResult, Empty, UnknownField, decode};
use canal_yaml::path::pattern;
use canal_yaml::tree::{self, YamlNode, YamlValue};
use serde::Deserialize;

use crate::annotations::without_unread;
use crate::entries;
use crate::fields::{FieldVerdict, classify_field};
use crate::kinds::{UnknownKindAction, kind_of};
use crate::limits::{
    CA_BUNDLE_BYTES_MAX, DOCUMENTS_PER_FILE_MAX, FILE_BYTES_MAX, FINDINGS_PER_DOCUMENT_MAX,
};
use crate::list::item_text;
use crate::locate::{file_location, position_in};
use crate::renamed::{RenamedField, renamed_fields, renamed_kind, with_new_kind};
use crate::split::{DocumentText, split};

/// The objects and diagnostics of one file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ParsedFile {
    /// Objects in the order of the file. An object with errors is included, reduced by its
    /// [`RejectedField`]s, if it has a kind and a valid name.
    pub documents: Vec<Document>,
    /// Diagnostics in the order of the file's documents.
    pub diagnostics: Vec<Diagnostic>,
    /// Number of documents of kinds that only another implementation reads. Each has an error, but
    /// none can be a broken object of Canal's.
    pub foreign: usize,
}

impl ParsedFile {
    /// Returns true if no diagnostic is an error, so that the whole file can be used as written.
    pub fn is_clean(&self) -> bool {
        self.diagnostics
            .iter()
            .all(|diagnostic| diagnostic.severity != Severity::Error)
    }

    /// Returns true if every object that Canal reads is in the file as written. Documents of kinds
    /// that only another implementation reads take no object down.
    pub fn is_complete(&self) -> bool {
        let errors = self
            .diagnostics
            .iter()
            .filter(|diagnostic| diagnostic.severity == Severity::Error);
        errors.count() == self.foreign
    }
}

/// Parses `text`. The name `file` is only used for the positions in diagnostics.
pub fn parse(file: &str, text: &str) -> ParsedFile {
    let mut parsed = ParsedFile::default();
    let file: Arc<str> = file.into();
    let start = SourceLocation {
        file,
        line: 1,
        column: 1,
    };
    // Nothing of a file beyond a limit is read: a part could open what the rest closes.
    if text.len() > FILE_BYTES_MAX {
        let problem = format!(
            "the file has {} bytes, more than {FILE_BYTES_MAX}",
            text.len()
        );
        parsed.diagnostics.push(error(
            Code::LimitExceeded,
            start,
            None,
            "",
            problem,
            "split it into several files",
        ));
        return parsed;
    }
    let chunks = split(text);
    if chunks.len() > DOCUMENTS_PER_FILE_MAX {
        let problem = format!(
            "the file has {} documents, more than {DOCUMENTS_PER_FILE_MAX}",
            chunks.len()
        );
        parsed.diagnostics.push(error(
            Code::LimitExceeded,
            start,
            None,
            "",
            problem,
            "split it into several files",
        ));
        return parsed;
    }
    // Items of lists count as documents, or one list would exceed the limit.
    let mut items_left = DOCUMENTS_PER_FILE_MAX.saturating_sub(chunks.len());
    for chunk in chunks {
        let origin = SourceLocation {
            file: start.file.clone(),
            line: chunk.line,
            column: 1,
        };
        let mut reading = DocumentReader {
            origin,
            key: None,
            diagnostics: &mut parsed.diagnostics,
            foreign: &mut parsed.foreign,
            items_left: &mut items_left,
            faults: Vec::new(),
        };
        let documents = reading.documents(&chunk);
        parsed.documents.extend(documents);
    }
    parsed.refuse_doubles();
    parsed
}

impl ParsedFile {
    /// Removes the second of two objects with the same key and reports an error for it.
    fn refuse_doubles(&mut self) {
        let mut seen = BTreeSet::new();
        let diagnostics = &mut self.diagnostics;
        self.documents.retain(|document| {
            let key = document.object.key();
            let is_new = seen.insert(key.clone());
            if !is_new {
                let problem = "the file has this object twice; the first one is used".to_owned();
                diagnostics.push(error(
                    Code::DuplicateObject,
                    document.origin.clone(),
                    Some(key),
                    "metadata.name",
                    problem,
                    "remove one of them or rename it",
                ));
            }
            is_new
        });
    }
}

fn error(
    code: Code,
    origin: SourceLocation,
    object: Option<ObjectKey>,
    field: &str,
    problem: String,
    fix: &str,
) -> Diagnostic {
    Diagnostic {
        severity: Severity::Error,
        code,
        origin: Some(origin),
        object,
        field: field.to_owned(),
        problem,
        fix: fix.to_owned(),
    }
}

/// Reads one document into an object and collects its diagnostics.
struct DocumentReader<'a> {
    origin: SourceLocation,
    key: Option<ObjectKey>,
    diagnostics: &'a mut Vec<Diagnostic>,
    foreign: &'a mut usize,
    /// Number of items of lists that the file may still have.
    items_left: &'a mut usize,
    faults: Vec<RejectedField>,
}

impl DocumentReader<'_> {
    /// Reads the objects of a document: one, or those of a list.
    fn documents(&mut self, chunk: &DocumentText<'_>) -> Vec<Document> {
        let written = match tree::parse(&chunk.text) {
            Ok(root) => root,
            Err(syntax) => {
                let origin = file_location(&self.origin, syntax.spot);
                let problem = format!("this is not YAML: {}", syntax.problem);
                self.diagnostics.push(error(
                    Code::InvalidYaml,
                    origin,
                    None,
                    "",
                    problem,
                    "fix the document from here on",
                ));
                return Vec::new();
            }
        };
        if is_list(&written) {
            return self.items(&written);
        }
        self.document(&chunk.text, written).into_iter().collect()
    }

    /// Reads each item of a list as a document of its own.
    fn items(&mut self, list: &YamlNode) -> Vec<Document> {
        // A list that is read as empty would remove what the file said before.
        let Some(YamlValue::List(items)) = list.field("items").map(|items| &items.value) else {
            self.diagnostics.push(error(
                Code::InvalidDocument,
                self.origin.clone(),
                None,
                "items",
                "a List needs items, which are a list of objects".to_owned(),
                "write items: [] for a list without objects",
            ));
            return Vec::new();
        };
        let Some(left) = self.items_left.checked_sub(items.len()) else {
            let problem = format!(
                "with the {} items of this list the file has more than {DOCUMENTS_PER_FILE_MAX} documents",
                items.len()
            );
            self.diagnostics.push(error(
                Code::LimitExceeded,
                self.origin.clone(),
                None,
                "items",
                problem,
                "split it into several files",
            ));
            return Vec::new();
        };
        *self.items_left = left;
        items.iter().filter_map(|item| self.item(item)).collect()
    }

    /// Reads an item of a list. Its text is written anew, so the positions of its diagnostics are
    /// looked up in the list.
    fn item(&mut self, item: &YamlNode) -> Option<Document> {
        let text = item_text(item);
        let mut found = Vec::new();
        let mut reading = DocumentReader {
            origin: file_location(&self.origin, item.spot),
            key: None,
            diagnostics: &mut found,
            foreign: &mut *self.foreign,
            items_left: &mut *self.items_left,
            faults: Vec::new(),
        };
        let document = match tree::parse(&text) {
            Ok(root) if !is_list(&root) => reading.document(&text, root),
            _ => {
                let (origin, problem) = (reading.origin.clone(), "this cannot stand in a list");
                let fix = "write it as a document of its own, parted by ---";
                found.push(error(
                    Code::InvalidDocument,
                    origin,
                    None,
                    "",
                    problem.to_owned(),
                    fix,
                ));
                None
            }
        };
        self.diagnostics
            .extend(found.into_iter().map(|diagnostic| Diagnostic {
                origin: Some(position_in(item, &self.origin, &diagnostic.field)),
                ..diagnostic
            }));
        document
    }

    /// Reads a document that is no list from its text and tree.
    fn document(&mut self, written_text: &str, written: YamlNode) -> Option<Document> {
        // The stored text omits unread annotations: `last-applied-configuration` would double its
        // size.
        let (text, mut root) = match without_unread(written_text, &written) {
            Some((text, root)) => (Cow::Owned(text), root),
            None => (Cow::Borrowed(written_text), written),
        };
        let kind = self.kind(&root)?;
        let mut text = text;
        if self.remove_entries(kind, &mut root) {
            text = Cow::Owned(item_text(&root));
        }
        let object = self.object(kind, &root)?;
        // An object of an old kind is stored as one of the new kind.
        let text = with_new_kind(&text, &root).map_or(text, Cow::Owned);
        Some(Document {
            object,
            origin: self.origin.clone(),
            text: text.as_ref().into(),
            faults: std::mem::take(&mut self.faults),
        })
    }

    /// Removes the entries that are not kept of a Secret or a ConfigMap. Returns whether it removed
    /// any.
    fn remove_entries(&mut self, kind: ObjectKind, root: &mut YamlNode) -> bool {
        let removed = match kind {
            ObjectKind::Secret => entries::remove_from_secret(root),
            ObjectKind::ConfigMap => entries::remove_from_config_map(root),
            _ => return false,
        };
        if let Some(bytes) = removed.bundle_bytes {
            let problem = format!(
                "{CA_BUNDLE} has {bytes} bytes, more than {CA_BUNDLE_BYTES_MAX}; it is not kept"
            );
            let fix = "leave out certificates that nobody needs";
            let (origin, key) = (self.origin.clone(), self.key.clone());
            let diagnostic = error(Code::LimitExceeded, origin, key, "data", problem, fix);
            self.diagnostics.push(Diagnostic {
                severity: Severity::Warning,
                ..diagnostic
            });
        }
        removed.is_changed
    }

    /// Returns the document's kind, or adds a diagnostic that says why it has none.
    fn kind(&mut self, root: &YamlNode) -> Option<ObjectKind> {
        let origin = file_location(&self.origin, root.spot);
        if !matches!(root.value, YamlValue::Map(_)) {
            let problem = "this is not an object".to_owned();
            self.diagnostics.push(error(
                Code::InvalidDocument,
                origin,
                None,
                "",
                problem,
                "write apiVersion, kind, metadata and spec",
            ));
            return None;
        }
        let word = |field: &str| {
            root.field(field)
                .and_then(YamlNode::text)
                .filter(|text| !text.is_empty())
        };
        let (Some(api_version), Some(kind)) = (word("apiVersion"), word("kind")) else {
            let field = if word("apiVersion").is_none() {
                "apiVersion"
            } else {
                "kind"
            };
            self.diagnostics.push(error(
                Code::MissingField,
                origin,
                None,
                field,
                "the field is missing".to_owned(),
                "add it, as in apiVersion: v1 and kind: Service",
            ));
            return None;
        };
        match kind_of(api_version, kind) {
            Ok(known) => {
                // The key is known before decoding, so that decoding errors can name the object.
                self.key = key(known, root);
                if renamed_kind(api_version, kind).is_some() {
                    let warning = self.renamed_kind_warning(root, kind, known);
                    self.diagnostics.push(warning);
                }
                Some(known)
            }
            Err(unknown) => {
                *self.foreign += usize::from(matches!(unknown, UnknownKindAction::Foreign(_)));
                let diagnostic = strange(&unknown, api_version, kind, origin);
                self.diagnostics.push(diagnostic);
                None
            }
        }
    }

    fn object(&mut self, kind: ObjectKind, root: &YamlNode) -> Option<Object> {
        match kind {
            // Kubernetes' own objects read an empty value as absent; others refuse it, or they
            // would lose a rule.
            ObjectKind::Pod => self.typed(kind, root, Empty::Absent).map(Object::Pod),
            ObjectKind::Service => self.typed(kind, root, Empty::Absent).map(Object::Service),
            ObjectKind::EndpointSlice => self
                .typed(kind, root, Empty::Absent)
                .map(Object::EndpointSlice),
            ObjectKind::Endpoints => self.typed(kind, root, Empty::Absent).map(Object::Endpoints),
            ObjectKind::Namespace => self.typed(kind, root, Empty::Absent).map(Object::Namespace),
            ObjectKind::ServiceAccount => self
                .typed(kind, root, Empty::Absent)
                .map(Object::ServiceAccount),
            ObjectKind::Secret => self
                .typed(kind, root, Empty::Absent)
                .map(|secret| Object::Secret(canal_certificate::read(secret))),
            ObjectKind::ConfigMap => self
                .typed(kind, root, Empty::Absent)
                .map(|map| Object::ConfigMap(canal_certificate::read_config_map(map))),
            // Its one entry is required by the type, so an empty one is still an error.
            ObjectKind::ClusterTrustBundle => self
                .typed(kind, root, Empty::Absent)
                .map(|bundle| Object::ClusterTrustBundle(read_trust_bundle(bundle))),
            ObjectKind::HttpRoute => self
                .typed(kind, root, Empty::Refused)
                .map(Object::HttpRoute),
            ObjectKind::GrpcRoute => self
                .typed(kind, root, Empty::Refused)
                .map(Object::GrpcRoute),
            ObjectKind::UdpRoute => self.typed(kind, root, Empty::Refused).map(Object::UdpRoute),
            ObjectKind::TlsRoute => self.typed(kind, root, Empty::Refused).map(Object::TlsRoute),
            ObjectKind::TcpRoute => self.typed(kind, root, Empty::Refused).map(Object::TcpRoute),
            ObjectKind::ReferenceGrant => self
                .typed(kind, root, Empty::Refused)
                .map(Object::ReferenceGrant),
            ObjectKind::IstioGateway => self
                .typed(kind, root, Empty::Refused)
                .map(Object::IstioGateway),
            ObjectKind::VirtualService => self
                .typed(kind, root, Empty::Refused)
                .map(Object::VirtualService),
            ObjectKind::DestinationRule => self
                .typed(kind, root, Empty::Refused)
                .map(Object::DestinationRule),
            ObjectKind::Tenant => self.typed(kind, root, Empty::Refused).map(Object::Tenant),
            ObjectKind::GatewayReplica => self
                .typed(kind, root, Empty::Refused)
                .map(Object::GatewayReplica),
            ObjectKind::GatewayClass => self
                .typed(kind, root, Empty::Refused)
                .map(Object::GatewayClass),
            ObjectKind::Gateway => self.typed(kind, root, Empty::Refused).map(Object::Gateway),
            ObjectKind::ListenerSet => self
                .typed(kind, root, Empty::Refused)
                .map(Object::ListenerSet),
            ObjectKind::Node => self.typed(kind, root, Empty::Absent).map(Object::Node),
            ObjectKind::Throttle => self.typed(kind, root, Empty::Refused).map(Object::Throttle),
            ObjectKind::AuthorizationPolicy => self
                .typed(kind, root, Empty::Refused)
                .map(Object::AuthorizationPolicy),
            ObjectKind::RequestAuthentication => self
                .typed(kind, root, Empty::Refused)
                .map(Object::RequestAuthentication),
            ObjectKind::PeerAuthentication => self
                .typed(kind, root, Empty::Refused)
                .map(Object::PeerAuthentication),
            ObjectKind::ExternalAuthorizer => self
                .typed(kind, root, Empty::Refused)
                .map(Object::ExternalAuthorizer),
            ObjectKind::Federation => self
                .typed(kind, root, Empty::Refused)
                .map(Object::Federation),
            ObjectKind::KeyServer => self
                .typed(kind, root, Empty::Refused)
                .map(Object::KeyServer),
            ObjectKind::Termination => self
                .typed(kind, root, Empty::Refused)
                .map(Object::Termination),
            ObjectKind::OffloadPreference => self
                .typed(kind, root, Empty::Refused)
                .map(Object::OffloadPreference),
            ObjectKind::TrafficPriority => self
                .typed(kind, root, Empty::Refused)
                .map(Object::TrafficPriority),
        }
    }

    fn typed<T: for<'de> Deserialize<'de>>(
        &mut self,
        kind: ObjectKind,
        root: &YamlNode,
        empty: Empty,
    ) -> Option<T> {
        let decoded: DecodeResult<T> = decode(root, empty);
        let mut found: Vec<Diagnostic> = Vec::new();
        for broken in decoded.broken {
            let origin = file_location(&self.origin, broken.spot);
            found.push(error(
                Code::InvalidValue,
                origin,
                self.key.clone(),
                &broken.path,
                broken.problem,
                &broken.fix,
            ));
        }
        let nodes = root.by_id();
        for unknown in decoded.unknown {
            found.extend(self.unknown(kind, nodes.get(&unknown.node).copied(), &unknown));
        }
        found.extend(renamed_fields(kind).filter_map(|renamed| self.renamed(renamed, root)));
        found.sort_by(|a, b| a.origin.cmp(&b.origin));
        // `decode` bounds the invalid values, which may reach the limit. Only unknown fields are
        // unbounded, so they may be as many again before the list is cut.
        if found.len() > 2 * FINDINGS_PER_DOCUMENT_MAX {
            found.truncate(FINDINGS_PER_DOCUMENT_MAX);
            // The faults below copy this error; the field `spec` makes it apply to the whole
            // object.
            let problem = format!("the document has more than {FINDINGS_PER_DOCUMENT_MAX} errors");
            found.push(error(
                Code::LimitExceeded,
                self.origin.clone(),
                self.key.clone(),
                "spec",
                problem,
                "fix those above first",
            ));
        }
        // Only errors become faults, because a warning does not change what the object means.
        let errors = found
            .iter()
            .filter(|diagnostic| diagnostic.severity == Severity::Error);
        self.faults.extend(errors.map(|d| RejectedField {
            field: d.field.clone(),
            problem: d.problem.clone(),
        }));
        self.diagnostics.append(&mut found);
        decoded.object
    }

    /// Returns the warning for an object whose kind is written under its old name.
    fn renamed_kind_warning(&self, root: &YamlNode, old: &str, new: ObjectKind) -> Diagnostic {
        let spot = root.entry("kind").map_or(root.spot, |(key, _)| key.spot);
        let problem =
            format!("the kind is now called {new}; the next release does not accept {old} here");
        let fix = format!("write kind: {new}");
        let origin = file_location(&self.origin, spot);
        Diagnostic {
            severity: Severity::Warning,
            ..error(
                Code::RenamedKind,
                origin,
                self.key.clone(),
                "kind",
                problem,
                &fix,
            )
        }
    }

    /// Returns the warning for a field that is written under its old name.
    fn renamed(&self, renamed: &RenamedField, root: &YamlNode) -> Option<Diagnostic> {
        let (last, parents) = renamed.path.split_last()?;
        let parent = parents
            .iter()
            .try_fold(root, |node, name| node.field(name))?;
        let (key, _) = parent.entry(last)?;
        let problem = format!(
            "the field is now called {}; the next release does not accept {last}",
            renamed.new_name
        );
        let fix = format!("write {}", renamed.new_name);
        let diagnostic = error(
            Code::RenamedField,
            file_location(&self.origin, key.spot),
            self.key.clone(),
            &renamed.path.join("."),
            problem,
            &fix,
        );
        Some(Diagnostic {
            severity: Severity::Warning,
            ..diagnostic
        })
    }

    fn unknown(
        &self,
        kind: ObjectKind,
        value: Option<&YamlNode>,
        unknown: &UnknownField,
    ) -> Option<Diagnostic> {
        let origin = file_location(&self.origin, unknown.spot);
        match classify_field(kind, &pattern(&unknown.path), value) {
            FieldVerdict::Noise => None,
            // The object works without the field, so the diagnostic must not refuse the object.
            FieldVerdict::LeftOut { problem, fix } => {
                let diagnostic = error(
                    Code::IgnoredField,
                    origin,
                    self.key.clone(),
                    &unknown.path,
                    problem.to_owned(),
                    fix,
                );
                Some(Diagnostic {
                    severity: Severity::Warning,
                    ..diagnostic
                })
            }
            FieldVerdict::Refused { problem, fix } => Some(error(
                Code::UnsupportedField,
                origin,
                self.key.clone(),
                &unknown.path,
                problem.to_owned(),
                fix,
            )),
            FieldVerdict::Unknown => {
                let fix = format!(
                    "remove it, or write one of {}",
                    unknown.known_fields.join(", ")
                );
                Some(error(
                    Code::UnknownField,
                    origin,
                    self.key.clone(),
                    &unknown.path,
                    "there is no such field".to_owned(),
                    &fix,
                ))
            }
        }
    }
}

/// Returns whether the document is a list of objects.
fn is_list(root: &YamlNode) -> bool {
    let word = |field: &str| root.field(field).and_then(YamlNode::text);
    word("apiVersion") == Some("v1") && word("kind") == Some("List")
}

/// Returns the object's key if its name and namespace are valid.
fn key(kind: ObjectKind, root: &YamlNode) -> Option<ObjectKey> {
    let metadata = root.field("metadata")?;
    let namespace = metadata
        .field("namespace")
        .and_then(YamlNode::text)
        .unwrap_or("default");
    let name = ObjectName::new(metadata.field("name")?.text()?).ok()?;
    Some(ObjectKey {
        kind,
        namespace: Namespace::new(namespace).ok()?,
        name,
    })
}

fn strange(
    unknown: &UnknownKindAction,
    api_version: &str,
    kind: &str,
    origin: SourceLocation,
) -> Diagnostic {
    let (severity, code, field, problem, fix) = match unknown {
        UnknownKindAction::OtherVersion(known) => (
            Severity::Error,
            Code::UnsupportedVersion,
            "apiVersion",
            format!("{kind} is not supported in {api_version:?}"),
            format!("write apiVersion: {}", known.api_versions().join(" or ")),
        ),
        // Charts hold many such objects, and none of them changes the mesh.
        UnknownKindAction::Skipped => (
            Severity::Warning,
            Code::SkippedKind,
            "kind",
            format!("{kind} ({api_version}) does not concern the mesh and is skipped"),
            "leave it to Kubernetes".to_owned(),
        ),
        UnknownKindAction::Foreign(foreign) => (
            Severity::Error,
            Code::ForeignKind,
            "kind",
            foreign.problem.to_owned(),
            foreign.fix.to_owned(),
        ),
        UnknownKindAction::Refused => (
            Severity::Error,
            Code::UnsupportedKind,
            "kind",
            format!("{kind} ({api_version}) is not supported in this version"),
            format!(
                "remove it; known kinds: {}",
                ObjectKind::ALL.map(ObjectKind::as_str).join(", ")
            ),
        ),
    };
    Diagnostic {
        severity,
        code,
        origin: Some(origin),
        object: None,
        field: field.to_owned(),
        problem,
        fix,
    }
}

#[cfg(test)]
mod tests {
    use crate::parse;

    /// Kubernetes prints fields without a value.
    #[test]
    fn a_field_of_a_trust_bundle_without_a_value_is_absent() {
        let read = |spec: &str| {
            let head = "apiVersion: certificates.k8s.io/v1beta1\nkind: ClusterTrustBundle\nmetadata: {name: a}\nspec:\n";
            parse("a.yaml", &format!("{head}{spec}"))
        };
        let bundle = read("  signerName:\n  trustBundle: x\n");
        assert!(bundle.is_clean(), "{:?}", bundle.diagnostics);
        // The entry itself must be there: without it, no client would be trusted.
        assert!(!read("  signerName: a\n  trustBundle:\n").is_clean());
    }
}
