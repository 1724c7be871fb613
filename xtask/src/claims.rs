//! Rules on tests that documents name as `path::name`: each test exists, and each row of
//! docs/security.md names one or states that no test proves it. docs/features.md names tests of Gateway
//! API's conformance suite, which have passed in the last whole run.

use syn::visit::Visit;

use crate::tree::SourceTree;

/// Document with the tables of claims that this file checks.
const CLAIMS: &str = "docs/security.md";
/// Page whose tests are those of Gateway API's conformance suite, and the verdicts on them.
const FEATURES: &str = "docs/features.md";
const VERDICTS: &str = "tests/conformance/results.tsv";
/// Beginning of the cell of a claim that no test proves.
const UNPROVEN: &str = "not proven by a test:";

pub(crate) fn check(tree: &SourceTree, found: &mut Vec<String>) {
    for (path, text) in tree.with_suffix(".md") {
        names(tree, path, text, found);
    }
    if let Some(text) = tree.files.get(CLAIMS) {
        rows(text, found);
    }
    if let Some(text) = tree.files.get(FEATURES) {
        let verdicts = tree.files.get(VERDICTS).map_or("", |text| text);
        features(text, verdicts, found);
    }
}

/// Checks that each feature that is claimed names tests, and that each named test has passed.
fn features(text: &str, verdicts: &str, found: &mut Vec<String>) {
    let has_passed = |test: &str| verdicts.lines().any(|line| is_passed(line, test));
    for (n, line) in text.lines().enumerate() {
        let tests = line.split('`').skip(1).step_by(2);
        let mut named = tests
            .filter_map(|it| it.strip_prefix("conformance::"))
            .peekable();
        if line.contains(" | claimed | ") && named.peek().is_none() {
            found.push(format!(
                "{FEATURES}:{}: this feature names no test; run make test-compat",
                n + 1
            ));
        }
        for test in named.filter(|test| !has_passed(test)) {
            found.push(format!(
                "{FEATURES}:{}: {VERDICTS} has no passed test {test}; run make test-compat",
                n + 1
            ));
        }
    }
}

/// Returns whether a line of verdicts says that the test passed.
fn is_passed(line: &str, test: &str) -> bool {
    let mut cells = line.split('\t');
    cells.next() == Some(test) && cells.next() == Some("passed")
}

/// Checks every `path::name` in backticks whose path is that of a Rust source.
fn names(tree: &SourceTree, doc: &str, text: &str, found: &mut Vec<String>) {
    for (n, line) in text.lines().enumerate() {
        for word in line.split('`').skip(1).step_by(2) {
            let Some((path, name)) = test_name(word) else {
                continue;
            };
            match tree.files.get(path) {
                None => found.push(format!(
                    "{doc}:{}: `{word}`: there is no file {path}",
                    n + 1
                )),
                Some(source) if !has_test(source, name) => found.push(format!(
                    "{doc}:{}: `{word}`: {path} has no test {name}",
                    n + 1
                )),
                Some(_) => {}
            }
        }
    }
}

fn test_name(word: &str) -> Option<(&str, &str)> {
    let (path, name) = word.split_once("::")?;
    let is_name = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let is_source = path
        .strip_suffix(".rs")
        .is_some_and(|stem| !stem.is_empty());
    (is_source && path.contains('/') && is_name).then_some((path, name))
}

fn has_test(source: &str, name: &str) -> bool {
    let parsed = crate::ast::parse(source);
    let Ok(ast) = parsed.as_ref() else {
        return false;
    };
    let mut search = ClaimSearch {
        name,
        is_found: false,
    };
    search.visit_file(ast);
    search.is_found
}

struct ClaimSearch<'a> {
    name: &'a str,
    is_found: bool,
}

impl<'ast> Visit<'ast> for ClaimSearch<'_> {
    fn visit_item_fn(&mut self, f: &'ast syn::ItemFn) {
        let is_test = f
            .attrs
            .iter()
            .any(|a| a.path().segments.last().is_some_and(|s| s.ident == "test"));
        self.is_found |= is_test && f.sig.ident == self.name;
        syn::visit::visit_item_fn(self, f);
    }
    /// The tests inside `proptest!` are tokens, not items.
    fn visit_macro(&mut self, m: &'ast syn::Macro) {
        let is_proptest = m
            .path
            .segments
            .last()
            .is_some_and(|s| s.ident == "proptest");
        self.is_found |=
            is_proptest && m.tokens.to_string().contains(&format!("fn {} ", self.name));
        syn::visit::visit_macro(self, m);
    }
}

/// Checks that each row of a table with a column `test` names a test there, or states that there is
/// none.
fn rows(text: &str, found: &mut Vec<String>) {
    let mut column = None;
    for (n, line) in text.lines().enumerate() {
        if !line.starts_with('|') {
            column = None;
            continue;
        }
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let Some(at) = column else {
            column = cells
                .iter()
                .position(|cell| *cell == "test")
                .or(Some(usize::MAX));
            continue;
        };
        if at == usize::MAX || line.starts_with("|---") {
            continue;
        }
        let cell = cells.get(at).copied().unwrap_or_default();
        let is_named = cell
            .split('`')
            .skip(1)
            .step_by(2)
            .any(|word| test_name(word).is_some());
        if !is_named && !cell.starts_with(UNPROVEN) {
            found.push(format!(
                "{CLAIMS}:{}: this claim names no test; write `path::name`, or `{UNPROVEN} why`",
                n + 1
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_all(claims: &str) -> Vec<String> {
        let source = "//! x\n#[test]\nfn holds() {}\nfn no_test() {}\nproptest! { #[test] fn always(n in 0..3) {} }\nmod t { #[tokio::test] async fn inner() {} }\n";
        let files = [("a/x.rs", source), (CLAIMS, claims)];
        let tree = SourceTree {
            root: "/".into(),
            files: files
                .iter()
                .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
                .collect(),
        };
        let mut found = Vec::new();
        check(&tree, &mut found);
        found
    }

    #[test]
    fn named_test_exists_as_a_test() {
        assert_eq!(
            check_all("`a/x.rs::holds`, `a/x.rs::always`, `a/x.rs::inner`, `Kind::SECURITY`"),
            Vec::<String>::new()
        );
        assert_eq!(
            check_all("`a/x.rs::no_test`"),
            ["docs/security.md:1: `a/x.rs::no_test`: a/x.rs has no test no_test"]
        );
        assert_eq!(check_all("`a/x.rs::hold`").len(), 1);
        assert_eq!(
            check_all("`b/x.rs::holds`"),
            ["docs/security.md:1: `b/x.rs::holds`: there is no file b/x.rs"]
        );
    }

    #[test]
    fn claim_without_a_test_states_it() {
        let table = |cell: &str| {
            format!(
                "| claim | test |\n|---|---|\n| Nothing leaks. | {cell} |\n\n| asset | where |\n|---|---|\n| key | disk |\n"
            )
        };
        assert_eq!(check_all(&table("`a/x.rs::holds`")), Vec::<String>::new());
        assert_eq!(
            check_all(&table("not proven by a test: it is read")),
            Vec::<String>::new()
        );
        assert_eq!(check_all(&table("group `paths`")).len(), 1);
        assert_eq!(check_all(&table("")).len(), 1);
    }

    #[test]
    fn a_claimed_feature_names_tests_that_passed() {
        let verdicts = "A\tpassed\t\nB\tfailed\twhy\n";
        let page = "| X | claimed | `conformance::A` |\n| Y | claimed | `conformance::B` |\n\
            | Z | claimed |  |\n| W | not claimed: why |  |\n";
        let mut found = Vec::new();
        features(page, verdicts, &mut found);
        let expected = [
            "docs/features.md:2: tests/conformance/results.tsv has no passed test B; run make test-compat",
            "docs/features.md:3: this feature names no test; run make test-compat",
        ];
        assert_eq!(found, expected);
    }
}
