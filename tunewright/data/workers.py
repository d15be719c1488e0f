"""The work on rows, in this process or in several.

A process for each core pays from some thousand rows on: then each runs the tokenizer with one
thread, and templates are rendered on all cores too. Below that, the tokenizer's own threads do it.

Workers are plain programs (`python -m tunewright.data.workers`) that read and write pickles.
They import nothing of the program that started them. They end when their input does, so they do not
outlive that program, however it ends.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO

from tunewright.contract.failures import TunewrightError
from tunewright.data.work import Chunk, Job, Outcome, Worker

_PAYS_FROM_ROWS = 8_000
_MOST_PROCESSES = 8
_WORDS = (sys.executable, "-m", "tunewright.data.workers")


def outcomes(job: Job, chunks: Iterator[Chunk], rows: int) -> Iterator[tuple[Chunk, Outcome]]:
    """Each chunk with its outcome, in order; `rows` are expected."""
    processes = min(_cores(), _MOST_PROCESSES)
    if processes == 1 or rows < _PAYS_FROM_ROWS:
        worker = Worker(job)
        yield from ((chunk, worker(chunk)) for chunk in chunks)
        return
    with _processes(job, processes) as free, ThreadPoolExecutor(processes) as threads:
        waiting: deque[tuple[Chunk, Future[Outcome]]] = deque()
        for chunk in chunks:
            waiting.append((chunk, threads.submit(_ask, free, chunk)))
            if len(waiting) >= 2 * processes:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()


Free = queue.SimpleQueue[subprocess.Popen[bytes]]


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _processes(job: Job, count: int) -> Iterator[Free]:
    """Workers that have begun; ended in every case."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    env = {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    begun: list[subprocess.Popen[bytes]] = []
    free: Free = queue.SimpleQueue()
    try:
        for _ in range(count):
            begun.append(
                subprocess.Popen(_WORDS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
            )
        for process in begun:
            _send(process, job)
            free.put(process)
        yield free
    finally:
        for process in begun:
            process.kill()
            process.communicate()


def _ask(free: Free, chunk: Chunk) -> Outcome:
    """Let a worker that is free do a chunk."""
    process = free.get()
    try:
        _send(process, chunk)
        assert process.stdout is not None, "it was started with a pipe"
        found = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError) as error:
        raise _lost(process) from error
    finally:
        free.put(process)
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, Outcome), "a worker answers with outcomes"
    return found


def _send(process: subprocess.Popen[bytes], what: Job | Chunk) -> None:
    assert process.stdin is not None, "it was started with a pipe"
    try:
        pickle.dump(what, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
    except BrokenPipeError as error:
        raise _lost(process) from error


def _lost(process: subprocess.Popen[bytes]) -> TunewrightError:
    code = process.wait()
    return TunewrightError(
        f"a process that tokenizes ended by itself (exit code {code}; -9 is often a lack of memory)"
    )


def main() -> None:
    """Be a worker: a Job comes first, then chunks, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us is told too, and ends us
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    try:
        _serve(sys.stdin.buffer, answers)
    except (EOFError, BrokenPipeError):
        os._exit(0)


def _serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    job = pickle.load(questions)
    worker = None
    while True:
        chunk = pickle.load(questions)
        try:
            worker = worker or Worker(job)
            found: Outcome | Exception = worker(chunk)
        except Exception as error:  # it is raised where the chunk came from
            found = error
        pickle.dump(found, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    main()
