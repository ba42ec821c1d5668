# The GPU set-up as an image: components by the pins of requirements/gpu.txt, megatron-rl as a wheel.
#
#   docker build -t megatron-rl .
#   docker build -t megatron-rl --network none --build-arg APT=0 --build-arg BASE=my/base \
#       --build-arg WHEELS=wheels --build-arg PIP_NO_INDEX=1 .       # offline: docs/install.md
#
# The base has CUDA's compiler: TransformerEngine's part is compiled here, kernels at run time.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}

# 0: the base has them already. What each is for: docs/gpu-install.md.
ARG APT=1
# hadolint ignore=DL3008
RUN if [ "$APT" = 1 ]; then \
        apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
            g++ gcc libseccomp2 numactl python3 python3-dev python3-venv util-linux \
        && rm -rf /var/lib/apt/lists/*; \
    fi

# A folder of the build context with wheels, and source packages where there are none. The default has
# none, and pip asks its index.
ARG WHEELS=requirements
ARG PIP_NO_INDEX=
ENV VIRTUAL_ENV=/opt/megatron-rl \
    PATH=/opt/megatron-rl/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    CUDA_HOME=/usr/local/cuda

# Pins alone: a change of the code leaves these layers as they are. Everything is pinned, so nothing
# is resolved.
COPY requirements/gpu.txt /build/requirements/gpu.txt
COPY ${WHEELS} /build/wheels
# hadolint ignore=DL3013,DL3042
RUN python3 -m venv "$VIRTUAL_ENV" \
    && grep -v '^transformer-engine-torch==' /build/requirements/gpu.txt >/build/pins.txt \
    && PIP_FIND_LINKS=/build/wheels PIP_NO_INDEX=$PIP_NO_INDEX \
        pip install --no-cache-dir --no-deps --no-compile -r /build/pins.txt

# As in tools/install.sh: its build finds the toolkit's headers, but not those beside torch.
# hadolint ignore=DL3042
RUN headers=$(python -c 'import glob, sysconfig; print(":".join(sorted(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/include"))))') \
    && CPLUS_INCLUDE_PATH=$headers NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE \
        PIP_FIND_LINKS=/build/wheels PIP_NO_INDEX=$PIP_NO_INDEX \
        pip install --no-cache-dir --no-deps --no-build-isolation \
            "$(grep '^transformer-engine-torch==' /build/requirements/gpu.txt)"

COPY setup.py pyproject.toml README.md LICENSE /build/
COPY requirements /build/requirements
COPY examples /build/examples
COPY megatron_rl /build/megatron_rl
COPY generation /build/generation
COPY verification /build/verification
# hadolint ignore=DL3042
RUN PIP_NO_INDEX=1 pip install --no-cache-dir --no-deps --no-build-isolation /build \
    && cp -r /build/examples "$VIRTUAL_ENV/examples" \
    && rm -rf /build

WORKDIR /workspace
ENTRYPOINT ["megatron-rl"]
CMD ["doctor"]
