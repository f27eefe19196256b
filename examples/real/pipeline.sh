#!/usr/bin/env bash
# SmolLM2-135M-Instruct, from its package to a trained policy behind an endpoint: pipeline.sh [SEED]
# Everything is written to runs/real-SEED*; the same command continues what was stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PWD/.venv/bin:$PATH
seed=${1:-0}
name=real-$seed
config=examples/real/smollm2-135m.toml

begun() { [ -e "$1" ] && echo "$1 is there"; }

agentrl-train fetch smollm2-135m
agentrl-train eval "$config" --set eval.samples=50 --output "runs/$name-untrained"

begun "runs/$name-imitation" || agentrl-train sft "$config" --output "runs/$name-imitation" --set "run.seed=$seed"

begun "runs/$name/summary.json" || agentrl-train run "$config" --set "run.name=$name" --set "run.seed=$seed" \
  --set "model.path=runs/$name-imitation"

# The result as any client of an OpenAI endpoint meets it.
log=$(mktemp)
agentrl-train gateway "runs/$name" --port 0 --output "runs/$name-gateway.jsonl" >"$log" &
gateway=$!
trap 'kill "$gateway" 2>/dev/null || true; rm -f "$log"' EXIT
until grep -q serving "$log"; do kill -0 "$gateway"; sleep 1; done
agentrl-env eval examples/real/tasks.py:Sql --split test-2 --samples 50 --temperature 0 \
  --base-url "$(grep -o 'http://[^ ,]*/v1' "$log" | head -n 1)" --model "$name" --output "runs/$name-served"
