"""A process of its own in which grammars of strangers are compiled first: what hangs or crashes does so there.

    engine's process                          trial process: python -m backends.llm.sampling.grammar_trial
      tokens, once  ────────── stdin ──────>    the library's vocabulary
      a grammar     ────────── stdin ──────>    compiled under limits on processor time and memory
      "" or what is wrong <─── stdout ──────    or killed by them, which is the answer too

The library bounds most of its work but not all: thirty patterns under "allOf" keep it busy for ever.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from backends.llm.sampling.grammar_source import Vocabulary, llguidance
from compiler.errors import EnvironmentLacks

_CPU_SECONDS = 1.0  # for one grammar; 4,000 properties of an object take about as much
_WALL_SECONDS = 20.0  # the same and the start of the process, on a busy machine
_MEMORY_BYTES = 2 << 30  # of address space
_TOO_MUCH = f"it takes more than {_CPU_SECONDS:g} s of processor time to compile, or too much memory"
# Where they are lower than the library's defaults: a mask then takes at most some 10 ms, and an answer's automaton
# some 40 MB, which go with the answer.
_LIMITS = {"max_lexer_states": 20_000, "max_grammar_size": 100_000, "verbose_errors": False}


def library_tokenizer(vocabulary: Vocabulary) -> Any:
    """Returns the library's form of a vocabulary; takes up to a second."""
    return llguidance().LLTokenizer(vocabulary, eos_token=sorted(vocabulary.eos_token_ids) or None)


_NO_TEXT = "it allows no text, or none that this model's tokens can spell"
_STUCK = ("NoExtension", "NoExtensionBias")  # what the library calls that, where it notices


def compiled(tokenizer: Any, vocabulary: Vocabulary, lark: str) -> tuple[Any, str]:
    """Compiles a grammar, and computes its first mask.

    Returns:
        The library's matcher at the start, and what is wrong with the grammar: "" if it can be used.
    """
    library = llguidance()
    matcher = library.LLMatcher(tokenizer, lark, log_level=0, limits=library.LLParserLimits(**_LIMITS))
    mask = int.from_bytes(b"" if matcher.is_error() else matcher.compute_bitmask(), "little")
    if matcher.is_error():
        reason = error_of(matcher)
        return matcher, _NO_TEXT if reason in _STUCK else reason
    ends = sum(1 << token_id for token_id in vocabulary.eos_token_ids)
    if not mask & ~ends & ((1 << len(vocabulary.tokens)) - 1):
        return matcher, _NO_TEXT
    return matcher, ""


def error_of(matcher: Any) -> str:
    """Returns what a matcher says of its error."""
    return str(matcher.get_error()).removesuffix("\n<non-verbose/>").strip()


class GrammarTrial:
    """Starts the process when it is needed, and again where a grammar killed it. Safe for threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def error(self, lark: str) -> str:
        """Returns what is wrong with a grammar, "" if it can be compiled here.

        Raises:
            EnvironmentLacks: the process cannot be started.
        """
        with self._lock:
            if self._closed:
                return "the model is being unloaded"
            if self._process is None:
                self._process = self._started()
            reply = self._asked(self._process, lark.encode())
            if reply is None:
                self._end()
                return _TOO_MUCH
            return reply.decode()

    def close(self) -> None:
        """Ends the process for good."""
        with self._lock:
            self._closed = True
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        command = [_python(), "-m", __name__]
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none, env=environment)
        except OSError as error:
            raise EnvironmentLacks(f"{command[0]} cannot be started to compile a grammar: {error}") from None
        ready = self._asked(process, json.dumps(self._vocabulary.as_json()).encode())
        if ready is None:
            process.kill()
            process.wait()
            raise EnvironmentLacks("the process that compiles grammars does not start", hint="pip install llguidance")
        return process

    def _asked(self, process: subprocess.Popen[bytes], message: bytes) -> bytes | None:
        """Returns the answer; None where there is none in time, or the process is gone."""
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, message)
        except OSError:
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            return _receive(process.stdout) if selector.select(_WALL_SECONDS) else None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _python() -> str:
    """Returns an interpreter of this version; within Triton's stub `sys.executable` need not be one."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in (sys.prefix, sys.base_prefix):
        path = Path(folder, "bin", name)
        if path.is_file():
            return str(path)
    found = shutil.which(name) or (sys.executable if Path(sys.executable or "").name.startswith("python") else None)
    if found is None:
        raise EnvironmentLacks(f"no {name} was found, in which grammars are compiled", hint=f"put {name} into PATH")
    return found


def _send(stream: BinaryIO | Any, message: bytes) -> None:
    stream.write(struct.pack(">I", len(message)) + message)
    stream.flush()


def _receive(stream: BinaryIO | Any) -> bytes | None:
    """Returns one message; None where the other side is gone."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    message: bytes = stream.read(struct.unpack(">I", head)[0])
    return message


def serve(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Compiles one grammar after the other until the engine's process is gone."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first = _receive(stdin)
    if first is None:
        return
    vocabulary = Vocabulary.from_json(json.loads(first))
    tokenizer = library_tokenizer(vocabulary)
    _send(stdout, b"")
    while (message := _receive(stdin)) is not None:
        signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)  # SIGPROF, which ends the process
        error = compiled(tokenizer, vocabulary, message.decode())[1]
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(stdout, error.encode(errors="replace"))


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
