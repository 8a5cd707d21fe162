"""``python -m megatron_lossy export FOLDER --hf OUT``: a checkpoint of our trainer as a LLaMA of Hugging Face's transformers.

FOLDER is that of ``--save``, or of the mean weights in it (``--save-consensus``). The vocabulary keeps its padding, which
is part of the loss. Nothing but the weights is read, in one process.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..base.checkpoints import TRACKER, iteration_folder, latest_iteration
from ..base.errors import ArgumentParser, check_package, first_line, refuse
from ..base.files import aside_of, check_folder, publish, writing
from ..base.flags import of_flags
from ..config import LossyConfig
from .data import build_tokenizer
from .train.config import TrainConfig
from .train.saved import SETTINGS, read_settings

_LAYERS = "decoder.layers."


def main(arguments: Sequence[str]) -> None:
    """Run the command line. Raise :class:`UsageError`."""
    what = "Write the weights of a checkpoint for other programs."
    parser = ArgumentParser("python -m megatron_lossy export", description=what)
    parser.add_argument("folder", metavar="FOLDER", help="of --save of megatron_lossy.train, or the consensus in it")
    parser.add_argument("--hf", required=True, metavar="OUT", help="new folder, for from_pretrained of transformers")
    given = parser.parse_args(arguments)
    folder, out = Path(given.folder), Path(given.hf)
    check_package("transformers", "--hf", out, "'megatron-lossy[tokenizers]'")
    check_folder("--hf", out)
    if out.exists() and any(out.iterdir()):
        raise refuse("--hf", out, "holds files already; give another folder")
    config = _settings(folder)
    if (iteration := latest_iteration(folder)) is None:
        raise refuse("FOLDER", folder, f"has no {TRACKER}, which names a checkpoint")
    model = llama(config, read_weights(iteration_folder(folder, iteration)))
    with writing("--hf", out):
        aside = aside_of(out)
        try:
            model.save_pretrained(aside)
            publish(aside, out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    print(f"{out}: iteration {iteration} of {folder}, {model.num_parameters():,} parameters in {model.dtype}")


def _settings(folder: Path) -> TrainConfig:
    """Return the settings of the run whose checkpoints, or whose mean weights, are in ``folder``."""
    places = [folder]
    if folder.name in LossyConfig.folders_of_weights:  # in the folder of the run, or next to those of its jobs
        places += [folder.parent, *sorted(folder.parent.glob("*_0"))]
    for place in places:
        if (settings := read_settings("FOLDER", place)) is not None:
            return of_flags(TrainConfig, settings["train"])
    why = f"holds no checkpoint of megatron_lossy.train (no {SETTINGS}); Megatron Bridge converts those of Megatron-LM"
    if jobs := [name for name in (*LossyConfig.folders_of_weights, "island_0") if Path(folder, name).is_dir()]:
        why = f"holds islands: choose {' or '.join(str(folder / name) for name in jobs)}"
    raise refuse("FOLDER", folder, why)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the model's weights in the checkpoint ``path``, by megatron-core's names; those of layers are stacked."""
    try:
        reader = checkpoint.FileSystemReader(path)
        weights = {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
            for name, tensor in reader.read_metadata().state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata) and not name.startswith("optimizer.")
        }
        with warnings.catch_warnings(action="ignore"):  # that there is one process
            checkpoint.load(weights, storage_reader=reader)
    except Exception as error:  # only files are read, and unpickling may raise any error
        raise refuse("FOLDER", path, f"cannot be read ({first_line(error)})") from None
    return weights


def llama(config: TrainConfig, weights: Mapping[str, torch.Tensor]) -> Any:
    """Return ``LlamaForCausalLM`` of transformers with the ``weights`` of :func:`read_weights`, in their dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    table = weights["embedding.word_embeddings.weight"]
    shape = LlamaConfig(
        vocab_size=len(table),
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.query_groups,
        max_position_embeddings=config.seq_length,
        rms_norm_eps=config.norm_epsilon,
        rope_theta=float(config.rotary_base),
        tie_word_embeddings=config.share_embeddings_and_output_weights,
        bos_token_id=None,
        eos_token_id=build_tokenizer(config.tokenizer).eod,
    )
    named = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": weights["decoder.final_layernorm.weight"],
        "lm_head.weight": weights.get("output_layer.weight", table),
    }
    of_layers = {name.removeprefix(_LAYERS): weight for name, weight in weights.items() if name.startswith(_LAYERS)}
    # [layers, query groups, heads of a group and then its key and its value, size of a head, hidden size]
    heads = (config.query_groups, -1, config.hidden_size // config.num_attention_heads)
    qkv = of_layers["self_attention.linear_qkv.weight"].unflatten(1, heads)
    gate, up = of_layers["mlp.linear_fc1.weight"].chunk(2, dim=1)
    stacked = {
        "input_layernorm": of_layers["self_attention.linear_qkv.layer_norm_weight"],
        "self_attn.q_proj": qkv[:, :, :-2].flatten(1, 3),
        "self_attn.k_proj": qkv[:, :, -2].flatten(1, 2),
        "self_attn.v_proj": qkv[:, :, -1].flatten(1, 2),
        "self_attn.o_proj": of_layers["self_attention.linear_proj.weight"],
        "post_attention_layernorm": of_layers["mlp.linear_fc1.layer_norm_weight"],
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": of_layers["mlp.linear_fc2.weight"],
    }
    for name, layers in stacked.items():
        named |= {f"model.layers.{number}.{name}.weight": weight for number, weight in enumerate(layers)}
    model = LlamaForCausalLM(shape).to(table.dtype)
    model.load_state_dict(named)
    return model
