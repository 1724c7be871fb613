//! Application side of the tests, in the child process: dials in every possible way and reports
//! what it sees.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use super::{pause, print_line};

/// Numbers of linux/socket.h and linux/in.h; the libc crate lacks them on some targets.
const MSG_FASTOPEN: i32 = 0x2000_0000;
const IPPROTO_MPTCP: i32 = 262;

/// Dials once. Arguments: `ADDRESS [option …]`.
pub fn dial(args: &[String]) {
    match try_dial(args) {
        Ok(said) => print_line(said),
        Err(e) => print_line(format!("error {:?} {:?}", e.kind(), e.raw_os_error())),
    }
}

fn try_dial(args: &[String]) -> io::Result<String> {
    let to: SocketAddr = args[0].parse().unwrap();
    let has = |o: &str| args.iter().any(|a| a == o);
    let value = |o: &str| args.iter().find_map(|a| a.strip_prefix(o));
    if has("unprivileged") {
        // 65534 is `nobody`.
        // SAFETY: no memory is involved; this process has one thread that matters and ends after
        // the case.
        assert_eq!(unsafe { libc::setresuid(65534, 65534, 65534) }, 0);
    }
    if has("net_raw") {
        only_net_raw();
    }
    let protocol = if has("mptcp") {
        Protocol::from(IPPROTO_MPTCP)
    } else {
        Protocol::TCP
    };
    let s = Socket::new(Domain::for_address(to), Type::STREAM, Some(protocol))?;
    s.set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(5))))?;
    if let Some(from) = value("bind=") {
        // A port that an earlier client left in TIME_WAIT may be bound again.
        s.set_reuse_address(true)?;
        s.bind(&from.parse::<SocketAddr>().unwrap().into())?;
    }
    if let Some(dev) = value("device=") {
        s.bind_device(Some(dev.as_bytes()))?;
    }
    if has("mark") {
        // The mark of the proxy's own connections.
        s.set_mark(0x539)?;
    }
    if has("nonblocking") {
        s.set_nonblocking(true)?;
        match s.connect(&to.into()) {
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            // The case is about a pending connection, so any other result is reported.
            other => return other.map(|()| "connected at once".to_string()),
        }
        let mut p = [rustix::event::PollFd::new(
            &s,
            rustix::event::PollFlags::OUT,
        )];
        rustix::event::poll(&mut p, None)?;
        s.take_error()?.map_or(Ok(()), Err)?;
        s.set_nonblocking(false)?;
    } else if has("fastopen") {
        s.send_to_with_flags(b"hi", &to.into(), MSG_FASTOPEN)?;
    } else {
        if has("fastopen_connect") {
            sockopt_fastopen_connect(&s)?;
        }
        s.connect(&to.into())?;
    }
    let mut t = TcpStream::from(s);
    // With TCP Fast Open the text is already on its way.
    if !has("fastopen") {
        t.write_all(b"hi")?;
    }
    if has("send_and_close") {
        return Ok("closed".into());
    }
    let mut reply = String::new();
    t.read_to_string(&mut reply)?;
    let said = format!(
        "peer={} local={} reply={reply}",
        t.peer_addr()?,
        t.local_addr()?.ip()
    );
    if has("hold") {
        print_line(&said);
        pause();
        return Ok(format!("peer={}", t.peer_addr()?));
    }
    Ok(said)
}

/// Turns this process into user nobody with CAP_NET_RAW only, which a container has by default and
/// can use.
fn only_net_raw() {
    // Numbers of linux/prctl.h and linux/capability.h.
    const KEEP_CAPABILITIES: libc::c_int = 8;
    const VERSION: u32 = 0x2008_0522;
    const NET_RAW: u32 = 1 << 13;
    // SAFETY: plain numbers; and two structures of the kernel's layout (capset(2)), which live
    // across the call. This process has one thread that matters and ends after the case.
    unsafe {
        assert_eq!(libc::prctl(KEEP_CAPABILITIES, 1, 0, 0, 0), 0);
        assert_eq!(libc::setresuid(65534, 65534, 65534), 0);
        let (header, data) = ([VERSION, 0], [NET_RAW, NET_RAW, 0, 0, 0, 0]);
        assert_eq!(
            libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr()),
            0
        );
    }
}

fn sockopt_fastopen_connect(s: &Socket) -> io::Result<()> {
    let one: libc::c_int = 1;
    // SAFETY: a plain int option, its size given; the descriptor is borrowed for the call.
    let rc = unsafe {
        libc::setsockopt(
            std::os::fd::AsRawFd::as_raw_fd(s),
            libc::IPPROTO_TCP,
            libc::TCP_FASTOPEN_CONNECT,
            std::ptr::from_ref(&one).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Dials COUNT times without waiting, reports how many were refused, and keeps the connections.
/// Arguments: `ADDRESS COUNT`.
pub fn burst(args: &[String]) {
    let (to, count) = (
        args[0].parse::<SocketAddr>().unwrap(),
        args[1].parse::<u64>().unwrap(),
    );
    let limit = libc::rlimit {
        rlim_cur: count + 64,
        rlim_max: count + 64,
    };
    // SAFETY: the structure lives across the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    let mut refused = 0;
    let held: Vec<Socket> = (0..count)
        .map(|_| {
            let s =
                Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP)).unwrap();
            s.set_nonblocking(true).unwrap();
            let dialled = s.connect(&to.into());
            refused +=
                u64::from(dialled.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused));
            s
        })
        .collect();
    print_line(format!("refused {refused}"));
    pause();
    drop(held);
}

/// Listens, and keeps the first connection until [`super::Client::go_on`]. Arguments: `AT`.
pub fn serve(args: &[String]) {
    let listener = std::net::TcpListener::bind(&args[0]).unwrap();
    print_line("open");
    let (mut accepted, _) = listener.accept().unwrap();
    print_line("accepted");
    pause();
    print_line(format!(
        "{:?}",
        accepted.write_all(b"hi").map_err(|e| e.kind())
    ));
}

/// Dials an address that is refused, then loopback with the same socket. The destination that was
/// stored for the first must not be used for the second.
pub fn redial(args: &[String]) {
    let first: SocketAddr = args[0].parse().unwrap();
    let second: SocketAddr = args[1].parse().unwrap();
    let s = Socket::new(
        Domain::for_address(first),
        Type::STREAM,
        Some(Protocol::TCP),
    )
    .unwrap();
    print_line(format!(
        "{:?}",
        s.connect(&first.into()).map_err(|e| e.kind())
    ));
    pause();
    print_line(format!(
        "{:?}",
        s.connect(&second.into()).map_err(|e| e.kind())
    ));
    print_line(format!(
        "peer={}",
        s.peer_addr().unwrap().as_socket().unwrap()
    ));
}

/// Uses two sockets with one local port and two local addresses.
pub fn one_port(args: &[String]) {
    let open = |from: &str| {
        let s = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
        s.set_reuse_address(true).unwrap();
        s.bind(&from.parse::<SocketAddr>().unwrap().into()).unwrap();
        s
    };
    let (a, b) = (open("10.77.0.2:4711"), open("127.0.0.1:4711"));
    a.connect(&args[0].parse::<SocketAddr>().unwrap().into())
        .unwrap();
    b.connect(&args[1].parse::<SocketAddr>().unwrap().into())
        .unwrap();
    let read = |s: Socket| {
        let mut reply = String::new();
        TcpStream::from(s).read_to_string(&mut reply).unwrap();
        reply
    };
    print_line(format!("{} {}", read(a), read(b)));
}

/// Dials several destinations from one local address and port. Reports the reply to each, in that
/// order. Arguments: `FROM TO…`.
pub fn from_one_port(args: &[String]) {
    let from: SocketAddr = args[0].parse().unwrap();
    let dial = |to: &String| -> io::Result<TcpStream> {
        let s = Socket::new(Domain::for_address(from), Type::STREAM, Some(Protocol::TCP))?;
        s.set_reuse_address(true)?;
        s.bind(&from.into())?;
        s.connect(&to.parse::<SocketAddr>().unwrap().into())?;
        Ok(s.into())
    };
    let dialled: io::Result<Vec<TcpStream>> = args[1..].iter().map(dial).collect();
    let mut streams = match dialled {
        Ok(streams) => streams,
        Err(e) => return print_line(format!("error {:?} {:?}", e.kind(), e.raw_os_error())),
    };
    let mut read = |s: &mut TcpStream| {
        let mut reply = String::new();
        s.write_all(b"hi")
            .and_then(|()| s.read_to_string(&mut reply))
            .unwrap();
        reply
    };
    let replies: Vec<String> = streams.iter_mut().map(&mut read).collect();
    print_line(replies.join(" "));
}

/// Dials COUNT times in succession, reports how many were refused, and closes each at once.
/// Arguments: `COUNT TO`.
pub fn dial_again(args: &[String]) {
    let (times, to) = (
        args[0].parse::<u64>().unwrap(),
        args[1].parse::<SocketAddr>().unwrap(),
    );
    let refused = (0..times)
        .filter(|_| {
            TcpStream::connect(to).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
        })
        .count();
    print_line(format!("refused {refused}"));
}

/// Dials an IPv6 address on an IPv4 socket: the application must see the kernel's own refusal.
fn wrong_family(args: &[String]) {
    let s = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
    print_line(format!(
        "{:?}",
        s.connect(&args[0].parse::<SocketAddr>().unwrap().into())
            .map_err(|e| e.raw_os_error())
    ));
}

/// Sends a datagram, which capture must not redirect.
pub fn udp(args: &[String]) {
    let s = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    s.connect(&args[0]).unwrap();
    print_line(format!("peer={}", s.peer_addr().unwrap()));
}

/// Runs the case with this name.
pub fn run(case: &[String]) {
    match case[0].as_str() {
        "dial" => dial(&case[1..]),
        "burst" => burst(&case[1..]),
        "serve" => serve(&case[1..]),
        "redial" => redial(&case[1..]),
        "one_port" => one_port(&case[1..]),
        "from_one_port" => from_one_port(&case[1..]),
        "dial_again" => dial_again(&case[1..]),
        "wrong_family" => wrong_family(&case[1..]),
        "udp" => udp(&case[1..]),
        "send" => super::packets::send(&case[1..]),
        "receive" => super::packets::receive(&case[1..]),
        "ask" => super::packets::send_query(&case[1..]),
        "datagram" => super::packets::datagram(&case[1..]),
        "answer" => super::packets::answer(&case[1..]),
        other => panic!("no case {other}"),
    }
}
