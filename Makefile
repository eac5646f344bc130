# `make demo` and `make test` set everything up by themselves on a machine with Python, pip, make and a C compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-long test-gpu-compile tpu-compile some-compiles check lint types proto bench soak clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	touch $@

demo: $(STAMP)  ## install, start the server on the embedded model, stream an answer from it over gRPC
	$(BIN)/python examples/serve_and_stream.py

test: $(STAMP)  ## the tests, long ones excepted
	@command -v chromium >/dev/null || echo "There is no chromium here: the tests of the page are skipped (Debian: apt-get install chromium)."
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

tpu-compile: $(STAMP)  ## compile every TPU kernel for every chip; needs no TPU, but libtpu (213 MB)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tpu]'
	$(BIN)/python -m pytest tests/kernels_pallas/test_tpu_compiles.py tests/test_tpu_configs.py tests/test_fit.py \
		tests/cache/test_copies.py

# What CI compiles for accelerators that are not there: an op of each kind on one chip each, and the demo model's steps.
SOME := $(addprefix tests/kernels_pallas/test_tpu_compiles.py::test_compiles_in_place, \
	[ssd_chunks-v5e] [ssd_step-v6e] [causal_conv_step-tpu7x] [gated_delta_step-v5p] [attention_decode-v6e]) \
	$(addprefix tests/kernels_pallas/test_gpu_compile.py::test_caches_are_updated_in_place, \
	[ssd-ragged] [gated_delta-decode] [causal_conv-decode] [paged_attention-decode]) \
	$(addprefix tests/test_fit.py::, test_a_step_compiles_for_a_tpu_slice_with_every_layer_shared_out[v6e] \
	test_every_kind_of_step_compiles_with_its_kernels_and_updates_its_caches_in_place[h100-1])

some-compiles: $(STAMP)  ## a few of the two targets around this one, as CI has them
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tpu,gpu-compile]'
	$(BIN)/python -m pytest -n 2 $(foreach test,$(SOME),'$(test)')

test-long: $(STAMP)  ## every test
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-gpu-compile: $(STAMP)  ## compile for GPUs that are not there (wheels of 150 MB, into an environment of their own)
	$(PYTHON) -m venv $(VENV)-gpu
	$(VENV)-gpu/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,gpu-compile]'
	JAX_PLATFORMS=cpu $(VENV)-gpu/bin/python -m pytest tests/kernels_pallas/test_gpu_compile.py tests/test_fit.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

check: lint types test  ## what CI runs, some-compiles excepted

proto: $(STAMP)  ## regenerate the gRPC stubs
	$(BIN)/python server/generate_stubs.py

bench: $(STAMP)  ## the engine's figures on this machine
	$(BIN)/python benchmarks/engine.py

soak: $(STAMP)  ## ten minutes of 200 unruly clients against a server of its own
	$(BIN)/python benchmarks/soak.py

clean:
	rm -rf $(VENV) build *.egg-info
