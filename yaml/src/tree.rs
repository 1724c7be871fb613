//! A YAML document as a tree in which every value has its position. It does not know objects or
//! their fields.
//!
//! The tree is built from parser events with an explicit stack: a recursive deserializer overflows
//! a thread's stack on input of one kilobyte.

use std::collections::{HashMap, HashSet};

use granit_parser::{Event, Marker, Parser, ScalarStyle, ScanError, Span, Tag};

use crate::limits::{
    ALIASED_BYTES_MAX, ALIASED_NODES_MAX, ANCHORED_BYTES_MAX, ANCHORED_NODES_MAX, DEPTH_MAX,
};
use crate::scalar;

/// A line and column inside a document, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    pub line: u32,
    pub column: u32,
}

/// One YAML value with its position.
#[derive(Debug, Clone, PartialEq)]
pub struct YamlNode {
    /// An identifier that is unique in the tree.
    pub id: u32,
    pub spot: Position,
    pub value: YamlValue,
    /// The text of an unquoted number or truth value as its writer typed it: `1.10` is not `1.1`.
    written: Option<Box<str>>,
}

/// The types of values in the YAML core schema.
#[derive(Debug, Clone, PartialEq)]
pub enum YamlValue {
    Null,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
    List(Vec<YamlNode>),
    Map(Vec<(YamlKey, YamlNode)>),
}

/// The name of a field, with its position.
#[derive(Debug, Clone, PartialEq)]
pub struct YamlKey {
    pub spot: Position,
    pub name: String,
    /// The key is an unquoted `<<` (merge key).
    is_merge: bool,
}

impl YamlNode {
    /// Returns the value of the field `name`, if this is a map that has it.
    pub fn field(&self, name: &str) -> Option<&YamlNode> {
        self.entry(name).map(|(_, node)| node)
    }

    /// Returns key and value of the field `name`, if this is a map that has it.
    pub fn entry(&self, name: &str) -> Option<&(YamlKey, YamlNode)> {
        match &self.value {
            YamlValue::Map(entries) => entries.iter().find(|(key, _)| key.name == name),
            _ => None,
        }
    }

    /// Returns the node with this id: this node or one inside it.
    pub fn find(&self, id: u32) -> Option<&YamlNode> {
        if self.id == id {
            return Some(self);
        }
        match &self.value {
            YamlValue::List(items) => items.iter().find_map(|item| item.find(id)),
            YamlValue::Map(entries) => entries.iter().find_map(|(_, item)| item.find(id)),
            _ => None,
        }
    }

    /// Returns this node and all nodes inside it, indexed by id.
    pub fn by_id(&self) -> HashMap<u32, &YamlNode> {
        let (mut found, mut left) = (HashMap::new(), vec![self]);
        while let Some(node) = left.pop() {
            found.insert(node.id, node);
            match &node.value {
                YamlValue::List(items) => left.extend(items),
                YamlValue::Map(entries) => left.extend(entries.iter().map(|(_, item)| item)),
                _ => {}
            }
        }
        found
    }

    /// Returns the text, if this is a text. A number without quotes is not a text.
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            YamlValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns a single value as its writer typed it, whatever its type, or `None` for a list, a
    /// map or an empty value.
    pub fn scalar_text(&self) -> Option<&str> {
        self.text().or(self.written.as_deref())
    }
}

/// The reason that a text is not a valid YAML document.
#[derive(Debug, PartialEq, Eq)]
pub struct SyntaxError {
    pub spot: Position,
    pub problem: String,
}

/// Parses one document.
///
/// # Errors
/// Returns the position and the problem if the text is not one YAML document or exceeds a limit.
pub fn parse(text: &str) -> Result<YamlNode, SyntaxError> {
    let options = granit_parser::options! {
        emit_comments: false,
        disallow_directives: true,
        flow_nesting_limit: DEPTH_MAX,
        block_nesting_limit: DEPTH_MAX,
    };
    let mut builder = TreeBuilder::default();
    for event in Parser::new_from_str_with_options(text, options) {
        let (event, span) = event.map_err(|error| syntax(&error))?;
        builder.event(event, &span)?;
    }
    let missing = SyntaxError {
        spot: Position { line: 1, column: 1 },
        problem: "the document is empty".to_owned(),
    };
    builder.root.ok_or(missing)
}

fn syntax(error: &ScanError) -> SyntaxError {
    SyntaxError {
        spot: spot(error.marker()),
        problem: error.info(),
    }
}

fn spot(marker: &Marker) -> Position {
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Position {
        line: narrow(marker.line()).max(1),
        column: narrow(marker.col()).saturating_add(1),
    }
}

/// A list or map whose end event has not arrived yet.
struct PartialNode {
    node: YamlNode,
    anchor: usize,
    /// The key that the next value belongs to.
    key: Option<YamlKey>,
    names: HashSet<String>,
    /// Maps that `<<` names. At the end, their fields are added where the map itself does not
    /// define them.
    merges: Vec<YamlNode>,
}

/// The size of copied trees.
#[derive(Default)]
struct CopySize {
    nodes: usize,
    /// Bytes of texts and of names of fields.
    bytes: usize,
}

impl CopySize {
    fn add(&mut self, node: &YamlNode) {
        self.nodes += 1;
        self.bytes += node.scalar_text().map_or(0, str::len);
        match &node.value {
            YamlValue::List(items) => items.iter().for_each(|item| self.add(item)),
            YamlValue::Map(entries) => {
                for (key, item) in entries {
                    self.bytes += key.name.len();
                    self.add(item);
                }
            }
            _ => {}
        }
    }

    fn exceeds(&self, nodes: usize, bytes: usize) -> bool {
        self.nodes > nodes || self.bytes > bytes
    }
}

#[derive(Default)]
struct TreeBuilder {
    ids: u32,
    open: Vec<PartialNode>,
    anchors: HashMap<usize, YamlNode>,
    anchored: CopySize,
    aliased: CopySize,
    root: Option<YamlNode>,
}

impl TreeBuilder {
    fn event(&mut self, event: Event<'_>, span: &Span) -> Result<(), SyntaxError> {
        let at = spot(&span.start);
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                self.scalar(&text, style, anchor, tag.as_deref(), at)
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.start(YamlValue::List(Vec::new()), anchor, tag.as_deref(), at)
            }
            Event::MappingStart(_, anchor, tag) => {
                self.start(YamlValue::Map(Vec::new()), anchor, tag.as_deref(), at)
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::Alias(id) => {
                let Some(target) = self.anchors.get(&id) else {
                    return refuse(at, "an alias must not appear inside its own anchor");
                };
                // The parser does not expand aliases. Counting the copies limits "billion laughs"
                // documents.
                self.aliased.add(target);
                if self.aliased.exceeds(ALIASED_NODES_MAX, ALIASED_BYTES_MAX) {
                    let problem = format!(
                        "aliases repeat more than {ALIASED_NODES_MAX} values or {ALIASED_BYTES_MAX} bytes"
                    );
                    return refuse(at, problem);
                }
                let mut copy = target.clone();
                copy.spot = at;
                self.renumber(&mut copy);
                self.add_node(copy, 0)
            }
            _ => Ok(()),
        }
    }

    fn next_id(&mut self) -> u32 {
        self.ids += 1;
        self.ids - 1
    }

    /// Gives the nodes of a copied tree new ids.
    fn renumber(&mut self, node: &mut YamlNode) {
        node.id = self.next_id();
        match &mut node.value {
            YamlValue::List(items) => items.iter_mut().for_each(|item| self.renumber(item)),
            YamlValue::Map(entries) => {
                let items = entries.iter_mut().map(|(_, item)| item);
                items.for_each(|item| self.renumber(item));
            }
            _ => {}
        }
    }

    fn scalar(
        &mut self,
        text: &str,
        style: ScalarStyle,
        anchor: usize,
        tag: Option<&Tag>,
        at: Position,
    ) -> Result<(), SyntaxError> {
        let is_key = self
            .open
            .last()
            .is_some_and(|open| matches!(open.node.value, YamlValue::Map(_)) && open.key.is_none());
        if is_key {
            return self.key(text, style, at);
        }
        let value = match tag.map(core_tag) {
            None if style == ScalarStyle::Plain => scalar::resolve(text),
            None | Some(Some("str")) => YamlValue::Text(text.to_owned()),
            Some(Some(_)) => scalar::resolve(text),
            Some(None) => return refuse(at, "custom YAML tags are not supported"),
        };
        let is_text = matches!(value, YamlValue::Text(_) | YamlValue::Null);
        let written = (!is_text).then(|| text.into());
        let id = self.next_id();
        self.add_node(
            YamlNode {
                id,
                spot: at,
                value,
                written,
            },
            anchor,
        )
    }

    fn key(&mut self, name: &str, style: ScalarStyle, at: Position) -> Result<(), SyntaxError> {
        let Some(open) = self.open.last_mut() else {
            return Ok(());
        };
        let is_merge = style == ScalarStyle::Plain && name == "<<";
        // Several `<<` keys are valid; any other repeated key would silently override the first
        // one.
        if !is_merge && !open.names.insert(name.to_owned()) {
            return refuse(at, format!("the field {name:?} is given twice"));
        }
        open.key = Some(YamlKey {
            spot: at,
            name: name.to_owned(),
            is_merge,
        });
        Ok(())
    }

    fn start(
        &mut self,
        value: YamlValue,
        anchor: usize,
        tag: Option<&Tag>,
        at: Position,
    ) -> Result<(), SyntaxError> {
        if self.open.len() >= DEPTH_MAX {
            return refuse(
                at,
                format!("values are nested more than {DEPTH_MAX} levels deep"),
            );
        }
        if self
            .open
            .last()
            .is_some_and(|open| matches!(open.node.value, YamlValue::Map(_)) && open.key.is_none())
        {
            return refuse(at, "the name of a field must be a word");
        }
        if tag.is_some_and(|tag| core_tag(tag).is_none()) {
            return refuse(at, "custom YAML tags are not supported");
        }
        let id = self.next_id();
        let node = YamlNode {
            id,
            spot: at,
            value,
            written: None,
        };
        self.open.push(PartialNode {
            node,
            anchor,
            key: None,
            names: HashSet::new(),
            merges: Vec::new(),
        });
        Ok(())
    }

    fn end(&mut self) -> Result<(), SyntaxError> {
        let Some(mut open) = self.open.pop() else {
            return Ok(());
        };
        if let YamlValue::Map(entries) = &mut open.node.value {
            for merge in open.merges {
                let YamlValue::Map(merged) = merge.value else {
                    return refuse(merge.spot, "`<<` takes a mapping or a list of mappings");
                };
                // The map's own fields take precedence over merged ones, and earlier merges over
                // later ones.
                entries.extend(
                    merged
                        .into_iter()
                        .filter(|(key, _)| open.names.insert(key.name.clone())),
                );
            }
        }
        self.add_node(open.node, open.anchor)
    }

    /// Adds a complete value to the open list or map, or makes it the root.
    fn add_node(&mut self, node: YamlNode, anchor: usize) -> Result<(), SyntaxError> {
        if anchor != 0 {
            self.anchored.add(&node);
            if self
                .anchored
                .exceeds(ANCHORED_NODES_MAX, ANCHORED_BYTES_MAX)
            {
                let problem = format!(
                    "anchors mark more than {ANCHORED_NODES_MAX} values or {ANCHORED_BYTES_MAX} bytes"
                );
                return refuse(node.spot, problem);
            }
            self.anchors.insert(anchor, node.clone());
        }
        let Some(open) = self.open.last_mut() else {
            if self.root.is_some() {
                return refuse(node.spot, "there is more than one document");
            }
            self.root = Some(node);
            return Ok(());
        };
        match (&mut open.node.value, open.key.take()) {
            (YamlValue::List(items), _) => items.push(node),
            (YamlValue::Map(_), Some(key)) if key.is_merge => match node.value {
                YamlValue::List(items) => open.merges.extend(items),
                _ => open.merges.push(node),
            },
            (YamlValue::Map(entries), Some(key)) => entries.push((key, node)),
            _ => return refuse(node.spot, "the name of a field must be a word"),
        }
        Ok(())
    }
}

fn refuse<T>(spot: Position, problem: impl Into<String>) -> Result<T, SyntaxError> {
    Err(SyntaxError {
        spot,
        problem: problem.into(),
    })
}

/// Returns the name of a tag of YAML's core schema, or `None` for another tag.
fn core_tag(tag: &Tag) -> Option<&str> {
    tag.core_suffix()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes `line:column value`, one per line, in the order of the tree.
    fn show(node: &YamlNode, out: &mut String) {
        use std::fmt::Write;
        let Position { line, column } = node.spot;
        match &node.value {
            YamlValue::List(items) => {
                writeln!(out, "{line}:{column} list").unwrap();
                items.iter().for_each(|item| show(item, out));
            }
            YamlValue::Map(entries) => {
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
            Err(error) => {
                shown = format!(
                    "{}:{} {}",
                    error.spot.line, error.spot.column, error.problem
                )
            }
        }
        assert_eq!(shown.trim(), expected.trim(), "{text:?}");
    }

    #[test]
    fn every_value_has_its_position() {
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
    fn numbers_keep_the_text_of_their_writer() {
        let node = parse("{a: 1.10, b: 0x1F, c: true, d: \"7\", e: ~, f: word}").unwrap();
        let text = |name: &str| node.field(name).unwrap().scalar_text().map(str::to_owned);
        let texts = ["a", "b", "c", "d", "e", "f"].map(text);
        let expected = [
            Some("1.10"),
            Some("0x1F"),
            Some("true"),
            Some("7"),
            None,
            Some("word"),
        ];
        assert_eq!(texts, expected.map(|text| text.map(str::to_owned)));
    }

    #[test]
    fn anchors_and_merges_are_followed() {
        check(
            "a: &x {k: 1, l: 2}\nb:\n  <<: *x\n  l: 3\nc: *x\n",
            "1:1 map\n1:1 a:\n1:7 map\n1:8 k:\n1:11 Unsigned(1)\n1:14 l:\n1:17 Unsigned(2)\n2:1 b:\n3:3 map\n4:3 l:\n4:6 Unsigned(3)\n1:8 k:\n1:11 Unsigned(1)\n5:1 c:\n5:4 map\n1:8 k:\n1:11 Unsigned(1)\n1:14 l:\n1:17 Unsigned(2)",
        );
    }

    #[test]
    fn broken_yaml_has_a_position() {
        check("a: 1\na: 2\n", "2:1 the field \"a\" is given twice");
        check("a: !mine x\n", "1:10 custom YAML tags are not supported");
        check("? [a]\n: b\n", "1:3 the name of a field must be a word");
        check(
            "a: &a [*a]\n",
            "1:8 an alias must not appear inside its own anchor",
        );
        check(
            "a: {<<: 3}\n",
            "1:9 `<<` takes a mapping or a list of mappings",
        );
        check("", "1:1 the document is empty");
        check("a: 1\n---\nb: 2\n", "3:1 there is more than one document");
        for (text, line) in [
            ("a: 1\n b: 2\n", 2),
            ("b: 2\na: [1\n", 2),
            ("a: \"x\n", 2),
            ("a:\n\tb: 1", 2),
            ("a: *x\n", 1),
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.spot.line, line, "{text:?}: {error:?}");
            assert!(!error.problem.is_empty(), "{text:?}: {error:?}");
        }
    }

    #[test]
    fn depth_and_aliases_are_limited() {
        let flow = |levels: usize| format!("{}1{}", "[".repeat(levels), "]".repeat(levels));
        let block = |levels: usize| {
            (0..levels)
                .map(|level| format!("{}a:\n", " ".repeat(level)))
                .collect::<String>()
        };
        for text in [flow(DEPTH_MAX), block(DEPTH_MAX)] {
            assert!(parse(&text).is_ok());
        }
        for text in [
            flow(DEPTH_MAX + 1),
            block(DEPTH_MAX + 1),
            flow(100_000),
            "- ".repeat(100_000),
        ] {
            assert!(parse(&text).is_err());
        }
        let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..6 {
            let names = vec![format!("*a{}", level - 1); 10].join(", ");
            laughs.push_str(&format!("a{level}: &a{level} [{names}]\n"));
        }
        assert!(
            parse(&laughs)
                .unwrap_err()
                .problem
                .contains("aliases repeat")
        );
    }

    #[test]
    fn bytes_that_aliases_repeat_are_limited() {
        let text = |length: usize, count: usize| {
            let aliases = vec!["*a"; count].join(", ");
            format!("a: &a {}\nb: [{aliases}]\n", "x".repeat(length))
        };
        let half = ALIASED_BYTES_MAX / 2;
        assert!(parse(&text(half, 2)).is_ok());
        for text in [
            text(half, 3),
            text(half + 1, 2),
            // Names of fields are copied too.
            format!(
                "a: &a {{{}: 1}}\nb: [{}]\n",
                "x".repeat(900),
                vec!["*a"; 1200].join(", ")
            ),
        ] {
            let problem = parse(&text).unwrap_err().problem;
            assert!(problem.contains("aliases repeat"), "{problem}");
        }
    }

    #[test]
    fn nodes_and_bytes_that_anchors_mark_are_limited() {
        // Each level is copied with everything inside it.
        let nested = |levels: usize, inner: &str| {
            let begin: String = (0..levels).map(|level| format!("&a{level} [")).collect();
            format!("{begin}{inner}{}", "]".repeat(levels))
        };
        let values = vec!["1"; 10_000].join(", ");
        assert!(parse(&nested(9, &values)).is_ok());
        let many = parse(&nested(10, &values)).unwrap_err();
        let long = "x".repeat(ANCHORED_BYTES_MAX / 8);
        assert!(parse(&nested(8, &long)).is_ok());
        for error in [many, parse(&nested(9, &long)).unwrap_err()] {
            assert!(error.problem.contains("anchors mark"), "{error:?}");
        }
    }
}
