//! The header table: where each field line lies in the read buffer, and which known name it bears. It holds no bytes itself.

use crate::name::Name;

/// A range of the read buffer, relative to the first byte of the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Span {
    pub(crate) start: u32,
    pub(crate) len: u32,
}

impl Span {
    /// Offsets fit: heads are at most [`crate::limits::HEAD_BYTES_CAP`] bytes.
    pub(crate) fn new(start: usize, len: usize) -> Span {
        Span { start: start as u32, len: len as u32 }
    }
    pub(crate) fn end(self) -> usize {
        (self.start + self.len) as usize
    }
    #[inline]
    pub(crate) fn of(self, buf: &[u8]) -> &[u8] {
        &buf[self.start as usize..self.end()]
    }
}

/// One field line: 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) start: u32,
    pub(crate) value: Span,
    pub(crate) name_len: u16,
    pub(crate) name: Name,
}

/// The field lines of one head, in the order sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) lines: Vec<Line>,
    /// A bit per [`Name`] that occurs.
    pub(crate) present: u64,
    /// Where the empty line after the fields begins.
    pub(crate) end: u32,
}

impl Table {
    pub(crate) fn clear(&mut self) {
        self.lines.clear();
        self.present = 0;
        self.end = 0;
    }

    #[inline]
    pub(crate) fn push(&mut self, line: Line) {
        self.present |= line.name.bit();
        self.lines.push(line);
    }

    /// Where line `i` ends, CR LF included.
    #[inline]
    pub(crate) fn line_end(&self, i: usize) -> u32 {
        self.lines.get(i + 1).map_or(self.end, |next| next.start)
    }
}

/// The fields of a head together with the bytes they lie in.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a> {
    pub(crate) table: &'a Table,
    pub(crate) buf: &'a [u8],
}

/// One field: its id, its name as sent, its value without white space around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field<'a> {
    pub id: Name,
    pub name: &'a [u8],
    pub value: &'a [u8],
}

impl<'a> Fields<'a> {
    /// How many field lines there are.
    pub fn len(&self) -> usize {
        self.table.lines.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.table.lines.is_empty()
    }

    /// One bit test: does a known name occur?
    #[inline]
    pub fn has(&self, name: Name) -> bool {
        self.table.present & name.bit() != 0
    }

    /// The first value of a known name.
    #[inline]
    pub fn get(&self, name: Name) -> Option<&'a [u8]> {
        self.all(name).next()
    }

    /// All values of a known name, in the order sent.
    pub fn all(&self, name: Name) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let (buf, lines) = (self.buf, if self.has(name) { self.table.lines.as_slice() } else { &[] });
        lines.iter().filter(move |l| l.name == name).map(move |l| l.value.of(buf))
    }

    /// All values of any name, given in any case, in the order sent.
    pub fn named<'n>(&self, name: &'n [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a, 'n> {
        let id = Name::of(name);
        let fields = *self;
        let lines = if self.has(id) { self.table.lines.as_slice() } else { &[] };
        lines
            .iter()
            .filter(move |l| l.name == id && (id != Name::Other || fields.name(l).eq_ignore_ascii_case(name)))
            .map(move |l| l.value.of(fields.buf))
    }

    /// All fields in the order sent.
    pub fn iter(&self) -> impl Iterator<Item = Field<'a>> + use<'a> {
        let fields = *self;
        self.table.lines.iter().map(move |l| fields.field(l))
    }

    pub(crate) fn field(&self, line: &Line) -> Field<'a> {
        Field { id: line.name, name: self.name(line), value: line.value.of(self.buf) }
    }

    pub(crate) fn name(&self, line: &Line) -> &'a [u8] {
        &self.buf[line.start as usize..line.start as usize + line.name_len as usize]
    }
}
