//! A relay that delivers what it hears later: the delay of a long way, where the kernel has no netem. Order and ends of streams are
//! kept, and each direction is late by the same time. Looks into nothing.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Chunks on the way in one direction; a sender that is faster waits.
const ON_THE_WAY_MAX: usize = 1024;
const CHUNK_BYTES: usize = 16 << 10;

/// Takes connections on `port` and carries each to `to`. Says when it is ready, and goes on until it is killed.
pub(crate) fn delay(port: u16, to: SocketAddr, late: Duration) -> std::io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
    println!("delaying on {port}");
    // One connection that cannot be carried is its own affair.
    for near in listener.incoming().flatten() {
        std::thread::spawn(move || carry(near, to, late));
    }
    Ok(())
}

fn carry(near: TcpStream, to: SocketAddr, late: Duration) -> std::io::Result<()> {
    let far = TcpStream::connect(to)?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    for (from, into) in [(near.try_clone()?, far.try_clone()?), (far, near)] {
        let (sender, receiver) = sync_channel(ON_THE_WAY_MAX);
        std::thread::spawn(move || hear(from, &sender, late));
        std::thread::spawn(move || tell(into, &receiver));
    }
    Ok(())
}

/// What was heard, and when it is due; no bytes: the end.
type Chunk = (Instant, Vec<u8>);

fn hear(mut from: TcpStream, sender: &SyncSender<Chunk>, late: Duration) {
    let mut room = vec![0; CHUNK_BYTES];
    loop {
        // A broken connection ends the other side too.
        let count = from.read(&mut room).unwrap_or(0);
        if sender.send((Instant::now() + late, room[..count].to_vec())).is_err() || count == 0 {
            return;
        }
    }
}

fn tell(mut into: TcpStream, receiver: &Receiver<Chunk>) {
    while let Ok((due, bytes)) = receiver.recv() {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if bytes.is_empty() || into.write_all(&bytes).is_err() {
            break;
        }
    }
    // The other end may be gone already.
    let _ = into.shutdown(Shutdown::Write);
}
