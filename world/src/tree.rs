//! A YAML document as a tree in which every value knows its line, and typed access to it that
//! reports *all* mistakes (serde stops at the first). Knows nothing of topologies.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use crate::problem::{Findings, Problem, Spot};

/// Files above this size are refused: a topology is written by a person.
pub(crate) const FILE_BYTES_MAX: usize = 1 << 20;

/// One YAML value and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    pub(crate) spot: Spot,
    pub(crate) value: Value,
}

/// The shapes a value can have. Scalars keep their text: `1.10` is not a number here.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Null,
    Scalar(String),
    List(Vec<Tree>),
    Map(Vec<(Spot, String, Tree)>),
}

impl Value {
    fn shape(&self) -> &'static str {
        match self {
            Value::Null => "nothing",
            Value::Scalar(_) => "a single value",
            Value::List(_) => "a list",
            Value::Map(_) => "a mapping",
        }
    }
}

/// Parses `text`. Errors: one problem with the parser's own words and place.
pub(crate) fn parse(file: &Path, text: &str) -> Result<Tree, Problem> {
    let problem = |spot, what: String, mend: &str| Problem { file: file.into(), spot, what, mend: mend.into() };
    if text.len() > FILE_BYTES_MAX {
        let what = format!("the file has {} bytes, more than {FILE_BYTES_MAX}", text.len());
        return Err(problem(Spot::default(), what, "split it into several worlds"));
    }
    // Schema-less scalars keep the writer's text, so versions and env values survive as written.
    let parsed: Result<Spanned<Shape>, _> = serde_saphyr::from_str(text);
    match parsed {
        Ok(root) => Ok(grow(root, text)),
        Err(error) => {
            let error = error.without_snippet();
            let spot = error.location().map(|at| Spot { line: at.line(), column: at.column() }).unwrap_or_default();
            Err(problem(spot, format!("not readable as YAML: {error}"), "mend the YAML syntax at this place"))
        }
    }
}

/// What the deserializer sees before spans are attached to scalar texts.
#[derive(Debug)]
enum Shape {
    Null,
    Scalar(String),
    List(Vec<Spanned<Shape>>),
    Map(Vec<(Spanned<String>, Spanned<Shape>)>),
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ShapeVisitor)
    }
}

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Shape;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("any YAML value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Shape, E> {
        Ok(Shape::Scalar(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Shape, E> {
        Ok(Shape::Scalar(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Shape, E> {
        Ok(Shape::Scalar(value.to_string()))
    }

    fn visit_i128<E>(self, value: i128) -> Result<Shape, E> {
        Ok(Shape::Scalar(value.to_string()))
    }

    fn visit_u128<E>(self, value: u128) -> Result<Shape, E> {
        Ok(Shape::Scalar(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Shape, E> {
        Ok(Shape::Scalar(value.to_string()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Shape, E> {
        Ok(Shape::Scalar(value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Shape, E> {
        Ok(Shape::Null)
    }

    fn visit_none<E>(self) -> Result<Shape, E> {
        Ok(Shape::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Shape, D::Error> {
        Shape::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Shape, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Shape::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Shape, A::Error> {
        let mut map = Vec::new();
        while let Some(entry) = entries.next_entry()? {
            map.push(entry);
        }
        Ok(Shape::Map(map))
    }
}

fn grow(shape: Spanned<Shape>, text: &str) -> Tree {
    let spot = Spot { line: shape.referenced.line(), column: shape.referenced.column() };
    let value = match shape.value {
        Shape::Null => Value::Null,
        Shape::Scalar(scalar) => Value::Scalar(written(&shape.defined, text).unwrap_or(scalar)),
        Shape::List(items) => Value::List(items.into_iter().map(|item| grow(item, text)).collect()),
        Shape::Map(entries) => Value::Map(entries.into_iter().map(|(key, value)| grow_entry(key, value, text)).collect()),
    };
    Tree { spot, value }
}

fn grow_entry(key: Spanned<String>, value: Spanned<Shape>, text: &str) -> (Spot, String, Tree) {
    let spot = Spot { line: key.referenced.line(), column: key.referenced.column() };
    (spot, key.value, grow(value, text))
}

/// The scalar as its writer typed it, when that is a plain number or word: `1.10` must not
/// become `1.1`. Quoted and multi-line scalars are the parser's business.
fn written(at: &serde_saphyr::Location, text: &str) -> Option<String> {
    let span = at.span();
    let start = usize::try_from(span.byte_offset()?).ok()?;
    let length = usize::try_from(span.byte_len()?).ok()?;
    let raw = text.get(start..start.checked_add(length)?)?.trim();
    let plain = !raw.is_empty() && raw.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".+-_".contains(&byte));
    plain.then(|| raw.to_owned())
}

/// One mapping being read: fields are taken by name, and [`Fields::close`] reports the rest.
pub(crate) struct Fields<'t> {
    /// What the mapping describes, for messages: "a gateway", "tenant \"alpha\"".
    owner: String,
    pub(crate) spot: Spot,
    entries: &'t [(Spot, String, Tree)],
    known: Vec<&'static str>,
}

impl<'t> Fields<'t> {
    pub(crate) fn open(tree: &'t Tree, owner: &str, findings: &mut Findings) -> Option<Self> {
        let Value::Map(entries) = &tree.value else {
            let what = format!("{owner} must be a mapping, but this is {}", tree.value.shape());
            findings.add(tree.spot, what, "write `field: value` lines here");
            return None;
        };
        let spot = entries.first().map_or(tree.spot, |(spot, _, _)| *spot);
        Some(Self { owner: owner.to_owned(), spot, entries, known: Vec::new() })
    }

    /// The field's tree, or `None` if it is absent or empty.
    pub(crate) fn tree(&mut self, name: &'static str) -> Option<&'t Tree> {
        if !self.known.contains(&name) {
            self.known.push(name);
        }
        let (_, _, tree) = self.entries.iter().find(|(_, key, _)| key == name)?;
        (!matches!(tree.value, Value::Null)).then_some(tree)
    }

    /// Where the field is written, or the owner's own place.
    pub(crate) fn spot_of(&self, name: &str) -> Spot {
        self.entries.iter().find(|(_, key, _)| key == name).map_or(self.spot, |(_, _, tree)| tree.spot)
    }

    pub(crate) fn text(&mut self, name: &'static str, findings: &mut Findings) -> Option<String> {
        let tree = self.tree(name)?;
        scalar(tree, &format!("{name} of {}", self.owner), findings)
    }

    /// A text that must be there.
    pub(crate) fn must_text(&mut self, name: &'static str, findings: &mut Findings) -> Option<String> {
        if self.tree(name).is_none() {
            self.report_missing(name, findings);
            return None;
        }
        self.text(name, findings)
    }

    pub(crate) fn report_missing(&self, name: &str, findings: &mut Findings) {
        findings.add(self.spot, format!("{} has no `{name}`", self.owner), format!("add `{name}: …`"));
    }

    /// A value that parses from text; `expected` is told to the writer when it does not.
    pub(crate) fn parsed<T: FromStr>(&mut self, name: &'static str, expected: &str, findings: &mut Findings) -> Option<T> {
        let text = self.text(name, findings)?;
        match text.parse() {
            Ok(value) => Some(value),
            Err(_) => {
                findings.add(self.spot_of(name), format!("{name}: {text:?} is not {expected}"), format!("write {expected}"));
                None
            }
        }
    }

    pub(crate) fn flag(&mut self, name: &'static str, default: bool, findings: &mut Findings) -> bool {
        self.parsed(name, "true or false", findings).unwrap_or(default)
    }

    pub(crate) fn list(&mut self, name: &'static str, findings: &mut Findings) -> &'t [Tree] {
        let Some(tree) = self.tree(name) else { return &[] };
        match &tree.value {
            Value::List(items) => items,
            other => {
                let what = format!("{name} of {} must be a list, but this is {}", self.owner, other.shape());
                findings.add(tree.spot, what, format!("write `{name}: [ … ]` or `- …` lines"));
                &[]
            }
        }
    }

    pub(crate) fn texts(&mut self, name: &'static str, findings: &mut Findings) -> Vec<String> {
        let owner = format!("an entry of {name}");
        self.list(name, findings).iter().filter_map(|item| scalar(item, &owner, findings)).collect()
    }

    /// A mapping of texts, such as env or labels.
    pub(crate) fn table(&mut self, name: &'static str, findings: &mut Findings) -> BTreeMap<String, String> {
        let Some(tree) = self.tree(name) else { return BTreeMap::new() };
        let Value::Map(entries) = &tree.value else {
            let what = format!("{name} of {} must be a mapping, but this is {}", self.owner, tree.value.shape());
            findings.add(tree.spot, what, "write `KEY: value` lines");
            return BTreeMap::new();
        };
        let mut table = BTreeMap::new();
        for (_, key, value) in entries {
            if let Some(text) = scalar_or_empty(value, &format!("{name}.{key}"), findings) {
                table.insert(key.clone(), text);
            }
        }
        table
    }

    /// Reports every field nobody asked for.
    pub(crate) fn close(self, findings: &mut Findings) {
        for (spot, key, _) in self.entries {
            if self.known.iter().any(|name| name == key) {
                continue;
            }
            let mend = match nearest(key, &self.known) {
                Some(name) => format!("did you mean `{name}`?"),
                None => format!("remove it; known here: {}", self.known.join(", ")),
            };
            findings.add(*spot, format!("{} has no field `{key}`", self.owner), mend);
        }
    }
}

fn scalar(tree: &Tree, what: &str, findings: &mut Findings) -> Option<String> {
    match &tree.value {
        Value::Scalar(text) => Some(text.clone()),
        other => {
            findings.add(tree.spot, format!("{what} must be a single value, but this is {}", other.shape()), "write one value");
            None
        }
    }
}

fn scalar_or_empty(tree: &Tree, what: &str, findings: &mut Findings) -> Option<String> {
    if matches!(tree.value, Value::Null) {
        return Some(String::new());
    }
    scalar(tree, what, findings)
}

/// The known name at the smallest edit distance, if it is near enough to be a slip of the pen.
pub(crate) fn nearest<'n>(word: &str, names: &[&'n str]) -> Option<&'n str> {
    let allowed = if word.len() < 4 { 1 } else { 2 };
    names.iter().map(|name| (distance(word, name), *name)).filter(|(distance, _)| *distance <= allowed).min().map(|(_, name)| name)
}

/// Levenshtein distance, case-insensitive.
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
