# Serves tasks on port 8000. The build context is the folder with the wheels of `make dist`:
#   docker build -f release/images/server.Dockerfile -t agentrl-server dist
#   docker run --init -e AGENTRL_TOKEN -p 127.0.0.1:8000:8000 agentrl-server household shop

ARG BASE=python:3.11-slim
FROM ${BASE} AS build
ARG EXTRAS=otel
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
RUN python3 -m venv /opt/agentrl
COPY *.whl /wheels/
RUN /opt/agentrl/bin/pip install --no-cache-dir --find-links /wheels \
    /wheels/agentrl_kit-*.whl /wheels/agentrl_tasks-*.whl "agentrl-kit[${EXTRAS}]"

FROM ${BASE}
ENV PATH=/opt/agentrl/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
COPY --from=build /opt/agentrl /opt/agentrl
# Folders of tasks that are mounted here are targets by their names.
WORKDIR /srv
# Numeric, so that Kubernetes can verify that it is not root.
USER 65532:65532
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["agentrl-env", "serve", "--host", "0.0.0.0", "--port", "8000"]
