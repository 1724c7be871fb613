"""One end of a TCP connection with a log of what it observes, for tcp_cases.py. It knows no case."""
import errno, fcntl, hashlib, socket, struct, termios, time

LIMITS = {"patience": 4.0}      # s: no single wait of a case is longer; the gate sets more
LOOK = 0.01             # s: between two looks at what a socket tells without a wait
X = b"\2"               # a first byte of no known protocol: nobody waits for more of it


def error_name(e):
    if isinstance(e, TimeoutError):
        return "TIMEOUT"
    return errno.errorcode.get(e.errno, str(e)) if isinstance(e, OSError) else repr(e)


def short(data):
    if len(data) <= 40:
        return repr(bytes(data))[1:]
    return f"{len(data)} bytes {hashlib.sha256(data).hexdigest()[:8]}"


class End:
    """One end of a connection, with a log of what it observed."""

    def __init__(self, sock, log):
        self.sock, self.log = sock, log
        sock.settimeout(LIMITS["patience"])

    def say(self, text):
        self.log.append(text)

    def send(self, data, flags=0):
        try:
            view = memoryview(data)
            while view:
                view = view[self.sock.send(view, flags):]
            return True
        except OSError as e:
            # Which of the two occurs depends on when the reset is detected.
            name = error_name(e)
            self.say("send: reset" if name in ("EPIPE", "ECONNRESET") else "send: " + name)
            return False

    def fin(self):
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as e:
            self.say("shutdown: " + error_name(e))

    def rst(self):
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def recv(self, n=65536, flags=0, patience=None):
        """Reads once; a text says how it ended where there are no bytes."""
        self.sock.settimeout(patience or LIMITS["patience"])
        try:
            data = self.sock.recv(n, flags)
            return data if data else "EOF"
        except OSError as e:
            return error_name(e)
        finally:
            try:
                self.sock.settimeout(LIMITS["patience"])
            except OSError:
                pass

    def read_all(self, patience=None, what="read"):
        data, end = bytearray(), None
        while True:
            got = self.recv(patience=patience)
            if isinstance(got, str):
                end = got
                break
            data += got
        self.say(f"{what} {short(data)} then {end}")
        return bytes(data)

    def read_n(self, n, patience=None, what="read"):
        data, end = bytearray(), ""
        while len(data) < n:
            got = self.recv(n - len(data), patience=patience)
            if isinstance(got, str):
                end = " then " + got
                break
            data += got
        self.say(f"{what} {short(data)}{end}")
        return bytes(data)

    def wait(self, holds, patience=None):
        """Waits until what the kernel tells of the socket is so."""
        end = time.monotonic() + (patience or LIMITS["patience"])
        while not holds() and time.monotonic() < end:
            time.sleep(LOOK)

    def waiting(self):
        """The number of bytes that have come and were not read."""
        return struct.unpack("i", fcntl.ioctl(self.sock, termios.FIONREAD, b"\0" * 4))[0]

    def wait_for(self, n):
        self.wait(lambda: self.waiting() >= n)

    def wait_for_end(self):
        """Waits until the other end has closed too: no longer ESTABLISHED, FIN_WAIT1 or FIN_WAIT2."""
        self.wait(lambda: self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in (1, 4, 5))

    def close(self):
        self.sock.close()


def pattern(n, seed):
    block = X + hashlib.sha256(seed).digest() * 2048
    return (block * (n // len(block) + 1))[:n]
