"""Former spellings of settings: using one is an error that names the current one."""

_FORMER_NAMES = {
    "advantage": "algorithm",
    "run.minutes": "run.run_timeout_s, in seconds",
    "engine.vllm.start_seconds": "engine.vllm.start_timeout_s",
    "rollout.episode_seconds": "rollout.episode_timeout_s",
    "rollout.environment_patience_seconds": "rollout.environment_wait_timeout_s",
    "train.rank_seconds": "train.rank_timeout_s",
    "train.step_seconds": "train.step_timeout_s",
    "placement.ray_seconds": "placement.launcher.timeout_s",
    "placement.ray_address": "placement.launcher.address",
    "placement.ray_timeout_s": "placement.launcher.timeout_s",
    "engine.vllm.kv_gib": "engine.vllm.args.kv_cache_memory_bytes, in bytes",
    "engine.vllm.memory_fraction": "engine.vllm.args.gpu_memory_utilization",
    "engine.vllm.tensor_parallel": "engine.vllm.args.tensor_parallel_size",
    "rollout.stale_fraction": "rollout.stale.fraction",
    "rollout.stale_interval": "rollout.stale.interval",
    "rollout.stale_model": "rollout.stale.model",
    "rollout.horizon_steps": "rollout.horizon.steps",
    "train.final_lr_fraction": "train.decay.to",
    "train.decay_fraction": "train.decay.over",
    "train.lr_decay": "train.decay.name",
    "eval.max_sessions": "eval.concurrent.max_sessions",
    "curriculum.levels": "rollout.curriculum.levels",
    "curriculum.raise_at": "rollout.curriculum.raise_at",
    "curriculum.window": "rollout.curriculum.window",
    "curriculum.mix": "rollout.curriculum.mix",
    "curriculum.fixed_share": "rollout.curriculum.mix.fixed_share",
    "curriculum.every": "rollout.curriculum.mix.every",
    "metrics.prometheus_port": "metrics.prometheus.port",
    "metrics.prometheus_host": "metrics.prometheus.host",
    "algorithm.invalid_call_penalty": "algorithm.penalties.invalid_call",
    "algorithm.truncation_penalty": "algorithm.penalties.truncation",
    "algorithm.overlong_buffer": "algorithm.penalties.overlong.buffer",
    "algorithm.overlong_penalty": "algorithm.penalties.overlong.most",
    "algorithm.mask_truncated": 'algorithm.leave_out = ["truncated"]',
    "algorithm.gamma": "algorithm.credit.gamma",
    "algorithm.token_gamma": "algorithm.credit.token_gamma",
    "algorithm.gae_lambda": "algorithm.credit.lam",
    "algorithm.state_weight": "algorithm.credit.weight",
    "algorithm.clip_low": "algorithm.region.low, or algorithm.ratio.low of the ratio 'geometric'",
    "algorithm.clip_high": "algorithm.region.high, or algorithm.ratio.high of the ratio 'geometric'",
    "algorithm.dual_clip": "algorithm.region.dual",
    "algorithm.soft_positive": "algorithm.region.positive",
    "algorithm.soft_negative": "algorithm.region.negative",
    "algorithm.divergence_low": "algorithm.region.low",
    "algorithm.divergence_high": "algorithm.region.high",
    "algorithm.correction_level": "algorithm.correction.level",
    "algorithm.importance_cap": "algorithm.correction.cap",
    "algorithm.importance_floor": "algorithm.correction.floor",
    "algorithm.constant_tokens": "algorithm.aggregation.tokens",
    "algorithm.covariance_share": "algorithm.clip_cov.share",
    "algorithm.covariance_low": "algorithm.clip_cov.low",
    "algorithm.covariance_high": "algorithm.clip_cov.high",
    "algorithm.kl_coef": "algorithm.kl.coefficient",
    "algorithm.kl_estimator": "algorithm.kl.estimator",
}
_CREDIT = [
    "model",
    "learning_rate",
    "warmup_steps",
    "passes",
    "clip",
    "replay",
    "target_rate",
    "beta",
    "pairs",
    "likelihood",
]
_REPLAY = ["weight", "warmup_steps", "size", "episodes", "max_age", "quantile", "history"]
_PROGRAM = {
    "samples": "samples",
    "eval_samples": "eval_samples",
    "program_folder": "folder",
    "ignore_sampling": "ignore",
}

RENAMED = (
    _FORMER_NAMES
    | {"environments.program.ignore_sampling": "environments.program.ignore"}
    | {f"critic.{key}": f"algorithm.credit.{key}" for key in _CREDIT}
    | {f"replay.{key}": f"algorithm.replay.{key}" for key in _REPLAY}
    | {f"distill.{key}": f"algorithm.distill.{key}" for key in ("weight", "teachers", "keep_rewards")}
    | {f"environments.{key}": f"environments.program.{new}" for key, new in _PROGRAM.items()}
)
"""Former key -> current key. Keys in ``environments`` have no number."""

REMOVED = dict.fromkeys(
    [
        "run.quiet_seconds",
        "run.idle_report_timeout_s",
        "critic.max_grad_norm",
        "train.max_logits",
        "metrics.trace_megabytes",
        "engine.vllm.silent_seconds",
        "engine.vllm.heartbeat_timeout_s",
        "engine.vllm.stale_replicas",
        "engine.vllm.evaluation_replicas",
        "checkpoint.seconds",
        "checkpoint.write_timeout_s",
        "sft.weight_decay",
        "sft.warmup_steps",
        "sft.decay_fraction",
        "sft.final_lr_fraction",
        "sft.betas",
        "sft.max_grad_norm",
    ],
    "no run needs another value than the default",
)
"""Former keys without a current one, and the reason."""
