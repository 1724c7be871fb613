//! Rule on time in assertions: only the assertions of `testing/timing` may depend on `elapsed()`,
//! because the gate's verdict must not depend on the speed of the machine (docs/testing.md). It
//! does not follow variables.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::tree::SourceTree;

/// The assertion macros, and the number of their arguments that the assertion depends on; further
/// arguments are its message.
const ASSERTIONS: [(&str, usize); 6] = [
    ("assert", 1),
    ("assert_eq", 2),
    ("assert_ne", 2),
    ("debug_assert", 1),
    ("debug_assert_eq", 2),
    ("debug_assert_ne", 2),
];
/// Folder of the only code that may assert on time.
const JUDGES: &str = "testing/timing/";
pub(crate) fn check(tree: &SourceTree, found: &mut Vec<String>) {
    for (path, text) in tree
        .with_suffix(".rs")
        .filter(|(path, _)| !path.starts_with(JUDGES))
    {
        let mut lines = Vec::new();
        // The search avoids parsing most files. `source` reports a file that is not valid Rust.
        if text.contains("elapsed")
            && let Ok(tokens) = text.parse::<TokenStream>()
        {
            timed_assertions(tokens, &mut lines);
        }
        for line in lines {
            let fix = "use canal_timing::assert_time or timed!, or wait with canal_timing::deadline in the crate's wait function";
            found.push(format!("{path}:{line}: an assertion on elapsed(); {fix}"));
        }
    }
}

/// Collects the lines of assertions that depend on elapsed time, also those inside other macros.
fn timed_assertions(tokens: TokenStream, lines: &mut Vec<usize>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for (n, token) in tokens.iter().enumerate() {
        let TokenTree::Group(group) = token else {
            continue;
        };
        if let Some(judged) = checked_arguments(&tokens[..n])
            && checks_time(group.stream(), judged)
        {
            lines.push(tokens[n - 2].span().start().line);
        }
        timed_assertions(group.stream(), lines);
    }
}

/// Returns the number of arguments that the assertion before a group depends on; `None` if there is
/// no assertion before it.
fn checked_arguments(before: &[TokenTree]) -> Option<usize> {
    let [.., TokenTree::Ident(name), TokenTree::Punct(mark)] = before else {
        return None;
    };
    let (_, judged) = ASSERTIONS
        .iter()
        .find(|(assertion, _)| name == assertion)
        .filter(|_| mark.as_char() == '!')?;
    Some(*judged)
}

fn checks_time(arguments: TokenStream, judged: usize) -> bool {
    let mut argument = 0;
    let mut kept = Vec::new();
    for token in arguments {
        argument += usize::from(matches!(&token, TokenTree::Punct(mark) if mark.as_char() == ','));
        if argument >= judged {
            break;
        }
        kept.push(token);
    }
    has_elapsed(&kept)
}

fn has_elapsed(tokens: &[TokenTree]) -> bool {
    let is_call = |pair: &[TokenTree]| {
        let is_name = matches!(&pair[0], TokenTree::Ident(name) if name == "elapsed");
        is_name
            && matches!(&pair[1], TokenTree::Group(group) if group.delimiter() == Delimiter::Parenthesis)
    };
    let is_inside = |token: &TokenTree| match token {
        TokenTree::Group(group) => has_elapsed(&group.stream().into_iter().collect::<Vec<_>>()),
        _ => false,
    };
    tokens.windows(2).any(is_call) || tokens.iter().any(is_inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        let files = [(path.to_owned(), text.to_owned())].into_iter().collect();
        let mut found = Vec::new();
        check(
            &SourceTree {
                root: "/".into(),
                files,
            },
            &mut found,
        );
        found
    }

    #[test]
    fn an_assertion_on_elapsed_time_is_found_over_lines_and_inside_macros() {
        for (text, line) in [
            (
                "fn a() {\n    assert!(begun.elapsed() < WITHIN, \"late\");\n}",
                2,
            ),
            (
                "fn a() {\n    assert!(\n        begun\n            .elapsed()\n            .as_millis() < 3\n    );\n}",
                2,
            ),
            (
                "fn a() { debug_assert!(is_well && (begun.elapsed() < WITHIN)); }",
                1,
            ),
            ("fn a() { assert_eq!(1, begun.elapsed().as_secs()); }", 1),
            (
                "fn a() { select! { _ = b => {\n assert!(begun.elapsed() < WITHIN) } } }",
                2,
            ),
        ] {
            let found = findings("a/src/lib.rs", text);
            assert_eq!(found.len(), 1, "{text}");
            assert!(
                found[0].starts_with(&format!("a/src/lib.rs:{line}: an assertion on elapsed()")),
                "{found:?}"
            );
        }
    }

    #[test]
    fn messages_variables_and_the_helpers_may_have_the_time() {
        for text in [
            "fn a() { assert!(is_well, \"after {:?}\", begun.elapsed()); }",
            "fn a() { assert_eq!(one, two, \"after {:?}\", begun.elapsed()); }",
            "fn a() { let waited = begun.elapsed(); assert!(waited >= LEAST); }",
            "fn a() { assert!(elapsed < WITHIN); println!(\"{:?}\", begun.elapsed()); }",
        ] {
            assert_eq!(
                findings("a/src/lib.rs", text),
                Vec::<String>::new(),
                "{text}"
            );
        }
        let judged = "fn a() { assert!(begun.elapsed() < WITHIN); }";
        assert_eq!(
            findings("testing/timing/src/lib.rs", judged),
            Vec::<String>::new()
        );
    }
}
