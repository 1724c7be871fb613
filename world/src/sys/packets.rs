//! Packet sockets (AF_PACKET) that carry whole Ethernet frames in batches, with the kernel's
//! offload header before each frame and the time of arrival beside it. They neither inspect nor
//! delay frames; `relay` does that. Start at [`PacketSocket::open`].

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum frames per system call. Nobody measured which number is best.
pub(crate) const BATCH: usize = 64;
/// Buffer size of one frame: the largest MTU of an underlay (9,100), the Ethernet header, and the
/// offload header.
pub(crate) const FRAME_BYTES_MAX: usize = 10 << 10;
/// Size of the kernel's buffers for a socket, in bytes. It bridges the time until the relay reads.
const SOCKET_BYTES: libc::c_int = 16 << 20;
/// Size of the buffer for the control message with the time of arrival, in 64-bit words. `cmsghdr`
/// and a `timespec` need four; the rest is for other messages that the kernel may add.
const CONTROL_WORDS: usize = 8;

/// A packet socket on one device.
#[derive(Debug)]
pub(crate) struct PacketSocket {
    fd: OwnedFd,
}

/// A frame that was received, with its offload header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received<'b> {
    pub(crate) frame: &'b [u8],
    /// Wall-clock time at which the device received the frame; `None` if the kernel does not report
    /// it.
    pub(crate) arrived: Option<SystemTime>,
    /// The frame did not fit into the buffer.
    pub(crate) is_cut: bool,
}

/// Memory for the frames of one receiving call.
pub(crate) struct ReceiveBatch {
    bytes: Vec<u8>,
    /// `u64`, for the alignment of a control message.
    control: Vec<u64>,
    /// One element per frame, which points into `bytes`.
    places: Vec<libc::iovec>,
    /// Messages that point at `places` and into `control`.
    messages: Vec<libc::mmsghdr>,
    /// Length, time of arrival, and whether the frame was cut.
    received: Vec<(usize, Option<SystemTime>, bool)>,
}

impl ReceiveBatch {
    pub(crate) fn new() -> Self {
        let mut bytes = vec![0; BATCH * FRAME_BYTES_MAX];
        let mut control = vec![0_u64; BATCH * CONTROL_WORDS];
        let mut places: Vec<libc::iovec> = bytes
            .chunks_exact_mut(FRAME_BYTES_MAX)
            .map(|bytes: &mut [u8]| libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            })
            .collect();
        let mut messages: Vec<libc::mmsghdr> = places.iter_mut().map(message).collect();
        for (message, control) in messages
            .iter_mut()
            .zip(control.chunks_exact_mut(CONTROL_WORDS))
        {
            message.msg_hdr.msg_control = control.as_mut_ptr().cast();
        }
        // None of these is ever resized, so the pointers stay valid.
        Self {
            bytes,
            control,
            places,
            messages,
            received: Vec::with_capacity(BATCH),
        }
    }

    /// Returns the frames of the last receiving call.
    pub(crate) fn frames(&self) -> impl Iterator<Item = Received<'_>> {
        let frames = self.bytes.chunks_exact(FRAME_BYTES_MAX);
        frames
            .zip(&self.received)
            .map(|(bytes, (length, arrived, is_cut))| Received {
                frame: &bytes[..*length],
                arrived: *arrived,
                is_cut: *is_cut,
            })
    }
}

/// Pointers of one sending call. The value is reused so that no call needs new memory.
#[derive(Default)]
pub(crate) struct SendBatch {
    places: Vec<libc::iovec>,
    messages: Vec<libc::mmsghdr>,
}

impl PacketSocket {
    /// Opens a socket for all frames that arrive at a device of this namespace. It does not receive
    /// frames that leave through the device.
    pub(crate) fn open(device: &str) -> io::Result<Self> {
        // SAFETY: the call takes numbers only.
        let fd = unsafe {
            libc::socket(
                libc::AF_PACKET,
                libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
                0,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let socket = Self { fd };
        // Segments, and frames with checksums that the sender left to its device, pass unchanged.
        socket.set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
        socket.set(libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
        socket.set(libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
        socket.set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, SOCKET_BYTES)?;
        socket.set(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, SOCKET_BYTES)?;
        socket.bind(rustix::net::netdevice::name_to_index(&socket.fd, device)?)?;
        Ok(socket)
    }

    fn set(&self, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
        let length = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the value outlives the call, and the length is that of its type.
        let result = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                name,
                ptr::from_ref(&value).cast(),
                length,
            )
        };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    fn bind(&self, index: u32) -> io::Result<()> {
        // SAFETY: a `sockaddr_ll` of zeros is a valid value.
        let mut address: libc::sockaddr_ll = unsafe { zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = i32::try_from(index).map_err(io::Error::other)?;
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the address outlives the call, and the length is that of its type.
        let result =
            unsafe { libc::bind(self.fd.as_raw_fd(), ptr::from_ref(&address).cast(), length) };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Receives the frames that have arrived, at most [`BATCH`]. It fails like `recvmmsg(2)`, with
    /// `WouldBlock` if there are none.
    pub(crate) fn receive(&self, batch: &mut ReceiveBatch) -> io::Result<()> {
        batch.received.clear();
        for message in &mut batch.messages {
            message.msg_hdr.msg_controllen = CONTROL_WORDS * size_of::<u64>();
        }
        debug_assert_eq!(
            (batch.places.len(), batch.control.len()),
            (BATCH, BATCH * CONTROL_WORDS)
        );
        // SAFETY: each message points at its own element of `places` and its own part of `control`.
        // Each element of `places` points at its own part of `bytes`. All lengths are right.
        // `batch` owns all of them, never resizes them, and is exclusively borrowed during the
        // call.
        let count = unsafe {
            libc::recvmmsg(
                self.fd.as_raw_fd(),
                batch.messages.as_mut_ptr(),
                BATCH as u32,
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        for message in &batch.messages[..count] {
            let is_cut = message.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
            let length = (message.msg_len as usize).min(FRAME_BYTES_MAX);
            batch
                .received
                .push((length, time_of_arrival(&message.msg_hdr), is_cut));
        }
        Ok(())
    }

    /// Sends frames with their offload headers, and returns how many left. It fails like
    /// `sendmmsg(2)` if the first frame could not be sent.
    pub(crate) fn send<'f>(
        &self,
        batch: &mut SendBatch,
        frames: impl Iterator<Item = &'f [u8]>,
    ) -> io::Result<usize> {
        batch.places.clear();
        batch.places.extend(frames.map(|frame| libc::iovec {
            iov_base: frame.as_ptr().cast_mut().cast(),
            iov_len: frame.len(),
        }));
        batch.messages.clear();
        batch.messages.extend(batch.places.iter_mut().map(message));
        // SAFETY: every message points at its own element of `places`, which points at a frame that
        // outlives the call. The kernel only reads what is sent. The pointers that stay in `batch`
        // afterwards are not used again.
        let count = unsafe {
            libc::sendmmsg(
                self.fd.as_raw_fd(),
                batch.messages.as_mut_ptr(),
                batch.messages.len() as u32,
                libc::MSG_DONTWAIT,
            )
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Returns the number of frames that the kernel dropped since the last call because the
    /// socket's buffer was full.
    pub(crate) fn missed(&self) -> u32 {
        // SAFETY: a `tpacket_stats` of zeros is a valid value.
        let mut stats: libc::tpacket_stats = unsafe { zeroed() };
        let mut length = size_of::<libc::tpacket_stats>() as libc::socklen_t;
        let at = ptr::from_mut(&mut stats).cast();
        // SAFETY: the kernel writes at most `length` bytes, which is the size of `stats`.
        let result = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                at,
                &raw mut length,
            )
        };
        if result < 0 { 0 } else { stats.tp_drops }
    }
}

impl std::os::fd::AsFd for PacketSocket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn message(place: &mut libc::iovec) -> libc::mmsghdr {
    // SAFETY: an `mmsghdr` of zeros is a valid value: no name, no buffers, no control message.
    let mut message: libc::mmsghdr = unsafe { zeroed() };
    message.msg_hdr.msg_iov = place;
    message.msg_hdr.msg_iovlen = 1;
    message
}

fn time_of_arrival(header: &libc::msghdr) -> Option<SystemTime> {
    // SAFETY: the kernel has filled in the header and its control buffer, which still exists; the
    // macros stay within its length.
    let first = unsafe { libc::CMSG_FIRSTHDR(header).as_ref() }?;
    if (first.cmsg_level, first.cmsg_type) != (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) {
        return None;
    }
    // SAFETY: a control message of this type contains a `timespec`, which may be unaligned.
    let time: libc::timespec = unsafe {
        libc::CMSG_DATA(first)
            .cast::<libc::timespec>()
            .read_unaligned()
    };
    Some(
        UNIX_EPOCH
            + Duration::new(
                u64::try_from(time.tv_sec).ok()?,
                u32::try_from(time.tv_nsec).ok()?,
            ),
    )
}
