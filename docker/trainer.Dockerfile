# What a node needs to run a recipe: the wheel of this checkout on a CUDA build of PyTorch.
#   docker build -f docker/trainer.Dockerfile -t tunewright-trainer .
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG BASE_IMAGE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY tunewright ./tunewright
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE_IMAGE}
# Newer base images keep their Python for the system; this one exists for nothing else.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /opt/tunewright
COPY constraints.txt ./
COPY --from=wheel /wheels ./wheels
# The base image's own torch stays: its version is a constraint, ours does not count here.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN grep -vE '^(torch|triton|nvidia)' constraints.txt > others.txt \
    ; pip list --format=freeze | grep -E '^(torch|triton)==' > torch.txt \
    && pip install --no-cache-dir -c others.txt -c torch.txt "$(echo wheels/tunewright-*.whl)[gpu,lora,ray-train]" \
    && useradd --create-home --uid 10001 tunewright \
    && install -d -o tunewright /var/lib/tunewright

ENV TUNEWRIGHT_HOME=/var/lib/tunewright
USER 10001
CMD ["python", "-m", "tunewright.recipes.fsdp", "--help"]
