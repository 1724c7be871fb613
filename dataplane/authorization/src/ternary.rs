//! Three-valued logic (Kleene): a condition on an attribute that the hop cannot observe is
//! [`Truth::Maybe`]. A Maybe keeps the first attribute that caused it.

use canal_model::authorization::Attribute;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Truth<'a> {
    No,
    Maybe(&'a Attribute),
    Yes,
}

impl<'a> Truth<'a> {
    /// Combines by AND. Without any value the result is Yes.
    pub(crate) fn all(each: impl Iterator<Item = Truth<'a>>) -> Self {
        let mut so_far = Truth::Yes;
        for truth in each {
            match truth {
                Truth::No => return Truth::No,
                Truth::Maybe(_) if so_far == Truth::Yes => so_far = truth,
                _ => {}
            }
        }
        so_far
    }

    /// Combines by OR. Without any value the result is No.
    pub(crate) fn any(each: impl Iterator<Item = Truth<'a>>) -> Self {
        let mut so_far = Truth::No;
        for truth in each {
            match truth {
                Truth::Yes => return Truth::Yes,
                Truth::Maybe(_) if so_far == Truth::No => so_far = truth,
                _ => {}
            }
        }
        so_far
    }

    pub(crate) fn and(self, other: impl FnOnce() -> Self) -> Self {
        match self {
            Truth::No => Truth::No,
            Truth::Yes => other(),
            Truth::Maybe(_) => match other() {
                Truth::No => Truth::No,
                _ => self,
            },
        }
    }
}
