//! [`MappingReader`]: a typed reader of YAML mappings that reports *all* mistakes. The fields of a topology are defined in `read`; the YAML
//! itself is parsed by `canal-yaml`.

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

use canal_yaml::tree::{Position, YamlKey, YamlNode, YamlValue};

use crate::problem::{FilePosition, TopologyProblem, TopologyProblems};

/// Maximum size of a topology file, in bytes. A topology is written by a person. Hosts of 500 bytes
/// each fill it with as many as a world may have (2,000).
pub(crate) const FILE_BYTES_MAX: usize = 1 << 20;

impl From<Position> for FilePosition {
    fn from(position: Position) -> Self {
        Self {
            line: position.line.into(),
            column: position.column.into(),
        }
    }
}

/// Names the shape of a value, for messages.
fn shape(node: &YamlNode) -> &'static str {
    match &node.value {
        YamlValue::Null => "nothing",
        YamlValue::List(_) => "a list",
        YamlValue::Map(_) => "a mapping",
        _ => "a single value",
    }
}

/// Parses `text`. The error is one problem with the parser's own message and position.
pub(crate) fn parse(file: &Path, text: &str) -> Result<YamlNode, TopologyProblem> {
    let problem = |spot, what: String, fix: &str| TopologyProblem {
        file: file.into(),
        spot,
        what,
        fix: fix.into(),
    };
    if text.len() > FILE_BYTES_MAX {
        let what = format!(
            "the file has {} bytes, more than {FILE_BYTES_MAX}",
            text.len()
        );
        return Err(problem(
            FilePosition::default(),
            what,
            "split it into several worlds",
        ));
    }
    canal_yaml::tree::parse(text).map_err(|error| {
        problem(
            error.spot.into(),
            format!("not readable as YAML: {}", error.problem),
            "fix the YAML syntax at this position",
        )
    })
}

/// Reader of one mapping. Fields are read by name, and [`MappingReader::close`] reports all others.
pub(crate) struct MappingReader<'t> {
    /// The described object, for messages: "a gateway", "tenant \"alpha\"".
    owner: String,
    pub(crate) spot: FilePosition,
    entries: &'t [(YamlKey, YamlNode)],
    known_fields: Vec<&'static str>,
}

impl<'t> MappingReader<'t> {
    pub(crate) fn open(
        tree: &'t YamlNode,
        owner: &str,
        findings: &mut TopologyProblems,
    ) -> Option<Self> {
        let YamlValue::Map(entries) = &tree.value else {
            let what = format!("{owner} must be a mapping, but this is {}", shape(tree));
            findings.add(tree.spot, what, "write `field: value` lines here");
            return None;
        };
        let spot = entries.first().map_or(tree.spot, |(key, _)| key.spot);
        Some(Self {
            owner: owner.to_owned(),
            spot: spot.into(),
            entries,
            known_fields: Vec::new(),
        })
    }

    /// Returns the field's tree, or `None` if the field is absent or empty.
    pub(crate) fn tree(&mut self, name: &'static str) -> Option<&'t YamlNode> {
        if !self.known_fields.contains(&name) {
            self.known_fields.push(name);
        }
        let (_, tree) = self.entries.iter().find(|(key, _)| key.name == name)?;
        (!matches!(tree.value, YamlValue::Null)).then_some(tree)
    }

    /// Returns the position of the field, or of the mapping if the field is absent.
    pub(crate) fn spot_of(&self, name: &str) -> FilePosition {
        self.entries
            .iter()
            .find(|(key, _)| key.name == name)
            .map_or(self.spot, |(_, tree)| tree.spot.into())
    }

    pub(crate) fn text(
        &mut self,
        name: &'static str,
        findings: &mut TopologyProblems,
    ) -> Option<String> {
        let tree = self.tree(name)?;
        scalar(tree, &format!("{name} of {}", self.owner), findings)
    }

    /// Reads a required text, and reports it if it is missing.
    pub(crate) fn must_text(
        &mut self,
        name: &'static str,
        findings: &mut TopologyProblems,
    ) -> Option<String> {
        if self.tree(name).is_none() {
            self.report_missing(name, findings);
            return None;
        }
        self.text(name, findings)
    }

    pub(crate) fn report_missing(&self, name: &str, findings: &mut TopologyProblems) {
        findings.add(
            self.spot,
            format!("{} has no `{name}`", self.owner),
            format!("add `{name}: …`"),
        );
    }

    /// Reads a value that is parsed from text. If that fails, the problem contains `expected`.
    pub(crate) fn parsed<T: FromStr>(
        &mut self,
        name: &'static str,
        expected: &str,
        findings: &mut TopologyProblems,
    ) -> Option<T> {
        let text = self.text(name, findings)?;
        match text.parse() {
            Ok(value) => Some(value),
            Err(_) => {
                findings.add(
                    self.spot_of(name),
                    format!("{name}: {text:?} is not {expected}"),
                    format!("write {expected}"),
                );
                None
            }
        }
    }

    /// Works like [`Self::parsed`] for a renamed field. The old name is accepted for one release.
    pub(crate) fn parsed_renamed<T: FromStr>(
        &mut self,
        (name, old): (&'static str, &'static str),
        expected: &str,
        findings: &mut TopologyProblems,
    ) -> Option<T> {
        let is_old = self.entries.iter().any(|(key, _)| key.name == old);
        self.parsed(if is_old { old } else { name }, expected, findings)
    }

    pub(crate) fn flag(
        &mut self,
        name: &'static str,
        default: bool,
        findings: &mut TopologyProblems,
    ) -> bool {
        self.parsed(name, "true or false", findings)
            .unwrap_or(default)
    }

    pub(crate) fn list(
        &mut self,
        name: &'static str,
        findings: &mut TopologyProblems,
    ) -> &'t [YamlNode] {
        let Some(tree) = self.tree(name) else {
            return &[];
        };
        match &tree.value {
            YamlValue::List(items) => items,
            _ => {
                let what = format!(
                    "{name} of {} must be a list, but this is {}",
                    self.owner,
                    shape(tree)
                );
                findings.add(
                    tree.spot,
                    what,
                    format!("write `{name}: [ … ]` or `- …` lines"),
                );
                &[]
            }
        }
    }

    pub(crate) fn texts(
        &mut self,
        name: &'static str,
        findings: &mut TopologyProblems,
    ) -> Vec<String> {
        let owner = format!("an entry of {name}");
        self.list(name, findings)
            .iter()
            .filter_map(|item| scalar(item, &owner, findings))
            .collect()
    }

    /// Reads a mapping of texts, such as env or labels.
    pub(crate) fn table(
        &mut self,
        name: &'static str,
        findings: &mut TopologyProblems,
    ) -> BTreeMap<String, String> {
        let Some(tree) = self.tree(name) else {
            return BTreeMap::new();
        };
        let YamlValue::Map(entries) = &tree.value else {
            let what = format!(
                "{name} of {} must be a mapping, but this is {}",
                self.owner,
                shape(tree)
            );
            findings.add(tree.spot, what, "write `KEY: value` lines");
            return BTreeMap::new();
        };
        let mut table = BTreeMap::new();
        for (YamlKey { name: key, .. }, value) in entries {
            if let Some(text) = scalar_or_empty(value, &format!("{name}.{key}"), findings) {
                table.insert(key.clone(), text);
            }
        }
        table
    }

    /// Reports every field that was not read.
    pub(crate) fn close(self, findings: &mut TopologyProblems) {
        for (
            YamlKey {
                name: key, spot, ..
            },
            _,
        ) in self.entries
        {
            if self.known_fields.iter().any(|name| name == key) {
                continue;
            }
            let fix = match nearest(key, &self.known_fields) {
                Some(name) => format!("did you mean `{name}`?"),
                None => format!("remove it; valid fields: {}", self.known_fields.join(", ")),
            };
            findings.add(*spot, format!("{} has no field `{key}`", self.owner), fix);
        }
    }
}

fn scalar(tree: &YamlNode, what: &str, findings: &mut TopologyProblems) -> Option<String> {
    match tree.scalar_text() {
        Some(text) => Some(text.to_owned()),
        None => {
            findings.add(
                tree.spot,
                format!("{what} must be a single value, but this is {}", shape(tree)),
                "write one value",
            );
            None
        }
    }
}

fn scalar_or_empty(tree: &YamlNode, what: &str, findings: &mut TopologyProblems) -> Option<String> {
    if matches!(tree.value, YamlValue::Null) {
        return Some(String::new());
    }
    scalar(tree, what, findings)
}

/// Returns the known name with the smallest edit distance, if the distance is small enough for a
/// typing error.
pub(crate) fn nearest<'n>(word: &str, names: &[&'n str]) -> Option<&'n str> {
    let allowed = if word.len() < 4 { 1 } else { 2 };
    names
        .iter()
        .map(|name| (distance(word, name), *name))
        .filter(|(distance, _)| *distance <= allowed)
        .min()
        .map(|(_, name)| name)
}

/// Returns the Levenshtein distance, ignoring case.
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.to_lowercase().chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (line, from) in left.to_lowercase().chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = line + 1;
        for (column, to) in right.iter().enumerate() {
            let above = row[column + 1];
            let swap = diagonal + usize::from(from != *to);
            row[column + 1] = swap.min(above + 1).min(row[column] + 1);
            diagonal = above;
        }
    }
    row[right.len()]
}
