//! Counts of evaluated documents: of policy, of the kinds that are due, and of each kind. It evaluates
//! nothing.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::evaluation::{DocumentVerdict, KindName};

/// Documents that are loaded, and all of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct LoadCount {
    loaded: usize,
    all: usize,
}

impl LoadCount {
    fn add(&mut self, document: &DocumentVerdict) {
        self.loaded += usize::from(document.is_loaded());
        self.all += 1;
    }

    /// Returns the count and its share of all, as `3 of 4 (75 %)`.
    fn text(self) -> String {
        match self.all {
            0 => "none".to_owned(),
            all => format!("{} of {all} ({} %)", self.loaded, 100 * self.loaded / all),
        }
    }
}

/// The counts of one corpus.
#[derive(Debug, Default)]
pub(crate) struct Tally<'d> {
    all: LoadCount,
    policy: LoadCount,
    due: LoadCount,
    /// Documents of due kinds that are loaded with a status which their API demands.
    with_status: usize,
    kinds: BTreeMap<&'d KindName, LoadCount>,
    /// Documents of due kinds that are not loaded, by kind and reason.
    reasons: BTreeMap<(&'d KindName, String), usize>,
}

impl<'d> Tally<'d> {
    /// Counts the documents of a corpus.
    pub(crate) fn of(documents: &'d [DocumentVerdict]) -> Self {
        let mut tally = Self::default();
        for document in documents {
            tally.all.add(document);
            if document.kind.is_policy() {
                tally.policy.add(document);
            }
            if document.kind.is_due() {
                tally.due.add(document);
                tally.with_status += usize::from(document.has_status);
                if let Some(reason) = document.reason() {
                    *tally.reasons.entry((&document.kind, reason)).or_default() += 1;
                }
            }
            tally.kinds.entry(&document.kind).or_default().add(document);
        }
        tally
    }

    /// Formats the counts for people.
    pub(crate) fn text(&self, corpus: &str, with_kinds: bool, reasons_max: usize) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "{corpus}: policy {}; kinds that are due {}, {} with a status; all documents {}",
            self.policy.text(),
            self.due.text(),
            self.with_status,
            self.all.text()
        );
        for (kind, count) in self.kinds.iter().filter(|_| with_kinds) {
            let due = if kind.is_due() { ", due" } else { "" };
            let _ = writeln!(out, "  {kind}: {}{due}", count.text());
        }
        let mut reasons: Vec<_> = self.reasons.iter().collect();
        reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        for ((kind, reason), count) in reasons.into_iter().take(reasons_max) {
            let _ = writeln!(out, "  {count} not loaded: {kind}: {reason}");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluation::evaluate_file;
    use crate::surroundings::Surroundings;

    #[test]
    fn documents_are_counted_by_their_kind() {
        let text = "apiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: b}\nspec: {selector: {a: b}, ports: [{port: 80}]}\n\
                    ---\napiVersion: networking.istio.io/v1\nkind: EnvoyFilter\nmetadata: {name: a}\n\
                    ---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: a}\n\
                    spec: {hosts: [a], tcp: [{match: [{sourceNamespace: b}]}]}\n";
        let documents = evaluate_file(&Surroundings::new([]), "a.yaml", text);
        let text = Tally::of(&documents).text("corpus", true, 5);
        let expected = "corpus: policy 0 of 2 (0 %); kinds that are due 1 of 2 (50 %), 0 with a status; all documents 1 of 3 (33 %)\n  \
                        Service: 1 of 1 (100 %), due\n  EnvoyFilter.networking.istio.io: 0 of 1 (0 %)\n  \
                        VirtualService.networking.istio.io: 0 of 1 (0 %), due\n  \
                        1 not loaded: VirtualService.networking.istio.io: spec.tcp[].match[].sourceNamespace: the client's namespace cannot be matched in this version\n";
        assert_eq!(text, expected);
    }
}
