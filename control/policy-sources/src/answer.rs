//! Builds the answer to a write request within a limit of bytes: the changes, with their texts if
//! they are wanted, and the diagnostics. It does not decide what changes. Start at [`ChangeList`].

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::ObjectKey;
use canal_wire::api::{self, change::ChangeKind};
use similar::TextDiff;

/// Maximum bytes of the changes in one answer, with their texts.
/// Changes and diagnostics together stay far below the largest message (200 MiB,
/// `MESSAGE_BYTES_MAX`), and more is not read by a person.
pub const CHANGES_BYTES_MAX: usize = 4 << 20;
/// Maximum bytes of the diagnostics in one answer.
/// The same as [`CHANGES_BYTES_MAX`], for the same reason.
const DIAGNOSTICS_BYTES_MAX: usize = 4 << 20;
/// Maximum lines of two texts together that are compared line by line.
/// The time grows with the square of the lines. Nobody measured this value; objects that people
/// write have far fewer lines.
const COMPARED_LINES_MAX: usize = 10_000;
/// Bytes of a change, or of a diagnostic, besides its texts.
/// It bounds lists of entries whose texts are empty; nobody measured the exact size.
const ENTRY_BYTES: usize = 32;

/// The changes that a response lists, and the number of those that do not fit.
#[derive(Debug, Default)]
pub(crate) struct ChangeList {
    changes: Vec<api::Change>,
    left_out: u64,
    bytes: usize,
    /// True if the changes have texts: unified diffs.
    has_texts: bool,
}

impl ChangeList {
    /// Creates a list without entries.
    pub(crate) fn new(has_texts: bool) -> Self {
        Self {
            has_texts,
            ..Self::default()
        }
    }

    /// Adds the change of one object from the text `old` to the text `new`.
    pub(crate) fn add(&mut self, what: ChangeKind, key: &ObjectKey, old: &str, new: &str) {
        let is_wanted = self.has_texts && what != ChangeKind::Unchanged && self.left_out == 0;
        let diff = if is_wanted {
            unified(key, old, new)
        } else {
            String::new()
        };
        let (kind, namespace, name) = (
            key.kind.to_string(),
            key.namespace.to_string(),
            key.name.to_string(),
        );
        self.push(api::Change {
            what: what.into(),
            kind,
            namespace,
            name,
            diff,
        });
    }

    /// Adds a change. After the first change that does not fit, further changes are only counted,
    /// so that the list has no gaps.
    pub(crate) fn push(&mut self, change: api::Change) {
        let is_change = change.what() != ChangeKind::Unchanged;
        let bytes = ENTRY_BYTES
            + change.kind.len()
            + change.namespace.len()
            + change.name.len()
            + change.diff.len();
        if self.left_out > 0 || self.bytes + bytes > CHANGES_BYTES_MAX {
            self.left_out += u64::from(is_change);
            return;
        }
        self.bytes += bytes;
        self.changes.push(change);
    }

    /// Returns the listed changes, and the number of further ones.
    pub(crate) fn into_parts(self) -> (Vec<api::Change>, u64) {
        (self.changes, self.left_out)
    }
}

/// Returns the unified diff of two texts. The time for it grows with the square of their lines, so
/// long texts are only counted.
fn unified(key: &ObjectKey, old: &str, new: &str) -> String {
    let (before, after) = (format!("{key} (now)"), format!("{key} (then)"));
    let [removed, added] = [old, new].map(|text| text.lines().count());
    if removed > 0 && added > 0 && removed + added > COMPARED_LINES_MAX {
        return format!(
            "--- {before}\n+++ {after}\n({removed} lines become {added}; they are too many to compare)\n"
        );
    }
    TextDiff::from_lines(old, new)
        .unified_diff()
        .header(&before, &after)
        .to_string()
}

/// Truncates diagnostics that are too long for a response, with a last one that states how many are
/// left out. Errors are then sorted first, so that the last one gets the highest severity among
/// those left out.
pub(crate) fn within_answer(mut diagnostics: Vec<Diagnostic>) -> Vec<Diagnostic> {
    let bytes = |d: &Diagnostic| ENTRY_BYTES + d.field.len() + d.problem.len() + d.fix.len();
    if diagnostics.iter().map(bytes).sum::<usize>() <= DIAGNOSTICS_BYTES_MAX {
        return diagnostics;
    }
    diagnostics.sort_by_key(|d| d.severity);
    let mut bytes_left = DIAGNOSTICS_BYTES_MAX;
    let fits = diagnostics
        .iter()
        .take_while(|d| match bytes_left.checked_sub(bytes(d)) {
            Some(left) => {
                bytes_left = left;
                true
            }
            None => false,
        });
    let shown = fits.count();
    let left_out = diagnostics.split_off(shown);
    let severity = left_out.first().map_or(Severity::Warning, |d| d.severity);
    let problem = format!(
        "{} more diagnostics do not fit into this answer",
        left_out.len()
    );
    let fix = "correct these, then send the objects again".to_owned();
    diagnostics.push(Diagnostic {
        severity,
        code: Code::DiagnosticsLeftOut,
        origin: None,
        object: None,
        field: String::new(),
        problem,
        fix,
    });
    diagnostics
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> ObjectKey {
        ObjectKey {
            kind: canal_model::policy::ObjectKind::Service,
            namespace: "shop".parse().unwrap(),
            name: name.parse().unwrap(),
        }
    }

    #[test]
    fn changes_beyond_the_limit_are_counted() {
        let mut list = ChangeList::new(true);
        let text = "x\n".repeat(100_000);
        for n in 0..30 {
            list.add(ChangeKind::Created, &key(&format!("s{n}")), "", &text);
            list.add(
                ChangeKind::Unchanged,
                &key(&format!("same{n}")),
                &text,
                &text,
            );
        }
        let (listed, left_out) = list.into_parts();
        let created = listed
            .iter()
            .filter(|change| change.what() == ChangeKind::Created)
            .count();
        assert!(
            created > 5 && created as u64 + left_out == 30,
            "{created} and {left_out}"
        );
        assert!(listed.iter().map(|change| change.diff.len()).sum::<usize>() <= CHANGES_BYTES_MAX);
        let mut names = ChangeList::new(false);
        (0..30).for_each(|n| names.add(ChangeKind::Created, &key(&format!("s{n}")), "", &text));
        assert_eq!(names.into_parts().1, 0, "an Apply has no texts");
    }

    #[test]
    fn long_texts_are_not_compared_line_by_line() {
        let text = |word: &str| {
            (0..COMPARED_LINES_MAX).fold(String::new(), |text, n| text + &format!("{word}: {n}\n"))
        };
        let (old, new) = (text("a"), text("b"));
        assert!(
            unified(&key("s"), &old, &new)
                .contains("(10000 lines become 10000; they are too many to compare)")
        );
        assert_eq!(
            unified(&key("s"), "", &new).lines().count(),
            COMPARED_LINES_MAX + 3,
            "one side has nothing to compare"
        );
    }

    #[test]
    fn diagnostics_beyond_the_limit_are_counted_and_an_error_stays_one() {
        let one = |severity| {
            let (field, fix) = (String::new(), String::new());
            Diagnostic {
                severity,
                code: Code::InvalidValue,
                origin: None,
                object: None,
                field,
                problem: "x".repeat(1 << 20),
                fix,
            }
        };
        let few = vec![one(Severity::Warning), one(Severity::Error)];
        assert_eq!(within_answer(few.clone()), few);
        let cut = within_answer(
            [Severity::Warning, Severity::Error]
                .repeat(5)
                .into_iter()
                .map(one)
                .collect(),
        );
        assert!(
            cut.len() == 4 && cut.iter().all(|d| d.severity == Severity::Error),
            "{}",
            cut.len()
        );
        assert!(
            cut[3].problem.starts_with("7 more diagnostics"),
            "{}",
            cut[3].problem
        );
    }
}
