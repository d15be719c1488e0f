# The control plane: the flow, its tasks, and a worker that runs them.
#   docker build -f docker/pipeline.Dockerfile -t tunewright-pipeline .
# A worker that also trains, on its own CPUs (target local): add --build-arg EXTRAS=train
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
FROM ${PYTHON_IMAGE}

ARG UV_VERSION=0.13.9
ARG EXTRAS=data,registry,databricks

# git tells which files a snapshot of code takes. Debian keeps one version of it per release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir "uv==${UV_VERSION}" \
    && useradd --create-home --uid 10001 tunewright \
    && install -d -o tunewright /var/lib/tunewright

WORKDIR /opt/tunewright
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tunewright ./tunewright
RUN uv pip install --system --no-cache --compile-bytecode --torch-backend cpu \
    --constraint constraints.txt ".[${EXTRAS}]" --group pipeline
COPY flows ./flows
COPY tasks ./tasks
COPY deployments ./deployments

ENV TUNEWRIGHT_HOME=/var/lib/tunewright \
    PREFECT_HOME=/var/lib/tunewright/prefect \
    PREFECT_SERVER_ANALYTICS_ENABLED=false
USER 10001
CMD ["prefect", "worker", "start", "--pool", "tunewright", "--type", "process"]
