//! Reads message bodies: a state machine over input slices that reports which spans are payload and
//! where the body ends. It neither copies nor stores payload; `rechunk` writes chunk framing. Start
//! with [`BodyReader::read`].

use std::ops::Range;

use crate::chunk::ChunkLine;
use crate::field_table::{FieldTable, HeaderFields};
use crate::framing::Framing;
use crate::limits::MessageLimits;
use crate::name::NOT_IN_TRAILERS;
use crate::refusal::MessageRefusal;
use crate::scan::{ScanProgress, scan_trailers};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodyState {
    Done,
    Length(u64),
    UntilClose,
    Line(ChunkLine),
    Data(u64),
    DataCr,
    DataLf,
    Trailers,
}

/// Result of one call of [`BodyReader::read`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyPart {
    /// Range of the input that is payload; it is never empty.
    Data(Range<usize>),
    /// More input is needed. The next input begins with the bytes that were not consumed, followed
    /// by new ones.
    NeedInput,
    /// The body has ended; see [`BodyReader::trailers`]. Bytes after `consumed` belong to the next
    /// message.
    End,
}

/// One step through a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BodyStep {
    /// Number of input bytes that are consumed, framing included. The payload, if any, lies within
    /// them.
    pub consumed: usize,
    pub part: BodyPart,
}

/// Result of one call of [`BodyReader::skim`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Skim {
    /// Number of input bytes that may be forwarded verbatim, chunk lines and trailers included.
    pub consumed: usize,
    /// Number of payload bytes among the consumed bytes.
    pub payload_bytes: u64,
    /// True if the body has ended.
    pub is_end: bool,
}

/// State of reading one body.
#[derive(Debug, Clone)]
pub struct BodyReader {
    state: BodyState,
    extension_bytes: usize,
    progress: ScanProgress,
    trailers: FieldTable,
    trailers_at: usize,
}

impl BodyReader {
    /// Creates a reader for a body with this framing.
    pub fn new(framing: Framing) -> BodyReader {
        let state = match framing {
            Framing::None | Framing::Length(0) => BodyState::Done,
            Framing::Length(n) => BodyState::Length(n),
            Framing::Chunked => BodyState::Line(ChunkLine::START),
            Framing::UntilClose => BodyState::UntilClose,
        };
        BodyReader {
            state,
            extension_bytes: 0,
            progress: ScanProgress::default(),
            trailers: FieldTable::default(),
            trailers_at: 0,
        }
    }

    /// Returns true once the body has ended.
    pub fn is_done(&self) -> bool {
        self.state == BodyState::Done
    }

    /// Returns the number of payload bytes that are still due; `None` if the framing does not tell.
    pub fn remaining(&self) -> Option<u64> {
        match self.state {
            BodyState::Done => Some(0),
            BodyState::Length(n) => Some(n),
            _ => None,
        }
    }

    /// Reads the next part of the body from `input`.
    ///
    /// # Errors
    /// Returns the refusal for malformed chunk framing, for a forbidden trailer, and for chunk
    /// extensions or trailers over the limits.
    pub fn read(
        &mut self,
        input: &[u8],
        limits: &MessageLimits,
    ) -> Result<BodyStep, MessageRefusal> {
        match self.state {
            BodyState::Done => Ok(BodyStep {
                consumed: 0,
                part: BodyPart::End,
            }),
            _ if input.is_empty() => Ok(BodyStep {
                consumed: 0,
                part: BodyPart::NeedInput,
            }),
            BodyState::UntilClose => Ok(data(0, input.len())),
            BodyState::Length(left) => {
                let len = at_most(left, input.len());
                self.state = if len as u64 == left {
                    BodyState::Done
                } else {
                    BodyState::Length(left - len as u64)
                };
                Ok(data(0, len))
            }
            _ => self.read_chunked(input, limits),
        }
    }

    fn read_chunked(
        &mut self,
        input: &[u8],
        limits: &MessageLimits,
    ) -> Result<BodyStep, MessageRefusal> {
        let mut at = 0;
        loop {
            let rest = &input[at..];
            let Some(&b) = rest.first() else {
                return Ok(BodyStep {
                    consumed: at,
                    part: BodyPart::NeedInput,
                });
            };
            match &mut self.state {
                // Payload is returned as it arrives: a chunk may be larger than any buffer.
                BodyState::Data(left) => {
                    let len = at_most(*left, rest.len());
                    *left -= len as u64;
                    if *left == 0 {
                        self.state = BodyState::DataCr;
                    }
                    return Ok(data(at, at + len));
                }
                BodyState::Trailers => return self.read_trailers(input, at, limits),
                BodyState::Line(line) => {
                    if let Some(size) = line.take(b, limits, &mut self.extension_bytes)? {
                        self.state = if size == 0 {
                            BodyState::Trailers
                        } else {
                            BodyState::Data(size)
                        };
                    }
                }
                BodyState::DataCr if b == b'\r' => self.state = BodyState::DataLf,
                BodyState::DataLf if b == b'\n' => self.state = BodyState::Line(ChunkLine::START),
                // Only CR LF may follow a chunk's data (RFC 9112 §7.1). `read` handles the states
                // without chunks.
                _ => return Err(MessageRefusal::BadChunkEnd),
            }
            at += 1;
        }
    }

    fn read_trailers(
        &mut self,
        input: &[u8],
        at: usize,
        limits: &MessageLimits,
    ) -> Result<BodyStep, MessageRefusal> {
        let rest = &input[at..];
        // Most bodies have no trailers; for these the header parser is not needed.
        let len = if rest.starts_with(b"\r\n") {
            2
        } else {
            match scan_trailers(rest, limits, &mut self.progress, &mut self.trailers)? {
                None => {
                    return Ok(BodyStep {
                        consumed: at,
                        part: BodyPart::NeedInput,
                    });
                }
                Some(len) => len,
            }
        };
        if self.trailers.present & NOT_IN_TRAILERS != 0 {
            return Err(MessageRefusal::ForbiddenTrailer);
        }
        self.trailers_at = at;
        self.state = BodyState::Done;
        Ok(BodyStep {
            consumed: at + len,
            part: BodyPart::End,
        })
    }

    /// Reads all parts in `input` at once, so that the bytes can be forwarded as they are.
    ///
    /// # Errors
    /// Returns the refusals of [`BodyReader::read`].
    pub fn skim(&mut self, input: &[u8], limits: &MessageLimits) -> Result<Skim, MessageRefusal> {
        let mut skim = Skim::default();
        loop {
            let step = self.read(&input[skim.consumed..], limits)?;
            if step.part == BodyPart::End {
                // `read` counts from the slice it was given; `trailers` is called with the whole
                // input.
                self.trailers_at += skim.consumed;
            }
            skim.consumed += step.consumed;
            match step.part {
                BodyPart::Data(span) => skim.payload_bytes += span.len() as u64,
                BodyPart::NeedInput => return Ok(skim),
                BodyPart::End => {
                    return Ok(Skim {
                        is_end: true,
                        ..skim
                    });
                }
            }
        }
    }

    /// Records that the read side of the connection has ended.
    ///
    /// # Errors
    /// Returns [`MessageRefusal::TruncatedBody`] if the framing does not allow the body to end
    /// here.
    pub fn end_of_input(&mut self) -> Result<(), MessageRefusal> {
        match self.state {
            BodyState::Done => Ok(()),
            BodyState::UntilClose => {
                self.state = BodyState::Done;
                Ok(())
            }
            _ => Err(MessageRefusal::TruncatedBody),
        }
    }

    /// Returns the trailer fields once the body has ended. `input` is the slice given to the call
    /// that reported the end.
    pub fn trailers<'a>(&'a self, input: &'a [u8]) -> HeaderFields<'a> {
        HeaderFields {
            table: &self.trailers,
            buf: input.get(self.trailers_at..).unwrap_or(&[]),
        }
    }
}

fn data(start: usize, end: usize) -> BodyStep {
    BodyStep {
        consumed: end,
        part: BodyPart::Data(start..end),
    }
}

fn at_most(left: u64, available: usize) -> usize {
    usize::try_from(left).map_or(available, |left| left.min(available))
}
