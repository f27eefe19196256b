# Trains a policy; runs are written into /work. The build context is the folder with the wheels of `make dist`:
#   docker build -f release/images/trainer.Dockerfile -t agentrl-trainer dist
#   docker run --init --user "$(id -u):$(id -g)" -v "$PWD:/work" agentrl-trainer quickstart
# With `--build-arg EXTRAS=train,vllm` and `docker run --gpus all`, it samples with vLLM.

ARG BASE=python:3.11-slim
FROM ${BASE} AS build
ARG EXTRAS=train
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
RUN python3 -m venv /opt/agentrl
COPY *.whl /wheels/
RUN /opt/agentrl/bin/pip install --no-cache-dir --find-links /wheels \
    /wheels/agentrl_kit-*.whl /wheels/agentrl_tasks-*.whl "agentrl-kit[${EXTRAS}]"

FROM ${BASE}
ENV PATH=/opt/agentrl/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
COPY --from=build /opt/agentrl /opt/agentrl
RUN mkdir -m 1777 /work
WORKDIR /work
USER 65532:65532
STOPSIGNAL SIGTERM
ENTRYPOINT ["agentrl-train"]
CMD ["quickstart"]
