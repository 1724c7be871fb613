"""One end of a TCP connection with a log of what it observes, for tcp_cases.py. It knows no case."""
import errno, hashlib, socket, struct

PATIENCE = 4.0          # no single wait of a case is longer
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
        sock.settimeout(PATIENCE)

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

    def recv(self, n=65536, flags=0, patience=PATIENCE):
        """Reads once; a text says how it ended where there are no bytes."""
        self.sock.settimeout(patience)
        try:
            data = self.sock.recv(n, flags)
            return data if data else "EOF"
        except OSError as e:
            return error_name(e)
        finally:
            try:
                self.sock.settimeout(PATIENCE)
            except OSError:
                pass

    def read_all(self, patience=PATIENCE, what="read"):
        data, end = bytearray(), None
        while True:
            got = self.recv(patience=patience)
            if isinstance(got, str):
                end = got
                break
            data += got
        self.say(f"{what} {short(data)} then {end}")
        return bytes(data)

    def read_n(self, n, patience=PATIENCE, what="read"):
        data, end = bytearray(), ""
        while len(data) < n:
            got = self.recv(n - len(data), patience=patience)
            if isinstance(got, str):
                end = " then " + got
                break
            data += got
        self.say(f"{what} {short(data)}{end}")
        return bytes(data)

    def close(self):
        self.sock.close()


def pattern(n, seed):
    block = X + hashlib.sha256(seed).digest() * 2048
    return (block * (n // len(block) + 1))[:n]
