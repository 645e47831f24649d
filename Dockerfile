# Megalith in a slim image: no toolkit, no compiler; pip brings what CUDA needs.
#
#   CPU    docker build -t megalith .
#   CUDA   docker build -t megalith:cuda --build-arg TORCH_INDEX= .       (pip's default torch for Linux is a CUDA build)
#   mirror docker build -t megalith --build-arg PIP_INDEX_URL=https://MIRROR/simple .
#
# How it is run, also as another user than root: docs/install.md.

ARG PYTHON_VERSION=3.12
FROM python:${PYTHON_VERSION}-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL=
# A user without a home of its own (docker run --user 1000) keeps caches in /tmp.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 HOME=/tmp

WORKDIR /opt/megalith
# torch first and by itself: its layer stays cached while the source changes.
COPY constraints.txt ./
RUN index="${TORCH_INDEX:-${PIP_INDEX_URL}}"; unset PIP_INDEX_URL; \
    pip install ${index:+--index-url "$index"} "$(grep '^torch==' constraints.txt)"

COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src ./src
RUN index="${PIP_INDEX_URL}"; unset PIP_INDEX_URL; \
    pip install ${index:+--index-url "$index"} -c constraints.txt '.[data,plot,serve,track]'

# Megatron's command lines by path: torchrun ... /opt/megalith/pretrain_gpt.py (docker run --entrypoint torchrun)
COPY pretrain_gpt.py pretrain_bert.py pretrain_t5.py ./
COPY tools ./tools
COPY tasks ./tasks
COPY examples ./examples
COPY recipes ./recipes

WORKDIR /data
ENTRYPOINT ["megalith"]
CMD ["--help"]
