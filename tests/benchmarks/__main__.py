"""``python -m tests.benchmarks [PART ...]`` runs the named parts, or all, and prints their tables."""

from __future__ import annotations

import argparse
import os

PARTS = ("serving", "engine", "learner", "bookkeeping", "overlap", "longtail", "trl", "sandbox", "fairness")
APART = ("vllm", "constraints")
"""Parts with requirements that `make bench` does not install: vLLM, a stored model."""


def main() -> None:
    """Run the parts named on the command line, or all parts."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, *APART, []], help=f"default: all but {', '.join(APART)}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes, shorter runs")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="of learner, vllm, trl")
    parser.add_argument(
        "--model",
        help="a stored model, as model.path names it, for constraints, engine, learner and trl on a CPU",
    )
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, for engine and learner")
    chosen = parser.parse_args()
    device = chosen.device or device_at_hand()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for part in chosen.parts or PARTS:
        match part:
            case "serving":
                from tests.benchmarks import serving

                serving.run(quick=chosen.quick)
            case "engine":
                from tests.benchmarks import engine, stored_engine

                if chosen.model:
                    stored_engine.run(chosen.model, quick=chosen.quick, threads=chosen.threads)
                else:
                    engine.run(quick=chosen.quick, threads=chosen.threads)
            case "learner":
                from tests.benchmarks import learner

                if chosen.model:
                    learner.run_stored(chosen.model, quick=chosen.quick, threads=chosen.threads)
                else:
                    learner.run(device=device, quick=chosen.quick)
            case "bookkeeping":
                from tests.benchmarks import bookkeeping

                bookkeeping.run(quick=chosen.quick)
            case "overlap":
                from tests.benchmarks import overlap

                overlap.run(quick=chosen.quick)
            case "longtail":
                from tests.benchmarks import longtail

                longtail.run(quick=chosen.quick)
            case "trl":
                from tests.benchmarks import trl

                trl.run(device=device, quick=chosen.quick, model=chosen.model)
            case "vllm":
                from tests.benchmarks import vllm

                vllm.run(device=device, quick=chosen.quick)
            case "constraints":
                from tests.benchmarks import constraints

                path = chosen.model or "smollm2-135m"
                constraints.run(path, quick=chosen.quick, threads=chosen.threads)
            case "sandbox":
                from tests.benchmarks import sandbox

                sandbox.run(quick=chosen.quick)
            case "fairness":
                from tests.benchmarks import fairness

                fairness.run(quick=chosen.quick)


def device_at_hand() -> str:
    """Return "cuda" if PyTorch sees a GPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
