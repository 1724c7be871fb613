//! Rules on names: an exported type name stands for one type in the whole workspace, a package has
//! the name of its folder, and no file, type, function or field has a meaningless name. The rules
//! do not know what a name means; `docs/glossary.md` defines that.

use std::collections::BTreeMap;

use syn::visit::Visit;

use crate::tree::SourceTree;

/// Types of `model/src/policy` have the names of the API objects that they mirror; code that needs
/// both kinds writes `policy::Service`.
const MIRRORS: &str = "model/src/policy/";
/// Names that may be defined more than once: private parts of a type, and the command line of a
/// binary.
const SHARED_NAMES: [&str; 2] = ["Inner", "Flags"];
/// Maximum number of repeated type names per thousand, private ones included.
/// The number was chosen; `tidy` prints the present share.
const REPEATED_PER_MILLE_MAX: usize = 20;
/// Words that no file, folder, type, function or field may have as its whole name: participles and
/// everyday objects, which do not describe a concept. Local variables and enum variants are free.
const EMPTY_NAMES: [&str; 46] = [
    "kit", "held", "kept", "told", "said", "worn", "shaken", "fallen", "taken", "seen", "known",
    "found", "heard", "judged", "listed", "made", "asked", "ended", "opened", "shown", "door",
    "doors", "hall", "desk", "keeper", "room", "seat", "stage", "rig", "board", "place", "way",
    "look", "mend", "grudge", "stranger", "wish", "parting", "greet", "ear", "rim", "ship",
    "wanted", "given", "done", "measured",
];

/// One definition of a type.
struct Definition {
    path: String,
    line: usize,
    is_exported: bool,
}

pub(crate) fn check(tree: &SourceTree, found: &mut Vec<String>) {
    let mut types: BTreeMap<String, Vec<Definition>> = BTreeMap::new();
    let mut banned = Vec::new();
    for (path, text) in tree.with_suffix(".rs") {
        check_path(path, &mut banned);
        // The rules on sources report a file that does not parse.
        if let Ok(ast) = crate::ast::parse(text).as_ref() {
            NameVisitor {
                path,
                types: &mut types,
                banned: &mut banned,
            }
            .visit_file(ast);
        }
    }
    println!(
        "names: {} banned words are the name of a file, type, function or field",
        banned.len()
    );
    found.append(&mut banned);
    check_types(&types, found);
    check_packages(tree, found);
}

fn check_path(path: &str, found: &mut Vec<String>) {
    let names = path.trim_end_matches(".rs").split('/');
    if let Some(name) = names.into_iter().find(|name| EMPTY_NAMES.contains(name)) {
        found.push(format!(
            "{path}: `{name}` says nothing; name the file after its main type, see docs/glossary.md"
        ));
    }
}

fn check_types(types: &BTreeMap<String, Vec<Definition>>, found: &mut Vec<String>) {
    for (name, definitions) in types {
        let exported: Vec<&Definition> = definitions
            .iter()
            .filter(|d| d.is_exported && !d.path.starts_with(MIRRORS))
            .collect();
        if let [first, second, ..] = exported.as_slice()
            && !SHARED_NAMES.contains(&name.as_str())
        {
            found.push(format!(
                "{}:{}: `{name}` is exported by {}:{} too; give one of them another name",
                second.path, second.line, first.path, first.line
            ));
        }
    }
    let repeated = types
        .values()
        .filter(|definitions| definitions.len() > 1)
        .count();
    let share = 100.0 * repeated as f64 / types.len().max(1) as f64;
    println!(
        "names: {} type names, {repeated} of them ({share:.1} %) defined more than once",
        types.len()
    );
    if repeated * 1000 > types.len() * REPEATED_PER_MILLE_MAX {
        let names: Vec<&str> = types
            .iter()
            .filter(|(_, definitions)| definitions.len() > 1)
            .map(|(name, _)| name.as_str())
            .collect();
        found.push(format!(
            "more than {REPEATED_PER_MILLE_MAX} of 1,000 type names are defined more than once: {}",
            names.join(", ")
        ));
    }
}

/// Packages are named as their folders: `canal-NAME`, `canal-bench-NAME` below `bench`, or the
/// folder's own name.
fn check_packages(tree: &SourceTree, found: &mut Vec<String>) {
    for (path, text) in tree.with_suffix("/Cargo.toml") {
        let Some(folder) = path.strip_suffix("/Cargo.toml") else {
            continue;
        };
        let last = folder.rsplit('/').next().unwrap_or(folder);
        let Some(name) = text
            .lines()
            .find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))
        else {
            continue;
        };
        let prefix = if folder.starts_with("bench/") {
            "canal-bench-"
        } else {
            "canal-"
        };
        if name != last && name != format!("{prefix}{last}") {
            found.push(format!(
                "{path}: package {name} is in the folder {last}; call it {prefix}{last}"
            ));
        }
    }
}

struct NameVisitor<'a> {
    path: &'a str,
    types: &'a mut BTreeMap<String, Vec<Definition>>,
    /// Findings on names that are a banned word.
    banned: &'a mut Vec<String>,
}

impl NameVisitor<'_> {
    fn add(&mut self, name: &syn::Ident, visibility: &syn::Visibility) {
        self.check_name(name, "is not a noun that says what the value is");
        let is_exported = !matches!(visibility, syn::Visibility::Inherited);
        let definition = Definition {
            path: self.path.to_owned(),
            line: name.span().start().line,
            is_exported,
        };
        self.types
            .entry(name.to_string())
            .or_default()
            .push(definition);
    }

    fn check_name(&mut self, name: &syn::Ident, problem: &str) {
        if EMPTY_NAMES.contains(&name.to_string().to_lowercase().as_str()) {
            let line = name.span().start().line;
            self.banned.push(format!(
                "{}:{line}: `{name}` {problem}, see docs/glossary.md",
                self.path
            ));
        }
    }

    fn check_function(&mut self, signature: &syn::Signature) {
        let problem = "does not say what the function does to which object";
        self.check_name(&signature.ident, problem);
    }
}

impl<'ast> Visit<'ast> for NameVisitor<'_> {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add(&item.ident, &item.vis);
        syn::visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add(&item.ident, &item.vis);
        syn::visit::visit_item_enum(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.add(&item.ident, &item.vis);
        syn::visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.add(&item.ident, &item.vis);
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.add(&item.ident, &item.vis);
        syn::visit::visit_item_union(self, item);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.check_function(&item.sig);
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.check_function(&item.sig);
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.check_function(&item.sig);
        syn::visit::visit_trait_item_fn(self, item);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if let Some(name) = &field.ident {
            self.check_name(name, "is not a noun that says what the field contains");
        }
        syn::visit::visit_field(self, field);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(files: &[(&str, &str)]) -> Vec<String> {
        let files = files
            .iter()
            .map(|(path, text)| (path.to_string(), text.to_string()))
            .collect();
        let tree = SourceTree {
            root: std::path::PathBuf::new(),
            files,
        };
        let mut all = Vec::new();
        check(&tree, &mut all);
        all
    }

    #[test]
    fn an_exported_type_name_stands_for_one_type() {
        let twice = [
            ("a/src/lib.rs", "pub struct Permit;"),
            ("b/src/lib.rs", "pub(crate) enum Permit {}"),
        ];
        assert!(
            findings(&twice)[0]
                .starts_with("b/src/lib.rs:1: `Permit` is exported by a/src/lib.rs:1 too"),
            "{:?}",
            findings(&twice)
        );
        let mirror = [
            ("model/src/policy/canal.rs", "pub struct Tenant;"),
            ("model/src/program.rs", "pub struct Tenant;"),
        ];
        assert!(
            findings(&mirror).iter().all(|f| !f.contains("exported")),
            "{:?}",
            findings(&mirror)
        );
    }

    #[test]
    fn meaningless_names_are_found() {
        assert!(findings(&[("a/src/held.rs", "")])[0].contains("`held` says nothing"));
        assert!(findings(&[("a/tests/rig/mod.rs", "")])[0].contains("`rig` says nothing"));
        let source = |text| findings(&[("a/src/lib.rs", text)]);
        for (text, expected) in [
            ("struct Seen;", "a/src/lib.rs:1: `Seen` is not a noun"),
            ("fn held() {}", "`held` does not say what the function"),
            ("impl A { fn told(&self) {} }", "`told` does not say"),
            ("trait A { fn look(&self); }", "`look` does not say"),
            ("fn a() { fn place() {} }", "`place` does not say"),
            ("struct A { pub kept: u8 }", "`kept` is not a noun"),
            ("enum A { B { given: u8 } }", "`given` is not a noun"),
        ] {
            let all = source(text);
            assert!(all.len() == 1 && all[0].contains(expected), "{all:?}");
        }
        for text in [
            "fn a() { let held = 1; }",
            "struct A { seen_at: u8 }",
            "enum A { Kept }",
            "struct A(u8);",
            "fn place_pod(place: u8) {}",
        ] {
            assert_eq!(source(text), Vec::<String>::new(), "{text}");
        }
    }

    #[test]
    fn packages_are_named_as_their_folders() {
        let manifest = |name: &str| format!("[package]\nname = \"{name}\"\n");
        assert_eq!(
            findings(&[("control/hub/Cargo.toml", &manifest("canal-hub"))]),
            Vec::<String>::new()
        );
        assert_eq!(
            findings(&[("bench/keys/Cargo.toml", &manifest("canal-bench-keys"))]),
            Vec::<String>::new()
        );
        assert!(
            findings(&[("control/hub/Cargo.toml", &manifest("canal-core"))])[0]
                .contains("call it canal-hub")
        );
    }
}
