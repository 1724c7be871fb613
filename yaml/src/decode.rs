//! Decodes a tree into a typed object and reports *all* errors.
//!
//! serde stops at the first error. The decoder therefore records the broken value, drops it from
//! the tree and decodes again, until decoding succeeds or nothing is left to drop.

use std::cell::RefCell;
use std::collections::HashSet;

use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, MapAccess, SeqAccess, Unexpected,
    VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use crate::error::DecodeError;
use crate::limits::FINDINGS_PER_DOCUMENT_MAX;
use crate::path::{FieldPath, OwnedPathStep, PathStep, steps};
use crate::tree::{Position, YamlKey, YamlNode, YamlValue};

/// The result of decoding one document.
pub struct DecodeResult<T> {
    /// The decoded object; `None` if a part that it requires is broken.
    pub object: Option<T>,
    /// Values that were dropped because they are broken.
    pub broken: Vec<InvalidValue>,
    /// Fields that the object's type does not have.
    pub unknown: Vec<UnknownField>,
}

/// A value that could not be decoded.
pub struct InvalidValue {
    pub path: String,
    pub spot: Position,
    pub problem: String,
    pub fix: String,
}

/// A field that the object's type does not have.
pub struct UnknownField {
    pub path: String,
    pub spot: Position,
    pub node: u32,
    /// The fields that are valid at its position.
    pub known_fields: &'static [&'static str],
}

/// Treatment of a field that is written without a value (`field:`).
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Empty {
    /// The field counts as absent; Kubernetes prints its own objects this way.
    Absent,
    /// The field is an error below `spec`: in a policy, an empty condition must not become no
    /// condition. Empty `metadata` and `status` fields are valid.
    Refused,
}

/// Decodes `root` as a `T`.
pub fn decode<T: for<'de> Deserialize<'de>>(root: &YamlNode, empty: Empty) -> DecodeResult<T> {
    let mut dropped = DroppedValues::default();
    let mut broken: Vec<InvalidValue> = Vec::new();
    loop {
        let notes = RefCell::new(DecodeNotes::default());
        let context = DecodeState {
            dropped: &dropped,
            empty,
            notes: &notes,
        };
        let result = T::deserialize(ValueReader {
            node: root,
            path: &FieldPath::ROOT,
            context,
        });
        let mut notes = notes.into_inner();
        let error = match result {
            Ok(object) => {
                broken.append(&mut notes.empty);
                return DecodeResult {
                    object: Some(object),
                    broken,
                    unknown: notes.unknown,
                };
            }
            Err(error) => error.at(root, String::new),
        };
        // `DecodeError::at` has set a location, so this branch is never taken.
        let Some(location) = error.location else {
            return DecodeResult {
                object: None,
                broken,
                unknown: notes.unknown,
            };
        };
        // A field that is missing only because the decoder dropped it was already reported.
        // A dropped value that fails again, as an empty map, was reported too.
        let is_consequence = error
            .missing
            .is_some_and(|field| dropped.made_missing(root, location.id, field));
        if !is_consequence && !dropped.is_emptied(location.id) {
            let path = match error.missing {
                Some(field) if location.path.is_empty() => field.to_owned(),
                Some(field) => format!("{}.{field}", location.path),
                None => location.path.clone(),
            };
            broken.push(InvalidValue {
                path,
                spot: location.spot,
                problem: error.problem,
                fix: error.fix,
            });
        }
        let next = match location.id {
            // The root cannot be dropped, because no object would be left.
            id if id == root.id => None,
            // Beyond the limit, the whole field is dropped at once, so that the number of passes is
            // bounded.
            id if broken.len() < FINDINGS_PER_DOCUMENT_MAX => Some(id),
            _ => whole_field(root, &location.path).map(|(path, key, value)| {
                let (problem, fix) =
                    (format!("the document has more than {FINDINGS_PER_DOCUMENT_MAX} errors, so this part is left out"), "fix those above first");
                broken.push(InvalidValue { path, spot: key.spot, problem, fix: fix.to_owned() });
                value.id
            }),
        };
        // Without a further value to drop, the next pass would fail in the same way.
        if !next.is_some_and(|id| dropped.drop_value(id)) {
            broken.append(&mut notes.empty);
            return DecodeResult {
                object: None,
                broken,
                unknown: notes.unknown,
            };
        }
    }
}

/// Returns the second-level field (`spec.rules`) around a value. It is dropped whole when there are
/// too many errors to report one by one.
fn whole_field<'t>(root: &'t YamlNode, path: &str) -> Option<(String, &'t YamlKey, &'t YamlNode)> {
    let mut steps = steps(path).into_iter();
    let (Some(OwnedPathStep::Field(outer)), Some(OwnedPathStep::Field(inner))) =
        (steps.next(), steps.next())
    else {
        return None;
    };
    let (key, value) = root.field(&outer)?.entry(&inner)?;
    Some((format!("{outer}.{inner}"), key, value))
}

/// Largest floating-point number that is read as an integer, 2^53: above it, a floating-point
/// number may stand for several integers.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;

/// Values that count as absent. The decoder first replaces an item of a list by an empty map, so
/// that the indexes of its neighbors stay correct. An item that fails even so is removed.
#[derive(Default)]
struct DroppedValues {
    /// Fields that count as absent, and items of lists that are read as an empty map.
    emptied: HashSet<u32>,
    /// Items of lists that are skipped.
    removed_items: HashSet<u32>,
}

impl DroppedValues {
    /// Drops a value. If the value was dropped before, removes it as an item of its list. Returns
    /// false if it was removed before.
    fn drop_value(&mut self, id: u32) -> bool {
        self.emptied.insert(id) || self.removed_items.insert(id)
    }
    fn is_emptied(&self, id: u32) -> bool {
        self.emptied.contains(&id)
    }
    /// Returns true if `field` of the map `id` is missing only because it was dropped.
    fn made_missing(&self, root: &YamlNode, id: u32, field: &str) -> bool {
        !self.emptied.is_empty()
            && root
                .find(id)
                .and_then(|map| map.field(field))
                .is_some_and(|value| self.emptied.contains(&value.id))
    }
}

/// Findings of one decoding pass that do not stop it.
#[derive(Default)]
struct DecodeNotes {
    unknown: Vec<UnknownField>,
    empty: Vec<InvalidValue>,
}

#[derive(Clone, Copy)]
struct DecodeState<'t> {
    dropped: &'t DroppedValues,
    empty: Empty,
    notes: &'t RefCell<DecodeNotes>,
}

/// Deserializer of one value of the tree.
#[derive(Clone, Copy)]
struct ValueReader<'t> {
    node: &'t YamlNode,
    path: &'t FieldPath<'t>,
    context: DecodeState<'t>,
}

impl<'t> ValueReader<'t> {
    fn unexpected(&self) -> Unexpected<'t> {
        match &self.node.value {
            YamlValue::Null => Unexpected::Unit,
            YamlValue::Bool(value) => Unexpected::Bool(*value),
            YamlValue::Unsigned(value) => Unexpected::Unsigned(*value),
            YamlValue::Signed(value) => Unexpected::Signed(*value),
            YamlValue::Float(value) => Unexpected::Float(*value),
            YamlValue::Text(text) => Unexpected::Str(text),
            YamlValue::List(_) => Unexpected::Seq,
            YamlValue::Map(_) => Unexpected::Map,
        }
    }

    fn is_emptied(&self) -> bool {
        self.context.dropped.is_emptied(self.node.id)
    }

    /// Returns a whole number that is written as a fraction, such as `90.0`. Kubernetes' own tools
    /// take it where an integer belongs.
    fn whole_number(&self) -> Option<u64> {
        match self.node.value {
            YamlValue::Float(value)
                if value.fract() == 0.0 && (0.0..=WHOLE_MAX).contains(&value) =>
            {
                Some(value as u64)
            }
            _ => None,
        }
    }

    fn visit_map<'de, V: Visitor<'de>>(
        self,
        visitor: V,
        known: &'static [&'static str],
        drops_empty: bool,
    ) -> Result<V::Value, DecodeError> {
        let entries: &[_] = match &self.node.value {
            _ if self.is_emptied() => &[],
            YamlValue::Map(entries) => entries,
            _ => return Err(serde::de::Error::invalid_type(self.unexpected(), &visitor)),
        };
        visitor.visit_map(MapReader {
            entries: entries.iter(),
            value: None,
            reader: self,
            known_fields: known,
            drops_empty,
        })
    }
}

/// Defines methods of [`Deserializer`] that accept integers which are written as fractions.
macro_rules! integers {
    ($($method:ident)*) => {
        $(
            fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
                match self.whole_number() {
                    Some(value) => visitor.visit_u64(value).map_err(|error: DecodeError| error.at(self.node, || self.path.to_string())),
                    None => self.deserialize_any(visitor),
                }
            }
        )*
    };
}

impl<'de> Deserializer<'de> for ValueReader<'_> {
    type Error = DecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        let result = match &self.node.value {
            _ if self.is_emptied() => self.visit_map(visitor, &[], false),
            YamlValue::Null => visitor.visit_unit(),
            YamlValue::Bool(value) => visitor.visit_bool(*value),
            YamlValue::Unsigned(value) => visitor.visit_u64(*value),
            YamlValue::Signed(value) => visitor.visit_i64(*value),
            YamlValue::Float(value) => visitor.visit_f64(*value),
            YamlValue::Text(text) => visitor.visit_str(text),
            YamlValue::List(items) => visitor.visit_seq(ListReader {
                items: items.iter().enumerate(),
                reader: self,
            }),
            YamlValue::Map(_) => self.visit_map(visitor, &[], false),
        };
        result.map_err(|error| error.at(self.node, || self.path.to_string()))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.node.value {
            YamlValue::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        self.visit_map(visitor, fields, true)
            .map_err(|error| error.at(self.node, || self.path.to_string()))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        let result = match &self.node.value {
            YamlValue::Text(text) if !self.is_emptied() => visitor.visit_enum(EnumVariant(text)),
            _ => Err(serde::de::Error::invalid_type(
                self.unexpected(),
                &"one word",
            )),
        };
        result.map_err(|error| error.at(self.node, || self.path.to_string()))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        visitor.visit_unit()
    }

    integers! {
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64
    }

    forward_to_deserialize_any! {
        bool i128 u128 f32 f64 char str string bytes byte_buf
        unit unit_struct seq tuple tuple_struct map identifier
    }
}

/// serde access to the fields of a map.
struct MapReader<'t> {
    entries: std::slice::Iter<'t, (YamlKey, YamlNode)>,
    value: Option<&'t (YamlKey, YamlNode)>,
    reader: ValueReader<'t>,
    known_fields: &'static [&'static str],
    /// The map is decoded into a struct, whose fields may be left empty.
    drops_empty: bool,
}

impl<'t> MapReader<'t> {
    /// Returns true if an empty field is skipped, and records an error where it must not be empty.
    fn skips_empty(&self, entry: &(YamlKey, YamlNode)) -> bool {
        if !self.drops_empty
            || !matches!(entry.1.value, YamlValue::Null)
            || !self.known_fields.contains(&entry.0.name.as_str())
        {
            return false;
        }
        let path = self
            .reader
            .path
            .to(PathStep::Field(&entry.0.name))
            .to_string();
        if self.reader.context.empty == Empty::Refused && path.starts_with("spec") {
            self.reader
                .context
                .notes
                .borrow_mut()
                .empty
                .push(InvalidValue {
                    path,
                    spot: entry.0.spot,
                    problem: "the field is empty".to_owned(),
                    fix: "write a value or remove the field".to_owned(),
                });
        }
        true
    }
}

impl<'de, 't> MapAccess<'de> for MapReader<'t> {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, DecodeError> {
        loop {
            let Some(entry) = self.entries.next() else {
                return Ok(None);
            };
            if self.reader.context.dropped.is_emptied(entry.1.id) || self.skips_empty(entry) {
                continue;
            }
            self.value = Some(entry);
            let name: StrDeserializer<'_, DecodeError> = entry.0.name.as_str().into_deserializer();
            return seed.deserialize(name).map(Some);
        }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<S::Value, DecodeError> {
        let Some((key, node)) = self.value.take() else {
            return Err(serde::de::Error::custom(
                "a value was requested before its key",
            ));
        };
        let path = self.reader.path.to(PathStep::Field(&key.name));
        if self.drops_empty && !self.known_fields.contains(&key.name.as_str()) {
            let unknown = UnknownField {
                path: path.to_string(),
                spot: key.spot,
                node: node.id,
                known_fields: self.known_fields,
            };
            self.reader.context.notes.borrow_mut().unknown.push(unknown);
        }
        let reader = ValueReader {
            node,
            path: &path,
            context: self.reader.context,
        };
        seed.deserialize(reader)
            .map_err(|error| error.at(node, || path.to_string()))
    }
}

/// serde access to the items of a list.
struct ListReader<'t> {
    items: std::iter::Enumerate<std::slice::Iter<'t, YamlNode>>,
    reader: ValueReader<'t>,
}

impl<'de> SeqAccess<'de> for ListReader<'_> {
    type Error = DecodeError;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, DecodeError> {
        loop {
            let Some((index, node)) = self.items.next() else {
                return Ok(None);
            };
            if self.reader.context.dropped.removed_items.contains(&node.id) {
                continue;
            }
            let path = self.reader.path.to(PathStep::Index(index));
            let reader = ValueReader {
                node,
                path: &path,
                context: self.reader.context,
            };
            return seed
                .deserialize(reader)
                .map(Some)
                .map_err(|error| error.at(node, || path.to_string()));
        }
    }
}

/// serde access to the name of an enum variant.
struct EnumVariant<'t>(&'t str);

impl<'de, 't> EnumAccess<'de> for EnumVariant<'t> {
    type Error = DecodeError;
    type Variant = Unit;
    fn variant_seed<S: DeserializeSeed<'de>>(
        self,
        seed: S,
    ) -> Result<(S::Value, Unit), DecodeError> {
        let word: StrDeserializer<'_, DecodeError> = self.0.into_deserializer();
        seed.deserialize(word).map(|value| (value, Unit))
    }
}

/// serde access to the content of an enum variant; only unit variants are valid.
struct Unit;

impl<'de> VariantAccess<'de> for Unit {
    type Error = DecodeError;
    fn unit_variant(self) -> Result<(), DecodeError> {
        Ok(())
    }
    fn newtype_variant_seed<S: DeserializeSeed<'de>>(
        self,
        _seed: S,
    ) -> Result<S::Value, DecodeError> {
        Err(serde::de::Error::invalid_type(
            Unexpected::UnitVariant,
            &"one word",
        ))
    }
    fn tuple_variant<V: Visitor<'de>>(
        self,
        _len: usize,
        _visitor: V,
    ) -> Result<V::Value, DecodeError> {
        Err(serde::de::Error::invalid_type(
            Unexpected::UnitVariant,
            &"one word",
        ))
    }
    fn struct_variant<V: Visitor<'de>>(
        self,
        _fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, DecodeError> {
        Err(serde::de::Error::invalid_type(
            Unexpected::UnitVariant,
            &"one word",
        ))
    }
}
