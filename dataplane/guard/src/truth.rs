//! Logic of three values (Kleene): what cannot be seen may hold or not. A Maybe remembers the first attribute that made it one.

use canal_model::authorization::Attribute;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Truth<'a> {
    No,
    Maybe(&'a Attribute),
    Yes,
}

impl<'a> Truth<'a> {
    /// All of them; none at all is Yes.
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

    /// One of them; none at all is No.
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
