//! The path of a field inside a document, as it is shown to its writer: `spec.rules[0].matches[1].headers`.

use std::fmt;

/// One step from a value to a value inside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step<'a> {
    Field(&'a str),
    Index(usize),
}

/// A path that shares its beginning with the paths beside it; built while a tree is walked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Path<'a> {
    up: Option<&'a Path<'a>>,
    step: Option<Step<'a>>,
}

impl<'a> Path<'a> {
    pub(crate) const ROOT: Path<'static> = Path { up: None, step: None };

    pub(crate) fn to(&'a self, step: Step<'a>) -> Path<'a> {
        Path { up: Some(self), step: Some(step) }
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(up) = self.up else { return Ok(()) };
        up.fmt(f)?;
        match self.step {
            Some(Step::Index(index)) => write!(f, "[{index}]"),
            Some(Step::Field(name)) if !is_plain(name) => write!(f, "[{name:?}]"),
            Some(Step::Field(name)) if up.up.is_none() => f.write_str(name),
            Some(Step::Field(name)) => write!(f, ".{name}"),
            None => Ok(()),
        }
    }
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_' || c == b'-')
}

/// The steps of a path as displayed; stops at the first thing it cannot read.
pub(crate) fn steps(mut path: &str) -> Vec<OwnedStep> {
    let mut steps = Vec::new();
    loop {
        path = path.strip_prefix('.').unwrap_or(path);
        if let Some(rest) = path.strip_prefix("[\"") {
            let Some((name, rest)) = rest.split_once("\"]") else { return steps };
            steps.push(OwnedStep::Field(name.replace("\\\"", "\"").replace("\\\\", "\\")));
            path = rest;
        } else if let Some(rest) = path.strip_prefix('[') {
            let Some((index, rest)) = rest.split_once(']') else { return steps };
            let Ok(index) = index.parse() else { return steps };
            steps.push(OwnedStep::Index(index));
            path = rest;
        } else {
            let end = path.find(['.', '[']).unwrap_or(path.len());
            if end == 0 {
                return steps;
            }
            steps.push(OwnedStep::Field(path[..end].to_owned()));
            path = &path[end..];
        }
    }
}

/// A [`Step`] that stands alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OwnedStep {
    Field(String),
    Index(usize),
}

/// The path with the numbers taken out, to look a field up in a table: `spec.rules[].filters`.
pub(crate) fn pattern(path: &str) -> String {
    let mut pattern = String::with_capacity(path.len());
    for step in steps(path) {
        match step {
            OwnedStep::Index(_) => pattern.push_str("[]"),
            OwnedStep::Field(name) => {
                if !pattern.is_empty() {
                    pattern.push('.');
                }
                pattern.push_str(&name);
            }
        }
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_read_back_from_what_is_shown() {
        let spec = Path::ROOT.to(Step::Field("spec"));
        let rules = spec.to(Step::Field("rules"));
        let rule = rules.to(Step::Index(12));
        let header = rule.to(Step::Field("x.y\"z"));
        assert_eq!(header.to_string(), r#"spec.rules[12]["x.y\"z"]"#);
        let owned = |s: &str| OwnedStep::Field(s.to_owned());
        assert_eq!(steps(&header.to_string()), [owned("spec"), owned("rules"), OwnedStep::Index(12), owned("x.y\"z")]);
        assert_eq!(pattern("spec.rules[3].backendRefs[0].filters"), "spec.rules[].backendRefs[].filters");
        assert_eq!(steps(""), []);
        assert_eq!(steps("a[x"), [owned("a")]);
    }
}
