"""The protocol of a peer: one JSON line in for a round, one JSON line out. Needs nothing but the standard library.

A peer is a script that runs in an environment of its own:

    python peers/NAME.py MODEL THREADS
    <- {"ready": true, "load_s": 1.2, "name": "..."}
    -> {"requests": [{"token_ids": [1, 2], "max_tokens": 64}], "max_num_seqs": 32}
    <- {"seconds": 1.3, "output_tokens": 64}
"""

import json
import os
import sys
import time


def serve(name, load):
    """Answers rounds until the input ends.

    Args:
        name: of the peer, with its version.
        load: (model path, threads) -> run, where run(requests, max_num_seqs) returns the number of output tokens.
    """
    answers = open_answers()
    started = time.perf_counter()
    run = load(sys.argv[1], int(sys.argv[2]))
    say(answers, {"ready": True, "load_s": time.perf_counter() - started, "name": name})
    for line in sys.stdin:
        work = json.loads(line)
        started = time.perf_counter()
        output_tokens = run(work["requests"], work["max_num_seqs"])
        say(answers, {"seconds": time.perf_counter() - started, "output_tokens": output_tokens})


def open_answers():
    """Takes stdout for the answers alone: what libraries print must not be taken for one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def say(stream, value):
    stream.write(json.dumps(value) + "\n")
    stream.flush()
