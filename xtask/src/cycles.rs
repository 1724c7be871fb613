//! No import cycles between the modules of a data-plane crate: a module is a file of `src` with the folder of its name. What tests import does
//! not count, nor what is reached by names that the crate's root hands on.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::Visit;

use crate::tree::Tree;

/// Modules of a crate that may import each other, and why. The list may only shrink: one that is not needed is found too.
const EXCUSED: [(&str, &[&str], &str); 1] = [(
    "dataplane/kit",
    &["certs", "keys", "tls"],
    "an identity of `tls` has its handshakes made by key servers (`keys`), whose channels are TLS with certificates of `certs`: \
     parted, callers would have to know where a key is",
)];

/// Who imports whom, and in which file that was seen first.
type Imports = BTreeMap<String, BTreeMap<String, String>>;

pub(crate) fn check(tree: &Tree, found: &mut Vec<String>) {
    let roots = tree.with_suffix("/src/lib.rs").filter_map(|(path, _)| path.strip_suffix("/src/lib.rs"));
    for krate in roots.filter(|krate| krate.starts_with("dataplane/")) {
        let files = tree.with_suffix(".rs").filter_map(|(path, text)| Some((path.strip_prefix(krate)?.strip_prefix("/src/")?, text)));
        judge(krate, &imports(files), found);
    }
}

fn judge(krate: &str, all: &Imports, found: &mut Vec<String>) {
    let mut rest = all.clone();
    for (_, set, _) in EXCUSED.iter().filter(|(of, ..)| *of == krate) {
        let inside = |a: &str, b: &str| set.contains(&a) && set.contains(&b);
        let among = all.iter().filter(|(a, _)| set.contains(&a.as_str()));
        if circle(among.map(|(a, to)| (a.clone(), to.clone())).collect()).is_none() {
            found.push(format!("xtask/src/cycles.rs: {krate}: {} need no excuse any more; take it out", set.join(", ")));
        }
        rest.iter_mut().for_each(|(a, to)| to.retain(|b, _| !inside(a, b)));
    }
    if let Some(circle) = circle(rest) {
        let steps = circle.iter().zip(circle.iter().cycle().skip(1)).map(|(a, b)| format!("{a} → {b} ({krate}/src/{})", all[a][b]));
        found.push(format!("{krate}: modules import each other in a circle: {}", steps.collect::<Vec<_>>().join(", ")));
    }
}

/// Modules of which each imports the next, and the last one the first.
fn circle(mut all: Imports) -> Option<Vec<String>> {
    // Who imports nobody is in no circle, and then nor is who imports only those.
    while let Some(end) = all.iter().find(|(_, to)| to.keys().all(|m| !all.contains_key(m))).map(|(m, _)| m.clone()) {
        all.remove(&end);
    }
    let mut road = vec![all.keys().next()?.clone()];
    loop {
        let next = all.get(road.last()?)?.keys().find(|m| all.contains_key(*m))?;
        match road.iter().position(|m| m == next) {
            Some(from) => return Some(road.split_off(from)),
            None => road.push(next.clone()),
        }
    }
}

/// The imports between the modules of a crate, from its sources by their paths in `src`.
fn imports<'a>(sources: impl Iterator<Item = (&'a str, &'a str)>) -> Imports {
    let sources: Vec<_> = sources.filter(|(path, _)| *path != "lib.rs" && !path.split(['/', '.']).any(|part| part == "tests")).collect();
    let module = |path: &str| path.split(['/', '.']).next().unwrap_or_default().to_string();
    let known: BTreeSet<String> = sources.iter().map(|(path, _)| module(path)).collect();
    let mut all = Imports::new();
    for (path, text) in sources {
        let Ok(ast) = syn::parse_file(text) else { continue };
        let mut seen = Seen { depth: path.split('/').filter(|part| *part != "mod.rs").count(), names: BTreeSet::new() };
        seen.visit_file(&ast);
        let of = all.entry(module(path)).or_default();
        for name in seen.names.into_iter().filter(|name| known.contains(name) && *name != module(path)) {
            of.entry(name).or_insert_with(|| path.to_string());
        }
    }
    all
}

/// Names that follow the crate's root in paths.
struct Seen {
    /// How many `super` lead to the root.
    depth: usize,
    names: BTreeSet<String>,
}

impl Seen {
    /// A path from its first part on; of a `use` each of its leaves.
    fn path(&mut self, parts: &[String]) {
        let supers = parts.iter().take_while(|part| *part == "super").count();
        let from_root = if parts.first().is_some_and(|part| part == "crate") { 1 } else { supers };
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
            syn::UseTree::Name(syn::UseName { ident }) | syn::UseTree::Rename(syn::UseRename { ident, .. }) => self.path(&with(ident)),
            syn::UseTree::Glob(_) => self.path(before),
            syn::UseTree::Group(group) => group.items.iter().for_each(|item| self.leaves(item, before)),
        }
    }
}

impl<'ast> Visit<'ast> for Seen {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.leaves(&item.tree, &[]);
    }
    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.path(&path.segments.iter().map(|segment| segment.ident.to_string()).collect::<Vec<_>>());
        syn::visit::visit_path(self, path);
    }
    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        // What a macro makes of its words is not known, but a path in them stays one.
        for after in call.tokens.to_string().split("crate :: ").skip(1) {
            self.names.extend(after.split(|c: char| !c.is_alphanumeric() && c != '_').next().map(String::from));
        }
    }
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        let is_test = |a: &syn::Attribute| a.path().is_ident("cfg") && a.meta.require_list().is_ok_and(|l| l.tokens.to_string() == "test");
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
            (&[("a.rs", "use crate::b::B;"), ("b.rs", "struct B;")][..], None),
            (&[("a.rs", "use crate::b::B;"), ("b.rs", "use crate::{c::C, Root};"), ("c.rs", "fn f() -> crate::a::A {}")], Some("a b c")),
            (&[("a.rs", "mod c;"), ("a/c.rs", "use super::super::b;"), ("b.rs", "fn f() { j!(x: crate::a::f()); }")], Some("a b")),
            (&[("a.rs", "mod c; use c::C;"), ("a/c.rs", "use super::A;"), ("b.rs", "use super::a;")], None),
            (&[("a.rs", "use crate::b;"), ("b.rs", "#[cfg(test)] mod tests { use crate::a; }"), ("b/tests.rs", "use crate::a;")], None),
        ] {
            let all = imports(sources.iter().copied());
            assert_eq!(circle(all).map(|road| road.join(" ")).as_deref(), want, "{sources:?}");
        }
    }
}
