//! A TLS 1.3 peer that says what it is told to, in either role, and notes which alert it got. It checks nothing that it hears.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::craft::*;
use super::keys::{Lane, Schedule, Secret, finished, hash, rolled_up};
use super::rig::{Badge, Rig};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

/// What is said in one go: a client's after the server's Finished, a server's after the client hello.
pub(crate) struct Speech {
    side: Side,
    pub(crate) out: Vec<u8>,
    pub(crate) transcript: Vec<u8>,
    pub(crate) heard: Heard,
    pub(crate) lane: Option<Lane>,
    /// What is in `out` from here on waits for the first word of the other side.
    pub(crate) pause: usize,
    schedule: Option<Schedule>,
    /// A client's, known before it speaks.
    traffic: Option<Secret>,
    rig: &'static Rig,
}

impl Speech {
    /// One record as it comes, protected if keys are there.
    pub(crate) fn put(&mut self, kind: u8, content: &[u8]) {
        let bytes = match &mut self.lane {
            Some(lane) => lane.seal(&[content, &[kind]].concat()),
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

    /// A handshake message that counts.
    pub(crate) fn say(&mut self, message: &[u8]) {
        self.transcript.extend_from_slice(message);
        message.chunks(16 << 10).for_each(|c| self.put(HANDSHAKE, c));
    }

    pub(crate) fn certificate(&mut self, chain: &[Vec<u8>]) {
        self.say(&certificate(chain));
    }

    /// What a proof signs, as the side `as_side`.
    pub(crate) fn to_sign(&self, as_side: Side) -> Vec<u8> {
        let who: &[u8] =
            if as_side == Side::Client { b"TLS 1.3, client CertificateVerify\0" } else { b"TLS 1.3, server CertificateVerify\0" };
        [&[0x20; 64], who, &hash(&self.transcript)].concat()
    }

    pub(crate) fn verify(&mut self, scheme: u16, signature: &[u8]) {
        self.say(&message(VERIFY, &[&scheme.to_be_bytes(), &vec16(signature)[..]].concat()));
    }

    pub(crate) fn proof(&mut self, badge: &Badge) {
        let signature = badge.sign(&self.to_sign(self.side));
        self.verify(ECDSA, &signature);
    }

    fn own(&self) -> Secret {
        let schedule = self.schedule.as_ref().expect("keys are agreed");
        if self.side == Side::Client { schedule.client } else { schedule.server }
    }

    pub(crate) fn verdict(&self) -> Vec<u8> {
        finished(&self.own(), &self.transcript)
    }

    /// Finished, then the keys of application data.
    pub(crate) fn finish(&mut self) {
        self.finish_with(&self.verdict());
    }

    pub(crate) fn finish_with(&mut self, verdict: &[u8]) {
        self.say(&message(FINISHED, verdict));
        self.advance();
    }

    /// Takes the keys of application data.
    pub(crate) fn advance(&mut self) {
        let schedule = self.schedule.as_ref().expect("keys are agreed");
        let traffic = self.traffic.unwrap_or_else(|| schedule.traffic(&self.transcript).1);
        self.lane = Some(Lane::new(&traffic));
    }

    pub(crate) fn key_update(&mut self, request: u8) {
        self.put(HANDSHAKE, &message(KEY_UPDATE, &[request]));
        self.lane = self.lane.as_ref().map(Lane::updated);
    }

    /// The honest end of either side: a word, and a proper close.
    pub(crate) fn ping(&mut self) {
        self.put(DATA, b"ping");
        self.alert(1, 0);
    }

    /// Waits for the first word of the other side, so that its handshake is over.
    pub(crate) fn wait(&mut self) {
        self.pause = self.out.len();
    }

    /// What to say at once and what after the wait.
    fn parts(mut self) -> (Vec<u8>, Option<Vec<u8>>) {
        let later = (self.pause <= self.out.len()).then(|| self.out.split_off(self.pause));
        (self.out, later)
    }

    /// A server's: hello in answer to what was heard.
    pub(crate) fn reply(&self) -> Hello {
        Hello {
            kind: SERVER_HELLO,
            version: 0x0303,
            random: [7; 32],
            session: self.heard.session.clone(),
            suites: vec![AES128],
            compressions: vec![0],
            extensions: vec![(VERSIONS, vec![3, 4]), (KEY_SHARE, self.rig.keys.share(X25519))],
        }
    }

    /// A server's: says `hello`, then has the keys of the handshake, over X25519 whatever it said.
    pub(crate) fn greet(&mut self, hello: &Hello) {
        self.say(&hello.message());
        self.protect();
    }

    pub(crate) fn protect(&mut self) {
        let theirs = self.heard.shares().into_iter().find(|(group, _)| *group == X25519).expect("a share of X25519");
        let schedule = Schedule::new(&self.rig.keys.agree(X25519, &theirs.1), &self.transcript);
        self.lane = Some(Lane::new(&schedule.server));
        self.schedule = Some(schedule);
    }

    /// A server's EncryptedExtensions.
    pub(crate) fn extend(&mut self, list: &[(u16, Vec<u8>)]) {
        self.say(&message(EXTENSIONS, &extensions(list)));
    }

    /// A server's CertificateRequest.
    pub(crate) fn request(&mut self, list: &[(u16, Vec<u8>)]) {
        self.say(&message(REQUEST, &[vec8(&[]), extensions(list)].concat()));
    }
}

/// How a client opens.
#[derive(Clone)]
pub(crate) struct Opening {
    /// On the wire.
    pub(crate) wire: Vec<u8>,
    /// The hello that is in it.
    pub(crate) hello: Vec<u8>,
    /// What to do if another hello is asked for.
    pub(crate) second: Option<Box<Opening>>,
    /// Ends the sending direction at once.
    pub(crate) close: bool,
}

impl Opening {
    pub(crate) fn of(hello: &Hello) -> Self {
        Self::wired(hello, |m| record(HANDSHAKE, m))
    }
    pub(crate) fn wired(hello: &Hello, wire: impl FnOnce(&[u8]) -> Vec<u8>) -> Self {
        let hello = hello.message();
        Self { wire: wire(&hello), hello, second: None, close: false }
    }
    pub(crate) fn raw(wire: impl Into<Vec<u8>>) -> Self {
        Self { wire: wire.into(), hello: Vec::new(), second: None, close: false }
    }
    pub(crate) fn again(mut self, second: &Hello) -> Self {
        self.second = Some(Box::new(Self::of(second)));
        self
    }
    pub(crate) fn closed(mut self) -> Self {
        self.close = true;
        self
    }
}

/// What the foe noticed.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) alert: Option<u8>,
    pub(crate) data: Vec<u8>,
    /// Bytes that the other side took, or that fit between.
    pub(crate) sent: usize,
}

impl Seen {
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

    /// Says what is not to wait, and ends if that is all.
    async fn open(&mut self, io: &mut (impl AsyncWrite + Unpin), speech: Speech) -> Option<Vec<u8>> {
        let (now, later) = speech.parts();
        self.push(io, &now).await;
        if later.is_none() {
            let _ = io.shutdown().await;
        }
        later
    }

    /// Says what had to wait, once, and ends.
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

/// A record with its header.
pub(crate) async fn hear(io: &mut (impl AsyncRead + Unpin)) -> Option<Vec<u8>> {
    let mut record = vec![0; 5];
    io.read_exact(&mut record).await.ok()?;
    record.resize(5 + usize::from(u16::from_be_bytes([record[3], record[4]])), 0);
    io.read_exact(&mut record[5..]).await.ok()?;
    Some(record)
}

/// Takes whole messages off the front.
fn messages(pending: &mut Vec<u8>) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    while pending.len() >= 4 {
        let end = 4 + pending[1..4].iter().fold(0, |n, b| n << 8 | usize::from(*b));
        if pending.len() < end {
            break;
        }
        found.push(pending.drain(..end).collect());
    }
    found
}

/// What a script says.
pub(crate) type Script = fn(&'static Rig, &mut Speech);

/// A client that opens with `opening` and, if the server gets as far as its Finished, goes on with `script`.
pub(crate) async fn attack<IO: AsyncRead + AsyncWrite + Unpin>(rig: &'static Rig, mut io: IO, opening: &Opening, script: Script) -> Seen {
    let (mut seen, mut transcript, mut pending) = (Seen::default(), opening.hello.clone(), Vec::new());
    let (mut lane, mut schedule, mut later): (Option<Lane>, Option<Schedule>, Option<Vec<u8>>) = (None, None, None);
    seen.push(&mut io, &opening.wire).await;
    if opening.close {
        let _ = io.shutdown().await;
    }
    while let Some(bytes) = hear(&mut io).await {
        let (kind, content) = match (&mut lane, bytes[0]) {
            (Some(lane), DATA) => lane.open(&bytes).expect("the server protects its records"),
            _ => (bytes[0], bytes[5..].to_vec()),
        };
        seen.note(kind, &content);
        if kind == DATA {
            seen.end(&mut io, &mut later).await;
        }
        if kind != HANDSHAKE || opening.hello.is_empty() {
            continue;
        }
        pending.extend(content);
        for m in messages(&mut pending) {
            transcript.extend_from_slice(&m);
            match (m[0], &opening.second) {
                (SERVER_HELLO, second) if m[6..38] == RETRY => {
                    transcript = [rolled_up(&opening.hello), m].concat();
                    if let Some(second) = second {
                        transcript.extend_from_slice(&second.hello);
                        seen.push(&mut io, &second.wire).await;
                    }
                }
                (SERVER_HELLO, _) => {
                    let (group, share) = Heard::read(&m).shares().remove(0);
                    let made = Schedule::new(&rig.keys.agree(group, &share), &transcript);
                    lane = Some(Lane::new(&made.server));
                    schedule = Some(made);
                }
                (FINISHED, _) => {
                    let made = schedule.clone().expect("the hello came first");
                    let (client, server) = made.traffic(&transcript);
                    lane = Some(Lane::new(&server));
                    let mut speech = Speech {
                        side: Side::Client,
                        out: Vec::new(),
                        transcript: transcript.clone(),
                        heard: Heard::default(),
                        lane: Some(Lane::new(&made.client)),
                        pause: usize::MAX,
                        schedule: Some(made),
                        traffic: Some(client),
                        rig,
                    };
                    script(rig, &mut speech);
                    later = seen.open(&mut io, speech).await;
                }
                (KEY_UPDATE, _) => lane = lane.as_ref().map(Lane::updated),
                _ => {}
            }
        }
    }
    seen
}

/// A server that hears one hello and then says all of `script`, without waiting for anything.
pub(crate) async fn ambush<IO: AsyncRead + AsyncWrite + Unpin>(rig: &'static Rig, mut io: IO, script: Script) -> Seen {
    let (mut seen, mut hello) = (Seen::default(), Vec::new());
    let hello = loop {
        let Some(bytes) = hear(&mut io).await else { return seen };
        hello.extend_from_slice(&bytes[5..]);
        if let Some(hello) = messages(&mut hello).pop() {
            break hello;
        }
    };
    let mut speech = Speech {
        side: Side::Server,
        out: Vec::new(),
        transcript: hello.clone(),
        heard: Heard::read(&hello),
        lane: None,
        pause: usize::MAX,
        schedule: None,
        traffic: None,
        rig,
    };
    script(rig, &mut speech);
    let flight = speech.transcript.clone();
    let mut lanes: Vec<Lane> = Vec::new();
    if let Some(schedule) = &speech.schedule {
        lanes = vec![Lane::new(&schedule.client), Lane::new(&schedule.traffic(&flight).0)];
    }
    let mut later = seen.open(&mut io, speech).await;
    while let Some(bytes) = hear(&mut io).await {
        let opened = if bytes[0] == DATA { lanes.iter_mut().find_map(|l| l.open(&bytes)) } else { Some((bytes[0], bytes[5..].to_vec())) };
        if let Some((kind, content)) = opened {
            seen.note(kind, &content);
            if kind == DATA {
                seen.end(&mut io, &mut later).await;
            }
        }
    }
    seen
}
