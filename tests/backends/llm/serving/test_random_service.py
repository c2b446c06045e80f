"""Random requests of several threads, wrong ones and given up ones, over too few blocks: nothing lost, nothing left."""

from __future__ import annotations

import random
import threading

import pytest

from backends.llm.serving.options import ServiceOptions
from backends.llm.serving.service import Service
from tests.backends.llm.engine.test_engine import letters, make_engine
from tests.backends.llm.engine.toy import plain_answer
from tests.backends.llm.serving.channels import RecordingChannel
from tests.backends.llm.serving.test_requests import tensors

NUM_THREADS, NUM_REQUESTS = 4, 100


class Leaving(RecordingChannel):
    """A client that goes away after some responses, and sees how much was sent to it nevertheless."""

    def __init__(self, patience):
        super().__init__()
        self.patience = patience

    def is_cancelled(self):
        return len(self.responses) >= self.patience


def submit(service, rng):
    """Sends one request; returns its channel and what must come of it: a text, "" for an error, or None."""
    prompt = [rng.randrange(96) for _ in range(rng.randint(1, 30))]
    num_tokens = rng.randint(1, 40)
    parameters = '{"ignore_eos": true}'
    values = {"input_ids": prompt, "max_tokens": num_tokens, "stream": rng.random() < 0.7}
    kind = rng.random()
    if kind < 0.1:
        values["temperature"] = -1.0
        wanted = ""
    elif kind < 0.4:
        channel = Leaving(rng.randint(0, 6))
        service.submit(channel, tensors(sampling_parameters=parameters, **values))
        return channel, None, letters(plain_answer(prompt, num_tokens))
    else:
        wanted = letters(plain_answer(prompt, num_tokens))
    channel = RecordingChannel()
    service.submit(channel, tensors(sampling_parameters=parameters, **values))
    return channel, wanted, wanted


@pytest.mark.parametrize("seed", range(2))
def test_every_request_ends_once_with_its_own_tokens_and_all_blocks_are_free(seed):
    engine = make_engine(num_blocks=24, max_num_batched_tokens=24, max_model_len=96)
    service = Service(engine, ServiceOptions())
    sent = []

    def send(number):
        rng = random.Random(f"{seed}-{number}")
        for _ in range(NUM_REQUESTS):
            sent.append(submit(service, rng))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for channel, wanted, whole in sent:
        channel.wait()
        if wanted is None:
            assert whole.startswith(channel.text) and not channel.errors
        else:
            assert channel.text == wanted and len(channel.errors) == (wanted == "")
    service.close()
    assert not sum(channel.num_late for channel, _, _ in sent)
    stats = engine.stats().scheduler
    assert len(sent) == NUM_THREADS * NUM_REQUESTS and stats.num_preemptions > 0
    assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (24, 0, 0)
    engine.scheduler.check_invariants()
