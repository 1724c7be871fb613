//! Tables in a document between two marks.

use std::path::Path;

use anyhow::Context;

/// Replaces the text between `<!-- MARK begin -->` and `<!-- MARK end -->` of a document.
pub fn replace(path: &Path, mark: &str, text: &str) -> anyhow::Result<()> {
    let old = std::fs::read_to_string(path)?;
    let new = replaced(&old, mark, text)
        .with_context(|| format!("{} has no marks for {mark}", path.display()))?;
    std::fs::write(path, new).with_context(|| format!("{} cannot be written", path.display()))
}

fn replaced(old: &str, mark: &str, text: &str) -> Option<String> {
    let (begin, end) = (
        format!("<!-- {mark} begin -->"),
        format!("<!-- {mark} end -->"),
    );
    let (head, rest) = old.split_once(&begin)?;
    let (_, tail) = rest.split_once(&end)?;
    Some(format!("{head}{begin}\n{text}{end}{tail}"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn only_text_between_the_marks_is_replaced() {
        let old = "a\n<!-- x begin -->\nold\n<!-- x end -->\nb\n";
        assert_eq!(
            super::replaced(old, "x", "new\n").as_deref(),
            Some("a\n<!-- x begin -->\nnew\n<!-- x end -->\nb\n")
        );
        assert_eq!(super::replaced(old, "y", "new\n"), None);
    }
}
