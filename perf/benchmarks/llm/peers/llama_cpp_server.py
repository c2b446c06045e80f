"""llama.cpp's OpenAI server on a free port of the loopback, until its input ends.

python peers/llama_cpp_server.py MODEL THREADS SLOTS NAME
<- {"ready": true, "address": "127.0.0.1:12345"}
"""

import sys

from llama_cpp import server
from worker import open_answers, say

if __name__ == "__main__":
    model, threads, slots, name = sys.argv[1:]
    answers = open_answers()
    running = server(model, int(threads), int(slots), name)
    say(answers, {"ready": True, "address": running.listening_address.removeprefix("http://")})
    sys.stdin.read()
