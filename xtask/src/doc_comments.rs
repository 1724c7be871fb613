//! Rule on doc comments: the comment of a public item has at least five words, so that it can be a
//! sentence that stands alone. The rule does not read the sentence, and enum variants are exempt,
//! because their name may be sufficient.

use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::{Attribute, Expr, Lit, Meta, Visibility};

use crate::tree::SourceTree;

/// Minimum number of words of a public doc comment: shorter ones are not sentences with a subject,
/// a verb and an object.
const WORDS_MIN: usize = 5;

pub(crate) fn check(tree: &SourceTree, found: &mut Vec<String>) {
    let before = found.len();
    for (path, text) in tree.with_suffix(".rs") {
        // The rules on sources report a file that does not parse.
        if let Ok(ast) = crate::ast::parse(text).as_ref() {
            DocVisitor {
                path,
                findings: found,
            }
            .visit_file(ast);
        }
    }
    println!(
        "doc comments: {} public ones have fewer than {WORDS_MIN} words",
        found.len() - before
    );
}

struct DocVisitor<'a> {
    path: &'a str,
    findings: &'a mut Vec<String>,
}

impl DocVisitor<'_> {
    fn check_item(&mut self, visibility: &Visibility, attributes: &[Attribute]) {
        if matches!(visibility, Visibility::Inherited) {
            return;
        }
        let mut lines = attributes
            .iter()
            .filter_map(|attribute| Some((attribute, doc_line(attribute)?)))
            .peekable();
        let Some(line) = lines
            .peek()
            .map(|(attribute, _)| attribute.span().start().line)
        else {
            return;
        };
        let words: usize = lines.map(|(_, text)| text.split_whitespace().count()).sum();
        if words < WORDS_MIN {
            self.findings.push(format!(
                "{}:{line}: a doc comment of {words} words; write a sentence that stands alone, or none",
                self.path
            ));
        }
    }
}

/// Returns the text of one line of a doc comment; `None` of other attributes.
fn doc_line(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(pair) = &attribute.meta else {
        return None;
    };
    match &pair.value {
        Expr::Lit(literal) if pair.path.is_ident("doc") => match &literal.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

impl<'ast> Visit<'ast> for DocVisitor<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.check_item(&item.vis, &item.attrs);
        syn::visit::visit_item_fn(self, item);
    }
    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.check_item(&item.vis, &item.attrs);
        syn::visit::visit_impl_item_fn(self, item);
    }
    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.check_item(&item.vis, &item.attrs);
    }
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.check_item(&item.vis, &item.attrs);
        syn::visit::visit_item_struct(self, item);
    }
    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.check_item(&item.vis, &item.attrs);
    }
    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.check_item(&item.vis, &item.attrs);
        syn::visit::visit_item_trait(self, item);
    }
    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.check_item(&item.vis, &item.attrs);
    }
    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.check_item(&item.vis, &item.attrs);
    }
    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.check_item(&item.vis, &item.attrs);
    }
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.check_item(&item.vis, &item.attrs);
        syn::visit::visit_item_mod(self, item);
    }
    fn visit_field(&mut self, field: &'ast syn::Field) {
        self.check_item(&field.vis, &field.attrs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_comments_of_public_items_are_found() {
        let count = |text: &str| {
            let tree = SourceTree {
                root: "/".into(),
                files: [("a.rs".to_owned(), text.to_owned())].into(),
            };
            let mut found = Vec::new();
            check(&tree, &mut found);
            found.len()
        };
        for (text, expected) in [
            ("/// A short one.\npub fn a() {}\n", 1),
            ("/// A sentence that stands alone.\npub fn a() {}\n", 0),
            ("/// Two lines\n/// are one comment.\npub fn a() {}\n", 0),
            ("/// A short one.\nfn a() {}\n", 0),
            ("pub fn a() {}\n", 0),
            (
                "pub struct A {\n    /// The tenant.\n    pub(crate) a: u32,\n}\n",
                1,
            ),
            ("pub enum A {\n    /// A variant.\n    B,\n}\n", 0),
            (
                "impl A {\n    /// Not any.\n    pub const B: u32 = 0;\n}\n",
                1,
            ),
        ] {
            assert_eq!(count(text), expected, "{text}");
        }
    }
}
