# check=skip=InvalidDefaultArgInFrom
#
# Two images from one vLLM image: `producer`, the default, and `consumer`, vLLM with the shim.
#
#   docker build --build-arg VLLM_DIGEST=sha256:… -t ec-producer .
#   docker build --build-arg VLLM_DIGEST=sha256:… -t vllm-ec-consumer --target consumer .
#
# VLLM_DIGEST has no default: which base is trusted is the builder's decision, and a build without it ends at the first
# FROM. To update the base, change VLLM_TAG, look up that tag's digest, and read docs/upgrade.md before the roll-out.
# Its steps are scripts in image/, which tests/image runs.
ARG VLLM_IMAGE=vllm/vllm-openai
ARG VLLM_TAG=v0.33.0
ARG VLLM_DIGEST

FROM ${VLLM_IMAGE}:${VLLM_TAG}@${VLLM_DIGEST:?pass-the-digest-of-VLLM_TAG-as-docs/deploy.md-says} AS vllm
# Stages install; images run as 10001.
# hadolint ignore=DL3002
USER 0


# What enters no image: the tools, and the wheel that they build

FROM vllm AS tools
COPY image/tools.sh image/requirements.txt /src/image/
RUN /src/image/tools.sh /src/image/requirements.txt /opt/tools

FROM tools AS wheel
COPY image/build-wheel.sh /src/image/
COPY pyproject.toml README.md LICENSE /src/
COPY producer /src/producer
COPY consumer_shim /src/consumer_shim
RUN PYTHON=/opt/tools/bin/python /src/image/build-wheel.sh /src /wheels


# What both images have: all that is ever written goes to one folder, so that the rest can be mounted read-only

FROM vllm AS runtime
ARG VLLM_IMAGE
ARG VLLM_TAG
ARG VLLM_DIGEST
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${VLLM_IMAGE}:${VLLM_TAG}" \
      org.opencontainers.image.base.digest="${VLLM_DIGEST}"
RUN install -d -o 10001 -g 0 -m 0775 /home/ec-producer
ENV HOME=/home/ec-producer \
    USER=ec-producer \
    TMPDIR=/home/ec-producer \
    XDG_CACHE_HOME=/home/ec-producer \
    XDG_CONFIG_HOME=/home/ec-producer \
    HF_HOME=/home/ec-producer/huggingface \
    VLLM_CACHE_ROOT=/home/ec-producer/vllm \
    VLLM_CONFIG_ROOT=/home/ec-producer/vllm \
    TORCHINDUCTOR_CACHE_DIR=/home/ec-producer/torchinductor \
    TRITON_CACHE_DIR=/home/ec-producer/triton \
    CUDA_CACHE_PATH=/home/ec-producer/cuda \
    PYTHONDONTWRITEBYTECODE=1 \
    VLLM_NO_USAGE_STATS=1
WORKDIR /home/ec-producer
STOPSIGNAL SIGTERM
COPY image/install.py image/healthcheck.py /opt/ec-producer/


# vLLM with the shim: nothing but the wheel is new

FROM runtime AS consumer-files
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 /opt/ec-producer/install.py /wheels/*.whl

FROM consumer-files AS consumer-sbom
COPY --from=tools /opt/tools /opt/tools
COPY image/sbom.sh /opt/ec-producer/
RUN CYCLONEDX=/opt/tools/bin/cyclonedx-py /opt/ec-producer/sbom.sh /sbom/sbom.cdx.json

FROM consumer-files AS consumer
LABEL org.opencontainers.image.title="vllm-ec-consumer" \
      org.opencontainers.image.description="vLLM that has its images, videos and sounds encoded by ec-producer"
COPY --from=consumer-sbom /sbom /opt/ec-producer/sbom
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "/opt/ec-producer/healthcheck.py", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["vllm", "serve"]
CMD ["--help"]


# The producer: its extras, and what Mooncake's wheel links

FROM runtime AS producer-files
# The base's digest decides which archive answers; its versions come and go.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4 \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 /opt/ec-producer/install.py /wheels/*.whl producer nixl mooncake tracing

FROM producer-files AS producer-sbom
COPY --from=tools /opt/tools /opt/tools
COPY image/sbom.sh /opt/ec-producer/
RUN CYCLONEDX=/opt/tools/bin/cyclonedx-py /opt/ec-producer/sbom.sh /sbom/sbom.cdx.json

FROM producer-files AS producer
LABEL org.opencontainers.image.title="ec-producer" \
      org.opencontainers.image.description="Encodes images, videos and sounds once for LLM-only vLLM servers"
COPY --from=producer-sbom /sbom /opt/ec-producer/sbom
USER 10001:10001
EXPOSE 50051 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "/opt/ec-producer/healthcheck.py"]
ENTRYPOINT ["ec-producer"]
CMD ["--help"]
