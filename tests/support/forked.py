"""Python programs that tests start, as forks of a process that has imported torch, which takes two seconds of each otherwise.

Not for programs that ask what is imported, or whose variables or options Python itself reads when it starts.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile


def captured(
    command: Iterable[object],
    *,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = False,
    timeout: float = 600,
    input: str = "",
) -> subprocess.CompletedProcess[str]:
    """A command's exit status, and what it printed, like ``processes.captured``. It begins with ``sys.executable``, and may go
    on with ``-W ignore``."""
    words = [str(word) for word in command]
    assert words[0] == sys.executable
    variables = dict(os.environ if env is None else env)
    with TemporaryFile() as inputs, TemporaryFile() as out, TemporaryFile() as err:
        request = json.dumps([words[1:], str(cwd or Path.cwd()), variables]).encode()
        inputs.write(input.encode())
        inputs.seek(0)
        channel, server = _server()
        channel.settimeout(timeout)
        files = [file.fileno() for file in (inputs, out, err)]
        try:
            socket.send_fds(channel, [len(request).to_bytes(8, "little")], files)
            channel.sendall(request)
            status = int.from_bytes(_received(channel, 8), "little", signed=True)
        except OSError:  # which would leave an answer to the next program
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    done = subprocess.CompletedProcess(words, status, *texts)
    if check:
        done.check_returncode()
    return done


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A connection to the process from which programs are forked, and that process, which ends with this one."""
    ours, theirs = socket.socketpair()
    with theirs:
        # What a program adds to the path comes before what is installed, as if it were a new process.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=variables,
            cwd="/",
            start_new_session=True,
        )
    return ours, process


def _received(channel: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = channel.recv(count - len(parts))
        if not part:
            raise ConnectionError("the process from which programs are forked has ended")
        parts += part
    return parts


def _serve(channel: socket.socket) -> list[str]:
    """Fork a process for each program. Returns the words of a program, in its process."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(channel, 8, 3)
        if not head:
            os._exit(0)
        words, folder, variables = json.loads(_received(channel, int.from_bytes(head, "little")))
        child = os.fork()
        if child == 0:
            channel.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(variables)
            return list(words)
        for descriptor in descriptors:
            os.close(descriptor)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        channel.sendall(status.to_bytes(8, "little", signed=True))


def _run(words: list[str]) -> int:
    """The status of a program."""
    try:
        _start(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """What Python does at the end, but for the deletion of all modules, which here would take as long as their imports."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


def _start(words: list[str]) -> None:
    """What Python does with its arguments."""
    if words[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        words = words[2:]
    first = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    importlib.invalidate_caches()
    if words[0] == "-m":
        sys.path[:0] = [os.getcwd(), *first]
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        sys.path[:0] = ["", *first]
        sys.argv = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec", dont_inherit=True)
    else:
        sys.path[:0] = [str(Path(words[0]).parent), *first]
        sys.argv = words
        main.__file__ = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec", dont_inherit=True)
    exec(code, main.__dict__)


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    import torch  # noqa: F401

    assert "scan_registry" not in sys.modules
    # Which children never go through, and so share with this process.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end(_run(_serve(socket.socket(fileno=int(sys.argv[1])))))
