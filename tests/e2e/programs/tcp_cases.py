#!/usr/bin/env python3
"""TCP cases: what two programs on two pods observe of a connection, as one line of text for each case.

`tcp_cases.py server` serves every case on a port of its own, for each base port. `tcp_cases.py client` runs all cases against one
address and prints a JSON object: case -> observation of both ends. Nothing here knows whether there is a mesh: the test compares.
An observation depends on no clock. What a clock tells is an observation of its own, `CASE_time`, which the client prints where the test
asks for it.
"""
import ctypes, errno, fcntl, json, select, socket, struct, sys, termios, threading, time

from tcp_ends import LIMITS, X, End, error_name, pattern, short

CONTROL_PORT = 7099
BASES = (7100, 7200)
AT_ONCE_WITHIN = 0.6    # s: "at once" on a loaded machine; below the second after which TCP repeats a SYN
RESET_WITHIN = 5        # s: a host's reset of a connection that it does not know arrives
BIG = 20_000_000        # bytes: more than all buffers on any path
LEFT_OUT = "left out"
HEAVY = ("twenty_megabytes_both_ways", "two_hundred_at_once")
CASES = []              # (name, server, client, repetitions)


def case(server, repeat=1):
    """Registers the client's half of a case with the server's half."""
    def register(client):
        CASES.append((client.__name__.replace("_c_", ""), server, client, repeat))
        return client
    return register


# --- servers: each gets the accepted connection

def s_echo(end):
    while True:
        got = end.recv()
        if isinstance(got, str):
            end.say("end " + got)
            break
        if not end.send(got):
            break
    end.fin()
    end.close()


def s_echo_without_resets(end):
    """Echoes; a connection that is reset before its first byte is left out. Beside one that is served, it is the dial of a node that gave up
    another one as dead while the machine had no time for it (docs/compatibility.md)."""
    s_echo(end)
    if end.log[:1] == ["end ECONNRESET"]:
        end.log[:] = [LEFT_OUT]


def s_drain(end):
    data = end.read_all()
    end.send(b"got %d" % len(data))
    end.close()


def s_drain_late(end):
    data = end.read_all()
    time.sleep(1)
    end.send(b"got %d" % len(data))
    end.close()


def s_fin_then_read(end):
    end.fin()
    end.read_all()
    end.close()


def s_greet_fin_then_read(end):
    end.send(b"hello\n")
    end.fin()
    end.read_all()
    end.close()


def s_read(end):
    end.read_all()
    end.close()


def s_read_late(end):
    time.sleep(0.4)
    end.read_all()
    end.close()


def s_close(end):
    end.close()


def s_close_after_byte(end):
    end.read_n(1)
    end.close()


def s_rst(end):
    end.rst()


def s_rst_after_byte(end):
    end.read_n(1)
    end.rst()


def s_read_some_rst(end):
    end.read_n(100_000)
    end.rst()


def s_write_rst(end):
    end.read_n(1)
    end.send(pattern(10_000, b"w"))
    end.rst()


def s_write_wait_rst(end):
    end.read_n(1)
    end.send(pattern(10_000, b"w"))
    time.sleep(0.4)
    end.rst()


def s_unread_close(end):
    end.wait_for(10_000)    # unread
    end.send(b"bye")
    end.close()


def s_answer_then_read(end):
    end.read_n(1)
    end.send(pattern(10_000, b"a"))
    end.read_all()
    end.close()


def s_banner(end):
    end.send(b"220 ready\r\n")
    end.read_all()
    end.close()


def s_dialog(end):
    end.send(b"220 ready\r\n")
    for _ in range(3):
        line = end.recv()
        end.send(b"250 " + line if isinstance(line, bytes) else b"?")
    end.read_all()
    end.close()


def s_silent(end):
    end.read_n(5)
    time.sleep(1)
    end.close()


def s_late_banner(end):
    time.sleep(1.5)
    end.send(b"late\n")
    end.read_all()
    end.close()


def s_shut_rd(end):
    end.sock.shutdown(socket.SHUT_RD)
    end.send(b"hello")
    end.wait_for(1)         # unread, so the close is a reset; a byte that comes after the close finds a FIN
    end.close()


def s_hello_then_read(end):
    end.read_n(1)
    end.send(b"hello")
    end.read_all()
    end.close()


def s_drip(end):
    for i in range(20):
        end.send(b"%c" % (97 + i))
        time.sleep(0.02)
    end.close()


def s_big(end):
    writer = threading.Thread(target=lambda: (end.send(pattern(BIG, b"down")), end.fin()))
    writer.start()
    end.read_all()
    writer.join()
    end.close()


def s_six(end):
    end.send(b"abcdef")
    end.read_all()
    end.close()


def s_urgent(end):
    """Bytes and their urgent byte, and whether all were there before the client went on."""
    got, urgent, begun, told = bytearray(), b"", time.monotonic(), False
    while True:
        data = end.recv(100)
        if isinstance(data, str):
            break
        got += data
        if b"cd\n" in got and not told:
            told = True
            end.say("before the pause" if time.monotonic() - begun < 0.9 else "held")
        poll = select.poll()
        poll.register(end.sock, select.POLLPRI)
        if not urgent and poll.poll(100):
            try:
                end.sock.setblocking(False)
                urgent += end.sock.recv(1, socket.MSG_OOB)
            except OSError:
                pass
    end.say(f"in line {short(got)} urgent {short(urgent)}")
    end.close()


def s_urgent_inline(end):
    end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
    end.send(b"go")
    end.read_all()
    end.close()


def s_names(end):
    end.say("IPv6" if end.sock.family == socket.AF_INET6 else "IPv4")
    end.say("own " + place(end.sock.getsockname()) + " peer " + place(end.sock.getpeername()).rsplit(":", 1)[0])
    s_echo(end)


def s_peer_port(end):
    got = bytearray()
    while len(got) < 6 and isinstance(more := end.recv(6 - len(got)), bytes):
        got += more
    end.say("peer port " + ("as bound" if str(end.sock.getpeername()[1]).encode() == got[1:] else "another"))
    end.close()


def s_first_bytes(end):
    got = end.recv()
    end.send(b"ok" if isinstance(got, bytes) else b"?")
    end.read_all(what="then")
    end.close()


def s_slow_reader(end):
    time.sleep(1)
    end.read_all()
    end.close()


# --- clients: each gets a Dialer

class Dialer:
    """Makes the case's connections, and knows the addresses that may be observed."""

    def __init__(self, arguments, index, log, times):
        self.target, self.base, self.family = arguments["target"], arguments["base"], arguments["family"]
        self.arguments, self.port, self.log, self.times = arguments, arguments["base"] + index, log, times

    def socket(self, protocol=0):
        s = socket.socket(self.family, socket.SOCK_STREAM, protocol)
        s.settimeout(LIMITS["patience"])
        return s

    def connect(self, sock=None, address=None, port=None):
        sock = sock or self.socket()
        sock.connect((address or self.target, port or self.port))
        return End(sock, self.log)

    def wait_for_server(self):
        """Waits until the server has accepted the case's connection: a mesh may accept before it has dialed the server."""
        ask_server(self.arguments["control"], f"accepted {self.base} {CASES[self.port - self.base][0]}")

    def say_time(self, took):
        self.times.append("at once" if took < AT_ONCE_WITHIN else "within 2 s" if took < 2 else "later")

    def try_connect(self, address, port=None):
        """Says only whether it failed in connect(), and with which of the two kinds of refusal."""
        try:
            self.socket().connect((address, port or self.port))
        except ConnectionResetError:
            pass
        except OSError as e:
            name = error_name(e)
            self.log.append("refused" if name in ("ECONNREFUSED", "EHOSTUNREACH", "ENETUNREACH", "TIMEOUT") else name)
            return
        self.log.append("connected")


def connected(sock):
    """Waits until a connect() that did not wait is over."""
    poll = select.poll(); poll.register(sock, select.POLLOUT); poll.poll(LIMITS["patience"] * 1000)


PLACES = {}


def place(address):
    ip, port = address[0].removeprefix("::ffff:"), address[1]
    name = PLACES.get(ip, ip)
    return f"{name}:{'port' if BASES[0] <= port < BASES[1] + 100 else 'ephemeral' if port >= 32768 else port}"


@case(s_echo)
def _c_echo(d):
    e = d.connect(); e.send(b"hello"); e.fin(); e.read_all()


@case(s_drain)
def _c_half_close_by_client(d):
    e = d.connect(); e.send(b"0123456789"); e.fin(); e.read_all()


@case(s_drain_late)
def _c_half_close_by_client_late_answer(d):
    e = d.connect(); e.send(b"0123456789"); e.fin(); e.read_all()


@case(s_drain)
def _c_half_close_without_bytes(d):
    e = d.connect(); e.fin(); e.read_all()


@case(s_fin_then_read)
def _c_half_close_by_server(d):
    e = d.connect(); e.read_all(); e.send(b"after"); e.fin(); time.sleep(0.2); e.close()


@case(s_greet_fin_then_read)
def _c_half_close_by_server_late_bytes(d):
    e = d.connect(); e.read_all(); time.sleep(1); e.send(b"after"); time.sleep(0.2); e.send(b"more"); e.fin(); time.sleep(0.2); e.close()


@case(s_read)
def _c_fin_by_client_idle(d):
    e = d.connect(); time.sleep(0.2); e.close()


@case(s_read)
def _c_fin_by_client_at_once(d):
    d.connect().close()


@case(s_close)
def _c_fin_by_server_idle(d):
    e = d.connect(); e.read_all()


@case(s_close_after_byte)
def _c_write_to_closed_server(d):
    e = d.connect(); e.send(X); e.read_all(); e.send(b"y")
    # Without a mesh the host resets; where nobody does, nothing shows that nobody will.
    poll = select.poll(); poll.register(e.sock, select.POLLERR | select.POLLHUP); poll.poll(RESET_WITHIN * 1000)
    e.send(b"z"); e.read_all(what="at last")


@case(s_read)
def _c_rst_by_client_idle(d):
    e = d.connect(); d.wait_for_server(); e.rst()


@case(s_rst)
def _c_rst_by_server_idle(d):
    s = d.socket()
    try:
        s.connect((d.target, d.port))
    except ConnectionResetError:    # it was as quick as that
        d.log.append("read '' then ECONNRESET")
        return
    End(s, d.log).read_all()


@case(s_rst_after_byte)
def _c_rst_by_server_after_byte(d):
    e = d.connect(); e.send(X); e.read_all()


@case(s_read_late)
def _c_rst_by_client_while_idle_server_reads_late(d):
    e = d.connect(); e.send(X + b"bc"); time.sleep(0.2); e.rst()


@case(s_read_late, repeat=5)
def _c_three_bytes_then_rst(d):
    e = d.connect(); e.send(X + b"bc"); e.rst()


@case(s_read_late, repeat=5)
def _c_ten_kilobytes_then_rst(d):
    e = d.connect(); e.send(pattern(10_000, b"c")); e.rst()


@case(s_write_rst, repeat=5)
def _c_server_writes_then_rst(d):
    e = d.connect(); e.send(X); time.sleep(0.5); e.read_all()


@case(s_write_wait_rst)
def _c_server_writes_waits_then_rst(d):
    e = d.connect(); e.send(X); time.sleep(0.8); e.read_all()


@case(s_read_some_rst)
def _c_rst_by_server_while_written(d):
    e = d.connect()
    while e.send(pattern(100_000, b"c")):
        pass


@case(s_unread_close)
def _c_server_closes_with_unread(d):
    e = d.connect(); e.send(pattern(10_000, b"c")); time.sleep(0.8); e.read_all()


@case(s_answer_then_read)
def _c_client_closes_with_unread(d):
    e = d.connect(); e.send(X); e.wait_for(10_000); e.close()


@case(s_banner)
def _c_server_first(d):
    e = d.connect(); begun = time.monotonic(); e.read_n(11); d.say_time(time.monotonic() - begun); e.close()


@case(s_dialog)
def _c_server_first_dialog(d):
    e = d.connect(); e.read_n(11)
    for word in (b"EHLO x\r\n", b"NOOP\r\n", b"GET \r\n"):
        e.send(word); e.read_n(4 + len(word))
    e.close()


@case(s_silent)
def _c_server_silent(d):
    e = d.connect(); e.send(X + b"ello"); e.read_all()


@case(s_late_banner)
def _c_both_silent_then_server(d):
    e = d.connect(); e.read_n(5); e.close()


@case(s_echo)
def _c_client_silent_then_speaks(d):
    e = d.connect(); time.sleep(1.5); e.send(b"hello"); e.fin(); e.read_all()


@case(s_hello_then_read)
def _c_shut_rd_by_client(d):
    e = d.connect(); e.sock.shutdown(socket.SHUT_RD); e.send(X)
    time.sleep(0.4); e.send(b"still"); e.fin(); e.wait_for_end(); e.close()


@case(s_shut_rd)
def _c_shut_rd_by_server(d):
    e = d.connect(); e.send(X); e.read_all(); e.close()


@case(s_drain)
def _c_drip_by_client(d):
    e = d.connect()
    for i in range(20):
        e.send(b"%c" % (97 + i)); time.sleep(0.02)
    e.fin(); e.read_all()


@case(s_drip)
def _c_drip_by_server(d):
    e = d.connect(); e.read_all()


@case(s_big)
def _c_twenty_megabytes_both_ways(d):
    e = d.connect()
    writer = threading.Thread(target=lambda: (e.send(pattern(BIG, b"up")), e.fin()))
    writer.start(); e.read_all(); writer.join()


@case(s_six)
def _c_peek(d):
    e = d.connect(); e.wait_for(6)
    e.say("peek " + str(e.recv(3, socket.MSG_PEEK))); e.say("peek " + str(e.recv(6, socket.MSG_PEEK))); e.read_n(6); e.close()


@case(s_six)
def _c_bytes_waiting(d):
    e = d.connect(); e.wait_for(6); e.say("FIONREAD %d" % e.waiting()); e.read_n(6); e.close()


@case(s_six)
def _c_low_water_mark(d):
    e = d.connect(); e.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 6); e.say(str(e.recv(10))); e.close()


@case(s_six)
def _c_waitall(d):
    e = d.connect(); e.sock.setblocking(True); e.say(str(e.sock.recv(6, socket.MSG_WAITALL))); e.close()


@case(s_drain)
def _c_zero_length_sends(d):
    e = d.connect()
    for _ in range(3):
        e.sock.send(b"")
    e.send(X); e.sock.send(b""); e.fin(); e.read_all()


@case(s_echo)
def _c_options(d):
    s = d.socket()
    chosen = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 33), (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 7),
              (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 9000), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
              (socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1), (socket.SOL_SOCKET, socket.SO_PRIORITY, 3)]
    for level, name, value in chosen:
        s.setsockopt(level, name, value)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1000)
    e = d.connect(s)
    e.say("kept" if all(s.getsockopt(l, n) == v for l, n, v in chosen if n != socket.TCP_QUICKACK) else "changed")
    e.send(b"hello"); e.fin(); e.read_all()


@case(s_echo)
def _c_linger_close_waits(d):
    e = d.connect(); e.sock.setblocking(True)
    e.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3)); e.send(X + b"ello"); e.say(str(e.sock.recv(5))); e.close()


@case(s_echo)
def _c_msg_fastopen(d):
    s = d.socket(); s.sendto(b"hello", socket.MSG_FASTOPEN, (d.target, d.port)); e = End(s, d.log); e.fin(); e.read_all()


@case(s_echo)
def _c_fastopen_connect(d):
    s = d.socket(); s.setsockopt(socket.IPPROTO_TCP, 30, 1); e = d.connect(s); e.send(b"hello"); e.fin(); e.read_all()


@case(s_echo)
def _c_unspec_then_reconnect(d):
    s = d.socket(); e = d.connect(s); e.send(X + b"ne"); e.read_n(3)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.connect(s.fileno(), ctypes.create_string_buffer(struct.pack("=H14x", 0)), 16)
    e = d.connect(s); e.send(X + b"wo"); e.read_n(3); e.say("to " + place(s.getpeername())); e.close()


@case(s_echo)
def _c_non_blocking_connect(d):
    s = d.socket(); s.setblocking(False); code = s.connect_ex((d.target, d.port))
    d.log.append("EINPROGRESS" if code == errno.EINPROGRESS else str(code)); connected(s)
    d.log.append("SO_ERROR %d" % s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)); e = End(s, d.log); e.send(b"hello"); e.fin(); e.read_all()


@case(s_echo)
def _c_connect_twice(d):
    s = d.socket(); e = d.connect(s)
    try:
        s.connect((d.target, d.port)); e.say("connected again")
    except OSError as x:
        e.say(error_name(x))
    e.send(b"hello"); e.fin(); e.read_all()


@case(s_echo)
def _c_bind_to_address(d):
    s = d.socket(); s.bind((d.arguments["own"], 0)); e = d.connect(s); e.say("own " + place(s.getsockname())); e.send(b"hello"); e.fin(); e.read_all()


@case(s_peer_port)
def _c_bind_to_port(d):
    port = d.arguments["fixed"]; s = d.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("", port)); e = d.connect(s)
    e.say("own port " + ("as bound" if s.getsockname()[1] == port else "another")); e.send(X + str(port).encode()); e.read_all()


@case(s_echo)
def _c_one_source_port_two_servers(d):
    port, ends = d.arguments["fixed"] + 1, []
    for other in (d.port, d.base):
        s = d.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("", port))
        try:
            ends.append(d.connect(s, port=other)); d.log.append("connected")
        except OSError as x:
            d.log.append(error_name(x))
    for e in ends:
        e.send(X); e.fin(); e.read_all()


@case(s_echo)
def _c_bind_to_device(d):
    s = d.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0\0"); e = d.connect(s); e.send(b"hello"); e.fin(); e.read_all()


@case(s_echo_without_resets)
def _c_two_hundred_at_once(d):
    results, lock = [], threading.Lock()
    def one(i):
        log = []
        try:
            e = End(d.socket(), log); e.sock.connect((d.target, d.port)); e.send(b"%03d" % i); time.sleep(0.3); e.fin(); e.read_all()
        except OSError as x:
            log.append(error_name(x))
        with lock:
            results.append(log == [f"read '{i:03d}' then EOF"])
    threads = [threading.Thread(target=one, args=(i,)) for i in range(200)]
    [t.start() for t in threads]; [t.join() for t in threads]
    d.log.append(f"{sum(results)} of {len(results)}")


@case(s_urgent, repeat=8)
def _c_urgent(d):
    e = d.connect(); e.send(X + b"b"); time.sleep(0.02); e.sock.send(b"!", socket.MSG_OOB); e.send(b"cd\n"); time.sleep(1.2); e.send(b"ef"); e.close()


@case(s_urgent_inline, repeat=4)
def _c_urgent_in_line(d):
    e = d.connect(); e.read_n(2); e.send(b"ab"); e.sock.send(b"!", socket.MSG_OOB); e.send(b"cd\n"); time.sleep(0.2); e.close()


@case(s_names)
def _c_names_at_server(d):
    e = d.connect(); e.send(X); e.fin(); e.read_all()


@case(s_echo)
def _c_names_at_client(d):
    e = d.connect(); e.say("own " + place(e.sock.getsockname()) + " peer " + place(e.sock.getpeername())); e.close()


@case(s_echo)
def _c_names_while_connecting(d):
    s = d.socket(); s.setblocking(False); s.connect_ex((d.target, d.port)); d.log.append("own " + place(s.getsockname())); connected(s)
    d.log.append("peer " + place(s.getpeername())); s.close()


@case(s_echo)
def _c_mptcp(d):
    s = d.socket(262); e = d.connect(s); e.send(b"hello"); e.fin(); e.read_all()


@case(s_echo)
def _c_mptcp_names(d):
    e = d.connect(d.socket(262)); e.say("own " + place(e.sock.getsockname()) + " peer " + place(e.sock.getpeername())); e.close()


def first_bytes(d, text):
    e = d.connect(); e.send(text); begun = time.monotonic(); e.read_n(2); d.say_time(time.monotonic() - begun); e.close()


for word in (b"ruok", b"x", b"GET", b"12345", b"\x16\x03", b"PRI", b"\0", b"hello\n"):
    name = "first_bytes_" + "".join(c if c.isalnum() else f"{ord(c):02x}" for c in word.decode("latin-1"))
    CASES.append((name, s_first_bytes, lambda d, word=word: first_bytes(d, word), 1))


@case(s_slow_reader)
def _c_slow_reader(d):
    e = d.connect(); e.send(pattern(1_000_000, b"s")); e.fin(); e.read_all()


@case(s_echo)
def _c_closed_port(d):
    d.try_connect(d.target, d.base + 98)


@case(s_echo)
def _c_undeclared_port(d):
    d.try_connect(d.target, 6666)


@case(s_echo)
def _c_unknown_service_address(d):
    d.try_connect("10.101.77.77" if d.family == socket.AF_INET else "fd00:101::7777")


@case(s_echo)
def _c_unused_pod_address(d):
    d.try_connect("10.1.2.99" if d.family == socket.AF_INET else "fd00:1::2:99")


@case(s_echo)
def _c_outside_address(d):
    d.try_connect("192.0.2.1" if d.family == socket.AF_INET else "2001:db8::1")


@case(s_echo)
def _c_reserved_address(d):
    d.try_connect("240.0.0.1" if d.family == socket.AF_INET else "fdca:a1:0:240::1")


# --- running them

def serve(names):
    PLACES.update(names)
    seen, lock = {base: {} for base in BASES}, threading.Lock()

    def attend(base, name, server, listener):
        while True:
            conn, _ = listener.accept()
            log = []
            with lock:
                seen[base].setdefault(name, []).append(log)
            def one(conn=conn, log=log):
                try:
                    server(End(conn, log))
                except OSError as e:
                    log.append("server: " + error_name(e))
                log.append("done")
            threading.Thread(target=one, daemon=True).start()

    for base in BASES:
        for index, (name, server, _, _) in enumerate(CASES):
            for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
                s = socket.socket(family, socket.SOCK_STREAM)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN, 16)
                s.bind((any_address, base + index))
                s.listen(512)
                threading.Thread(target=attend, args=(base, name, server, s), daemon=True).start()
    def wait(holds):
        until = time.monotonic() + LIMITS["patience"]
        while time.monotonic() < until:
            with lock:
                if holds():
                    break
            time.sleep(0.05)

    def control(conn):
        """`accepted BASE CASE`: waits until the case's server has a connection. `take BASE`: all that the servers observed, once they are
        done or timed out."""
        what, base, *name = conn.recv(256).decode().split()
        base, answer = int(base), "ok"
        if what == "accepted":
            wait(lambda: seen[base].get(name[0]))
        else:
            wait(lambda: all(log and log[-1] == "done" for logs in seen[base].values() for log in logs))
            with lock:
                answer, seen[base] = json.dumps(seen[base]), {}
        conn.sendall(answer.encode())
        conn.close()

    questions = socket.create_server(("0.0.0.0", CONTROL_PORT))
    print("serving", flush=True)
    while True:
        threading.Thread(target=control, args=(questions.accept()[0],), daemon=True).start()


def ask_server(address, words):
    """Asks the server of all cases, beside their connections."""
    with socket.create_connection((address, CONTROL_PORT), timeout=LIMITS["patience"] + 15) as s:
        s.sendall(words.encode() + b"\n")
        data = b""
        while got := s.recv(65536):
            data += got
    return data


def take(server, base):
    return json.loads(ask_server(server, f"take {base}"))


def summary(logs):
    """What each of several equal runs observed: once where all agree."""
    texts = ["; ".join(entry for entry in log if entry != "done") for log in logs]
    distinct = sorted(set(texts))
    return distinct[0] if len(distinct) == 1 else " | ".join(distinct) if distinct else "no connection"


def run(arguments):
    PLACES.update(arguments["names"])
    arguments["family"] = socket.AF_INET6 if ":" in arguments["target"] else socket.AF_INET
    take(arguments["control"], arguments["base"])
    logs, times = {}, {}

    def one(index, name, client, log):
        try:
            client(Dialer(arguments, index, log, times.setdefault(name, [])))
        except OSError as e:
            log.append("client: " + error_name(e))

    # Cases with much data come after all that measure a time.
    for heavy in (False, True):
        threads = []
        for index, (name, _, client, repeat) in enumerate(CASES):
            for _ in range(repeat if heavy == (name in HEAVY) else 0):
                log = []
                logs.setdefault(name, []).append(log)
                threads.append(threading.Thread(target=one, args=(index, name, client, log), daemon=True))
        for t in threads:
            t.start()
            time.sleep(0.004)
        for t in threads:
            t.join(3 * LIMITS["patience"] + 8)
    at_server = take(arguments["control"], arguments["base"])
    result = {}
    for name, _, _, _ in CASES:
        served = [log for log in at_server.get(name, []) if LEFT_OUT not in log]
        # The 200 connections differ in nothing, and the echo case is also another case's second server.
        result[name] = "client: " + summary(logs[name]) + " / server: " + summary(served)
        if arguments["timed"] and times.get(name):
            result[name + "_time"] = "client: " + " | ".join(sorted(set(times[name])))
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1] == "list":
        print("\n".join(name for name, *_ in CASES))
    elif sys.argv[1] == "server":
        LIMITS["patience"] = float(sys.argv[3])
        serve(json.loads(sys.argv[2]))
    else:
        chosen = json.loads(sys.argv[2])
        LIMITS["patience"] = chosen["patience"]
        run(chosen)
