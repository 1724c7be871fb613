#!/usr/bin/env python3
"""Small clients for the software program: a line dialogue, the time until a server's first bytes, and many connections at once.

`talk.py say HOST PORT LINE...` sends each line and prints one line of answer for each. `talk.py banner HOST PORT` prints whether the
fastest of 20 first bytes came at once: a wait for the client's first byte is in each of them, the load of a machine is not. `talk.py many
HOST PORT N HEX WANTED` holds N connections and prints how many were answered.
"""
import asyncio, resource, socket, sys, time

AT_ONCE = 0.08      # seconds a greeting may take: less than the 0.1 s that a gateway waits for the client on a port of undeclared protocol


def say(host, port, *lines):
    with socket.create_connection((host, port), timeout=5) as s:
        answers = s.makefile("rb")
        for line in lines:
            if line == "-":     # an answer that comes unasked
                print(answers.readline().decode().strip())
                continue
            s.sendall(line.encode().decode("unicode_escape").encode() + b"\r\n")
            print(answers.readline().decode().strip())


def banner(host, port):
    times = []
    for _ in range(20):
        begun = time.monotonic()
        with socket.create_connection((host, port), timeout=5) as s:
            assert s.recv(1), "the server closed"
            times.append(time.monotonic() - begun)
    fastest = min(times)
    print("at once" if fastest < AT_ONCE else f"after {fastest:.2f} s")


async def many(host, port, count, ask, wanted):
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100,) * 2)
    async def answer(reader):
        if wanted.startswith(b"HTTP/"):     # of a HEAD request
            return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20))[:len(wanted)]
        return await asyncio.wait_for(reader.readexactly(len(wanted)), 20)

    gate, everybody, connected = asyncio.Semaphore(100), asyncio.Event(), 0

    async def one():
        nonlocal connected
        try:
            async with gate:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 20)
                writer.write(ask)
                got = await answer(reader)
            connected += 1
            if connected == count:
                everybody.set()
            # All are open at the same time, and each still responds.
            await asyncio.wait_for(everybody.wait(), 40)
            async with gate:
                writer.write(ask)
                again = await answer(reader)
            writer.close()
            return got == wanted == again
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            everybody.set()     # the others need not wait for one that failed
            return False

    answered = await asyncio.gather(*(one() for _ in range(count)))
    print(f"{sum(answered)} of {count}")


if __name__ == "__main__":
    what, host, port, *more = sys.argv[1:]
    if what == "say":
        say(host, int(port), *more)
    elif what == "banner":
        banner(host, int(port))
    else:
        asyncio.run(many(host, int(port), int(more[0]), bytes.fromhex(more[1]), bytes.fromhex(more[2])))
