"""One training of an LSTM language model that loses gradients (SMART, section 4.2). See scripts/lstm_language_model.py.

There is one rank, and what it sends to itself is lost (``--lossy-self``): the gradient of a step goes through the
exchange, the channel and the recovery rules of the package, and is clipped afterwards.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn

from megatron_lossy.base.errors import refuse
from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.config import PHASES, LossyConfig
from megatron_lossy.lab.data import Tokenizer, stdlib_documents
from megatron_lossy.lab.data.indexed import find_files, read_documents, validation_documents
from megatron_lossy.lab.environment import processor, versions
from megatron_lossy.lab.studies.design import loss_seed_of
from megatron_lossy.recovery import Gradients
from megatron_lossy.transport import BucketSpec, LossyGroup, Network, wire_for

LAYERS, DROPOUT, CLIP, LEARNING_RATE, LEAST = 2, 0.3, 1.0, 1e-3, 1e-6
#: Without loss there is no rule.
LOSSLESS = "no loss"
ARMS: dict[str, dict[str, str]] = {
    "zero, priority": {"grad_recovery": "zero", "grad_priority": "packet-mean"},
    "error feedback, priority": {"grad_recovery": "error-feedback", "grad_priority": "packet-mean"},
    "error feedback": {"grad_recovery": "error-feedback", "grad_priority": "none"},
}
_VALID_SHARE, _VALID_BATCH = 0.05, 32


@dataclass(frozen=True)
class Scale:
    """The size of a training. ``epoch_tokens``, ``valid_tokens``: ``None`` takes the whole text."""

    hidden: int
    batch: int
    block: int
    epochs: int
    epoch_tokens: int | None
    valid_tokens: int | None
    evaluations: int
    packet_bytes: int


#: ``paper``: as its section 4.2 says; the size of a packet is that of its section 4.1.
SCALES = {
    "small": Scale(128, 8, 128, 1, 307_200, 32_768, 5, 1024),
    "paper": Scale(512, 32, 256, 20, None, None, 20, 4096),
}


@dataclass(frozen=True)
class Text:
    """Token ids int32[tokens] to train on and to evaluate, the size of their vocabulary, and what tells them apart."""

    train: np.ndarray
    valid: np.ndarray
    vocabulary: int
    digest: str


def read_text(files: Sequence[str] | None, valid_files: Sequence[str] | None, tokenizer: Tokenizer) -> Text:
    """The text in ``files``, or the source of Python's standard library, in tokens. Raises :class:`UsageError`.

    Without ``valid_files`` one document of twenty is for validation; of a single document its last twentieth.
    """
    documents = stdlib_documents() if files is None else _documents("--text", files)
    if valid_files is not None:
        train, valid = documents, _documents("--valid-text", valid_files)
    elif len(documents) > 1:
        chosen = validation_documents([name for name, _ in documents], _VALID_SHARE)
        train = [one for place, one in enumerate(documents) if place not in chosen]
        valid = [documents[place] for place in sorted(chosen)]
    else:
        train, valid = documents, []
    ids, valid_ids = (_tokens(some, tokenizer) for some in (train, valid))
    if not valid:
        cut = len(ids) - int(_VALID_SHARE * len(ids))
        ids, valid_ids = ids[:cut], ids[cut:]
    digest = hashlib.sha256(tokenizer.fingerprint.encode() + ids.tobytes() + b"|" + valid_ids.tobytes()).hexdigest()
    return Text(ids, valid_ids, tokenizer.vocab_size, digest[:16])


def _documents(flag: str, files: Sequence[str]) -> list[tuple[str, bytes]]:
    found = list(read_documents(find_files(files, flag), flag=flag))
    if not found:
        raise refuse(flag, " ".join(files), "holds no text")
    return found


def _tokens(documents: Sequence[tuple[str, bytes]], tokenizer: Tokenizer) -> np.ndarray:
    parts = [np.append(tokenizer.encode(text), tokenizer.eod).astype(np.int32) for _, text in documents]
    return np.concatenate([*parts, np.zeros(0, dtype=np.int32)])


@dataclass(frozen=True)
class Run:
    """One training. ``seed``: of weights, order and dropout; ``loss_seed``: which losses with it.

    ``burst``: mean packets lost in a row, 0: independent losses.
    """

    arm: str
    rate: float
    seed: int
    loss_seed: int
    burst: float
    fraction: float
    scale: Scale
    text: str
    device: str

    @property
    def name(self) -> str:
        """A digest of all that makes it what it is."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def loss(self) -> LossyConfig | None:
        """The loss flags. Raises :class:`UsageError`."""
        if self.arm == LOSSLESS:
            return None
        rule = ARMS[self.arm]["grad_priority"]
        priority = {} if rule == "none" else {"grad_priority": f"{rule}:{self.fraction}"}
        burst = {"loss_model": (f"gilbert-elliott:{self.burst}",)} if self.burst else {}
        return LossyConfig(
            p_grad=self.rate, lossy_self=True, loss_unit="packet", packet_bytes=self.scale.packet_bytes,
            loss_seed=loss_seed_of(self.seed, self.loss_seed), **(ARMS[self.arm] | priority), **burst,
        )  # fmt: skip


class LanguageModel(nn.Module):
    """An LSTM whose embedding is also its output layer. Each block of text begins with an empty state."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.lstm = nn.LSTM(hidden, hidden, LAYERS, dropout=DROPOUT, batch_first=True)
        self.dropout = nn.Dropout(DROPOUT)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of ``targets`` int64[batch, block] after ``tokens`` int64[batch, block], in nats."""
        states, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits = nn.functional.linear(self.dropout(states), self.embedding.weight, self.bias)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Blocks:
    """Blocks of ``block`` tokens of ``tokens`` int32[n], with the token that follows each."""

    def __init__(self, tokens: np.ndarray, block: int, device: torch.device) -> None:
        self.count = max(0, len(tokens) - 1) // block
        self._tokens, self._block, self._device = tokens, block, device

    def __getitem__(self, places: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._tokens[places[:, None] * self._block + np.arange(self._block + 1)].astype(np.int64)
        block = torch.from_numpy(found).to(self._device)
        return block[:, :-1], block[:, 1:]


def epoch_batches(scale: Scale, blocks: int) -> int:
    """Steps of an epoch over so many ``blocks``."""
    wanted = blocks if scale.epoch_tokens is None else scale.epoch_tokens // scale.block
    return min(wanted, blocks) // scale.batch


def batches(scale: Scale, blocks: int, seed: int) -> Iterator[np.ndarray]:
    """int[batch]: which blocks each step trains on; every epoch in another order."""
    random = np.random.default_rng(seed)
    for _ in range(scale.epochs):
        order = random.permutation(blocks)[: epoch_batches(scale, blocks) * scale.batch]
        yield from order.reshape(-1, scale.batch)


def check_text(scale: Scale, text: Text) -> None:
    """Raise :class:`UsageError` unless ``text`` is long enough."""
    for flag, tokens, blocks in (("--text", text.train, scale.batch), ("--valid-text", text.valid, 1)):
        if len(tokens) < blocks * scale.block + 1:
            allowed = f"needs {blocks * scale.block + 1:,} tokens at least"
            raise refuse(flag, f"with {len(tokens):,} tokens", allowed)
    if not epoch_batches(scale, (len(text.train) - 1) // scale.block):
        raise refuse("--epoch-tokens", scale.epoch_tokens, f"must be at least {scale.batch * scale.block}, a batch")


def train(run: Run, text: Text, tick: Callable[[int, int], None]) -> dict:
    """Train ``run``; ``tick(step, steps)`` after each step. The result can be written as JSON.

    In it: ``valid``: [step, loss] of each evaluation; ``train``: mean loss over the last tenth of all steps; ``lost``,
    ``high``: shares of packets lost for good, and of high priority; ``missing``: what was lost for good of the sum of
    |payload|; ``diverged``: at which step the loss was not finite, or null.
    """
    scale, device = run.scale, torch.device(run.device)
    torch.manual_seed(run.seed)
    model = LanguageModel(text.vocabulary, scale.hidden).to(device)
    parameters = list(model.parameters())
    gradients = flat_gradients(parameters)
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    group = None if run.loss is None else group_of_one(run.loss, gradients.numel())
    blocks, valid_blocks = (
        Blocks(tokens, scale.block, device) for tokens in (text.train, text.valid[: scale.valid_tokens])
    )
    steps = scale.epochs * epoch_batches(scale, blocks.count)
    evaluated = {round((k + 1) * steps / scale.evaluations) for k in range(scale.evaluations)}
    result: dict = {"run": asdict(run), "valid": [], "diverged": None}
    told, recent = np.zeros(5), []
    for step, places in enumerate(batches(scale, blocks.count, run.seed)):
        for part in optimizer.param_groups:
            part["lr"] = LEAST + (LEARNING_RATE - LEAST) * (1 + math.cos(math.pi * step / steps)) / 2
        gradients.zero_()
        loss = model(*blocks[places])
        loss.backward()
        recent = [*recent, loss.item()][-max(1, steps // 10) :]
        if not math.isfinite(recent[-1]):
            result["diverged"] = step
            break
        if group is not None:
            with torch.no_grad():
                exchange = Exchange("grad", group.stream, step)
                group.reduce_scatter(Gradients(exchange, 0, gradients, gradients)).wait()
            group.finish_step(step, True)
            (one,) = group.told()
            told += (one.units, one.left, one.high, one.residual, one.payload)
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        tick(step + 1, steps)
        if step + 1 in evaluated:
            result["valid"].append([step + 1, evaluate(model, valid_blocks)])
    units, left, high, residual, payload = told
    shares = {"lost": left / units, "high": high / units, "missing": residual / payload} if units else {}
    origin = {"date": datetime.date.today().isoformat(), "hardware": hardware_of(device), "versions": versions()}
    return result | {"train": float(np.mean(recent)), "origin": origin} | shares


def flat_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """A flat buffer that holds the gradients of all ``parameters``, in their order; zeros."""
    buffer = parameters[0].new_zeros(sum(one.numel() for one in parameters)).detach()
    start = 0
    for one in parameters:
        one.grad = buffer[start : start + one.numel()].view_as(one)
        start += one.numel()
    return buffer


def group_of_one(config: LossyConfig, elements: int) -> LossyGroup:
    """The exchange of one bucket of ``elements`` between a rank and itself; no process group is needed."""
    networks = {phase: Network(config, phase, 1) for phase in PHASES}
    return LossyGroup(config, wire_for(config, [BucketSpec(elements)], networks, range(1), 0, Stream(), None, None))


@torch.no_grad()
def evaluate(model: LanguageModel, blocks: Blocks) -> float:
    """Mean cross entropy over all ``blocks``, in nats per token."""
    model.eval()
    total = 0.0
    for start in range(0, blocks.count, _VALID_BATCH):
        places = np.arange(start, min(start + _VALID_BATCH, blocks.count))
        total += len(places) * model(*blocks[places]).item()
    model.train()
    return total / blocks.count


def hardware_of(device: torch.device) -> str:
    """What ``device`` is."""
    return processor() if device.type == "cpu" else getattr(torch, device.type).get_device_name(device)
