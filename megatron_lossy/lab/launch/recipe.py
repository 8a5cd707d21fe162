"""A configuration file for the launcher: one source of flags for Megatron-LM's scripts and for our trainer.

A YAML file holds flags of ``python -m megatron_lossy.train`` under their names. Three keys are the launcher's own:

* ``base``: another such file, next to this one, whose settings this one changes;
* ``launch``: flags of ``python -m megatron_lossy.launch``, for example ``device`` and ``accelerators``;
* ``megatron``: flags that only Megatron-LM has; they win over what is translated from the others.

A file without these keys works with ``--config`` of the trainer as well.

Most flags have the same name in Megatron-LM. Settings that our trainer always uses (RMSNorm, rotary positions, SwiGLU, no biases,
the distributed optimizer) become flags of Megatron-LM, and so do defaults that differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.errors import refuse
from ...config import LossyConfig, given
from ...config.settings import from_origin, off, read_yaml
from ...config.shipped import find_config
from ..train.config import TrainConfig

_OWN = ("launch", "megatron")


@dataclass(frozen=True)
class Recipe:
    """The content of a file and its bases: trainer flags, launcher flags, Megatron flags, by name with dashes.

    ``files``: the file that each comes from.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)

    def over(self, base: Recipe) -> Recipe:
        """Return these settings if they are given, else those of ``base``."""
        ours, below = vars(self), vars(base)
        return Recipe(**{part: below[part] | ours[part] for part in ours})

    def with_origins(self, words: Sequence[str]) -> list[str]:
        """Return ``words`` of a command line, made of the content, with the file that each flag comes from."""
        result: list[str] = []
        for word in words:
            name = word.partition("=")[0].removeprefix("--")
            file = self.files.get(name) or self.files.get(name.removeprefix("no-"))
            result += from_origin([word], f"from {file}")
        return result


def read_recipe(file: str | Path, above: tuple[Path, ...] = ()) -> Recipe:
    """Return the configuration ``file`` over its bases. Raise :class:`UsageError` that names the file."""
    path = find_config(file)
    content = {str(key).replace("_", "-"): value for key, value in read_yaml("--config", path).items()}
    base = content.pop("base", None)
    own = {name: _section(path, name, content.pop(name, None)) for name in _OWN}
    recipe = Recipe(content, **own, files={name: path for part in (content, *own.values()) for name in part})
    if base is None:
        return recipe
    below = path.parent / str(base)
    if below.resolve() in (path.resolve(), *above):
        raise refuse("--config", file, f"base {base} leads back to it")
    return recipe.over(read_recipe(below, (path.resolve(), *above)))


def flag_arguments(section: Mapping[str, Any], where: str) -> list[str]:
    """Return flags and values as command-line arguments; ``true`` is a switch, ``false`` leaves the flag out.

    Raise :class:`UsageError` that names ``where``.
    """
    arguments: list[str] = []
    for name, value in section.items():
        flag = f"--{name}"
        if value is None or value is False:
            continue
        if value is True:
            arguments.append(flag)
        elif isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
            arguments += [flag, *map(str, value)]
        elif isinstance(value, str | int | float):
            arguments += [flag, str(value)]
        else:
            raise refuse(where, f"{name} {value}", "must be a value, a list of values, or true")
    return arguments


def _section(path: Path, name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse("--config", path, f"{name} must be a mapping from flag names to values")
    return {str(key).replace("_", "-"): item for key, item in value.items()}


# --- the same run for pretrain_gpt.py --------------------------------------------------------------------------------


#: Flags of our trainer that Megatron-LM has not, or under another name, or not always.
_NOT_SAME = {
    *("ffn_hidden_size", "num_query_groups", "share_embeddings_and_output_weights", "tokenizer"),
    *("nadam_momentum_decay", "sgd_momentum", "num_distributed_optimizer_instances", "virtual_workers"),
    *("data", "data_path", "valid_data_path", "save_retain", "save_failures", "sharpness_interval", "metrics_dir"),
}
_ALWAYS = {
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "swiglu": True,
    "disable-bias-linear": True,
    # On SIGTERM the trainer saves and ends.
    "exit-signal-handler": True,
}


def megatron_arguments(
    config: TrainConfig, lossy: LossyConfig, only_megatron: Mapping[str, Any], mock_data: bool = False
) -> list[str]:
    """Return the command line of ``pretrain_gpt.py`` after the script's name.

    ``only_megatron``: flags by name with dashes, which win. Raise :class:`UsageError` for settings that Megatron-LM
    does not support.
    """
    for name in ("save_retain", "save_failures"):
        if value := getattr(config, name):
            has = "; Megatron-LM has --save-retain-interval" if name == "save_retain" else ""
            raise refuse(f"--{_dashed(name)}", value, f"needs --program train{has}")
    flags: dict[str, Any] = {_dashed(name): value for name, value in vars(config).items() if name not in _NOT_SAME}
    flags |= _ALWAYS
    flags["global-batch-size"] = config.global_batch_size // lossy.jobs().number  # Megatron-LM has its own job's
    flags |= {
        "ffn-hidden-size": config.ffn,
        "max-position-embeddings": config.seq_length,
        "untie-embeddings-and-output-weights": not config.share_embeddings_and_output_weights,
    }
    if config.query_groups != config.num_attention_heads:
        flags |= {"group-query-attention": True, "num-query-groups": config.query_groups}
    if config.num_distributed_optimizer_instances > 1:
        flags["num-distributed-optimizer-instances"] = config.num_distributed_optimizer_instances
    if config.optimizer == "sgd":
        flags["sgd-momentum"] = config.sgd_momentum
    flags |= _tokenizer(config.tokenizer)
    if config.data is not None and not mock_data:
        raise refuse("--data", config.data, "needs --program train; Megatron-LM takes --data-path")
    if not mock_data:
        flags["train-data-path"] = list(config.data_path)
    if config.valid_data_path and not mock_data:
        flags["valid-data-path"] = list(config.valid_data_path)
    return flag_arguments(flags | dict(only_megatron), "megatron") + changed_arguments(lossy)


def changed_arguments(config: TrainConfig | LossyConfig) -> list[str]:
    """Return the flags of ``config`` that differ from their defaults."""
    changed = {_dashed(name): list(v) if isinstance(v, tuple) else v for name, v in given(config).items()}
    return flag_arguments(changed, "flags") + [off(f"--{name}") for name, value in changed.items() if value is False]


def _tokenizer(name: str) -> dict[str, Any]:
    """Return Megatron-LM's tokenizer with the same ids (megatron_lossy/lab/data/tokenizers.py)."""
    if name == "byte":
        return {"tokenizer-type": "NullTokenizer", "vocab-size": 256}
    kind, _, source = name.partition(":")
    types = {"hf": "HuggingFaceTokenizer", "sentencepiece": "GPTSentencePieceTokenizer"}
    if kind not in types or not source:
        raise refuse("--tokenizer", name, "must be byte, hf:NAME_OR_PATH or sentencepiece:MODEL_FILE")
    return {"tokenizer-type": types[kind], "tokenizer-model": source}


def _dashed(name: str) -> str:
    return name.replace("_", "-")
