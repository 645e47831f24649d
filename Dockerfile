# Megalith in a slim image: no toolkit, no compiler; pip brings what CUDA needs.
#
#   CPU    docker build -t megalith .
#   CUDA   docker build -t megalith:cuda --build-arg TORCH_INDEX= .       (pip's default torch for Linux is a CUDA build)
#   mirror docker build -t megalith --build-arg PIP_INDEX_URL=https://MIRROR/simple .
#
#   docker run --rm -it -v "$PWD:/data" megalith quickstart
#   docker run --rm -it --gpus all -v "$PWD:/data" megalith:cuda train --config recipe.toml
#
# No --shm-size: the loader reads ahead with threads, so Docker's 64 MB of /dev/shm do not matter.

ARG PYTHON_VERSION=3.12
FROM python:${PYTHON_VERSION}-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

WORKDIR /opt/megalith
# torch first and by itself: its layer stays cached while the source changes.
COPY constraints.txt ./
RUN index="${TORCH_INDEX:-${PIP_INDEX_URL}}"; unset PIP_INDEX_URL; \
    pip install ${index:+--index-url "$index"} "$(grep '^torch==' constraints.txt)"

COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN index="${PIP_INDEX_URL}"; unset PIP_INDEX_URL; \
    pip install ${index:+--index-url "$index"} -c constraints.txt '.[plot,track]'

COPY pretrain_gpt.py ./
COPY tools ./tools

WORKDIR /data
ENTRYPOINT ["megalith"]
CMD ["--help"]
