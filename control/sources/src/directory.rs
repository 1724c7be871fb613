//! A directory of YAML per tenant, `<root>/<tenant>/*.yaml`, as it is now and as it was last good. Does not wait for changes.
//!
//! A file that is broken keeps the objects it had when it was last good, and nobody else is touched. A file that never was good
//! gives what can be read of it; its faults make the compiler fail closed.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use canal_model::diagnostic::{Diagnostic, Origin, Severity};
use canal_model::ids::TenantName;
use canal_model::policy::Document;
use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::file::{self, Content, Opened, Stamp, Unreadable};
use crate::limits::{FILES_PER_TENANT_MAX, TENANT_BYTES_MAX, TENANTS_MAX};
use crate::read::parse;

/// Everything one tenant's directory says now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantFiles {
    pub tenant: TenantName,
    /// The complete set, sorted by file; empty when the directory is gone.
    pub documents: Vec<Arc<Document>>,
    pub diagnostics: Vec<Diagnostic>,
}

/// What a look at the directory brought.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Scan {
    /// The tenants whose set or diagnostics differ from the last scan's; all of them on the first.
    pub changed: Vec<TenantFiles>,
    /// What is wrong with the directory itself: the complete list as of now.
    pub diagnostics: Vec<Diagnostic>,
    /// Files were being written; look again soon.
    pub(crate) is_moving: bool,
}

/// What a watcher knows about files by tenant and name.
#[derive(Debug, Default)]
pub(crate) struct Hints {
    /// Read again even if nothing but their content changed.
    pub(crate) touched: BTreeSet<(String, String)>,
    /// Being written; left as they are.
    pub(crate) busy: BTreeSet<(String, String)>,
}

/// The state of all tenants' files.
#[derive(Debug)]
pub struct Directory {
    root: PathBuf,
    tenants: BTreeMap<TenantName, Tenant>,
}

/// One tenant's files by name.
#[derive(Debug, Default)]
struct Tenant {
    files: BTreeMap<String, FileState>,
    /// What is wrong with the directory as a whole.
    diagnostics: Vec<Diagnostic>,
}

/// One file as last read.
#[derive(Debug, Default)]
struct FileState {
    stamp: Option<Stamp>,
    bytes: usize,
    was_good: bool,
    documents: Vec<Arc<Document>>,
    diagnostics: Vec<Diagnostic>,
}

impl Directory {
    /// Nothing is read yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), tenants: BTreeMap::new() }
    }

    /// Looks at all files again and reads those that changed.
    pub fn scan(&mut self) -> Scan {
        self.scan_with(&Hints::default())
    }

    pub(crate) fn scan_with(&mut self, hints: &Hints) -> Scan {
        let mut scan = Scan::default();
        let (root, names) = match list(&self.root) {
            Ok(found) => found,
            Err(error) => {
                // Nothing is taken away: a lost mount must not take the mesh down.
                let problem = format!("the configuration directory cannot be read: {error}; what was read before stays in force");
                scan.diagnostics.push(complaint(&self.root, problem, "make it a directory that the controller may read"));
                return scan;
            }
        };
        let present = self.present(names, &mut scan.diagnostics);
        let gone: Vec<TenantName> = self.tenants.keys().filter(|name| !present.contains(*name)).cloned().collect();
        for tenant in gone {
            self.tenants.remove(&tenant);
            scan.changed.push(TenantFiles { tenant, documents: Vec::new(), diagnostics: Vec::new() });
        }
        for name in present {
            let path = self.root.join(name.as_str());
            let is_new = !self.tenants.contains_key(&name);
            let tenant = self.tenants.entry(name.clone()).or_default();
            let mut visit = Visit { path: &path, tenant: &name, hints, changed: is_new, is_moving: false };
            tenant.visit(root.as_fd(), &mut visit);
            scan.is_moving |= visit.is_moving;
            if visit.changed {
                scan.changed.push(tenant.files(name));
            }
        }
        scan
    }

    /// The tenants that have a directory.
    fn present(&self, names: Vec<String>, diagnostics: &mut Vec<Diagnostic>) -> BTreeSet<TenantName> {
        let mut present = BTreeSet::new();
        let mut newcomers = Vec::new();
        for name in names {
            let path = self.root.join(&name);
            if !path.is_dir() {
                diagnostics.push(complaint(
                    &path,
                    "only tenants' directories are read here".to_owned(),
                    "move the file into a tenant's directory",
                ));
                continue;
            }
            match TenantName::new(&name) {
                Ok(tenant) if self.tenants.contains_key(&tenant) => drop(present.insert(tenant)),
                Ok(tenant) => newcomers.push(tenant),
                Err(error) => diagnostics.push(complaint(&path, error.to_string(), "rename the directory to the tenant's name")),
            }
        }
        let room = TENANTS_MAX.saturating_sub(present.len());
        if newcomers.len() > room {
            let problem = format!("there are more than {TENANTS_MAX} tenants; {} are left out", newcomers.len() - room);
            diagnostics.push(complaint(&self.root, problem, "use several controllers"));
        }
        present.extend(newcomers.into_iter().take(room));
        present
    }
}

/// One look at one tenant.
struct Visit<'a> {
    path: &'a Path,
    tenant: &'a TenantName,
    hints: &'a Hints,
    changed: bool,
    is_moving: bool,
}

impl Visit<'_> {
    fn is_in(&self, set: &BTreeSet<(String, String)>, file: &str) -> bool {
        !set.is_empty() && set.contains(&(self.tenant.to_string(), file.to_owned()))
    }
}

impl Tenant {
    fn visit(&mut self, root: BorrowedFd<'_>, visit: &mut Visit<'_>) {
        let mut diagnostics = Vec::new();
        let listed = file::open_directory(root, visit.tenant.as_str()).and_then(|directory| {
            let names = file::names(directory.as_fd())?;
            Ok((directory, names))
        });
        match listed {
            Err(error) => {
                let problem = format!("the tenant's directory cannot be read: {error}; what was read before stays in force");
                diagnostics.push(complaint(visit.path, problem, "make it a directory of its own that the controller may read"));
            }
            Ok((directory, names)) => {
                let names = self.admitted(names, visit, &mut diagnostics);
                let before = self.files.len();
                self.files.retain(|name, _| names.contains(name));
                visit.changed |= self.files.len() != before;
                for name in &names {
                    self.look(directory.as_fd(), name, visit);
                }
            }
        }
        visit.changed |= self.diagnostics != diagnostics;
        self.diagnostics = diagnostics;
    }

    /// The YAML files that are read; of too many, those that were read before.
    fn admitted(&self, names: Vec<String>, visit: &Visit<'_>, diagnostics: &mut Vec<Diagnostic>) -> BTreeSet<String> {
        let is_yaml = |name: &String| name.ends_with(".yaml") || name.ends_with(".yml");
        let (known, new): (Vec<String>, Vec<String>) = names.into_iter().filter(is_yaml).partition(|name| self.files.contains_key(name));
        let room = FILES_PER_TENANT_MAX.saturating_sub(known.len());
        if new.len() > room {
            let problem =
                format!("the tenant has more than {FILES_PER_TENANT_MAX} files; {} are left out, {} first", new.len() - room, new[room]);
            diagnostics.push(complaint(visit.path, problem, "put several documents into one file"));
        }
        known.into_iter().chain(new.into_iter().take(room)).collect()
    }

    /// Reads one file if it changed.
    fn look(&mut self, directory: BorrowedFd<'_>, name: &str, visit: &mut Visit<'_>) {
        if visit.is_in(&visit.hints.busy, name) {
            visit.is_moving = true;
            return;
        }
        let others: usize = self.files.iter().filter(|(other, _)| *other != name).map(|(_, state)| state.bytes).sum();
        let path = visit.path.join(name);
        let opened = file::open_file(directory, name);
        let stamp = opened.as_ref().ok().map(|opened| opened.stamp);
        let is_known = self.files.contains_key(name);
        let state = self.files.entry(name.to_owned()).or_default();
        if is_known && stamp.is_some() && state.stamp == stamp && !visit.is_in(&visit.hints.touched, name) {
            return;
        }
        match opened.map(|mut opened: Opened| file::read(&mut opened)) {
            Ok(Content::Moving) => visit.is_moving = true,
            Ok(Content::Text(text)) if others + text.len() > TENANT_BYTES_MAX => {
                let problem = format!("with this file the tenant's files have more than {TENANT_BYTES_MAX} bytes");
                visit.changed |= state.refuse(&path, stamp, &Unreadable { problem, mend: "remove what is not needed" });
            }
            Ok(Content::Text(text)) => visit.changed |= state.take(&path, stamp, &text),
            Ok(Content::Refused(why)) | Err(why) => visit.changed |= state.refuse(&path, stamp, &why),
        }
    }

    fn files(&self, tenant: TenantName) -> TenantFiles {
        let documents = self.files.values().flat_map(|file| file.documents.iter().cloned()).collect();
        let of_files = self.files.values().flat_map(|file| &file.diagnostics);
        TenantFiles { tenant, documents, diagnostics: self.diagnostics.iter().chain(of_files).cloned().collect() }
    }
}

impl FileState {
    /// Takes a new text; true if it says something else than before.
    fn take(&mut self, path: &Path, stamp: Option<Stamp>, text: &str) -> bool {
        let parsed = parse(&path.to_string_lossy(), text);
        self.stamp = stamp;
        self.bytes = text.len();
        let is_clean = parsed.is_clean();
        let mut diagnostics = parsed.diagnostics;
        let documents: Vec<Arc<Document>> = if is_clean || !self.was_good {
            parsed.documents.into_iter().map(Arc::new).collect()
        } else {
            diagnostics.push(kept(path, self.documents.len()));
            self.documents.clone()
        };
        self.was_good |= is_clean;
        // What did not change keeps its allocation, so that whoever holds the old set shares it.
        let documents = share(&self.documents, documents);
        let changed = self.documents != documents || self.diagnostics != diagnostics;
        self.documents = documents;
        self.diagnostics = diagnostics;
        changed
    }

    /// The file cannot be read; what it said before stays.
    fn refuse(&mut self, path: &Path, stamp: Option<Stamp>, why: &Unreadable) -> bool {
        let mut diagnostics = vec![complaint(path, why.problem.clone(), why.mend)];
        if self.was_good {
            diagnostics.push(kept(path, self.documents.len()));
        }
        self.stamp = stamp;
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
    let directory = openat(CWD, root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let names = file::names(directory.as_fd())?;
    Ok((directory, names))
}

fn complaint(path: &Path, problem: String, mend: &str) -> Diagnostic {
    let origin = Origin { file: path.to_string_lossy().into(), line: 1, column: 1 };
    Diagnostic { severity: Severity::Error, origin: Some(origin), object: None, field: String::new(), problem, mend: mend.to_owned() }
}

fn kept(path: &Path, objects: usize) -> Diagnostic {
    let problem = format!("the file is broken, so its last good {objects} objects stay in force");
    Diagnostic { severity: Severity::Warning, ..complaint(path, problem, "mend the errors above") }
}
