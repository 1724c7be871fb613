//! A YAML document as a tree in which every value knows its place. Knows nothing of objects.
//!
//! Built from the parser's events with a stack of its own: a deserializer that recurses overflows a thread's stack on input
//! that is a kilobyte long.

use std::collections::{HashMap, HashSet};

use granit_parser::{Event, Marker, Parser, ScalarStyle, ScanError, Span, Tag};

use crate::limits::{ALIASED_NODES_MAX, DEPTH_MAX};
use crate::scalar;

/// A place inside a document, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Spot {
    pub(crate) line: u32,
    pub(crate) column: u32,
}

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Node {
    /// Unique in its tree.
    pub(crate) id: u32,
    pub(crate) spot: Spot,
    pub(crate) value: Value,
}

/// The shapes a value can have (YAML core schema).
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<(Key, Node)>),
}

/// The name of a field.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Key {
    pub(crate) spot: Spot,
    pub(crate) name: String,
    /// A plain `<<`.
    is_merge: bool,
}

impl Node {
    /// The value of a field of a map.
    pub(crate) fn field(&self, name: &str) -> Option<&Node> {
        self.entry(name).map(|(_, node)| node)
    }

    /// A field of a map.
    pub(crate) fn entry(&self, name: &str) -> Option<&(Key, Node)> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|(key, _)| key.name == name),
            _ => None,
        }
    }

    /// The node with this id, here or inside.
    pub(crate) fn find(&self, id: u32) -> Option<&Node> {
        if self.id == id {
            return Some(self);
        }
        match &self.value {
            Value::List(items) => items.iter().find_map(|item| item.find(id)),
            Value::Map(entries) => entries.iter().find_map(|(_, item)| item.find(id)),
            _ => None,
        }
    }

    /// This node and all inside, by id.
    pub(crate) fn by_id(&self) -> HashMap<u32, &Node> {
        let (mut found, mut left) = (HashMap::new(), vec![self]);
        while let Some(node) = left.pop() {
            found.insert(node.id, node);
            match &node.value {
                Value::List(items) => left.extend(items),
                Value::Map(entries) => left.extend(entries.iter().map(|(_, item)| item)),
                _ => {}
            }
        }
        found
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// Why a text is not a YAML document.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SyntaxError {
    pub(crate) spot: Spot,
    pub(crate) problem: String,
}

/// Reads one document.
pub(crate) fn parse(text: &str) -> Result<Node, SyntaxError> {
    let options = granit_parser::options! {
        emit_comments: false,
        disallow_directives: true,
        flow_nesting_limit: DEPTH_MAX,
        block_nesting_limit: DEPTH_MAX,
    };
    let mut builder = Builder::default();
    for event in Parser::new_from_str_with_options(text, options) {
        let (event, span) = event.map_err(|error| syntax(&error))?;
        builder.event(event, &span)?;
    }
    let missing = SyntaxError { spot: Spot { line: 1, column: 1 }, problem: "the document is empty".to_owned() };
    builder.root.ok_or(missing)
}

fn syntax(error: &ScanError) -> SyntaxError {
    SyntaxError { spot: spot(error.marker()), problem: error.info() }
}

fn spot(marker: &Marker) -> Spot {
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Spot { line: narrow(marker.line()).max(1), column: narrow(marker.col()).saturating_add(1) }
}

/// A list or map whose end has not come yet.
struct Open {
    node: Node,
    anchor: usize,
    /// The key whose value comes next.
    key: Option<Key>,
    names: HashSet<String>,
    /// Maps named by `<<`, to be added where the map itself says nothing.
    merges: Vec<Node>,
}

#[derive(Default)]
struct Builder {
    ids: u32,
    open: Vec<Open>,
    anchors: HashMap<usize, Node>,
    aliased: usize,
    root: Option<Node>,
}

impl Builder {
    fn event(&mut self, event: Event<'_>, span: &Span) -> Result<(), SyntaxError> {
        let at = spot(&span.start);
        match event {
            Event::Scalar(text, style, anchor, tag) => self.scalar(&text, style, anchor, tag.as_deref(), at),
            Event::SequenceStart(_, anchor, tag) => self.start(Value::List(Vec::new()), anchor, tag.as_deref(), at),
            Event::MappingStart(_, anchor, tag) => self.start(Value::Map(Vec::new()), anchor, tag.as_deref(), at),
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::Alias(id) => {
                let Some(target) = self.anchors.get(&id) else { return refuse(at, "an alias may not stand inside its own anchor") };
                let mut copy = target.clone();
                copy.spot = at;
                self.aliased += self.renumber(&mut copy);
                if self.aliased > ALIASED_NODES_MAX {
                    return refuse(at, format!("aliases repeat more than {ALIASED_NODES_MAX} values"));
                }
                self.place(copy, 0)
            }
            _ => Ok(()),
        }
    }

    fn next_id(&mut self) -> u32 {
        self.ids += 1;
        self.ids - 1
    }

    /// Gives a copied tree ids of its own; returns how many nodes it has.
    fn renumber(&mut self, node: &mut Node) -> usize {
        node.id = self.next_id();
        1 + match &mut node.value {
            Value::List(items) => items.iter_mut().map(|item| self.renumber(item)).sum(),
            Value::Map(entries) => entries.iter_mut().map(|(_, item)| self.renumber(item)).sum(),
            _ => 0,
        }
    }

    fn scalar(&mut self, text: &str, style: ScalarStyle, anchor: usize, tag: Option<&Tag>, at: Spot) -> Result<(), SyntaxError> {
        let is_key = self.open.last().is_some_and(|open| matches!(open.node.value, Value::Map(_)) && open.key.is_none());
        if is_key {
            return self.key(text, style, at);
        }
        let value = match tag.map(core_tag) {
            None if style == ScalarStyle::Plain => scalar::resolve(text),
            None | Some(Some("str")) => Value::Text(text.to_owned()),
            Some(Some(_)) => scalar::resolve(text),
            Some(None) => return refuse(at, "tags other than YAML's own are not read"),
        };
        let id = self.next_id();
        self.place(Node { id, spot: at, value }, anchor)
    }

    fn key(&mut self, name: &str, style: ScalarStyle, at: Spot) -> Result<(), SyntaxError> {
        let Some(open) = self.open.last_mut() else { return Ok(()) };
        let is_merge = style == ScalarStyle::Plain && name == "<<";
        if !is_merge && !open.names.insert(name.to_owned()) {
            return refuse(at, format!("the field {name:?} is given twice"));
        }
        open.key = Some(Key { spot: at, name: name.to_owned(), is_merge });
        Ok(())
    }

    fn start(&mut self, value: Value, anchor: usize, tag: Option<&Tag>, at: Spot) -> Result<(), SyntaxError> {
        if self.open.len() >= DEPTH_MAX {
            return refuse(at, format!("values are nested more than {DEPTH_MAX} levels deep"));
        }
        if self.open.last().is_some_and(|open| matches!(open.node.value, Value::Map(_)) && open.key.is_none()) {
            return refuse(at, "the name of a field must be a word");
        }
        if tag.is_some_and(|tag| core_tag(tag).is_none()) {
            return refuse(at, "tags other than YAML's own are not read");
        }
        let id = self.next_id();
        let node = Node { id, spot: at, value };
        self.open.push(Open { node, anchor, key: None, names: HashSet::new(), merges: Vec::new() });
        Ok(())
    }

    fn end(&mut self) -> Result<(), SyntaxError> {
        let Some(mut open) = self.open.pop() else { return Ok(()) };
        if let Value::Map(entries) = &mut open.node.value {
            for merge in open.merges {
                let Value::Map(merged) = merge.value else { return refuse(merge.spot, "`<<` takes a mapping or a list of mappings") };
                entries.extend(merged.into_iter().filter(|(key, _)| open.names.insert(key.name.clone())));
            }
        }
        self.place(open.node, open.anchor)
    }

    /// Puts a complete value where it belongs.
    fn place(&mut self, node: Node, anchor: usize) -> Result<(), SyntaxError> {
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
        }
        let Some(open) = self.open.last_mut() else {
            self.root = Some(node);
            return Ok(());
        };
        match (&mut open.node.value, open.key.take()) {
            (Value::List(items), _) => items.push(node),
            (Value::Map(_), Some(key)) if key.is_merge => match node.value {
                Value::List(items) => open.merges.extend(items),
                _ => open.merges.push(node),
            },
            (Value::Map(entries), Some(key)) => entries.push((key, node)),
            _ => return refuse(node.spot, "the name of a field must be a word"),
        }
        Ok(())
    }
}

fn refuse<T>(spot: Spot, problem: impl Into<String>) -> Result<T, SyntaxError> {
    Err(SyntaxError { spot, problem: problem.into() })
}

/// The name of a tag of YAML's core schema.
fn core_tag(tag: &Tag) -> Option<&str> {
    tag.core_suffix()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `line:column value`, one a line, in the order of the tree.
    fn show(node: &Node, out: &mut String) {
        use std::fmt::Write;
        let Spot { line, column } = node.spot;
        match &node.value {
            Value::List(items) => {
                writeln!(out, "{line}:{column} list").unwrap();
                items.iter().for_each(|item| show(item, out));
            }
            Value::Map(entries) => {
                writeln!(out, "{line}:{column} map").unwrap();
                for (key, item) in entries {
                    writeln!(out, "{}:{} {}:", key.spot.line, key.spot.column, key.name).unwrap();
                    show(item, out);
                }
            }
            scalar => writeln!(out, "{line}:{column} {scalar:?}").unwrap(),
        }
    }

    fn check(text: &str, expected: &str) {
        let mut shown = String::new();
        match parse(text) {
            Ok(node) => show(&node, &mut shown),
            Err(error) => shown = format!("{}:{} {}", error.spot.line, error.spot.column, error.problem),
        }
        assert_eq!(shown.trim(), expected.trim(), "{text:?}");
    }

    #[test]
    fn every_value_knows_its_place() {
        check(
            "# c\na: 1\nb:\n  - x\n  - {k: -1, l: 1.5}\nc: !!str 3\n",
            "2:1 map\n2:1 a:\n2:4 Unsigned(1)\n3:1 b:\n4:3 list\n4:5 Text(\"x\")\n5:5 map\n5:6 k:\n5:9 Signed(-1)\n5:13 l:\n5:16 Float(1.5)\n6:1 c:\n6:10 Text(\"3\")",
        );
        check(
            "a: ~\nb: \"true\"\nc: true\nd: on\n",
            "1:1 map\n1:1 a:\n1:4 Null\n2:1 b:\n2:4 Text(\"true\")\n3:1 c:\n3:4 Bool(true)\n4:1 d:\n4:4 Text(\"on\")",
        );
    }

    #[test]
    fn anchors_and_merges_are_followed() {
        check(
            "a: &x {k: 1, l: 2}\nb:\n  <<: *x\n  l: 3\nc: *x\n",
            "1:1 map\n1:1 a:\n1:7 map\n1:8 k:\n1:11 Unsigned(1)\n1:14 l:\n1:17 Unsigned(2)\n2:1 b:\n3:3 map\n4:3 l:\n4:6 Unsigned(3)\n1:8 k:\n1:11 Unsigned(1)\n5:1 c:\n5:4 map\n1:8 k:\n1:11 Unsigned(1)\n1:14 l:\n1:17 Unsigned(2)",
        );
    }

    #[test]
    fn broken_yaml_has_a_place() {
        check("a: 1\na: 2\n", "2:1 the field \"a\" is given twice");
        check("a: !mine x\n", "1:10 tags other than YAML's own are not read");
        check("? [a]\n: b\n", "1:3 the name of a field must be a word");
        check("a: &a [*a]\n", "1:8 an alias may not stand inside its own anchor");
        check("a: {<<: 3}\n", "1:9 `<<` takes a mapping or a list of mappings");
        check("", "1:1 the document is empty");
        for (text, line) in [("a: 1\n b: 2\n", 2), ("b: 2\na: [1\n", 2), ("a: \"x\n", 2), ("a:\n\tb: 1", 2), ("a: *x\n", 1)] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.spot.line, line, "{text:?}: {error:?}");
            assert!(!error.problem.is_empty(), "{text:?}: {error:?}");
        }
    }

    #[test]
    fn depth_and_aliases_are_limited() {
        let flow = |levels: usize| format!("{}1{}", "[".repeat(levels), "]".repeat(levels));
        let block = |levels: usize| (0..levels).map(|level| format!("{}a:\n", " ".repeat(level))).collect::<String>();
        for text in [flow(DEPTH_MAX), block(DEPTH_MAX)] {
            assert!(parse(&text).is_ok());
        }
        for text in [flow(DEPTH_MAX + 1), block(DEPTH_MAX + 1), flow(100_000), "- ".repeat(100_000)] {
            assert!(parse(&text).is_err());
        }
        let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..6 {
            let names = vec![format!("*a{}", level - 1); 10].join(", ");
            laughs.push_str(&format!("a{level}: &a{level} [{names}]\n"));
        }
        assert!(parse(&laughs).unwrap_err().problem.contains("aliases repeat"));
    }
}
