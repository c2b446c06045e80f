"""llama.cpp: its C++ server inside this process (the package xllamacpp), continuous batching on the same GGUF."""

from concurrent.futures import ThreadPoolExecutor

import xllamacpp
from worker import serve

CONTEXT = 1024  # tokens of a slot: more than any request of the benchmarks has


def server(model, threads, slots, name="model"):
    """Loads the model; the server listens on a free port of the loopback, too, at `listening_address`."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {name}
    params.n_parallel = slots
    params.n_ctx = slots * CONTEXT
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False
    params.cache_ram_mib = 0  # or it copies the blocks of whatever has ended
    params.sampling.samplers = "temperature"  # all of them that greedy choice needs: the others cost a few percent
    params.verbosity = 1  # errors
    return xllamacpp.Server(params)


def load(model, threads):
    servers = {}

    def sized(max_num_seqs):
        if max_num_seqs not in servers:
            servers.clear()
            servers[max_num_seqs] = server(model, threads, max_num_seqs)
        return servers[max_num_seqs]

    def run(requests, max_num_seqs):
        llama = sized(max_num_seqs)

        def answer(request):
            body = {"prompt": request["token_ids"], "max_tokens": request["max_tokens"], "ignore_eos": True}
            done = llama.handle_completions({**body, "temperature": 0})
            return done["usage"]["completion_tokens"]

        with ThreadPoolExecutor(len(requests)) as pool:  # all at once: it does the queueing
            return sum(pool.map(answer, requests))

    sized(32)
    return run


if __name__ == "__main__":
    serve(f"llama.cpp (xllamacpp {xllamacpp.__version__})", load)
