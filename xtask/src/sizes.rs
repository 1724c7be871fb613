//! Rule on the size of crates: the code of a crate, without blank lines and comments, has a limit.
//! It counts files of `src` only, with their unit tests; files and functions have their limits in
//! `source`.

use crate::tree::SourceTree;

/// Maximum number of lines of code in the `src` of a crate. A larger crate has more than one
/// subject.
/// The number was chosen.
const CRATE_LINES_MAX: usize = 12_500;

pub(crate) fn check(tree: &SourceTree, found: &mut Vec<String>) {
    let sizes = sizes(tree);
    if let Some((folder, lines)) = sizes.iter().max_by_key(|(_, lines)| *lines) {
        println!(
            "sizes: {} crates, the largest is {folder} with {lines} lines of code",
            sizes.len()
        );
    }
    for (folder, lines) in &sizes {
        if *lines > CRATE_LINES_MAX {
            found.push(format!("{folder}: {lines} lines of code, the limit is {CRATE_LINES_MAX}; give a subject its own crate"));
        }
    }
}

/// Returns the lines of code of each crate by its folder.
fn sizes(tree: &SourceTree) -> Vec<(&str, usize)> {
    let folders = tree
        .with_suffix("/Cargo.toml")
        .filter_map(|(path, _)| path.strip_suffix("/Cargo.toml"));
    folders
        .map(|folder| (folder, crate_lines(tree, folder)))
        .collect()
}

fn crate_lines(tree: &SourceTree, folder: &str) -> usize {
    let files = tree.with_suffix(".rs").filter(|(path, _)| {
        path.strip_prefix(folder)
            .is_some_and(|rest| rest.starts_with("/src/"))
    });
    files.map(|(_, text)| code_lines(text)).sum()
}

fn code_lines(text: &str) -> usize {
    text.lines()
        .map(str::trim_start)
        .filter(|line| !line.is_empty() && !line.starts_with("//"))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(folder: &str, lines: usize) -> Vec<String> {
        let text = format!("//! a\n\n{}", "let a = 1; // b\n    // c\n".repeat(lines));
        let files = [
            ("Cargo.toml", ""),
            ("src/lib.rs", text.as_str()),
            ("tests/suite.rs", text.as_str()),
        ];
        let files = files
            .iter()
            .map(|(path, text)| (format!("{folder}/{path}"), text.to_string()))
            .collect();
        let mut found = Vec::new();
        check(
            &SourceTree {
                root: std::path::PathBuf::new(),
                files,
            },
            &mut found,
        );
        found
    }

    #[test]
    fn crate_beyond_the_limit_is_found() {
        assert_eq!(findings("a", CRATE_LINES_MAX), Vec::<String>::new());
        assert!(
            findings("a", CRATE_LINES_MAX + 1)[0]
                .starts_with("a: 12501 lines of code, the limit is 12500")
        );
    }
}
