//! The path of a field inside a document in the form that diagnostics show:
//! `spec.rules[0].matches[1].headers`.

use std::fmt;

/// One step from a value to a value inside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathStep<'a> {
    Field(&'a str),
    Index(usize),
}

/// A path that is built while a tree is walked; it shares its prefix with its sibling paths.
#[derive(Debug, Clone, Copy)]
pub struct FieldPath<'a> {
    up: Option<&'a FieldPath<'a>>,
    step: Option<PathStep<'a>>,
}

impl<'a> FieldPath<'a> {
    pub const ROOT: FieldPath<'static> = FieldPath {
        up: None,
        step: None,
    };

    pub fn to(&'a self, step: PathStep<'a>) -> FieldPath<'a> {
        FieldPath {
            up: Some(self),
            step: Some(step),
        }
    }
}

impl fmt::Display for FieldPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(up) = self.up else { return Ok(()) };
        up.fmt(f)?;
        match self.step {
            Some(PathStep::Index(index)) => write!(f, "[{index}]"),
            Some(PathStep::Field(name)) if !is_plain(name) => write!(f, "[{name:?}]"),
            Some(PathStep::Field(name)) if up.up.is_none() => f.write_str(name),
            Some(PathStep::Field(name)) => write!(f, ".{name}"),
            None => Ok(()),
        }
    }
}

fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|c| c.is_ascii_alphanumeric() || c == b'_' || c == b'-')
}

/// Parses a displayed path into steps. Parsing stops at the first part that is not valid.
pub fn steps(mut path: &str) -> Vec<OwnedPathStep> {
    let mut steps = Vec::new();
    loop {
        path = path.strip_prefix('.').unwrap_or(path);
        if let Some(rest) = path.strip_prefix("[\"") {
            let Some((name, rest)) = rest.split_once("\"]") else {
                return steps;
            };
            steps.push(OwnedPathStep::Field(
                name.replace("\\\"", "\"").replace("\\\\", "\\"),
            ));
            path = rest;
        } else if let Some(rest) = path.strip_prefix('[') {
            let Some((index, rest)) = rest.split_once(']') else {
                return steps;
            };
            let Ok(index) = index.parse() else {
                return steps;
            };
            steps.push(OwnedPathStep::Index(index));
            path = rest;
        } else {
            let end = path.find(['.', '[']).unwrap_or(path.len());
            if end == 0 {
                return steps;
            }
            steps.push(OwnedPathStep::Field(path[..end].to_owned()));
            path = &path[end..];
        }
    }
}

/// An owned [`PathStep`], independent of the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OwnedPathStep {
    Field(String),
    Index(usize),
}

/// Returns the path without its list indexes, as the key for the tables of known fields:
/// `spec.rules[].filters`.
pub fn pattern(path: &str) -> String {
    let mut pattern = String::with_capacity(path.len());
    for step in steps(path) {
        match step {
            OwnedPathStep::Index(_) => pattern.push_str("[]"),
            OwnedPathStep::Field(name) => {
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
    fn shown_paths_parse_back() {
        let spec = FieldPath::ROOT.to(PathStep::Field("spec"));
        let rules = spec.to(PathStep::Field("rules"));
        let rule = rules.to(PathStep::Index(12));
        let header = rule.to(PathStep::Field("x.y\"z"));
        assert_eq!(header.to_string(), r#"spec.rules[12]["x.y\"z"]"#);
        let owned = |s: &str| OwnedPathStep::Field(s.to_owned());
        assert_eq!(
            steps(&header.to_string()),
            [
                owned("spec"),
                owned("rules"),
                OwnedPathStep::Index(12),
                owned("x.y\"z")
            ]
        );
        assert_eq!(
            pattern("spec.rules[3].backendRefs[0].filters"),
            "spec.rules[].backendRefs[].filters"
        );
        assert_eq!(steps(""), []);
        assert_eq!(steps("a[x"), [owned("a")]);
    }
}
