//! Parses Rust sources, each text once, because several rules read every file. It has no rules.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

thread_local! {
    /// Syntax trees that this thread has parsed, by the source text.
    static PARSED: RefCell<HashMap<String, Rc<syn::Result<syn::File>>>> = RefCell::default();
}

/// Returns the syntax tree of the text, or the syntax error.
pub(crate) fn parse(text: &str) -> Rc<syn::Result<syn::File>> {
    if let Some(known) = PARSED.with_borrow(|parsed| parsed.get(text).cloned()) {
        return known;
    }
    let parsed = Rc::new(syn::parse_file(text));
    PARSED.with_borrow_mut(|all| all.insert(text.to_owned(), parsed.clone()));
    parsed
}
