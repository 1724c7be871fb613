//! From a tree to a typed object, with *all* mistakes. serde stops at the first error; so the broken value is noted and cut
//! out of the tree, and the object is read again, until it can be read or nothing is left of it.

use std::cell::RefCell;
use std::collections::HashSet;

use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, MapAccess, SeqAccess, Unexpected, VariantAccess, Visitor};
use serde::forward_to_deserialize_any;

use crate::error::DecodeError;
use crate::limits::FINDINGS_PER_DOCUMENT_MAX;
use crate::path::{OwnedStep, Path, Step, steps};
use crate::tree::{Key, Node, Spot, Value};

/// What could be read.
pub(crate) struct Decoded<T> {
    /// `None` if what the object cannot do without is broken.
    pub(crate) object: Option<T>,
    /// Values that were cut.
    pub(crate) broken: Vec<Broken>,
    /// Fields that the type does not have.
    pub(crate) unknown: Vec<Unknown>,
}

/// A value that could not be taken.
pub(crate) struct Broken {
    pub(crate) path: String,
    pub(crate) spot: Spot,
    pub(crate) problem: String,
    pub(crate) mend: String,
}

/// A field that nobody asked for.
pub(crate) struct Unknown {
    pub(crate) path: String,
    pub(crate) spot: Spot,
    pub(crate) node: u32,
    /// What could be written beside it.
    pub(crate) known: &'static [&'static str],
}

/// Whether `field:` with nothing after it may stand for an absent field.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Empty {
    /// As Kubernetes prints its own objects.
    Absent,
    /// In policy an empty condition must not become no condition. `metadata` and `status` are excepted.
    Refused,
}

/// Reads `root` as a `T`.
pub(crate) fn decode<T: for<'de> Deserialize<'de>>(root: &Node, empty: Empty) -> Decoded<T> {
    let mut cuts = Cuts::default();
    let mut broken: Vec<Broken> = Vec::new();
    loop {
        let notes = RefCell::new(Notes::default());
        let context = Context { cuts: &cuts, empty, notes: &notes };
        let result = T::deserialize(Reader { node: root, path: &Path::ROOT, context });
        let mut notes = notes.into_inner();
        let error = match result {
            Ok(object) => {
                broken.append(&mut notes.empty);
                return Decoded { object: Some(object), broken, unknown: notes.unknown };
            }
            Err(error) => error.at(root, String::new),
        };
        let Some(place) = error.place else { return Decoded { object: None, broken, unknown: notes.unknown } };
        let follows = error.missing.is_some_and(|field| cuts.made_missing(root, place.id, field));
        if !follows && !cuts.is_hollow(place.id) {
            let path = match error.missing {
                Some(field) if place.path.is_empty() => field.to_owned(),
                Some(field) => format!("{}.{field}", place.path),
                None => place.path.clone(),
            };
            broken.push(Broken { path, spot: place.spot, problem: error.problem, mend: error.mend });
        }
        let next = match place.id {
            id if id == root.id => None,
            id if broken.len() < FINDINGS_PER_DOCUMENT_MAX => Some(id),
            _ => whole_field(root, &place.path).map(|(path, key, value)| {
                let (problem, mend) =
                    (format!("there are more than {FINDINGS_PER_DOCUMENT_MAX} mistakes, so this is left out"), "mend those above first");
                broken.push(Broken { path, spot: key.spot, problem, mend: mend.to_owned() });
                value.id
            }),
        };
        if !next.is_some_and(|id| cuts.cut(id)) {
            broken.append(&mut notes.empty);
            return Decoded { object: None, broken, unknown: notes.unknown };
        }
    }
}

/// The field of the second level (`spec.rules`) around a value: what is cut when there are too many mistakes to tell one by one.
fn whole_field<'t>(root: &'t Node, path: &str) -> Option<(String, &'t Key, &'t Node)> {
    let mut steps = steps(path).into_iter();
    let (Some(OwnedStep::Field(outer)), Some(OwnedStep::Field(inner))) = (steps.next(), steps.next()) else { return None };
    let (key, value) = root.field(&outer)?.entry(&inner)?;
    Some((format!("{outer}.{inner}"), key, value))
}

/// The values that are taken as absent. An item of a list is hollowed out first, to keep the places of its neighbours.
#[derive(Default)]
struct Cuts {
    hollow: HashSet<u32>,
    gone: HashSet<u32>,
}

impl Cuts {
    /// False if there is nothing left to cut.
    fn cut(&mut self, id: u32) -> bool {
        self.hollow.insert(id) || self.gone.insert(id)
    }
    fn is_hollow(&self, id: u32) -> bool {
        self.hollow.contains(&id)
    }
    /// Whether `field` of the map `id` is missing only because it was cut.
    fn made_missing(&self, root: &Node, id: u32, field: &str) -> bool {
        !self.hollow.is_empty() && root.find(id).and_then(|map| map.field(field)).is_some_and(|value| self.hollow.contains(&value.id))
    }
}

/// What was seen on the way.
#[derive(Default)]
struct Notes {
    unknown: Vec<Unknown>,
    empty: Vec<Broken>,
}

#[derive(Clone, Copy)]
struct Context<'t> {
    cuts: &'t Cuts,
    empty: Empty,
    notes: &'t RefCell<Notes>,
}

/// A value about to be read.
#[derive(Clone, Copy)]
struct Reader<'t> {
    node: &'t Node,
    path: &'t Path<'t>,
    context: Context<'t>,
}

impl<'t> Reader<'t> {
    fn unexpected(&self) -> Unexpected<'t> {
        match &self.node.value {
            Value::Null => Unexpected::Unit,
            Value::Bool(value) => Unexpected::Bool(*value),
            Value::Unsigned(value) => Unexpected::Unsigned(*value),
            Value::Signed(value) => Unexpected::Signed(*value),
            Value::Float(value) => Unexpected::Float(*value),
            Value::Text(text) => Unexpected::Str(text),
            Value::List(_) => Unexpected::Seq,
            Value::Map(_) => Unexpected::Map,
        }
    }

    fn is_hollow(&self) -> bool {
        self.context.cuts.is_hollow(self.node.id)
    }

    fn visit_map<'de, V: Visitor<'de>>(
        self,
        visitor: V,
        known: &'static [&'static str],
        drops_empty: bool,
    ) -> Result<V::Value, DecodeError> {
        let entries: &[_] = match &self.node.value {
            _ if self.is_hollow() => &[],
            Value::Map(entries) => entries,
            _ => return Err(serde::de::Error::invalid_type(self.unexpected(), &visitor)),
        };
        visitor.visit_map(Fields { entries: entries.iter(), value: None, reader: self, known, drops_empty })
    }
}

impl<'de> Deserializer<'de> for Reader<'_> {
    type Error = DecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        let result = match &self.node.value {
            _ if self.is_hollow() => self.visit_map(visitor, &[], false),
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Unsigned(value) => visitor.visit_u64(*value),
            Value::Signed(value) => visitor.visit_i64(*value),
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(text) => visitor.visit_str(text),
            Value::List(items) => visitor.visit_seq(Items { items: items.iter().enumerate(), reader: self }),
            Value::Map(_) => self.visit_map(visitor, &[], false),
        };
        result.map_err(|error| error.at(self.node, || self.path.to_string()))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.node.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _name: &'static str, visitor: V) -> Result<V::Value, DecodeError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        self.visit_map(visitor, fields, true).map_err(|error| error.at(self.node, || self.path.to_string()))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        let result = match &self.node.value {
            Value::Text(text) if !self.is_hollow() => visitor.visit_enum(Word(text)),
            _ => Err(serde::de::Error::invalid_type(self.unexpected(), &"one word")),
        };
        result.map_err(|error| error.at(self.node, || self.path.to_string()))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf
        unit unit_struct seq tuple tuple_struct map identifier
    }
}

/// The fields of a map.
struct Fields<'t> {
    entries: std::slice::Iter<'t, (Key, Node)>,
    value: Option<&'t (Key, Node)>,
    reader: Reader<'t>,
    known: &'static [&'static str],
    /// A struct, whose fields may be left empty.
    drops_empty: bool,
}

impl<'t> Fields<'t> {
    /// Whether an empty field is skipped; notes it where it should not be there.
    fn skips_empty(&self, entry: &(Key, Node)) -> bool {
        if !self.drops_empty || !matches!(entry.1.value, Value::Null) || !self.known.contains(&entry.0.name.as_str()) {
            return false;
        }
        let path = self.reader.path.to(Step::Field(&entry.0.name)).to_string();
        if self.reader.context.empty == Empty::Refused && path.starts_with("spec") {
            self.reader.context.notes.borrow_mut().empty.push(Broken {
                path,
                spot: entry.0.spot,
                problem: "the field is empty".to_owned(),
                mend: "write a value or remove the field".to_owned(),
            });
        }
        true
    }
}

impl<'de, 't> MapAccess<'de> for Fields<'t> {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, DecodeError> {
        loop {
            let Some(entry) = self.entries.next() else { return Ok(None) };
            if self.reader.context.cuts.is_hollow(entry.1.id) || self.skips_empty(entry) {
                continue;
            }
            self.value = Some(entry);
            let name: StrDeserializer<'_, DecodeError> = entry.0.name.as_str().into_deserializer();
            return seed.deserialize(name).map(Some);
        }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, DecodeError> {
        let Some((key, node)) = self.value.take() else { return Err(serde::de::Error::custom("a value was asked for before its key")) };
        let path = self.reader.path.to(Step::Field(&key.name));
        if self.drops_empty && !self.known.contains(&key.name.as_str()) {
            let unknown = Unknown { path: path.to_string(), spot: key.spot, node: node.id, known: self.known };
            self.reader.context.notes.borrow_mut().unknown.push(unknown);
        }
        let reader = Reader { node, path: &path, context: self.reader.context };
        seed.deserialize(reader).map_err(|error| error.at(node, || path.to_string()))
    }
}

/// The items of a list.
struct Items<'t> {
    items: std::iter::Enumerate<std::slice::Iter<'t, Node>>,
    reader: Reader<'t>,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = DecodeError;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, DecodeError> {
        loop {
            let Some((index, node)) = self.items.next() else { return Ok(None) };
            if self.reader.context.cuts.gone.contains(&node.id) {
                continue;
            }
            let path = self.reader.path.to(Step::Index(index));
            let reader = Reader { node, path: &path, context: self.reader.context };
            return seed.deserialize(reader).map(Some).map_err(|error| error.at(node, || path.to_string()));
        }
    }
}

/// A word of a closed set.
struct Word<'t>(&'t str);

impl<'de, 't> EnumAccess<'de> for Word<'t> {
    type Error = DecodeError;
    type Variant = Unit;
    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Unit), DecodeError> {
        let word: StrDeserializer<'_, DecodeError> = self.0.into_deserializer();
        seed.deserialize(word).map(|value| (value, Unit))
    }
}

/// Words carry nothing.
struct Unit;

impl<'de> VariantAccess<'de> for Unit {
    type Error = DecodeError;
    fn unit_variant(self) -> Result<(), DecodeError> {
        Ok(())
    }
    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, _seed: S) -> Result<S::Value, DecodeError> {
        Err(serde::de::Error::invalid_type(Unexpected::UnitVariant, &"one word"))
    }
    fn tuple_variant<V: Visitor<'de>>(self, _len: usize, _visitor: V) -> Result<V::Value, DecodeError> {
        Err(serde::de::Error::invalid_type(Unexpected::UnitVariant, &"one word"))
    }
    fn struct_variant<V: Visitor<'de>>(self, _fields: &'static [&'static str], _visitor: V) -> Result<V::Value, DecodeError> {
        Err(serde::de::Error::invalid_type(Unexpected::UnitVariant, &"one word"))
    }
}
