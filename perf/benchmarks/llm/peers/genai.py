"""OpenVINO GenAI: its C++ continuous batching on the same GGUF, with its own defaults for the CPU."""

import os
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai
from worker import serve


def load(model, threads):
    folder = Path(model).parent / "openvino_genai"
    gguf = folder / Path(model).name
    if not (folder / "openvino_model.xml").exists():
        folder.mkdir(exist_ok=True)
        os.link(model, gguf)
        openvino_genai.LLMPipeline(str(gguf), "CPU", enable_save_ov_model=True)
        gguf.unlink()
    pipelines = {}

    def pipeline(max_num_seqs):
        if max_num_seqs not in pipelines:
            pipelines.clear()
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.cache_size = 1  # GB
            scheduler.max_num_batched_tokens = 512
            scheduler.max_num_seqs = max_num_seqs
            scheduler.enable_prefix_caching = False
            pipelines[max_num_seqs] = openvino_genai.ContinuousBatchingPipeline(
                str(folder), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
            )
        return pipelines[max_num_seqs]

    def run(requests, max_num_seqs):
        configs = []
        for request in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = request["max_tokens"]
            config.ignore_eos = True
            configs.append(config)
        prompts = [ov.Tensor(np.array([r["token_ids"]], dtype=np.int64)) for r in requests]
        results = pipeline(max_num_seqs).generate(prompts, configs)
        return sum(len(result.m_generation_ids[0]) for result in results)

    pipeline(32)
    return run


if __name__ == "__main__":
    serve(f"OpenVINO GenAI {openvino_genai.__version__.split('-')[0]}", load)
