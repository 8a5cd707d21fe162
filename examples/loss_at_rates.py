"""The cost of loss for an FSDP2 model: its training loss at 0, 10, 20 and 40 %, in two minutes on two cores.

Run it (``python examples/loss_at_rates.py``), or cell by cell in an editor or in a Jupyter that supports ``# %%``.
"""

# %% What we need: torch, and one function of ours.
import argparse
import inspect
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.fsdp import fully_shard

from megatron_lossy.config import LossyConfig
from megatron_lossy.pytorch import make_lossy

# %% How much: the workers share the parameters out among them. Each rate is one run of all workers.
WORKERS, RATES, STEPS = 4, (0.0, 0.1, 0.2, 0.4), 100
LENGTH, BATCH, WIDTH, LAYERS = 64, 4, 64, 2

# %% The text: the source of a module of Python's library, one token a byte.
TEXT = torch.tensor(list(inspect.getsource(argparse).encode()), dtype=torch.long)


# %% The model: an embedding, layers of a transformer that look back only, and a linear layer.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH))
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x.flatten(0, 1))


# %% FSDP2: each layer is gathered by itself, and the rest together.
def sharded():
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


# %% The data of a worker: other places of the text for each.
def batches(worker):
    chance = torch.Generator().manual_seed(worker)
    while True:
        first = torch.randint(len(TEXT) - LENGTH - 1, (BATCH, 1), generator=chance)
        window = TEXT[first + torch.arange(LENGTH + 1)]
        yield window[:, :-1], window[:, 1:]


# %% Training as always, but for one line.
def train(worker, rate, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=worker, world_size=WORKERS)
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lossy = make_lossy(model, optimizer, LossyConfig(p_grad=rate, p_param=rate))  # this one
    data, curve = batches(worker), []
    for _ in range(STEPS):
        tokens, following = next(data)
        loss = nn.functional.cross_entropy(model(tokens), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        curve.append(mean.item())
    # How many parameters were late at a worker that computed with them, and by how many updates.
    measured = lossy.metrics()
    lossy.close()
    if worker == 0:
        results.put((curve, measured.get("stale age mean", 0.0)))
    dist.destroy_process_group()


# %% A run: the workers are processes of this machine.
def run(rate):
    from tempfile import TemporaryDirectory

    results = processes.get_context("fork").SimpleQueue()
    with TemporaryDirectory() as folder:
        ranks = processes.start_processes(
            train, (rate, f"{folder}/store", results), nprocs=WORKERS, join=False, start_method="fork"
        )
        found = results.get()
        while not ranks.join():
            pass
    return found


# %% All rates, one after the other.
began = time.monotonic()
curves = {}
for rate in RATES:
    curves[rate], late = run(rate)
    last = sum(curves[rate][-10:]) / 10
    print(f"{rate:4.0%}: loss {last:.3f}, late parameters by {late:.2f} updates, {time.monotonic() - began:.0f} s")

# %% The picture: a mean over ten steps at each point.
for rate, curve in curves.items():
    smooth = torch.tensor(curve).unfold(0, 10, 1).mean(dim=1)
    plt.plot(range(10, STEPS + 1), smooth, label=f"{rate:.0%} lost")
plt.xlabel("step")
plt.ylabel("training loss")
plt.legend()
plt.savefig("loss_at_rates.png", dpi=120)
plt.show()

# %% Where to go from here: another rule, packets instead of shards, or a real network.
print(LossyConfig(p_grad=0.1, p_param=0.1, loss_unit="packet", param_send="compensated").describe())
