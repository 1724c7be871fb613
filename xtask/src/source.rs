//! Rules on Rust and C sources: first line, sizes, places of unsafe code, dead files, ignored
//! tests, and words that names may not contain.

use std::collections::BTreeSet;

use syn::spanned::Spanned;
use syn::visit::Visit;

use crate::tree::SourceTree;

/// Maximum lines of a file, which a reader can still survey. The number was chosen.
const FILE_LINES_MAX: usize = 1_000;
/// Maximum lines of a function, a screen and a half. The number was chosen.
const FUNCTION_LINES_MAX: usize = 90;
/// Path prefixes under which `unsafe` is allowed. All other crates forbid it.
const UNSAFE_PATHS: [&str; 5] = [
    "dataplane/abi/",
    "dataplane/offload/",
    "dataplane/net/src/sys",
    "runtime/allocator/",
    "world/src/sys",
];
/// Words that do not describe a concept.
const EMPTY_WORDS: [&str; 6] = ["util", "utils", "manager", "common", "helper", "misc"];

pub(crate) fn check(tree: &SourceTree, found: &mut Vec<String>) -> anyhow::Result<()> {
    for (path, text) in tree.with_suffix(".rs") {
        one_file(path, text, found);
    }
    for suffix in [".c", ".h"] {
        for (path, text) in tree.with_suffix(suffix) {
            size(path, text, found);
            if !text.starts_with("/*") && !text.starts_with("//") {
                found.push(format!("{path}:1: the first line says what the file does"));
            }
        }
    }
    dead_files(tree, found);
    test_programs(tree, found);
    Ok(())
}

fn size(path: &str, text: &str, found: &mut Vec<String>) {
    let n = text.lines().count();
    if n > FILE_LINES_MAX {
        found.push(format!("{path}: {n} lines, the limit is {FILE_LINES_MAX}"));
    }
}

fn one_file(path: &str, text: &str, found: &mut Vec<String>) {
    size(path, text, found);
    if !text.starts_with("//!") {
        found.push(format!("{path}:1: the first line of a module is `//!` and says what it does and what it does not"));
    }
    let stem = path
        .rsplit('/')
        .next()
        .unwrap_or(path)
        .trim_end_matches(".rs");
    if stem.split('_').any(|w| EMPTY_WORDS.contains(&w)) {
        found.push(format!("{path}: the name says nothing; name the thing"));
    }
    crate_root(path, text, found);
    match crate::ast::parse(text).as_ref() {
        Ok(ast) => SourceVisitor {
            path,
            findings: found,
            in_test: false,
        }
        .visit_file(ast),
        Err(e) => found.push(format!(
            "{path}:{}: does not parse: {e}",
            e.span().start().line
        )),
    }
}

fn crate_root(path: &str, text: &str, found: &mut Vec<String>) {
    let Some(krate) = path
        .strip_suffix("/src/lib.rs")
        .or_else(|| path.strip_suffix("/src/main.rs"))
    else {
        return;
    };
    // A crate with a module that may contain unsafe code cannot declare `forbid`.
    let has_room = UNSAFE_PATHS.iter().any(|room| {
        room.strip_prefix(krate)
            .is_some_and(|rest| rest.starts_with('/'))
    });
    if !has_room && !text.contains("#![forbid(unsafe_code)]") {
        found.push(format!(
            "{path}: add `#![forbid(unsafe_code)]`; unsafe lives in {}",
            UNSAFE_PATHS.join(", ")
        ));
    }
}

struct SourceVisitor<'a> {
    path: &'a str,
    findings: &'a mut Vec<String>,
    in_test: bool,
}

impl SourceVisitor<'_> {
    fn function(&mut self, sig: &syn::Signature, span: proc_macro2::Span) {
        let n = span.end().line - span.start().line + 1;
        let name = sig.ident.to_string();
        if n > FUNCTION_LINES_MAX {
            self.findings.push(format!(
                "{}:{}: fn {name} has {n} lines, the limit is {FUNCTION_LINES_MAX}",
                self.path,
                span.start().line
            ));
        }
        if name.split('_').any(|w| EMPTY_WORDS.contains(&w)) {
            self.findings.push(format!(
                "{}:{}: fn {name}: the name says nothing; name the thing",
                self.path,
                span.start().line
            ));
        }
    }
    fn unsafe_here(&mut self, line: usize) {
        if !UNSAFE_PATHS.iter().any(|r| self.path.starts_with(r)) {
            self.findings.push(format!(
                "{}:{line}: unsafe outside the files that may contain it ({})",
                self.path,
                UNSAFE_PATHS.join(", ")
            ));
        }
    }
    fn attributes(&mut self, attrs: &[syn::Attribute]) {
        for a in attrs {
            let line = a.span().start().line;
            if a.path().is_ident("ignore") {
                self.findings.push(format!(
                    "{}:{line}: an ignored test is no test: make it run or delete it",
                    self.path
                ));
            }
            let is_allow = a.path().is_ident("allow") || a.path().is_ident("expect");
            if is_allow
                && a.meta
                    .require_list()
                    .is_ok_and(|l| !l.tokens.to_string().contains("reason"))
            {
                self.findings.push(format!(
                    "{}:{line}: `allow` needs `reason = \"…\"`",
                    self.path
                ));
            }
        }
    }
}

impl<'ast> Visit<'ast> for SourceVisitor<'_> {
    fn visit_item_fn(&mut self, f: &'ast syn::ItemFn) {
        self.function(&f.sig, f.span());
        if f.sig.unsafety.is_some() {
            self.unsafe_here(f.span().start().line);
        }
        syn::visit::visit_item_fn(self, f);
    }
    fn visit_impl_item_fn(&mut self, f: &'ast syn::ImplItemFn) {
        self.function(&f.sig, f.span());
        syn::visit::visit_impl_item_fn(self, f);
    }
    fn visit_trait_item_fn(&mut self, f: &'ast syn::TraitItemFn) {
        self.function(&f.sig, f.span());
        syn::visit::visit_trait_item_fn(self, f);
    }
    fn visit_expr_unsafe(&mut self, e: &'ast syn::ExprUnsafe) {
        self.unsafe_here(e.span().start().line);
        syn::visit::visit_expr_unsafe(self, e);
    }
    fn visit_attribute(&mut self, a: &'ast syn::Attribute) {
        self.attributes(std::slice::from_ref(a));
    }
    fn visit_item_struct(&mut self, s: &'ast syn::ItemStruct) {
        let name = s.ident.to_string().to_lowercase();
        if EMPTY_WORDS.iter().any(|w| name.ends_with(w)) {
            self.findings.push(format!(
                "{}:{}: struct {}: the name says nothing; name the thing",
                self.path,
                s.span().start().line,
                s.ident
            ));
        }
        syn::visit::visit_item_struct(self, s);
    }
    fn visit_item_mod(&mut self, m: &'ast syn::ItemMod) {
        let was = self.in_test;
        self.in_test |= m.ident == "tests";
        syn::visit::visit_item_mod(self, m);
        self.in_test = was;
    }
}

/// Reports every `.rs` file that no `mod` names, because it is never compiled.
fn dead_files(tree: &SourceTree, found: &mut Vec<String>) {
    let mut named: BTreeSet<String> = BTreeSet::new();
    for (path, text) in tree.with_suffix(".rs") {
        let parsed = crate::ast::parse(text);
        let Ok(ast) = parsed.as_ref() else { continue };
        let file = path.rsplit('/').next().unwrap_or(path);
        let dir = path.strip_suffix(file).unwrap_or_default();
        let is_root = ["lib.rs", "main.rs", "mod.rs"].contains(&file) || is_target(tree, path);
        let base = if is_root {
            dir.to_string()
        } else {
            format!("{}/", path.trim_end_matches(".rs"))
        };
        mods(&ast.items, &base, dir, &mut named);
    }
    for (path, _) in tree.with_suffix(".rs") {
        let file = path.rsplit('/').next().unwrap_or(path);
        let root = ["lib.rs", "main.rs"].contains(&file) || is_target(tree, path);
        if !root && !named.contains(path) {
            found.push(format!(
                "{path}: no `mod` names this file; delete it or name it"
            ));
        }
    }
}

/// Reports crates with several programs of integration tests, because each program is linked
/// separately.
fn test_programs(tree: &SourceTree, found: &mut Vec<String>) {
    for (manifest, text) in tree
        .with_suffix("Cargo.toml")
        .filter(|(_, text)| !has_named_tests(text))
    {
        let tests = format!("{}tests/", manifest.trim_end_matches("Cargo.toml"));
        let files = tree
            .with_suffix(".rs")
            .filter(|(path, _)| {
                path.strip_prefix(&tests)
                    .is_some_and(|file| !file.contains('/'))
            })
            .count();
        if files > 1 && text.contains("[package]") {
            found.push(format!("{manifest}: {files} test programs; name the files in tests/suite.rs, and `autotests = false`"));
        }
    }
}

/// Returns whether the manifest names its test programs, so that cargo searches for no others.
fn has_named_tests(manifest: &str) -> bool {
    manifest.lines().any(|line| line == "autotests = false")
}

/// Returns whether cargo finds the file by its path (`build.rs`, `tests/x.rs`, `benches/x.rs`,
/// `examples/x.rs`, `src/bin/x.rs`) or by the manifest.
fn is_target(tree: &SourceTree, path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').collect();
    let n = parts.len();
    if n >= 2 && parts[n - 2] == "tests" && !parts.contains(&"src") {
        let manifest = tree
            .files
            .get(&[&parts[..n - 2], &["Cargo.toml"]].concat().join("/"));
        if let Some(text) = manifest.filter(|text| has_named_tests(text)) {
            return text.contains(&format!("path = \"tests/{}\"", parts[n - 1]));
        }
    }
    if parts[n - 1] == "build.rs" && !parts.contains(&"src") {
        return true;
    }
    n >= 2
        && (["tests", "benches", "examples"].contains(&parts[n - 2]) && !parts.contains(&"src")
            || n >= 3 && parts[n - 2] == "bin" && parts[n - 3] == "src")
}

fn mods(items: &[syn::Item], base: &str, dir: &str, named: &mut BTreeSet<String>) {
    for item in items {
        let syn::Item::Mod(m) = item else { continue };
        let name = m.ident.to_string();
        let at = m
            .attrs
            .iter()
            .find(|a| a.path().is_ident("path"))
            .and_then(|a| match &a.meta {
                syn::Meta::NameValue(nv) => match &nv.value {
                    syn::Expr::Lit(syn::ExprLit {
                        lit: syn::Lit::Str(s),
                        ..
                    }) => Some(s.value()),
                    _ => None,
                },
                _ => None,
            });
        match (&m.content, at) {
            (Some((_, inner)), _) => mods(inner, &format!("{base}{name}/"), dir, named),
            (None, Some(p)) => {
                named.insert(format!("{dir}{p}"));
            }
            (None, None) => {
                named.insert(format!("{base}{name}.rs"));
                named.insert(format!("{base}{name}/mod.rs"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> SourceTree {
        SourceTree {
            root: "/".into(),
            files: files
                .iter()
                .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
                .collect(),
        }
    }

    #[test]
    fn long_files_and_functions_are_found() {
        let long = format!(
            "//! A\nfn long() {{\n{}}}\n",
            "    a();\n".repeat(FUNCTION_LINES_MAX)
        );
        let large = format!("//! A\n{}", "// b\n".repeat(FILE_LINES_MAX));
        let mut found = Vec::new();
        one_file("a/long.rs", &long, &mut found);
        one_file("a/large.rs", &large, &mut found);
        assert_eq!(
            found,
            [
                "a/long.rs:2: fn long has 92 lines, the limit is 90",
                "a/large.rs: 1001 lines, the limit is 1000"
            ]
        );
    }

    #[test]
    fn test_file_that_no_suite_names_is_dead() {
        let named =
            "[package]\nautotests = false\n[[test]]\nname = \"suite\"\npath = \"tests/suite.rs\"\n";
        let check_all = |suite: &str| {
            let mut found = Vec::new();
            dead_files(
                &tree(&[
                    ("a/Cargo.toml", named),
                    ("a/tests/suite.rs", suite),
                    ("a/tests/x.rs", ""),
                ]),
                &mut found,
            );
            found
        };
        assert_eq!(check_all("mod x;"), Vec::<String>::new());
        assert_eq!(
            check_all(""),
            ["a/tests/x.rs: no `mod` names this file; delete it or name it"]
        );
    }

    #[test]
    fn crate_with_two_test_programs_is_found() {
        let check_all = |manifest: &str| {
            let mut found = Vec::new();
            test_programs(
                &tree(&[
                    ("a/Cargo.toml", manifest),
                    ("a/tests/x.rs", ""),
                    ("a/tests/y.rs", ""),
                ]),
                &mut found,
            );
            found.len()
        };
        assert_eq!(
            (
                check_all("[package]\n"),
                check_all("[package]\nautotests = false\n"),
                check_all("[workspace]\n")
            ),
            (1, 0, 0)
        );
    }
}
