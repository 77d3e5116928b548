# The cluster's image, for a Ray head, its workers, and a submitted job's driver: vLLM's CPU build and the locked versions, the
# very environment of `make test`. For GPUs give an image that has vLLM's CUDA build as BASE, with LOCK= (empty) and
# EXTRAS=ray,s3,gcs: its torch and vLLM stay, and this package is added.
# python:3.11-slim and not Ray's image, as that one brings a Python environment of its own, which the lock would replace anyway.
ARG BASE=python:3.11-slim
FROM ${BASE}

ARG LOCK=requirements/dev.lock
ARG EXTRAS=

# vLLM's CPU build loads libnuma and GCC's OpenMP.
RUN apt-get update \
 && apt-get install -y --no-install-recommends libnuma1 libgomp1 \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY requirements requirements
RUN python3 -m pip install --no-cache-dir uv \
 && if [ -n "$LOCK" ]; then \
        python3 -m uv pip install --system --no-cache --no-deps --torch-backend cpu -r "$LOCK"; \
    fi
COPY . .
RUN if [ -n "$LOCK" ]; then \
        python3 -m uv pip install --system --no-cache --no-build-isolation --no-deps .; \
    else \
        python3 -m uv pip install --system --no-cache ".[$EXTRAS]"; \
    fi

RUN useradd --create-home --uid 1000 hsx
USER hsx
WORKDIR /home/hsx
# Built-in models are made here on first use; mount a volume to keep them.
ENV HSX_CACHE=/home/hsx/.cache/hsx_dist RAY_USAGE_STATS_ENABLED=0
ENTRYPOINT []
CMD ["hsx", "--help"]
