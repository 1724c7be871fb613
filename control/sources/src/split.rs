//! Splits a file into YAML documents at its `---` lines, so that an error in one document does not
//! hide the others.
//!
//! It needs no parser: a line that starts with `---` or `...` in the first column always ends a
//! document (YAML 1.2.2 §9.1.2), even inside a block scalar.

use std::borrow::Cow;

/// The text of one document, and the line of the file on which it begins, counted from 1.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DocumentText<'a> {
    pub(crate) line: u32,
    pub(crate) text: Cow<'a, str>,
}

/// Returns the documents of `text` that contain more than comments, directives and blank lines.
pub(crate) fn split(text: &str) -> Vec<DocumentText<'_>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut chunks = Vec::new();
    let (mut start, mut first_line, mut at) = (0, 1, 0);
    let mut inline: Option<&str> = None;
    for (number, line) in (1u32..).zip(text.split_inclusive('\n')) {
        if let Some(rest) = marker(line) {
            push(&mut chunks, first_line, inline.take(), &text[start..at]);
            start = at + line.len();
            first_line = number + 1;
            if !rest.trim().is_empty() {
                inline = Some(rest);
                first_line = number;
            }
        }
        at += line.len();
    }
    push(&mut chunks, first_line, inline, &text[start..]);
    chunks
}

/// Returns the text after the marker on its line, or `None` if the line is not a marker.
fn marker(line: &str) -> Option<&str> {
    let rest = line
        .strip_prefix("---")
        .or_else(|| line.strip_prefix("..."))?;
    rest.is_empty()
        .then_some(rest)
        .or_else(|| rest.starts_with([' ', '\t', '\n', '\r']).then_some(rest))
}

fn push<'a>(
    chunks: &mut Vec<DocumentText<'a>>,
    mut line: u32,
    inline: Option<&str>,
    body: &'a str,
) {
    if let Some(inline) = inline {
        // Spaces replace the marker, so that columns in diagnostics stay correct.
        chunks.extend(has_content(inline, body).then(|| DocumentText {
            line,
            text: Cow::Owned(format!("   {inline}{body}")),
        }));
        return;
    }
    let mut body = body;
    while let Some((blank, rest)) = body
        .split_once('\n')
        .filter(|(blank, _)| blank.trim().is_empty())
    {
        let _ = blank;
        body = rest;
        line += 1;
    }
    chunks.extend(has_content("", body).then_some(DocumentText {
        line,
        text: Cow::Borrowed(body),
    }));
}

fn has_content(inline: &str, body: &str) -> bool {
    let means = |line: &str| !line.is_empty() && !line.starts_with('#') && !line.starts_with('%');
    means(inline.trim()) || body.lines().any(|line| means(line.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[(u32, &str)]) {
        let chunks: Vec<(u32, String)> = split(text)
            .into_iter()
            .map(|c| (c.line, c.text.into_owned()))
            .collect();
        let expected: Vec<(u32, String)> = expected
            .iter()
            .map(|(line, text)| (*line, (*text).to_owned()))
            .collect();
        assert_eq!(chunks, expected, "{text:?}");
    }

    #[test]
    fn documents_end_at_markers() {
        check("", &[]);
        check("# nothing\n\n", &[]);
        check("a: 1\n", &[(1, "a: 1\n")]);
        check("a: 1\n---\nb: 2", &[(1, "a: 1\n"), (3, "b: 2")]);
        check(
            "---\n\n\na: 1\n---\n---\nb: 2\n",
            &[(4, "a: 1\n"), (7, "b: 2\n")],
        );
        check("a: 1\n...\n# end\n", &[(1, "a: 1\n")]);
        check(
            "a: |\n  --- not a marker\n  x\n--- \nb: 2\n",
            &[(1, "a: |\n  --- not a marker\n  x\n"), (5, "b: 2\n")],
        );
        check("a: ---x\n---x: 1\n", &[(1, "a: ---x\n---x: 1\n")]);
        check(
            "a: 1\r\n---\r\nb: 2\r\n",
            &[(1, "a: 1\r\n"), (3, "b: 2\r\n")],
        );
        check("%YAML 1.2\n---\na: 1\n", &[(3, "a: 1\n")]);
        check(
            "--- {a: 1}\n--- # comment\nb: 2\n",
            &[(1, "    {a: 1}\n"), (2, "    # comment\nb: 2\n")],
        );
    }
}
