//! Rules on names: an exported type name stands for one type in the whole workspace, a package has the name of its folder, and no file or
//! type has a meaningless name. The rules do not know what a name means; `docs/glossary.md` defines that.

use std::collections::BTreeMap;

use syn::visit::Visit;

use crate::tree::SourceTree;

/// Types of `model/src/policy` have the names of the API objects that they mirror; code that needs both kinds writes `policy::Service`.
const MIRRORS: &str = "model/src/policy/";
/// Names that may be defined more than once: private parts of a type, and the command line of a binary.
const SHARED_NAMES: [&str; 2] = ["Inner", "Flags"];
/// Maximum number of repeated type names per thousand, private ones included.
const REPEATED_PER_MILLE_MAX: usize = 20;
/// Words that no file, folder or type may have as its name: participles and everyday objects, which
/// do not describe a concept.
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
    for (path, text) in tree.with_suffix(".rs") {
        check_path(path, found);
        // The rules on sources report a file that does not parse.
        if let Ok(ast) = crate::ast::parse(text).as_ref() {
            TypeVisitor {
                path,
                types: &mut types,
            }
            .visit_file(ast);
        }
    }
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
        if EMPTY_NAMES.contains(&name.to_lowercase().as_str()) {
            let first = &definitions[0];
            found.push(format!(
                "{}:{}: `{name}` is no noun that says what the value is, see docs/glossary.md",
                first.path, first.line
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

/// Packages are named as their folders: `canal-NAME`, `canal-bench-NAME` below `bench`, or the folder's own name.
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

struct TypeVisitor<'a> {
    path: &'a str,
    types: &'a mut BTreeMap<String, Vec<Definition>>,
}

impl TypeVisitor<'_> {
    fn add(&mut self, name: &syn::Ident, visibility: &syn::Visibility) {
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
}

impl<'ast> Visit<'ast> for TypeVisitor<'_> {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add(&item.ident, &item.vis);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add(&item.ident, &item.vis);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.add(&item.ident, &item.vis);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.add(&item.ident, &item.vis);
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.add(&item.ident, &item.vis);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let files = files
            .iter()
            .map(|(path, text)| (path.to_string(), text.to_string()))
            .collect();
        let tree = SourceTree {
            root: std::path::PathBuf::new(),
            files,
        };
        let mut found = Vec::new();
        check(&tree, &mut found);
        found
    }

    #[test]
    fn an_exported_type_name_stands_for_one_type() {
        let twice = [
            ("a/src/lib.rs", "pub struct Permit;"),
            ("b/src/lib.rs", "pub(crate) enum Permit {}"),
        ];
        assert!(
            found(&twice)[0]
                .starts_with("b/src/lib.rs:1: `Permit` is exported by a/src/lib.rs:1 too"),
            "{:?}",
            found(&twice)
        );
        let mirror = [
            ("model/src/policy/canal.rs", "pub struct Tenant;"),
            ("model/src/program.rs", "pub struct Tenant;"),
        ];
        assert!(
            found(&mirror).iter().all(|f| !f.contains("exported")),
            "{:?}",
            found(&mirror)
        );
    }

    #[test]
    fn meaningless_names_are_found() {
        assert!(found(&[("a/src/held.rs", "")])[0].contains("`held` says nothing"));
        assert!(found(&[("a/tests/rig/mod.rs", "")])[0].contains("`rig` says nothing"));
        assert!(found(&[("a/src/lib.rs", "struct Seen;")])[0].contains("`Seen` is no noun"));
    }

    #[test]
    fn packages_are_named_as_their_folders() {
        let manifest = |name: &str| format!("[package]\nname = \"{name}\"\n");
        assert_eq!(
            found(&[("control/hub/Cargo.toml", &manifest("canal-hub"))]),
            Vec::<String>::new()
        );
        assert_eq!(
            found(&[("bench/keys/Cargo.toml", &manifest("canal-bench-keys"))]),
            Vec::<String>::new()
        );
        assert!(
            found(&[("control/hub/Cargo.toml", &manifest("canal-core"))])[0]
                .contains("call it canal-hub")
        );
    }
}
