//! Header table: the position of each field line in the read buffer, and its interned name. It does
//! not own the bytes.

use crate::name::FieldName;

/// Range of the read buffer, relative to the first byte of the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Span {
    pub(crate) start: u32,
    pub(crate) len: u32,
}

impl Span {
    /// Creates a span. Offsets fit into 32 bits, because heads have at most
    /// [`crate::limits::HEAD_BYTES_CAP`] bytes.
    pub(crate) fn new(start: usize, len: usize) -> Span {
        Span {
            start: start as u32,
            len: len as u32,
        }
    }
    pub(crate) fn end(self) -> usize {
        (self.start + self.len) as usize
    }
    #[inline]
    pub(crate) fn of(self, buf: &[u8]) -> &[u8] {
        &buf[self.start as usize..self.end()]
    }
}

/// Position and name of one field line, in 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FieldLine {
    pub(crate) start: u32,
    pub(crate) value: Span,
    pub(crate) name_len: u16,
    pub(crate) name: FieldName,
}

/// Field lines of one head, in the order sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FieldTable {
    pub(crate) lines: Vec<FieldLine>,
    /// Mask with the bit of each [`FieldName`] that occurs.
    pub(crate) present: u64,
    /// Offset of the empty line after the fields.
    pub(crate) end: u32,
    /// True if a line ends in LF alone. Such a head is not forwarded verbatim.
    pub(crate) has_bare_lf: bool,
}

impl FieldTable {
    pub(crate) fn clear(&mut self) {
        self.lines.clear();
        self.present = 0;
        self.end = 0;
        self.has_bare_lf = false;
    }

    #[inline]
    pub(crate) fn push(&mut self, line: FieldLine) {
        self.present |= line.name.bit();
        self.lines.push(line);
    }

    /// Returns the offset where line `i` ends, its line end included.
    #[inline]
    pub(crate) fn line_end(&self, i: usize) -> u32 {
        self.lines.get(i + 1).map_or(self.end, |next| next.start)
    }
}

/// Fields of a head, together with the buffer that contains them.
#[derive(Debug, Clone, Copy)]
pub struct HeaderFields<'a> {
    pub(crate) table: &'a FieldTable,
    pub(crate) buf: &'a [u8],
}

/// One field: its interned name, its name as sent, and its value without surrounding white space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeaderField<'a> {
    pub id: FieldName,
    pub name: &'a [u8],
    pub value: &'a [u8],
}

impl<'a> HeaderFields<'a> {
    /// Returns the number of field lines.
    pub fn len(&self) -> usize {
        self.table.lines.len()
    }

    /// Returns true if there are no fields.
    pub fn is_empty(&self) -> bool {
        self.table.lines.is_empty()
    }

    /// Returns true if a field with this known name occurs. It costs one bit test.
    #[inline]
    pub fn has(&self, name: FieldName) -> bool {
        self.table.present & name.bit() != 0
    }

    /// Returns the first value of a known name.
    #[inline]
    pub fn get(&self, name: FieldName) -> Option<&'a [u8]> {
        self.all(name).next()
    }

    /// Iterates over all values of a known name, in the order sent.
    pub fn all(&self, name: FieldName) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let (buf, lines) = (
            self.buf,
            if self.has(name) {
                self.table.lines.as_slice()
            } else {
                &[]
            },
        );
        lines
            .iter()
            .filter(move |l| l.name == name)
            .map(move |l| l.value.of(buf))
    }

    /// Iterates over all values of any name, known or not, in the order sent. `name` may have any
    /// case.
    pub fn named<'n>(&self, name: &'n [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a, 'n> {
        let id = FieldName::of(name);
        let fields = *self;
        let lines = if self.has(id) {
            self.table.lines.as_slice()
        } else {
            &[]
        };
        lines
            .iter()
            .filter(move |l| {
                l.name == id
                    && (id != FieldName::Other || fields.name(l).eq_ignore_ascii_case(name))
            })
            .map(move |l| l.value.of(fields.buf))
    }

    /// Iterates over all fields in the order sent.
    pub fn iter(&self) -> impl Iterator<Item = HeaderField<'a>> + use<'a> {
        let fields = *self;
        self.table.lines.iter().map(move |l| fields.field(l))
    }

    pub(crate) fn field(&self, line: &FieldLine) -> HeaderField<'a> {
        HeaderField {
            id: line.name,
            name: self.name(line),
            value: line.value.of(self.buf),
        }
    }

    pub(crate) fn name(&self, line: &FieldLine) -> &'a [u8] {
        &self.buf[line.start as usize..line.start as usize + line.name_len as usize]
    }
}
