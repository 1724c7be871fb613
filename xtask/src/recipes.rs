//! Rules on the recipes of `docs/how-to`: a recipe has at most eight numbered lines, every line
//! names a path, and every path exists. It does not know whether the steps are right.

use crate::tree::SourceTree;

/// Folder of the recipes.
const FOLDER: &str = "docs/how-to/";
/// Maximum number of steps of a recipe. A change that needs more steps needs a better module
/// boundary.
/// The number was chosen.
const STEPS_MAX: usize = 8;
/// Maximum number of characters of a step, which is one line.
/// It was chosen: two lines of 80 columns in a terminal.
const STEP_CHARS_MAX: usize = 160;

pub(crate) fn check(tree: &SourceTree, found: &mut Vec<String>) {
    for (path, text) in tree
        .with_suffix(".md")
        .filter(|(path, _)| path.starts_with(FOLDER))
    {
        check_recipe(tree, path, text, found);
    }
}

fn check_recipe(tree: &SourceTree, recipe: &str, text: &str, found: &mut Vec<String>) {
    let mut steps = 0;
    for (n, line) in text.lines().enumerate() {
        let at = n + 1;
        for path in paths(line).filter(|path| !tree.has(path)) {
            found.push(format!("{recipe}:{at}: `{path}` does not exist; name the file where this step is done today"));
        }
        let number = line
            .split_once(". ")
            .and_then(|(number, _)| number.parse::<usize>().ok());
        let Some(number) = number else { continue };
        steps += 1;
        if number != steps {
            found.push(format!("{recipe}:{at}: this is step {steps}, not {number}"));
        }
        if paths(line).next().is_none() {
            found.push(format!(
                "{recipe}:{at}: the step names no path; write which file to open"
            ));
        }
        if line.chars().count() > STEP_CHARS_MAX {
            found.push(format!(
                "{recipe}:{at}: the step has more than {STEP_CHARS_MAX} characters; shorten it"
            ));
        }
    }
    if steps == 0 || steps > STEPS_MAX {
        found.push(format!(
            "{recipe}: {steps} numbered steps; write one to {STEPS_MAX}"
        ));
    }
}

/// Returns the words in backticks that are paths: they have a slash, or end as a file of the root
/// does.
fn paths(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2).filter(|word| {
        let is_plain = word
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"/._-".contains(&b));
        let is_path = word.contains('/') || [".md", ".toml"].iter().any(|end| word.ends_with(end));
        is_plain && is_path
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(recipe: &str) -> Vec<String> {
        let files = [("a/src/lib.rs", "//! a"), ("docs/how-to/add-a.md", recipe)];
        let files = files
            .iter()
            .map(|(path, text)| (path.to_string(), text.to_string()))
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
    fn recipe_with_existing_paths_passes() {
        assert_eq!(
            findings("# Add a\n\n1. Open `a/src/lib.rs`.\n2. Write a file in `a/src`.\n"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn missing_path_is_found_in_any_folder() {
        assert!(
            findings("1. Open `a/src/main.rs`.\n")[0]
                .starts_with("docs/how-to/add-a.md:1: `a/src/main.rs` does not exist")
        );
        assert!(findings("1. Open `b/src/lib.rs`.\n")[0].contains("`b/src/lib.rs` does not exist"));
        assert!(findings("1. Open `gone.toml`.\n")[0].contains("`gone.toml` does not exist"));
    }

    #[test]
    fn steps_are_counted_and_name_a_path() {
        assert!(findings("# Add a\n")[0].contains("0 numbered steps"));
        assert!(findings("1. Think.\n")[0].contains("names no path"));
        assert!(findings("1. `a/src`\n3. `a/src`\n")[0].contains("this is step 2, not 3"));
        let nine: String = (1..10).map(|n| format!("{n}. `a/src`\n")).collect();
        assert!(findings(&nine)[0].contains("9 numbered steps; write one to 8"));
    }
}
