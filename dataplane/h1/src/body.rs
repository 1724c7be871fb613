//! Reading bodies: a state machine over input slices that says which spans are payload and where the body ends.
//! It never copies or holds payload. Writing chunks again is in `write`.

use std::ops::Range;

use crate::chunk::ChunkLine;
use crate::framing::Framing;
use crate::limits::Limits;
use crate::name::NOT_IN_TRAILERS;
use crate::refusal::Refusal;
use crate::scan::{Progress, look_at_trailers};
use crate::table::{Fields, Table};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Done,
    Length(u64),
    UntilClose,
    Line(ChunkLine),
    Data(u64),
    DataCr,
    DataLf,
    Trailers,
}

/// What one call of [`BodyReader::read`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyPart {
    /// These bytes of the input are payload; never empty.
    Data(Range<usize>),
    /// All of the input that could be used is used: read more. Unconsumed bytes must come again, before the new ones.
    NeedInput,
    /// The body is over; see [`BodyReader::trailers`]. Bytes after `consumed` belong to the next message.
    End,
}

/// One step through a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BodyStep {
    /// Bytes of the input that are done with, framing included. The payload, if any, lies within them.
    pub consumed: usize,
    pub part: BodyPart,
}

/// What [`BodyReader::skim`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Skim {
    /// Bytes of the input that may be forwarded verbatim, chunk lines and trailers included.
    pub consumed: usize,
    /// How many of them are payload.
    pub payload_bytes: u64,
    /// The body is over.
    pub ended: bool,
}

/// Reads one body.
#[derive(Debug, Clone)]
pub struct BodyReader {
    state: State,
    extension_bytes: usize,
    progress: Progress,
    trailers: Table,
    trailers_at: usize,
}

impl BodyReader {
    /// For a body framed so.
    pub fn new(framing: Framing) -> BodyReader {
        let state = match framing {
            Framing::None | Framing::Length(0) => State::Done,
            Framing::Length(n) => State::Length(n),
            Framing::Chunked => State::Line(ChunkLine::START),
            Framing::UntilClose => State::UntilClose,
        };
        BodyReader { state, extension_bytes: 0, progress: Progress::default(), trailers: Table::default(), trailers_at: 0 }
    }

    /// True once the body is over.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Payload bytes still due, if the framing tells.
    pub fn remaining(&self) -> Option<u64> {
        match self.state {
            State::Done => Some(0),
            State::Length(n) => Some(n),
            _ => None,
        }
    }

    /// The next part of the body in `input`.
    pub fn read(&mut self, input: &[u8], limits: &Limits) -> Result<BodyStep, Refusal> {
        match self.state {
            State::Done => Ok(BodyStep { consumed: 0, part: BodyPart::End }),
            _ if input.is_empty() => Ok(BodyStep { consumed: 0, part: BodyPart::NeedInput }),
            State::UntilClose => Ok(data(0, input.len())),
            State::Length(left) => {
                let len = at_most(left, input.len());
                self.state = if len as u64 == left { State::Done } else { State::Length(left - len as u64) };
                Ok(data(0, len))
            }
            _ => self.read_chunked(input, limits),
        }
    }

    fn read_chunked(&mut self, input: &[u8], limits: &Limits) -> Result<BodyStep, Refusal> {
        let mut at = 0;
        loop {
            let rest = &input[at..];
            let Some(&b) = rest.first() else {
                return Ok(BodyStep { consumed: at, part: BodyPart::NeedInput });
            };
            match &mut self.state {
                State::Data(left) => {
                    let len = at_most(*left, rest.len());
                    *left -= len as u64;
                    if *left == 0 {
                        self.state = State::DataCr;
                    }
                    return Ok(data(at, at + len));
                }
                State::Trailers => return self.read_trailers(input, at, limits),
                State::Line(line) => {
                    if let Some(size) = line.take(b, limits, &mut self.extension_bytes)? {
                        self.state = if size == 0 { State::Trailers } else { State::Data(size) };
                    }
                }
                State::DataCr if b == b'\r' => self.state = State::DataLf,
                State::DataLf if b == b'\n' => self.state = State::Line(ChunkLine::START),
                _ => return Err(Refusal::BadChunkEnd),
            }
            at += 1;
        }
    }

    fn read_trailers(&mut self, input: &[u8], at: usize, limits: &Limits) -> Result<BodyStep, Refusal> {
        let rest = &input[at..];
        let len = if rest.starts_with(b"\r\n") {
            2
        } else {
            match look_at_trailers(rest, limits, &mut self.progress, &mut self.trailers)? {
                None => return Ok(BodyStep { consumed: at, part: BodyPart::NeedInput }),
                Some(len) => len,
            }
        };
        if self.trailers.present & NOT_IN_TRAILERS != 0 {
            return Err(Refusal::ForbiddenTrailer);
        }
        self.trailers_at = at;
        self.state = State::Done;
        Ok(BodyStep { consumed: at + len, part: BodyPart::End })
    }

    /// All parts in `input` at once, for forwarding the bytes as they are.
    pub fn skim(&mut self, input: &[u8], limits: &Limits) -> Result<Skim, Refusal> {
        let mut skim = Skim::default();
        loop {
            let step = self.read(&input[skim.consumed..], limits)?;
            if step.part == BodyPart::End {
                self.trailers_at += skim.consumed;
            }
            skim.consumed += step.consumed;
            match step.part {
                BodyPart::Data(span) => skim.payload_bytes += span.len() as u64,
                BodyPart::NeedInput => return Ok(skim),
                BodyPart::End => return Ok(Skim { ended: true, ..skim }),
            }
        }
    }

    /// The connection's read side ended. `Ok` if the body may end so.
    pub fn end_of_input(&mut self) -> Result<(), Refusal> {
        match self.state {
            State::Done => Ok(()),
            State::UntilClose => {
                self.state = State::Done;
                Ok(())
            }
            _ => Err(Refusal::TruncatedBody),
        }
    }

    /// The trailer fields, after the end. `input` is the slice given to the call that returned the end.
    pub fn trailers<'a>(&'a self, input: &'a [u8]) -> Fields<'a> {
        Fields { table: &self.trailers, buf: input.get(self.trailers_at..).unwrap_or(&[]) }
    }
}

fn data(start: usize, end: usize) -> BodyStep {
    BodyStep { consumed: end, part: BodyPart::Data(start..end) }
}

fn at_most(left: u64, available: usize) -> usize {
    usize::try_from(left).map_or(available, |left| left.min(available))
}
