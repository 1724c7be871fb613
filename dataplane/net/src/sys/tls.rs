//! System calls of kernel TLS: attaching it to a connection, its keys, and records with their
//! types. The handshake and the choice of the keys are the caller's. Start with [`tls_attach`].

use std::io;
use std::os::fd::AsRawFd;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::ReadBuf;
use tokio::net::TcpStream;
use zeroize::Zeroizing;

use super::{OneControl, get_option, receive_message, set_option};

/// Returns whether the kernel can encrypt and decrypt TLS records (`TCP_ULP` "tls"). It checks that
/// before the connection, so the probe needs no connected socket.
///
/// # Errors
/// The probe itself fails.
pub fn kernel_tls() -> io::Result<bool> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    match set_option(&socket, libc::SOL_TCP, libc::TCP_ULP, TLS_ULP) {
        Ok(()) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOTCONN) => Ok(true),
            Some(libc::ENOENT | libc::ENOPROTOOPT) => Ok(false),
            _ => Err(error),
        },
    }
}

const TLS_ULP: &[u8] = b"tls";
// These constants are from linux/tls.h; the libc crate has none of them.
const TLS_TX: libc::c_int = 1;
const TLS_RX: libc::c_int = 2;
const TLS_SET_RECORD_TYPE: libc::c_int = 1;
const TLS_GET_RECORD_TYPE: libc::c_int = 2;
const TLS_1_3: u16 = 0x0304;
const TLS_AES_GCM_128: u16 = 51;
const TLS_AES_GCM_256: u16 = 52;
/// Size of `struct tls12_crypto_info_aes_gcm_256`, the longest one used.
const TLS_KEYS_MAX: usize = 56;

/// Direction of the records of a connection, as this end sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsDirection {
    Out,
    In,
}

impl TlsDirection {
    fn name(self) -> libc::c_int {
        match self {
            TlsDirection::Out => TLS_TX,
            TlsDirection::In => TLS_RX,
        }
    }
}

/// Kernel TLS keys of one direction: TLS 1.3, AES-GCM, in the layout of linux/tls.h. They are
/// erased when dropped.
pub struct TlsKeys {
    pub(super) bytes: Zeroizing<[u8; TLS_KEYS_MAX]>,
    pub(super) length: usize,
}

impl TlsKeys {
    /// Builds the keys; `sequence` is that of the next record. `None` if the key is not as long as
    /// one of AES-128 or AES-256.
    pub fn new(key: &[u8], iv: &[u8; 12], sequence: u64) -> Option<Self> {
        let cipher = match key.len() {
            16 => TLS_AES_GCM_128,
            32 => TLS_AES_GCM_256,
            _ => return None,
        };
        let mut bytes = Zeroizing::new([0; TLS_KEYS_MAX]);
        let mut length = 0;
        // The kernel calls the first four bytes of the IV the salt.
        for part in [
            &TLS_1_3.to_ne_bytes()[..],
            &cipher.to_ne_bytes(),
            &iv[4..],
            key,
            &iv[..4],
            &sequence.to_be_bytes(),
        ] {
            bytes[length..length + part.len()].copy_from_slice(part);
            length += part.len();
        }
        Some(Self { bytes, length })
    }
}

/// Attaches kernel TLS to the connection. Its bytes are unchanged until keys are set too.
///
/// # Errors
/// The kernel has no TLS support, or the connection is not established.
pub fn tls_attach(stream: &TcpStream) -> io::Result<()> {
    set_option(stream, libc::SOL_TCP, libc::TCP_ULP, TLS_ULP)
}

/// Makes the kernel encrypt or decrypt one direction, irrevocably. A second call works only on
/// Linux 6.14 and later.
///
/// # Errors
/// The kernel refuses the keys.
pub fn tls_keys(stream: &TcpStream, way: TlsDirection, keys: &TlsKeys) -> io::Result<()> {
    set_option(
        stream,
        libc::SOL_TLS,
        way.name(),
        &keys.bytes[..keys.length],
    )
}

/// Returns how many records the kernel has encrypted or decrypted under the present keys, which are
/// those of AES-`bits`.
///
/// # Errors
/// The kernel does not return the keys.
pub fn tls_records(stream: &TcpStream, way: TlsDirection, bits: usize) -> io::Result<u64> {
    let mut bytes = Zeroizing::new([0; TLS_KEYS_MAX]);
    let length = get_option(
        stream,
        libc::SOL_TLS,
        way.name(),
        &mut bytes[..TLS_KEYS_MAX - 32 + bits / 8],
    )?;
    let number = bytes[..length]
        .last_chunk()
        .ok_or(io::ErrorKind::InvalidData)?;
    Ok(u64::from_be_bytes(*number))
}

/// Reads one or more records of the same type, no further than the capacity of `buf`. Returns the
/// number of bytes put behind the filled part, which are initialized but not yet marked as filled,
/// and the type, or `None` at the end of the transport.
///
/// # Errors
/// The read fails, also with `WouldBlock`.
pub fn tls_receive(stream: &TcpStream, buf: &mut ReadBuf<'_>) -> io::Result<(usize, Option<u8>)> {
    // SAFETY: only the kernel writes to the uninitialized part, and nothing reads it.
    let free = unsafe { buf.unfilled_mut() };
    let (got, kind) = receive_message(stream, free, (libc::SOL_TLS, TLS_GET_RECORD_TYPE))?;
    // SAFETY: the kernel wrote the first `got` bytes of `free`.
    unsafe { buf.assume_init(got) };
    Ok((got, kind.map(|[kind]| kind)))
}

/// Sends one record of type `kind`, completely or not at all.
///
/// # Errors
/// The write fails, or the kernel accepted only a part (`WriteZero`).
pub fn tls_send(stream: &TcpStream, kind: u8, content: &[u8]) -> io::Result<()> {
    let mut control: OneControl = [0; 4];
    let mut part = libc::iovec {
        iov_base: content.as_ptr().cast_mut().cast(),
        iov_len: content.len(),
    };
    // SAFETY: the structure consists of integers and pointers, all of which may be zero.
    let mut head: libc::msghdr = unsafe { std::mem::zeroed() };
    (head.msg_iov, head.msg_iovlen) = (&raw mut part, 1);
    // SAFETY: the call is pure arithmetic.
    (head.msg_control, head.msg_controllen) =
        ((&raw mut control).cast(), unsafe { libc::CMSG_SPACE(1) }
            as usize);
    // SAFETY: `control` fits a header and a byte, and is aligned for a header. The kernel only
    // reads `content`, whose length `part` has.
    let rc = unsafe {
        let say = libc::CMSG_FIRSTHDR(&raw const head);
        ((*say).cmsg_level, (*say).cmsg_type, (*say).cmsg_len) = (
            libc::SOL_TLS,
            TLS_SET_RECORD_TYPE,
            libc::CMSG_LEN(1) as usize,
        );
        *libc::CMSG_DATA(say) = kind;
        libc::sendmsg(stream.as_raw_fd(), &raw const head, libc::MSG_NOSIGNAL)
    };
    match usize::try_from(rc) {
        Ok(sent) if sent == content.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}
