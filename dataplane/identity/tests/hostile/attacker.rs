//! A TLS 1.3 attacker that sends the content of a script, in either role, and records which alert
//! it got. It verifies nothing that it receives.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::craft::*;
use super::fixture::{HandshakeFixture, TestCredential};
use super::keys::{RecordDirection, Schedule, Secret, finished, hash, rolled_up};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

/// Messages that are sent at once: a client's after the server's Finished, or a server's after the
/// ClientHello.
pub(crate) struct MessageFlight {
    side: Side,
    pub(crate) out: Vec<u8>,
    pub(crate) transcript: Vec<u8>,
    pub(crate) received: ReceivedRecords,
    pub(crate) direction: Option<RecordDirection>,
    /// Position in `out` from which the bytes wait for the other side's first data.
    pub(crate) pause: usize,
    schedule: Option<Schedule>,
    /// Traffic secret of a client, which is known before it sends.
    traffic: Option<Secret>,
    fixture: &'static HandshakeFixture,
}

impl MessageFlight {
    /// Appends one record as it is, encrypted if there are keys.
    pub(crate) fn put(&mut self, kind: u8, content: &[u8]) {
        let bytes = match &mut self.direction {
            Some(direction) => direction.seal(&[content, &[kind]].concat()),
            None => record(kind, content),
        };
        self.out.extend(bytes);
    }

    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    pub(crate) fn alert(&mut self, level: u8, description: u8) {
        self.put(ALERT, &[level, description]);
    }

    /// Appends a handshake message that is part of the transcript.
    pub(crate) fn add_handshake_message(&mut self, message: &[u8]) {
        self.transcript.extend_from_slice(message);
        message
            .chunks(16 << 10)
            .for_each(|c| self.put(HANDSHAKE, c));
    }

    pub(crate) fn certificate(&mut self, chain: &[Vec<u8>]) {
        self.add_handshake_message(&certificate(chain));
    }

    /// Returns the input of a CertificateVerify signature of the side `as_side`.
    pub(crate) fn to_sign(&self, as_side: Side) -> Vec<u8> {
        let who: &[u8] = if as_side == Side::Client {
            b"TLS 1.3, client CertificateVerify\0"
        } else {
            b"TLS 1.3, server CertificateVerify\0"
        };
        [&[0x20; 64], who, &hash(&self.transcript)].concat()
    }

    pub(crate) fn verify(&mut self, scheme: u16, signature: &[u8]) {
        self.add_handshake_message(&message(
            VERIFY,
            &[&scheme.to_be_bytes(), &vec16(signature)[..]].concat(),
        ));
    }

    pub(crate) fn proof(&mut self, credential: &TestCredential) {
        let signature = credential.sign(&self.to_sign(self.side));
        self.verify(ECDSA, &signature);
    }

    fn own(&self) -> Secret {
        let schedule = self.schedule.as_ref().expect("keys are agreed");
        if self.side == Side::Client {
            schedule.client
        } else {
            schedule.server
        }
    }

    pub(crate) fn verdict(&self) -> Vec<u8> {
        finished(&self.own(), &self.transcript)
    }

    /// Sends Finished, then switches to the keys of application data.
    pub(crate) fn finish(&mut self) {
        self.finish_with(&self.verdict());
    }

    pub(crate) fn finish_with(&mut self, verdict: &[u8]) {
        self.add_handshake_message(&message(FINISHED, verdict));
        self.advance();
    }

    /// Switches to the keys of application data.
    pub(crate) fn advance(&mut self) {
        let schedule = self.schedule.as_ref().expect("keys are agreed");
        let traffic = self
            .traffic
            .unwrap_or_else(|| schedule.traffic(&self.transcript).1);
        self.direction = Some(RecordDirection::new(&traffic));
    }

    pub(crate) fn key_update(&mut self, request: u8) {
        self.put(HANDSHAKE, &message(KEY_UPDATE, &[request]));
        self.direction = self.direction.as_ref().map(RecordDirection::updated);
    }

    /// Ends like an honest side: sends some data and close_notify.
    pub(crate) fn ping(&mut self) {
        self.put(DATA, b"ping");
        self.alert(1, 0);
    }

    /// Makes the following bytes wait for the other side's first data, so that its handshake has
    /// finished.
    pub(crate) fn wait(&mut self) {
        self.pause = self.out.len();
    }

    /// Returns the bytes to send at once, and those to send after the wait.
    fn parts(mut self) -> (Vec<u8>, Option<Vec<u8>>) {
        let later = (self.pause <= self.out.len()).then(|| self.out.split_off(self.pause));
        (self.out, later)
    }

    /// Returns a server's ServerHello for the received ClientHello.
    pub(crate) fn reply(&self) -> CraftedHello {
        CraftedHello {
            kind: SERVER_HELLO,
            version: 0x0303,
            random: [7; 32],
            session: self.received.session.clone(),
            suites: vec![AES128],
            compressions: vec![0],
            extensions: vec![
                (VERSIONS, vec![3, 4]),
                (KEY_SHARE, self.fixture.keys.share(X25519)),
            ],
        }
    }

    /// Sends the ServerHello `hello`, and then uses the handshake keys over X25519, whatever it
    /// says.
    pub(crate) fn send_server_hello(&mut self, hello: &CraftedHello) {
        self.add_handshake_message(&hello.message());
        self.protect();
    }

    pub(crate) fn protect(&mut self) {
        let theirs = self
            .received
            .shares()
            .into_iter()
            .find(|(group, _)| *group == X25519)
            .expect("a share of X25519");
        let schedule = Schedule::new(
            &self.fixture.keys.agree(X25519, &theirs.1),
            &self.transcript,
        );
        self.direction = Some(RecordDirection::new(&schedule.server));
        self.schedule = Some(schedule);
    }

    /// Sends a server's EncryptedExtensions with this list.
    pub(crate) fn extend(&mut self, list: &[(u16, Vec<u8>)]) {
        self.add_handshake_message(&message(EXTENSIONS, &extensions(list)));
    }

    /// Sends a server's CertificateRequest with these extensions.
    pub(crate) fn request(&mut self, list: &[(u16, Vec<u8>)]) {
        self.add_handshake_message(&message(REQUEST, &[vec8(&[]), extensions(list)].concat()));
    }
}

/// First flight of a client.
#[derive(Clone)]
pub(crate) struct Opening {
    /// Bytes that are sent on the wire.
    pub(crate) wire: Vec<u8>,
    /// ClientHello that is in these bytes.
    pub(crate) hello: Vec<u8>,
    /// Flight that answers a HelloRetryRequest.
    pub(crate) second: Option<Box<Opening>>,
    /// If true, the client closes its sending direction at once.
    pub(crate) close: bool,
}

impl Opening {
    pub(crate) fn of(hello: &CraftedHello) -> Self {
        Self::wired(hello, |m| record(HANDSHAKE, m))
    }
    pub(crate) fn wired(hello: &CraftedHello, wire: impl FnOnce(&[u8]) -> Vec<u8>) -> Self {
        let hello = hello.message();
        Self {
            wire: wire(&hello),
            hello,
            second: None,
            close: false,
        }
    }
    pub(crate) fn raw(wire: impl Into<Vec<u8>>) -> Self {
        Self {
            wire: wire.into(),
            hello: Vec::new(),
            second: None,
            close: false,
        }
    }
    pub(crate) fn again(mut self, second: &CraftedHello) -> Self {
        self.second = Some(Box::new(Self::of(second)));
        self
    }
    pub(crate) fn closed(mut self) -> Self {
        self.close = true;
        self
    }
}

/// Observations of the attacker about the other side.
#[derive(Debug, Default)]
pub(crate) struct AttackerView {
    pub(crate) alert: Option<u8>,
    pub(crate) data: Vec<u8>,
    /// Bytes that the other side read, or that fit into the buffers between.
    pub(crate) sent: usize,
}

impl AttackerView {
    async fn push(&mut self, io: &mut (impl AsyncWrite + Unpin), mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match io.write(bytes).await {
                Ok(n) if n > 0 => {
                    self.sent += n;
                    bytes = &bytes[n..];
                }
                _ => return,
            }
        }
    }

    /// Sends the bytes that do not wait, and ends if there are no others.
    async fn open(
        &mut self,
        io: &mut (impl AsyncWrite + Unpin),
        speech: MessageFlight,
    ) -> Option<Vec<u8>> {
        let (now, later) = speech.parts();
        self.push(io, &now).await;
        if later.is_none() {
            let _ = io.shutdown().await;
        }
        later
    }

    /// Sends the waiting bytes, once, and ends.
    async fn end(&mut self, io: &mut (impl AsyncWrite + Unpin), later: &mut Option<Vec<u8>>) {
        if let Some(later) = later.take() {
            self.push(io, &later).await;
            let _ = io.shutdown().await;
        }
    }

    fn note(&mut self, kind: u8, content: &[u8]) {
        match kind {
            ALERT if content.len() == 2 => self.alert = self.alert.or(Some(content[1])),
            DATA => self.data.extend_from_slice(content),
            _ => {}
        }
    }
}

/// Reads a record with its header.
pub(crate) async fn read_record(io: &mut (impl AsyncRead + Unpin)) -> Option<Vec<u8>> {
    let mut record = vec![0; 5];
    io.read_exact(&mut record).await.ok()?;
    record.resize(
        5 + usize::from(u16::from_be_bytes([record[3], record[4]])),
        0,
    );
    io.read_exact(&mut record[5..]).await.ok()?;
    Some(record)
}

/// Removes complete messages from the front.
fn messages(pending: &mut Vec<u8>) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    while pending.len() >= 4 {
        let end = 4 + pending[1..4]
            .iter()
            .fold(0, |n, b| n << 8 | usize::from(*b));
        if pending.len() < end {
            break;
        }
        found.push(pending.drain(..end).collect());
    }
    found
}

/// Script that fills a flight of the attacker.
pub(crate) type AttackScript = fn(&'static HandshakeFixture, &mut MessageFlight);

/// Acts as a client that sends `opening` and, if the server gets to its Finished, continues with
/// `script`.
pub(crate) async fn attack<IO: AsyncRead + AsyncWrite + Unpin>(
    fixture: &'static HandshakeFixture,
    mut io: IO,
    opening: &Opening,
    script: AttackScript,
) -> AttackerView {
    let (mut view, mut transcript, mut pending) =
        (AttackerView::default(), opening.hello.clone(), Vec::new());
    let (mut direction, mut schedule, mut after_data): (
        Option<RecordDirection>,
        Option<Schedule>,
        Option<Vec<u8>>,
    ) = (None, None, None);
    view.push(&mut io, &opening.wire).await;
    if opening.close {
        // The server may have closed already after what it read.
        let _ = io.shutdown().await;
    }
    while let Some(bytes) = read_record(&mut io).await {
        let (kind, content) = match (&mut direction, bytes[0]) {
            (Some(direction), DATA) => direction
                .open(&bytes)
                .expect("the server protects its records"),
            _ => (bytes[0], bytes[5..].to_vec()), // A record's header has five bytes.
        };
        view.note(kind, &content);
        if kind == DATA {
            view.end(&mut io, &mut after_data).await;
        }
        // A raw opening contains no hello, so there is no transcript to continue.
        if kind != HANDSHAKE || opening.hello.is_empty() {
            continue;
        }
        pending.extend(content);
        for m in messages(&mut pending) {
            transcript.extend_from_slice(&m);
            match (m[0], &opening.second) {
                // A HelloRetryRequest is a ServerHello with a fixed random (RFC 8446 §4.1.3).
                (SERVER_HELLO, second) if m[6..38] == RETRY => {
                    transcript = [rolled_up(&opening.hello), m].concat();
                    if let Some(second) = second {
                        transcript.extend_from_slice(&second.hello);
                        view.push(&mut io, &second.wire).await;
                    }
                }
                (SERVER_HELLO, _) => {
                    let (group, share) = ReceivedRecords::read(&m).shares().remove(0);
                    let made = Schedule::new(&fixture.keys.agree(group, &share), &transcript);
                    direction = Some(RecordDirection::new(&made.server));
                    schedule = Some(made);
                }
                (FINISHED, _) => {
                    let made = schedule.clone().expect("the hello came first");
                    let (client, server) = made.traffic(&transcript);
                    direction = Some(RecordDirection::new(&server));
                    let mut flight = MessageFlight {
                        side: Side::Client,
                        out: Vec::new(),
                        transcript: transcript.clone(),
                        // The client's flight is protected with the handshake keys, which precede
                        // those of `direction`.
                        received: ReceivedRecords::default(),
                        direction: Some(RecordDirection::new(&made.client)),
                        // No byte waits: the server expects this flight now.
                        pause: usize::MAX,
                        schedule: Some(made),
                        traffic: Some(client),
                        fixture,
                    };
                    script(fixture, &mut flight);
                    after_data = view.open(&mut io, flight).await;
                }
                (KEY_UPDATE, _) => direction = direction.as_ref().map(RecordDirection::updated),
                // The attacker verifies no certificate, so other messages only extend the
                // transcript.
                _ => {}
            }
        }
    }
    view
}

/// Acts as a server that reads one ClientHello and then sends all of `script`, without waiting.
pub(crate) async fn ambush<IO: AsyncRead + AsyncWrite + Unpin>(
    fixture: &'static HandshakeFixture,
    mut io: IO,
    script: AttackScript,
) -> AttackerView {
    let (mut view, mut hello) = (AttackerView::default(), Vec::new());
    let hello = loop {
        let Some(bytes) = read_record(&mut io).await else {
            return view;
        };
        hello.extend_from_slice(&bytes[5..]); // A record's header has five bytes.
        if let Some(hello) = messages(&mut hello).pop() {
            break hello;
        }
    };
    let mut flight = MessageFlight {
        side: Side::Server,
        out: Vec::new(),
        transcript: hello.clone(),
        received: ReceivedRecords::read(&hello),
        direction: None,
        // No byte waits unless the script says so.
        pause: usize::MAX,
        schedule: None,
        traffic: None,
        fixture,
    };
    script(fixture, &mut flight);
    let transcript = flight.transcript.clone();
    // The client protects its Finished with keys of the handshake, and what follows with keys of
    // application data. Whichever opens a record is the right one.
    let mut client_keys: Vec<RecordDirection> = Vec::new();
    if let Some(schedule) = &flight.schedule {
        client_keys = vec![
            RecordDirection::new(&schedule.client),
            RecordDirection::new(&schedule.traffic(&transcript).0),
        ];
    }
    let mut after_data = view.open(&mut io, flight).await;
    while let Some(bytes) = read_record(&mut io).await {
        let opened = if bytes[0] == DATA {
            client_keys.iter_mut().find_map(|l| l.open(&bytes))
        } else {
            Some((bytes[0], bytes[5..].to_vec()))
        };
        if let Some((kind, content)) = opened {
            view.note(kind, &content);
            if kind == DATA {
                view.end(&mut io, &mut after_data).await;
            }
        }
    }
    view
}
