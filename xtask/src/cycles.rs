//! Rule on modules: those of a crate have no import cycles. A module is a file of `src` with the
//! folder of its name. Imports of tests do not count, nor imports through names that the crate's
//! root re-exports.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::Visit;

use crate::tree::SourceTree;

/// Modules of a crate that still import each other. The list may only shrink: an entry that is not
/// needed is reported too.
const EXCUSED: [(&str, &[&str]); 11] = [
    (
        "apps/canal",
        &["bundled_topology", "cli", "demo", "verbs", "view"],
    ),
    ("bench/keys", &["figures", "tables"]),
    ("compiler/ir", &["direct", "ir", "lower"]),
    ("compiler/ir", &["text", "text_security"]),
    ("control/ca", &["files", "revocation"]),
    ("control/store", &["database", "fleet", "trust"]),
    ("model", &["authorization", "program"]),
    ("model", &["diagnostic", "policy"]),
    (
        "world",
        &["check", "plan", "read", "services", "tier", "topology"],
    ),
    (
        "world",
        &[
            "control",
            "host_environment",
            "launch",
            "net",
            "probe",
            "process_supervisor",
            "relay",
            "tool_batch",
            "vswitch",
        ],
    ),
    ("yaml", &["scalar", "tree"]),
];

/// The imports of each module, and the file where each import was found first.
type Imports = BTreeMap<String, BTreeMap<String, String>>;

pub(crate) fn check(tree: &SourceTree, found: &mut Vec<String>) {
    let root = |path: &'_ str| {
        ["/src/lib.rs", "/src/main.rs"]
            .iter()
            .find_map(|file| path.strip_suffix(file))
            .map(str::to_owned)
    };
    let roots: BTreeSet<String> = tree
        .with_suffix(".rs")
        .filter_map(|(path, _)| root(path))
        .collect();
    for krate in &roots {
        let files = tree.with_suffix(".rs").filter_map(|(path, text)| {
            Some((
                path.strip_prefix(krate.as_str())?.strip_prefix("/src/")?,
                text,
            ))
        });
        check_all(krate, &imports(files), found);
    }
}

fn check_all(krate: &str, all: &Imports, found: &mut Vec<String>) {
    let mut rest = all.clone();
    for (_, set) in EXCUSED.iter().filter(|(of, _)| *of == krate) {
        let inside = |a: &str, b: &str| set.contains(&a) && set.contains(&b);
        let among = all.iter().filter(|(a, _)| set.contains(&a.as_str()));
        if find_cycle(among.map(|(a, to)| (a.clone(), to.clone())).collect()).is_none() {
            found.push(format!(
                "xtask/src/cycles.rs: {krate}: {} need no excuse any more; take it out",
                set.join(", ")
            ));
        }
        rest.iter_mut()
            .for_each(|(a, to)| to.retain(|b, _| !inside(a, b)));
    }
    if let Some(circle) = find_cycle(rest) {
        let steps = circle
            .iter()
            .zip(circle.iter().cycle().skip(1))
            .map(|(a, b)| format!("{a} → {b} ({krate}/src/{})", all[a][b]));
        found.push(format!(
            "{krate}: modules import each other in a circle: {}",
            steps.collect::<Vec<_>>().join(", ")
        ));
    }
}

/// Returns a cycle: each module imports the next, and the last one imports the first.
fn find_cycle(mut all: Imports) -> Option<Vec<String>> {
    // A module that imports no other is in no cycle; remove such modules until none is left.
    while let Some(end) = all
        .iter()
        .find(|(_, to)| to.keys().all(|m| !all.contains_key(m)))
        .map(|(m, _)| m.clone())
    {
        all.remove(&end);
    }
    let mut path = vec![all.keys().next()?.clone()];
    loop {
        let next = all
            .get(path.last()?)?
            .keys()
            .find(|m| all.contains_key(*m))?;
        match path.iter().position(|m| m == next) {
            Some(from) => return Some(path.split_off(from)),
            None => path.push(next.clone()),
        }
    }
}

/// Collects the imports between the modules of a crate from its sources, by their paths in `src`.
fn imports<'a>(sources: impl Iterator<Item = (&'a str, &'a str)>) -> Imports {
    let sources: Vec<_> = sources
        .filter(|(path, _)| {
            !["lib.rs", "main.rs"].contains(path)
                && !path.split(['/', '.']).any(|part| part == "tests")
        })
        .collect();
    let module = |path: &str| {
        path.split(['/', '.'])
            .next()
            .unwrap_or_default()
            .to_string()
    };
    let known: BTreeSet<String> = sources.iter().map(|(path, _)| module(path)).collect();
    let mut all = Imports::new();
    for (path, text) in sources {
        let parsed = crate::ast::parse(text);
        let Ok(ast) = parsed.as_ref() else { continue };
        let mut seen = RootNames {
            depth: path.split('/').filter(|part| *part != "mod.rs").count(),
            names: BTreeSet::new(),
        };
        seen.visit_file(ast);
        let of = all.entry(module(path)).or_default();
        for name in seen
            .names
            .into_iter()
            .filter(|name| known.contains(name) && *name != module(path))
        {
            of.entry(name).or_insert_with(|| path.to_string());
        }
    }
    all
}

/// Names that follow the crate's root in paths.
struct RootNames {
    /// Number of `super` that lead to the root.
    depth: usize,
    names: BTreeSet<String>,
}

impl RootNames {
    /// Visits a path from its first part on, and each leaf of a `use`.
    fn path(&mut self, parts: &[String]) {
        let supers = parts.iter().take_while(|part| *part == "super").count();
        let from_root = if parts.first().is_some_and(|part| part == "crate") {
            1
        } else {
            supers
        };
        if (from_root == 1 && supers == 0 || from_root == self.depth)
            && let Some(name) = parts.get(from_root)
        {
            self.names.insert(name.clone());
        }
    }

    fn leaves(&mut self, tree: &syn::UseTree, before: &[String]) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            syn::UseTree::Path(path) => self.leaves(&path.tree, &with(&path.ident)),
            syn::UseTree::Name(syn::UseName { ident })
            | syn::UseTree::Rename(syn::UseRename { ident, .. }) => self.path(&with(ident)),
            syn::UseTree::Glob(_) => self.path(before),
            syn::UseTree::Group(group) => group
                .items
                .iter()
                .for_each(|item| self.leaves(item, before)),
        }
    }
}

impl<'ast> Visit<'ast> for RootNames {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.leaves(&item.tree, &[]);
    }
    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.path(
            &path
                .segments
                .iter()
                .map(|segment| segment.ident.to_string())
                .collect::<Vec<_>>(),
        );
        syn::visit::visit_path(self, path);
    }
    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        // The meaning of a macro's tokens is unknown, but a path in them is still a path.
        for after in call.tokens.to_string().split("crate :: ").skip(1) {
            self.names.extend(
                after
                    .split(|c: char| !c.is_alphanumeric() && c != '_')
                    .next()
                    .map(String::from),
            );
        }
    }
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        let is_test = |a: &syn::Attribute| {
            a.path().is_ident("cfg")
                && a.meta
                    .require_list()
                    .is_ok_and(|l| l.tokens.to_string() == "test")
        };
        if !module.attrs.iter().any(is_test) {
            self.depth += 1;
            syn::visit::visit_item_mod(self, module);
            self.depth -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn circles_are_found_and_named() {
        for (sources, want) in [
            (
                &[("a.rs", "use crate::b::B;"), ("b.rs", "struct B;")][..],
                None,
            ),
            (
                &[
                    ("a.rs", "use crate::b::B;"),
                    ("b.rs", "use crate::{c::C, Root};"),
                    ("c.rs", "fn f() -> crate::a::A {}"),
                ],
                Some("a b c"),
            ),
            (
                &[
                    // `super` of a file in a folder is the folder's module, and macros contain
                    // paths too.
                    ("a.rs", "mod c;"),
                    ("a/c.rs", "use super::super::b;"),
                    ("b.rs", "fn f() { j!(x: crate::a::f()); }"),
                ],
                Some("a b"),
            ),
            (
                // A module and its own submodule are one unit.
                &[
                    ("a.rs", "mod c; use c::C;"),
                    ("a/c.rs", "use super::A;"),
                    ("b.rs", "use super::a;"),
                ],
                None,
            ),
            (
                // Imports of tests are no cycle of the program.
                &[
                    ("a.rs", "use crate::b;"),
                    ("b.rs", "#[cfg(test)] mod tests { use crate::a; }"),
                    ("b/tests.rs", "use crate::a;"),
                ],
                None,
            ),
        ] {
            let all = imports(sources.iter().copied());
            assert_eq!(
                find_cycle(all).map(|cycle| cycle.join(" ")).as_deref(),
                want,
                "{sources:?}"
            );
        }
    }
}
