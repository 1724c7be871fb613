//! The current and the last valid state of a directory of YAML files per tenant,
//! `<root>/<tenant>/*.yaml`. It does not wait for changes.
//!
//! A broken file keeps the objects of its last valid version, and no other file or tenant is
//! affected. A file that was never valid contributes the objects that can be read from it; their
//! faults make the compiler fail closed.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use canal_model::diagnostic::{Diagnostic, Severity, SourceLocation};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::TenantName;
use canal_model::policy::Document;
use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::file::{self, FileContent, FileFingerprint, FileReadError, OpenFile};
use crate::limits::{FILES_PER_TENANT_MAX, TENANT_BYTES_MAX, TENANTS_MAX};
use crate::read::parse;

/// All objects and diagnostics of one tenant's directory as of now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantFiles {
    pub tenant: TenantName,
    /// The complete set, sorted by file. It is empty if the directory no longer exists.
    pub documents: Vec<Arc<Document>>,
    pub diagnostics: Vec<Diagnostic>,
}

/// The result of one scan of the directory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ScanResult {
    /// Tenants whose objects or diagnostics differ from the last scan. The first scan returns all
    /// tenants.
    pub changed: Vec<TenantFiles>,
    /// The complete current list of problems with the root directory itself.
    pub diagnostics: Vec<Diagnostic>,
    /// Files were being written during the scan; scan again soon.
    pub(crate) is_moving: bool,
}

/// Information from the watcher about files, by tenant and file name.
#[derive(Debug, Default)]
pub(crate) struct Hints {
    /// Files to read again even if their fingerprint did not change.
    pub(crate) touched: BTreeSet<(String, String)>,
    /// Files that are being written and are not read.
    pub(crate) busy: BTreeSet<(String, String)>,
}

/// The state of all tenants' files.
#[derive(Debug)]
pub struct Directory {
    root: PathBuf,
    tenants: BTreeMap<TenantName, TenantFileSet>,
}

/// One tenant's files by name.
#[derive(Debug, Default)]
struct TenantFileSet {
    files: BTreeMap<String, FileState>,
    /// Problems with the tenant's directory as a whole.
    diagnostics: Vec<Diagnostic>,
}

/// One file as it was last read.
#[derive(Debug, Default)]
struct FileState {
    stamp: Option<FileFingerprint>,
    bytes: usize,
    /// Size of a text that did not fit beside the tenant's other files.
    unfit_bytes: Option<usize>,
    was_good: bool,
    documents: Vec<Arc<Document>>,
    diagnostics: Vec<Diagnostic>,
}

impl Directory {
    /// Creates the state for `root`. It reads nothing until the first scan.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            tenants: BTreeMap::new(),
        }
    }

    /// Scans all files and reads those that changed.
    pub fn scan(&mut self) -> ScanResult {
        self.scan_with(&Hints::default())
    }

    pub(crate) fn scan_with(&mut self, hints: &Hints) -> ScanResult {
        let mut scan = ScanResult::default();
        let (root, names) = match list(&self.root) {
            Ok(found) => found,
            Err(error) => {
                // All tenants stay: a lost mount must not take the mesh down.
                let problem = format!(
                    "the configuration directory cannot be read: {error}; the configuration read before stays in force"
                );
                scan.diagnostics.push(complaint(
                    &self.root,
                    problem,
                    "make it a directory that the controller may read",
                ));
                return scan;
            }
        };
        let present = self.present(names, &mut scan.diagnostics);
        let gone: Vec<TenantName> = self
            .tenants
            .keys()
            .filter(|name| !present.contains(*name))
            .cloned()
            .collect();
        // A directory that was removed is a tenant without files: its objects from files end.
        for tenant in gone {
            self.tenants.remove(&tenant);
            scan.changed.push(TenantFiles {
                tenant,
                documents: Vec::new(),
                diagnostics: Vec::new(),
            });
        }
        for name in present {
            let path = self.root.join(name.as_str());
            let is_new = !self.tenants.contains_key(&name);
            let tenant = self.tenants.entry(name.clone()).or_default();
            let mut visit = TenantVisit {
                path: &path,
                tenant: &name,
                hints,
                // A new tenant is reported even without a file.
                changed: is_new,
                is_moving: false,
            };
            tenant.visit(root.as_fd(), &mut visit);
            scan.is_moving |= visit.is_moving;
            if visit.changed {
                scan.changed.push(tenant.files(name));
            }
        }
        scan
    }

    /// Returns the tenants that have a directory, up to [`TENANTS_MAX`], and reports all other
    /// entries.
    fn present(
        &self,
        names: Vec<String>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> BTreeSet<TenantName> {
        let mut present = BTreeSet::new();
        let mut newcomers = Vec::new();
        for name in names {
            let path = self.root.join(&name);
            if !path.is_dir() {
                diagnostics.push(complaint(
                    &path,
                    "only directories of tenants are read here".to_owned(),
                    "move the file into a tenant's directory",
                ));
                continue;
            }
            match TenantName::new(&name) {
                // A known tenant never loses its slot to a new one.
                Ok(tenant) if self.tenants.contains_key(&tenant) => drop(present.insert(tenant)),
                Ok(tenant) => newcomers.push(tenant),
                Err(error) => diagnostics.push(complaint(
                    &path,
                    error.problem(),
                    "rename the directory to the tenant's name",
                )),
            }
        }
        let slots_left = TENANTS_MAX.saturating_sub(present.len());
        if newcomers.len() > slots_left {
            let problem = format!(
                "there are more than {TENANTS_MAX} tenants; {} are left out",
                newcomers.len() - slots_left
            );
            diagnostics.push(complaint(&self.root, problem, "use several controllers"));
        }
        present.extend(newcomers.into_iter().take(slots_left));
        present
    }
}

/// One scan of one tenant.
struct TenantVisit<'a> {
    path: &'a Path,
    tenant: &'a TenantName,
    hints: &'a Hints,
    changed: bool,
    is_moving: bool,
}

impl TenantVisit<'_> {
    fn is_in(&self, set: &BTreeSet<(String, String)>, file: &str) -> bool {
        !set.is_empty() && set.contains(&(self.tenant.to_string(), file.to_owned()))
    }
}

impl TenantFileSet {
    fn visit(&mut self, root: BorrowedFd<'_>, visit: &mut TenantVisit<'_>) {
        let mut diagnostics = Vec::new();
        let listed = file::open_directory(root, visit.tenant.as_str()).and_then(|directory| {
            let names = file::names(directory.as_fd())?;
            Ok((directory, names))
        });
        match listed {
            Err(error) => {
                // An unreadable directory may be a temporary fault, so the files of the last scan
                // stay.
                let problem = format!(
                    "the tenant's directory cannot be read: {error}; the configuration read before stays in force"
                );
                diagnostics.push(complaint(
                    visit.path,
                    problem,
                    "make it a directory of its own that the controller may read",
                ));
            }
            Ok((directory, names)) => {
                let names = self.admitted(names, visit, &mut diagnostics);
                let before = self.files.len();
                self.files.retain(|name, _| names.contains(name));
                visit.changed |= self.files.len() != before;
                for name in &names {
                    self.read_if_changed(directory.as_fd(), name, visit);
                }
            }
        }
        visit.changed |= self.diagnostics != diagnostics;
        self.diagnostics = diagnostics;
    }

    /// Returns the names of the YAML files to read. If there are too many, files that were read
    /// before have priority.
    fn admitted(
        &self,
        names: Vec<String>,
        visit: &TenantVisit<'_>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> BTreeSet<String> {
        let is_yaml = |name: &String| name.ends_with(".yaml") || name.ends_with(".yml");
        let (known, new): (Vec<String>, Vec<String>) = names
            .into_iter()
            .filter(is_yaml)
            .partition(|name| self.files.contains_key(name));
        let slots_left = FILES_PER_TENANT_MAX.saturating_sub(known.len());
        if new.len() > slots_left {
            let problem = format!(
                "the tenant has more than {FILES_PER_TENANT_MAX} files; {} are left out, {} first",
                new.len() - slots_left,
                new[slots_left]
            );
            diagnostics.push(complaint(
                visit.path,
                problem,
                "put several documents into one file",
            ));
        }
        known
            .into_iter()
            .chain(new.into_iter().take(slots_left))
            .collect()
    }

    /// Reads one file if it changed.
    fn read_if_changed(
        &mut self,
        directory: BorrowedFd<'_>,
        name: &str,
        visit: &mut TenantVisit<'_>,
    ) {
        // The file is still being written, so it is read by the next scan.
        if visit.is_in(&visit.hints.busy, name) {
            visit.is_moving = true;
            return;
        }
        let others: usize = self
            .files
            .iter()
            .filter(|(other, _)| *other != name)
            .map(|(_, state)| state.bytes)
            .sum();
        let path = visit.path.join(name);
        let opened = file::open_file(directory, name);
        let stamp = opened.as_ref().ok().map(|opened| opened.stamp);
        let is_known = self.files.contains_key(name);
        let state = self.files.entry(name.to_owned()).or_default();
        // Two writes within one clock tick leave the same fingerprint; the watcher's event still
        // forces a read.
        if is_known
            // A file that cannot be opened has no fingerprint, and the reason may have changed.
            && stamp.is_some()
            && state.stamp == stamp
            && !visit.is_in(&visit.hints.touched, name)
            // The other files may have become smaller since the file did not fit beside them.
            && state.unfit_bytes.is_none_or(|bytes| others + bytes > TENANT_BYTES_MAX)
        {
            return;
        }
        match opened.map(|mut opened: OpenFile| file::read(&mut opened)) {
            Ok(FileContent::Moving) => visit.is_moving = true,
            Ok(FileContent::Text(text)) if others + text.len() > TENANT_BYTES_MAX => {
                let problem = format!(
                    "with this file the tenant's files have more than {TENANT_BYTES_MAX} bytes"
                );
                visit.changed |= state.refuse(
                    &path,
                    stamp,
                    &FileReadError {
                        problem,
                        fix: "remove objects that are not needed",
                    },
                );
                state.unfit_bytes = Some(text.len());
            }
            Ok(FileContent::Text(text)) => visit.changed |= state.take(&path, stamp, &text),
            Ok(FileContent::Refused(why)) | Err(why) => {
                visit.changed |= state.refuse(&path, stamp, &why)
            }
        }
    }

    fn files(&self, tenant: TenantName) -> TenantFiles {
        let documents = self
            .files
            .values()
            .flat_map(|file| file.documents.iter().cloned())
            .collect();
        let of_files = self.files.values().flat_map(|file| &file.diagnostics);
        TenantFiles {
            tenant,
            documents,
            diagnostics: self.diagnostics.iter().chain(of_files).cloned().collect(),
        }
    }
}

impl FileState {
    /// Takes over a new text. Returns true if objects or diagnostics changed.
    fn take(&mut self, path: &Path, stamp: Option<FileFingerprint>, text: &str) -> bool {
        let parsed = parse(&path.to_string_lossy(), text);
        self.stamp = stamp;
        self.unfit_bytes = None;
        self.bytes = text.len();
        let is_complete = parsed.is_complete();
        let mut diagnostics = parsed.diagnostics;
        let documents: Vec<Arc<Document>> = if is_complete || !self.was_good {
            parsed.documents.into_iter().map(Arc::new).collect()
        } else {
            diagnostics.push(retention_warning(path, self.documents.len()));
            self.documents.clone()
        };
        self.was_good |= is_complete;
        // Unchanged documents keep their allocation, so that holders of the old set share it.
        let documents = share(&self.documents, documents);
        let changed = self.documents != documents || self.diagnostics != diagnostics;
        self.documents = documents;
        self.diagnostics = diagnostics;
        changed
    }

    /// Records that the file cannot be read. Its previous objects stay.
    fn refuse(&mut self, path: &Path, stamp: Option<FileFingerprint>, why: &FileReadError) -> bool {
        let mut diagnostics = vec![complaint(path, why.problem.clone(), why.fix)];
        if self.was_good {
            diagnostics.push(retention_warning(path, self.documents.len()));
        }
        self.stamp = stamp;
        self.unfit_bytes = None;
        let changed = self.diagnostics != diagnostics;
        self.diagnostics = diagnostics;
        changed
    }
}

fn share(old: &[Arc<Document>], new: Vec<Arc<Document>>) -> Vec<Arc<Document>> {
    let mut new = new;
    for (old, new) in old.iter().zip(&mut new).filter(|(old, new)| old == new) {
        *new = Arc::clone(old);
    }
    new
}

fn list(root: &Path) -> rustix::io::Result<(OwnedFd, Vec<String>)> {
    let directory = openat(
        CWD,
        root,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let names = file::names(directory.as_fd())?;
    Ok((directory, names))
}

fn complaint(path: &Path, problem: String, fix: &str) -> Diagnostic {
    let origin = SourceLocation {
        file: path.to_string_lossy().into(),
        line: 1,
        column: 1,
    };
    Diagnostic {
        severity: Severity::Error,
        code: Code::UnreadableSource,
        origin: Some(origin),
        object: None,
        field: String::new(),
        problem,
        fix: fix.to_owned(),
    }
}

fn retention_warning(path: &Path, objects: usize) -> Diagnostic {
    let problem = format!("the file is broken, so its last good {objects} objects stay in force");
    Diagnostic {
        severity: Severity::Warning,
        code: Code::StaleObjects,
        ..complaint(path, problem, "fix the errors above")
    }
}
