//! Reads the YAML of one file into objects. Judges each document alone; what objects mean together is the compiler's.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use canal_model::diagnostic::{Diagnostic, Origin, Severity};
use canal_model::ids::{Namespace, ObjectName};
use canal_model::policy::{Document, Fault, Object, ObjectKey, ObjectKind};
use serde::Deserialize;

use crate::annotations::without_unread;
use crate::decode::{Decoded, Empty, Unknown, decode};
use crate::fields::{Stranger, Verdict, judge, kind_of};
use crate::limits::{DOCUMENTS_PER_FILE_MAX, FILE_BYTES_MAX, FINDINGS_PER_DOCUMENT_MAX};
use crate::path::pattern;
use crate::pinpoint::place;
use crate::split::{Chunk, split};
use crate::tree::{self, Node, Value};

/// What a file says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Parsed {
    /// In the order of the file. An object with mistakes is here too, reduced by its [`Fault`]s, if it can be named at all.
    pub documents: Vec<Document>,
    /// In the order of the file.
    pub diagnostics: Vec<Diagnostic>,
}

impl Parsed {
    /// Whether everything in the file can be taken as written.
    pub fn is_clean(&self) -> bool {
        self.diagnostics.iter().all(|diagnostic| diagnostic.severity != Severity::Error)
    }
}

/// Reads the text of `file`, whose name is only used to say where something stands.
pub fn parse(file: &str, text: &str) -> Parsed {
    let mut parsed = Parsed::default();
    let file: Arc<str> = file.into();
    let start = Origin { file, line: 1, column: 1 };
    if text.len() > FILE_BYTES_MAX {
        let problem = format!("the file has {} bytes, more than {FILE_BYTES_MAX}", text.len());
        parsed.diagnostics.push(error(start, None, "", problem, "split it into several files"));
        return parsed;
    }
    let chunks = split(text);
    if chunks.len() > DOCUMENTS_PER_FILE_MAX {
        let problem = format!("the file has {} documents, more than {DOCUMENTS_PER_FILE_MAX}", chunks.len());
        parsed.diagnostics.push(error(start, None, "", problem, "split it into several files"));
        return parsed;
    }
    for chunk in chunks {
        let origin = Origin { file: start.file.clone(), line: chunk.line, column: 1 };
        let mut reading = Reading { origin, key: None, diagnostics: &mut parsed.diagnostics, faults: Vec::new() };
        parsed.documents.extend(reading.document(&chunk));
    }
    parsed.refuse_doubles();
    parsed
}

impl Parsed {
    /// The second of two objects with one name is taken out.
    fn refuse_doubles(&mut self) {
        let mut seen = BTreeSet::new();
        let diagnostics = &mut self.diagnostics;
        self.documents.retain(|document| {
            let key = document.object.key();
            let is_new = seen.insert(key.clone());
            if !is_new {
                let problem = "the file has this object twice; the first one is used".to_owned();
                diagnostics.push(error(document.origin.clone(), Some(key), "metadata.name", problem, "remove one of them or rename it"));
            }
            is_new
        });
    }
}

fn error(origin: Origin, object: Option<ObjectKey>, field: &str, problem: String, mend: &str) -> Diagnostic {
    Diagnostic { severity: Severity::Error, origin: Some(origin), object, field: field.to_owned(), problem, mend: mend.to_owned() }
}

/// One document being read.
struct Reading<'a> {
    origin: Origin,
    key: Option<ObjectKey>,
    diagnostics: &'a mut Vec<Diagnostic>,
    faults: Vec<Fault>,
}

impl Reading<'_> {
    fn document(&mut self, chunk: &Chunk<'_>) -> Option<Document> {
        let written = match tree::parse(&chunk.text) {
            Ok(root) => root,
            Err(syntax) => {
                let origin = place(&self.origin, syntax.spot);
                let problem = format!("this is not YAML: {}", syntax.problem);
                self.diagnostics.push(error(origin, None, "", problem, "mend the document from here on"));
                return None;
            }
        };
        let (text, root) = match without_unread(&chunk.text, &written) {
            Some((text, root)) => (Cow::Owned(text), root),
            None => (Cow::Borrowed(chunk.text.as_ref()), written),
        };
        let kind = self.kind(&root)?;
        let object = self.object(kind, &root)?;
        Some(Document { object, origin: self.origin.clone(), text: text.as_ref().into(), faults: std::mem::take(&mut self.faults) })
    }

    /// The document's kind, or a word on why it has none.
    fn kind(&mut self, root: &Node) -> Option<ObjectKind> {
        let origin = place(&self.origin, root.spot);
        if !matches!(root.value, Value::Map(_)) {
            let problem = "this is not an object".to_owned();
            self.diagnostics.push(error(origin, None, "", problem, "write apiVersion, kind, metadata and spec"));
            return None;
        }
        let word = |field: &str| root.field(field).and_then(Node::text).filter(|text| !text.is_empty());
        let (Some(api_version), Some(kind)) = (word("apiVersion"), word("kind")) else {
            let field = if word("apiVersion").is_none() { "apiVersion" } else { "kind" };
            self.diagnostics.push(error(
                origin,
                None,
                field,
                "the field is missing".to_owned(),
                "add it, as in apiVersion: v1 and kind: Service",
            ));
            return None;
        };
        match kind_of(api_version, kind) {
            Ok(kind) => {
                self.key = key(kind, root);
                Some(kind)
            }
            Err(stranger) => {
                let diagnostic = strange(&stranger, api_version, kind, origin);
                self.diagnostics.push(diagnostic);
                None
            }
        }
    }

    fn object(&mut self, kind: ObjectKind, root: &Node) -> Option<Object> {
        match kind {
            ObjectKind::Pod => self.typed(kind, root, Empty::Absent).map(Object::Pod),
            ObjectKind::Service => self.typed(kind, root, Empty::Absent).map(Object::Service),
            ObjectKind::HttpRoute => self.typed(kind, root, Empty::Refused).map(Object::HttpRoute),
            ObjectKind::UdpRoute => self.typed(kind, root, Empty::Refused).map(Object::UdpRoute),
            ObjectKind::ReferenceGrant => self.typed(kind, root, Empty::Refused).map(Object::ReferenceGrant),
            ObjectKind::VirtualService => self.typed(kind, root, Empty::Refused).map(Object::VirtualService),
            ObjectKind::DestinationRule => self.typed(kind, root, Empty::Refused).map(Object::DestinationRule),
            ObjectKind::Tenant => self.typed(kind, root, Empty::Refused).map(Object::Tenant),
            ObjectKind::Gateway => self.typed(kind, root, Empty::Refused).map(Object::Gateway),
            ObjectKind::Node => self.typed(kind, root, Empty::Absent).map(Object::Node),
            ObjectKind::Throttle => self.typed(kind, root, Empty::Refused).map(Object::Throttle),
            ObjectKind::AuthorizationPolicy => self.typed(kind, root, Empty::Refused).map(Object::AuthorizationPolicy),
            ObjectKind::RequestAuthentication => self.typed(kind, root, Empty::Refused).map(Object::RequestAuthentication),
            ObjectKind::PeerAuthentication => self.typed(kind, root, Empty::Refused).map(Object::PeerAuthentication),
            ObjectKind::ExternalAuthorizer => self.typed(kind, root, Empty::Refused).map(Object::ExternalAuthorizer),
            ObjectKind::Federation => self.typed(kind, root, Empty::Refused).map(Object::Federation),
            ObjectKind::KeyServer => self.typed(kind, root, Empty::Refused).map(Object::KeyServer),
            ObjectKind::Termination => self.typed(kind, root, Empty::Refused).map(Object::Termination),
        }
    }

    fn typed<T: for<'de> Deserialize<'de>>(&mut self, kind: ObjectKind, root: &Node, empty: Empty) -> Option<T> {
        let decoded: Decoded<T> = decode(root, empty);
        let mut found: Vec<Diagnostic> = Vec::new();
        for broken in decoded.broken {
            let origin = place(&self.origin, broken.spot);
            found.push(error(origin, self.key.clone(), &broken.path, broken.problem, &broken.mend));
        }
        let nodes = root.by_id();
        for unknown in decoded.unknown {
            found.extend(self.unknown(kind, nodes.get(&unknown.node).copied(), &unknown));
        }
        found.sort_by(|a, b| a.origin.cmp(&b.origin));
        if found.len() > 2 * FINDINGS_PER_DOCUMENT_MAX {
            found.truncate(FINDINGS_PER_DOCUMENT_MAX);
            // As a fault it concerns all of the object.
            let problem = format!("there are more than {FINDINGS_PER_DOCUMENT_MAX} mistakes");
            found.push(error(self.origin.clone(), self.key.clone(), "spec", problem, "mend those above first"));
        }
        let errors = found.iter().filter(|diagnostic| diagnostic.severity == Severity::Error);
        self.faults.extend(errors.map(|d| Fault { field: d.field.clone(), problem: d.problem.clone() }));
        self.diagnostics.append(&mut found);
        decoded.object
    }

    fn unknown(&self, kind: ObjectKind, value: Option<&Node>, unknown: &Unknown) -> Option<Diagnostic> {
        let origin = place(&self.origin, unknown.spot);
        match judge(kind, &pattern(&unknown.path), value) {
            Verdict::Noise => None,
            Verdict::LeftOut { problem, mend } => {
                let diagnostic = error(origin, self.key.clone(), &unknown.path, problem.to_owned(), mend);
                Some(Diagnostic { severity: Severity::Warning, ..diagnostic })
            }
            Verdict::Refused { problem, mend } => Some(error(origin, self.key.clone(), &unknown.path, problem.to_owned(), mend)),
            Verdict::Unknown => {
                let mend = format!("remove it, or write one of {}", unknown.known.join(", "));
                Some(error(origin, self.key.clone(), &unknown.path, "there is no such field".to_owned(), &mend))
            }
        }
    }
}

/// The object's name, as far as it has a valid one.
fn key(kind: ObjectKind, root: &Node) -> Option<ObjectKey> {
    let metadata = root.field("metadata")?;
    let namespace = metadata.field("namespace").and_then(Node::text).unwrap_or("default");
    let name = ObjectName::new(metadata.field("name")?.text()?).ok()?;
    Some(ObjectKey { kind, namespace: Namespace::new(namespace).ok()?, name })
}

fn strange(stranger: &Stranger, api_version: &str, kind: &str, origin: Origin) -> Diagnostic {
    let (severity, field, problem, mend) = match stranger {
        Stranger::OtherVersion(known) => (
            Severity::Error,
            "apiVersion",
            format!("{kind} is not read in {api_version:?}"),
            format!("write apiVersion: {}", known.api_versions().join(" or ")),
        ),
        Stranger::Skipped => (
            Severity::Warning,
            "kind",
            format!("{kind} ({api_version}) says nothing about the mesh and is skipped"),
            "leave it to Kubernetes".to_owned(),
        ),
        Stranger::Refused if kind == "List" => (
            Severity::Error,
            "kind",
            "lists are not read".to_owned(),
            "write the items as documents of their own, parted by ---".to_owned(),
        ),
        Stranger::Refused => (
            Severity::Error,
            "kind",
            format!("{kind} ({api_version}) is not in this version"),
            format!("remove it; known are {}", ObjectKind::ALL.map(ObjectKind::as_str).join(", ")),
        ),
    };
    Diagnostic { severity, origin: Some(origin), object: None, field: field.to_owned(), problem, mend }
}
