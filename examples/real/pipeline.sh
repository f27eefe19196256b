#!/usr/bin/env bash
# SmolLM2-135M-Instruct, from its package to a trained policy behind an endpoint: pipeline.sh [SEED] [--set ...]
# Everything is written to runs/real-SEED*. The same command continues an interrupted run.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PWD/.venv/bin:$PATH
seed=${1:-0}
settings=("${@:2}")
name=real-$seed
config=examples/real/smollm2-135m.toml

agentrl-train fetch smollm2-135m
agentrl-train eval "$config" --set eval.samples=20 "${settings[@]}" --output "runs/$name-untrained"

if [ ! -e "runs/$name-imitation/config.json" ]; then
  agentrl-train sft "$config" --output "runs/$name-imitation" --set "run.seed=$seed" "${settings[@]}"
fi

if [ ! -e "runs/$name/summary.json" ]; then
  resume=()
  [ ! -d "runs/$name/checkpoints" ] || resume=(--resume)
  agentrl-train run "$config" --set "run.name=$name" --set "run.seed=$seed" \
    --set "model.path=$PWD/runs/$name-imitation" "${settings[@]}" "${resume[@]}"
fi

# Evaluate the result like any model behind an OpenAI endpoint.
log=$(mktemp)
agentrl-train gateway "runs/$name" --port 0 --output "runs/$name-gateway.jsonl" \
  --set engine.max_new_tokens=64 >"$log" &
gateway=$!
trap 'kill "$gateway" 2>/dev/null || true; rm -f "$log"' EXIT
until grep -q '^serving' "$log"; do
  kill -0 "$gateway"
  sleep 1
done
agentrl-env eval examples/real/tasks.py:Sql --split test --samples 50 --output "runs/$name-served" \
  --base-url "$(grep -o 'http://[^ ,]*/v1' "$log" | head -n 1)" --model "$name"
